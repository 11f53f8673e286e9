"""A GGUF file as a config, a vocabulary, and tensors under Hugging Face's names.

The `gguf` package expands the block formats; this file translates names, rows and metadata.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor

from .config import ModelConfig
from .errors import CheckpointError, ConfigError
from .gguf_header import GGUFTensor, read_gguf
from .packing import GROUP, GroupedInt4, Weight

READABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_PLAIN = {"F32": np.float32, "F16": np.float16}  # the rest go to the package as bytes
ARCHITECTURES = ("llama", "qwen2", "qwen3")

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFFile(Mapping):
    """Maps Hugging Face tensor names to weights, expanded one at a time as they are asked for.

    `fields` is the metadata as plain Python values. With `keep_int4` matrices in Q4_0 and Q4_1 come as GroupedInt4.
    Raises CheckpointError for a file that is missing, truncated, damaged or holds an unsupported tensor type.
    """

    def __init__(self, path: str | Path, keep_int4: bool = False) -> None:
        self.path, self.keep_int4 = Path(path), keep_int4
        self.fields, self._tensors = _read(self.path)
        try:
            self.config = _config(self.fields, self._tensors)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from None

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __getitem__(self, name: str) -> Weight:
        tensor = self._tensors[name]
        kind = tensor.kind.name
        matrix = len(tensor.shape) == 2 and name != "model.embed_tokens.weight"
        int4 = self.keep_int4 and matrix and kind in ("Q4_0", "Q4_1")
        weight = _codes(tensor) if int4 else _expand(tensor)
        heads = self._permuted_heads(name)
        if heads is None:
            return weight
        if weight.shape[0] % (2 * heads):
            raise CheckpointError(f"tensor {name} has {weight.shape[0]} rows, not whole pairs for {heads} heads")
        return weight.map(lambda rows: _unpermute(rows, heads)) if int4 else _unpermute(weight, heads)

    def _permuted_heads(self, name: str) -> int | None:
        """llama.cpp reorders the q and k rows of Llama (not of Qwen) for interleaved rotary pairs."""
        if self.fields["general.architecture"] != "llama":
            return None
        if ".q_proj." in name:
            return self.config.num_attention_heads
        return self.config.num_key_value_heads if ".k_proj." in name else None


def _unpermute(rows: Tensor, heads: int) -> Tensor:
    """Within each head: (pair, half) back to (half, pair)."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _expand(tensor: GGUFTensor) -> Tensor:
    """float32 in the tensor's shape."""
    columns = tensor.shape[-1]
    rows = tensor.data.reshape(-1, tensor.data.size * columns // math.prod(tensor.shape))  # bytes of one row each
    values = dequantize(rows if tensor.kind.name not in _PLAIN else rows.view(_PLAIN[tensor.kind.name]), tensor.kind)
    return torch.from_numpy(np.array(values, dtype=np.float32, copy=not values.flags.writeable)).view(tensor.shape)


def _codes(tensor: GGUFTensor) -> GroupedInt4:
    """Q4_0: w = d · (code - 8). Q4_1: w = d · code + m. 32 codes in 16 bytes, low halves first."""
    rows, columns = tensor.shape
    head = 2 if tensor.kind.name == "Q4_0" else 4  # bytes of float16 before the codes
    blocks = torch.from_numpy(np.array(tensor.data)).view(rows, columns // GROUP, head + GROUP // 2)
    scales = blocks[..., :head].contiguous().view(torch.float16).to(torch.float32)  # (rows, groups, 1 or 2)
    packed = blocks[..., head:]
    codes = torch.cat([packed & 15, packed >> 4], dim=-1).view(rows, columns)
    scale = scales[..., 0].contiguous()
    return GroupedInt4(codes, scale, -8 * scale if head == 2 else scales[..., 1].contiguous())


def _read(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    fields, tensors = read_gguf(path)
    unknown = sorted({t.kind.name for t in tensors.values()} - set(READABLE))
    if unknown:
        raise CheckpointError(f"{path}: tensor type {unknown[0]} is not supported; minillm reads {', '.join(READABLE)}")
    return fields, {_hugging_face_name(name): tensor for name, tensor in tensors.items()}


def _hugging_face_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; an unknown name stays and is refused later."""
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in _BLOCK:
        return f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.{parts[3]}"
    return f"{_TOP[parts[0]]}.{parts[1]}" if parts[0] in _TOP and len(parts) == 2 else name


def _config(fields: dict[str, Any], tensors: dict[str, Any]) -> ModelConfig:
    arch = fields.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ConfigError(f"architecture {arch!r} is not supported; from GGUF minillm runs {', '.join(ARCHITECTURES)}")

    def get(name: str, default: Any = None) -> Any:
        return fields.get(f"{arch}.{name}", default)

    if "model.embed_tokens.weight" not in tensors:
        raise ConfigError("tensor token_embd.weight is missing; download the file again")
    heads, hidden = get("attention.head_count"), get("embedding_length")
    raw = {
        "model_type": arch,
        "vocab_size": int(tensors["model.embed_tokens.weight"].shape[0]),
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length"),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base"),
        "rope_scaling": _rope_scaling(get, tensors),
        "sliding_window": get("attention.sliding_window"),
        "use_sliding_window": get("attention.sliding_window") is not None,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in tensors,
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
    }
    config = ModelConfig.from_dict(raw, "GGUF header")
    divisors = (config.rope_scaling or {}).get("divisors")
    if divisors is not None and len(divisors) != config.head_dim // 2:
        raise ConfigError(f"rope_freqs.weight has {len(divisors)} entries for {config.head_dim // 2} rotary pairs")
    if (turned := get("rope.dimension_count", config.head_dim)) != config.head_dim:
        raise ConfigError(f"rotary embedding on {turned} of {config.head_dim} dimensions is not supported")
    return config


def _rope_scaling(get, tensors: dict[str, GGUFTensor]) -> dict[str, Any] | None:
    if "rope_freqs.weight" in tensors:  # Llama 3.1: the file carries the finished divisors
        divisors = _expand(tensors.pop("rope_freqs.weight")).flatten().tolist()
        if not all(math.isfinite(d) and d > 0 for d in divisors):
            raise ConfigError("tensor rope_freqs.weight holds numbers that no angle can be divided by")
        return {"rope_type": "divisors", "divisors": tuple(divisors)}
    kind = get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    return {
        "rope_type": kind,
        "factor": get("rope.scaling.factor"),
        "original_max_position_embeddings": get("rope.scaling.original_context_length"),
    }
