"""Tiny random transformers configs of every shape that the cost model knows, and their ModelConfigs."""

import copy

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from minillm.config import ModelConfig

_COMMON = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_MLA = {"kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14}


def _with(kind, **more):
    return kind(**{**_COMMON, **more})


HF_CONFIGS = {
    "llama": _with(LlamaConfig),
    "llama biased": _with(LlamaConfig, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "mistral": _with(MistralConfig, sliding_window=7),
    "qwen2": _with(Qwen2Config),
    "qwen3": _with(Qwen3Config, head_dim=16, tie_word_embeddings=True),
    "mixtral": _with(MixtralConfig, num_local_experts=5, num_experts_per_tok=2, sliding_window=None),
    "qwen3_moe": _with(Qwen3MoeConfig, head_dim=16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20),
    "qwen3_next": _with(
        Qwen3NextConfig,
        head_dim=16,
        num_hidden_layers=5,
        full_attention_interval=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=12,
        linear_value_head_dim=8,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=28,
        mlp_only_layers=[1],
    ),
    "qwen3_moe in some layers": _with(
        Qwen3MoeConfig,
        head_dim=16,
        num_hidden_layers=5,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        mlp_only_layers=[3],
        decoder_sparse_step=2,
    ),
    "deepseek_v3": _with(
        DeepseekV3Config,
        **_MLA,
        num_key_value_heads=6,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=20,
        first_k_dense_replace=1,
    ),
    "deepseek_v3 without query rank": _with(
        DeepseekV3Config,
        **{**_MLA, "q_lora_rank": None},
        num_key_value_heads=6,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=20,
        first_k_dense_replace=0,
    ),
    "gpt_oss": _with(GptOssConfig, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=5),
    "gemma3_text": _with(Gemma3TextConfig, head_dim=8, sliding_window=5, num_hidden_layers=7),
}


def build(name: str, **options):
    """The transformers model of that config, in float32 unless told otherwise. Building one writes into its config, so
    it gets a copy."""
    options = {"dtype": torch.float32, **options}
    return AutoModelForCausalLM.from_config(copy.deepcopy(HF_CONFIGS[name]), **options).eval()


def ours(hf_config) -> ModelConfig:
    return ModelConfig.from_dict(hf_config.to_dict(), "tiny")
