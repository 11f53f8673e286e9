"""Writes a transformers model as a GGUF file, as llama.cpp's converter lays it out."""

from __future__ import annotations

import json

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    body, _, suffix = name.rpartition(".")
    if not body.startswith("model.layers."):
        return f"{NAMES[body]}.{suffix}"
    _, _, layer, rest = body.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{suffix}"


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's reordering of Llama's q and k rows, for interleaved rotary pairs."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write(path, model, tokenizer_json, kind="F32", arch=None) -> None:
    """Writes the file, and puts the values that `kind` can hold back into `model`, so that the two stay equal."""
    config = model.config
    arch = arch or config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _write_vocabulary(writer, tokenizer_json)
    quant = gguf.GGMLQuantizationType[kind]
    for name, parameter in dict(model.named_parameters()).items():
        values = parameter.detach().numpy()
        permuted = arch == "llama" and ("q_proj" in name or "k_proj" in name)
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        if values.ndim == 2 and kind != "F32":
            packed = quantize(permute(values, heads) if permuted else values, quant)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=quant)
            back = quantize(values, quant)  # by rows, so the order of rows does not matter
            parameter.data = torch.from_numpy(dequantize(back, quant).reshape(values.shape).copy())
        else:
            writer.add_tensor(gguf_name(name), permute(values, heads) if permuted else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_vocabulary(writer, tokenizer_json) -> None:
    data = json.loads(tokenizer_json.read_text())
    tokens = sorted(data["model"]["vocab"], key=data["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in ("<start>", "<end>") else 1 for t in tokens])
    writer.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in data["model"]["merges"]])
    writer.add_eos_token_id(1)
