"""Tiny random models, written to disk by transformers itself, so that what minillm loads was not made by minillm."""

from __future__ import annotations

import copy

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from minillm import checkpoint
from minillm.transformer import Transformer

VOCAB = 320
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden_size / num_attention_heads, which is 8
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 12, "qk_rope_head_dim": 16, "v_head_dim": 10,
          "num_key_value_heads": 6, "first_k_dense_replace": 3}  # fmt: skip
LATENT_YARN = {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64}

LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 8,
          "linear_conv_kernel_dim": 4, "num_hidden_layers": 4, "mlp_only_layers": [0, 1, 2, 3],
          "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}  # fmt: skip
HALVED = {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 3}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}
GROUPED = {"first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
           "n_shared_experts": 2, "n_group": 4, "topk_group": 2}  # fmt: skip

# name -> (class name, what it adds to SHAPE)
FAMILIES = {
    "llama": ("Llama", {}),
    "llama-mqa-tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-mha-bias": ("Llama", {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True}),
    "llama-3.1-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "yarn-mscale": ("Llama", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16}}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "deepseek": ("DeepseekV3", {**LATENT, "q_lora_rank": 24}),
    "deepseek-yarn": (
        "DeepseekV3",
        {**LATENT, "q_lora_rank": None, "rope_parameters": LATENT_YARN, "rms_norm_eps": 1e-2, "attention_bias": True},
    ),
    "deepseek-halves": ("DeepseekV3", {**LATENT, "q_lora_rank": 24, "rope_interleave": False}),
    "deepseek-experts": ("DeepseekV3", {**LATENT, **GROUPED, "q_lora_rank": 24}),
    "qwen3": ("Qwen3", {}),
    "qwen3-next": ("Qwen3Next", LINEAR),
    "qwen3-next-experts": (
        "Qwen3Next",
        {**LINEAR, **EXPERTS, "mlp_only_layers": [1], "shared_expert_intermediate_size": 20},
    ),
    "qwen3-next-bias": ("Qwen3Next", {**LINEAR, "attention_bias": True, "full_attention_interval": 2, **HALVED}),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS),
    "qwen3-moe-some": (
        "Qwen3Moe",
        {**EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [3], "decoder_sparse_step": 2, "num_hidden_layers": 5},
    ),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
}
# what minillm adds to a family and transformers has not: keys that it writes into config.json and does not read
OWN = {
    "mistral-sinks": ("Mistral", {"sliding_window": 7, "attention_sinks": 3}),
    "qwen2-sinks": ("Qwen2", {**FAMILIES["qwen2-window"][1], "attention_sinks": 2}),
}


def make(name: str, seed: int = 0, **changes):
    """A transformers model in float32 with random weights, norms and biases included."""
    kind, extra = {**FAMILIES, **OWN}[name]
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **extra, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # transformers starts norms at one and biases at zero, which would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(3)  # attention far from uniform
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.3)
    return model


def copies(tmp_path_factory, **usual):
    """get(name, **changes) -> a model of ours as transformers saved it, read once and copied for each call. `usual`:
    changes of every model."""
    made = {}

    def get(name: str, **changes) -> Transformer:
        changes = usual | changes
        key = name, *sorted(changes.items())
        if key not in made:
            make(name, **changes).save_pretrained(folder := tmp_path_factory.mktemp(name))
            made[key] = checkpoint.load_model(folder)
        return copy.deepcopy(made[key])

    return get


def write_tokenizer(folder) -> Tokenizer:
    """A byte-level BPE tokenizer of VOCAB ids at most, with an end token 1, in the folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<start>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog sat on the log " * 20], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    return tokenizer


def save(name: str, folder, **changes):
    """Writes the model, sharded, and a tokenizer. Returns the transformers model."""
    model = make(name, **changes)
    model.save_pretrained(folder, max_shard_size="60KB")
    write_tokenizer(folder)
    return model
