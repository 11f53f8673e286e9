"""Real models by name: the part of each published config.json that decides its cost.

Each entry says where its values come from and whether they were compared with that file (`checked`); an entry that
was not is shown as "from memory" wherever its numbers are printed.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import ModelConfig
from ..errors import ConfigError, short


@dataclass(frozen=True)
class ModelEntry:
    """A named model: an excerpt of its config.json, the public repository it is from, and whether it was checked."""

    name: str
    raw: Mapping[str, Any]
    source: str
    checked: bool = True

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_dict(self.raw, self.name)


def _shape(kind: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> dict:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        **more,
    }


def _llama3(layers: int, hidden: int, ffn: int, heads: int, context: int, scaled: bool = False) -> dict:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    more = {"rope_scaling": scaling} if scaled else {}
    return _shape("llama", layers, hidden, ffn, heads, 8, 128256, max_position_embeddings=context,
                  rope_theta=500000.0, rms_norm_eps=1e-5, **more)  # fmt: skip


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, tied: bool = False, **experts: Any) -> dict:
    kv_heads = 4 if experts else 8
    return _shape("qwen3_moe" if experts else "qwen3", layers, hidden, ffn, heads, kv_heads, 151936, head_dim=128,
                  max_position_embeddings=40960, rope_theta=1000000.0, rms_norm_eps=1e-6, tie_word_embeddings=tied,
                  norm_topk_prob=True, **experts)  # fmt: skip


def _latent(heads: int, experts: int, dense: int, vocab: int, **more: Any) -> dict:
    kind = "kimi_k2" if experts == 384 else "deepseek_v3"
    return _shape(kind, 61, 7168, 18432, heads, heads, vocab, kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128,
                  qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=experts, num_experts_per_tok=8,
                  n_shared_experts=1, moe_intermediate_size=2048, first_k_dense_replace=dense, norm_topk_prob=True,
                  rms_norm_eps=1e-6, **more)  # fmt: skip


_YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096, "beta_slow": 1.0}
_DEEPSEEK_YARN = {**_YARN, "factor": 40.0, "beta_fast": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0}
_GEMMA_LAYERS = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(62)]
_GPT_OSS_LAYERS = ["full_attention" if i % 2 else "sliding_attention" for i in range(36)]
_ENTRIES = (
    ModelEntry("SmolLM2-135M", _shape("llama", 30, 576, 1536, 9, 3, 49152, max_position_embeddings=8192,
               rope_theta=100000.0, rms_norm_eps=1e-5, tie_word_embeddings=True),
               "HuggingFaceTB/SmolLM2-135M-Instruct"),
    ModelEntry("Llama-2-7B", _shape("llama", 32, 4096, 11008, 32, 32, 32000, max_position_embeddings=4096,
               rms_norm_eps=1e-5), "meta-llama/Llama-2-7b-hf"),
    ModelEntry("Llama-2-13B", _shape("llama", 40, 5120, 13824, 40, 40, 32000, max_position_embeddings=4096,
               rms_norm_eps=1e-5), "meta-llama/Llama-2-13b-hf"),
    ModelEntry("Llama-3-8B", _llama3(32, 4096, 14336, 32, 8192), "meta-llama/Meta-Llama-3-8B"),
    ModelEntry("Llama-3-70B", _llama3(80, 8192, 28672, 64, 8192), "meta-llama/Meta-Llama-3-70B"),
    ModelEntry("Llama-3.1-8B", _llama3(32, 4096, 14336, 32, 131072, scaled=True), "meta-llama/Llama-3.1-8B"),
    ModelEntry("Llama-3.1-70B", _llama3(80, 8192, 28672, 64, 131072, scaled=True), "meta-llama/Llama-3.1-70B"),
    ModelEntry("Llama-3.1-405B", _llama3(126, 16384, 53248, 128, 131072, scaled=True), "meta-llama/Llama-3.1-405B"),
    ModelEntry("Mistral-7B-v0.1", _shape("mistral", 32, 4096, 14336, 32, 8, 32000, max_position_embeddings=32768,
               sliding_window=4096, rms_norm_eps=1e-5), "mistralai/Mistral-7B-v0.1"),
    ModelEntry("Mistral-7B", _shape("mistral", 32, 4096, 14336, 32, 8, 32768, max_position_embeddings=32768,
               sliding_window=None, rope_theta=1000000.0, rms_norm_eps=1e-5), "mistralai/Mistral-7B-v0.3",
               checked=False),
    ModelEntry("Mixtral-8x7B", _shape("mixtral", 32, 4096, 14336, 32, 8, 32000, max_position_embeddings=32768,
               rope_theta=1000000.0, rms_norm_eps=1e-5, num_local_experts=8, num_experts_per_tok=2,
               sliding_window=None), "mistralai/Mixtral-8x7B-v0.1"),
    ModelEntry("Qwen2.5-32B", _shape("qwen2", 64, 5120, 27648, 40, 8, 152064, max_position_embeddings=131072,
               rope_theta=1000000.0, rms_norm_eps=1e-5, use_sliding_window=False), "Qwen/Qwen2.5-32B"),
    ModelEntry("Qwen3-0.6B", _qwen3(28, 1024, 3072, 16, tied=True), "Qwen/Qwen3-0.6B"),
    ModelEntry("Qwen3-8B", _qwen3(36, 4096, 12288, 32), "Qwen/Qwen3-8B"),
    ModelEntry("Qwen3-32B", _qwen3(64, 5120, 25600, 64), "Qwen/Qwen3-32B"),
    ModelEntry("Qwen3-30B-A3B", _qwen3(48, 2048, 6144, 32, num_experts=128, num_experts_per_tok=8,
               moe_intermediate_size=768), "Qwen/Qwen3-30B-A3B"),
    ModelEntry("Qwen3-235B-A22B", _qwen3(94, 4096, 12288, 64, num_experts=128, num_experts_per_tok=8,
               moe_intermediate_size=1536), "Qwen/Qwen3-235B-A22B"),
    ModelEntry("Qwen3-Next-80B-A3B", _shape("qwen3_next", 48, 2048, 5120, 16, 2, 151936, head_dim=256,
               max_position_embeddings=262144, rope_theta=10000000.0, rms_norm_eps=1e-6, partial_rotary_factor=0.25,
               linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
               linear_conv_kernel_dim=4, full_attention_interval=4, num_experts=512, num_experts_per_tok=10,
               moe_intermediate_size=512, shared_expert_intermediate_size=512, norm_topk_prob=True),
               "Qwen/Qwen3-Next-80B-A3B-Instruct", checked=False),
    ModelEntry("DeepSeek-V3", _latent(128, 256, 3, 129280, max_position_embeddings=163840, rope_scaling=_DEEPSEEK_YARN,
               n_group=8, topk_group=4, routed_scaling_factor=2.5), "deepseek-ai/DeepSeek-V3"),
    ModelEntry("Kimi-K2", _latent(64, 384, 1, 163840, max_position_embeddings=131072, rope_theta=50000.0,
               rope_scaling={**_YARN, "factor": 32.0, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
               n_group=1, topk_group=1, routed_scaling_factor=2.827), "moonshotai/Kimi-K2-Instruct"),
    ModelEntry("gpt-oss-120b", _shape("gpt_oss", 36, 2880, 2880, 64, 8, 201088, head_dim=64, sliding_window=128,
               layer_types=_GPT_OSS_LAYERS, num_local_experts=128, num_experts_per_tok=4, attention_bias=True,
               max_position_embeddings=131072, rope_theta=150000.0, rms_norm_eps=1e-5,
               rope_scaling={**_YARN, "factor": 32.0, "beta_fast": 32.0, "truncate": False}), "openai/gpt-oss-120b"),
    ModelEntry("Gemma-3-27B", _shape("gemma3_text", 62, 5376, 21504, 32, 16, 262208, head_dim=128,
               sliding_window=1024, layer_types=_GEMMA_LAYERS, tie_word_embeddings=True,
               max_position_embeddings=131072, rope_theta=1000000.0, rms_norm_eps=1e-6,
               rope_scaling={"rope_type": "linear", "factor": 8.0}), "google/gemma-3-27b-it, text part"),
)  # fmt: skip
MODELS: Mapping[str, ModelEntry] = {entry.name: entry for entry in _ENTRIES}


def find_model(name: str) -> ModelEntry:
    """The entry called `name`, whatever its capitals. Raises ConfigError with the closest names."""
    if not isinstance(name, str):
        raise ConfigError(f"a model's name is {short(repr(name))}; give a text such as {next(iter(MODELS))!r}")
    by_lower = {known.lower(): entry for known, entry in MODELS.items()}
    if entry := by_lower.get(name.strip().lower()):
        return entry
    close = difflib.get_close_matches(short(name.lower()), by_lower, n=3, cutoff=0.4)
    hint = ", ".join(by_lower[match].name for match in close) or ", ".join(MODELS)
    raise ConfigError(f"no model called {short(name)!r} in the built-in table; did you mean {hint}?")


def model_config(name: str) -> ModelConfig:
    """The ModelConfig of a model of the built-in table. Raises ConfigError."""
    return find_model(name).config
