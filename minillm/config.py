"""What a model is, read from a Hugging Face config.json.

Field names are those of the file, so that a reader who knows one knows the other. Nothing here needs torch:
the cost model, the memory budget and the engine all start from the same frozen value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .config_reader import check_range, read_fields
from .errors import ConfigError, short

# model_type -> what it adds to the plain Llama block
DENSE = {"llama", "mistral", "qwen2", "qwen3"}
LATENT = {"deepseek_v3", "kimi_k2"}  # multi-head latent attention; Kimi K2 is DeepSeek-V3 in other sizes
EXPERTS = {"mixtral", "qwen3_moe"} | LATENT
HYBRID = {"qwen3_next"}  # most layers a gated delta rule with a state of constant size, every fourth full attention
COSTED_ONLY = {"gpt_oss", "gemma3_text"}  # sized by the cost model, not run
SUPPORTED = DENSE | EXPERTS | HYBRID | COSTED_ONLY

_LIMIT = 1 << 31  # no dimension of a real model comes near it; a corrupt file does


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only transformer. Units: counts, except `rms_norm_eps` and `rope_theta`.

    `head_dim` is the file's own value and falls back to hidden_size / num_attention_heads only if absent
    (Qwen3-0.6B has 1024 / 16 = 64 but head_dim 128). `layer_types[i]` is "full_attention", "sliding_attention" or
    "linear_attention".
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # on q, k, v
    attention_out_bias: bool = False  # on o: Llama's attention_bias sets both, Qwen2 has q, k, v alone
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm on each query and key head (Qwen3)
    sliding_window: int | None = None
    attention_sinks: int = 0  # first tokens that a sliding layer keeps seeing (StreamingLLM)
    layer_types: tuple[str, ...] = ()
    # mixture of experts
    num_experts: int = 0  # routed experts; 0 means every layer is dense
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    n_shared_experts: int = 0
    shared_expert_intermediate_size: int = 0  # of Qwen3-Next's one shared expert, which a gate of its own scales
    first_k_dense_replace: int = 0  # the first k layers stay dense (DeepSeek-V3: 3)
    mlp_only_layers: tuple[int, ...] = ()  # dense among expert layers
    decoder_sparse_step: int = 1  # every so many-th layer has experts
    scoring_func: str = "softmax"
    norm_topk_prob: bool = True  # the chosen experts' weights are made to sum to 1
    n_group: int = 1  # experts are chosen within the best topk_group of so many groups
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    # multi-head latent attention
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None  # set means MLA
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    rope_interleave: bool = True  # rotary pairs are (x[2i], x[2i+1]) in the file
    num_nextn_predict_layers: int = 0  # further layers in a DeepSeek-V3 file, which guess ahead; not run
    # gated delta rule, of the layers called "linear_attention"
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    partial_rotary_factor: float = 1.0  # share of a head that turns; the rest passes
    mlp_only_layers: tuple[int, ...] = ()  # dense among expert layers
    decoder_sparse_step: int = 1  # every so many-th layer has experts
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank is not None

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """What a cache holds of one token in one layer: (2, Hkv, D) for keys and values, (1, 1, width) for MLA, whose
        one row is key and value: kv_lora_rank entries of latent, then the rotary key that all heads share."""
        if self.is_mla:
            return 1, 1, self.kv_lora_rank + self.qk_rope_head_dim
        return 2, self.num_key_value_heads, self.head_dim

    @property
    def rotary_dim(self) -> int:
        return self.qk_rope_head_dim if self.is_mla else int(self.head_dim * self.partial_rotary_factor)

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.num_key_value_heads

    def window(self, layer: int) -> int | None:
        """Tokens visible to a query of this layer, itself included; None means all earlier ones."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def sinks(self, layer: int) -> int:
        """First tokens that a query of this layer sees wherever its window is."""
        return self.attention_sinks if self.window(layer) is not None else 0

    def visible(self, layer: int) -> int | None:
        """The most tokens that a query of this layer sees; None means all earlier ones."""
        window = self.window(layer)
        return None if window is None else window + self.attention_sinks

    def is_expert_layer(self, layer: int) -> bool:
        dense = layer < self.first_k_dense_replace or layer in self.mlp_only_layers
        return self.is_moe and not dense and (layer + 1) % self.decoder_sparse_step == 0

    @property
    def shared_width(self) -> int:
        """Inner size of what every token passes besides its experts, all shared experts together."""
        return self.shared_expert_intermediate_size or self.n_shared_experts * self.moe_intermediate_size

    @property
    def linear_layers(self) -> list[int]:
        """Layers that keep a state of constant size instead of keys and values."""
        return [i for i, kind in enumerate(self.layer_types) if kind == "linear_attention"]

    @property
    def kv_layers(self) -> list[int]:
        """Layers that keep something for each token."""
        return [i for i, kind in enumerate(self.layer_types) if kind != "linear_attention"]

    @property
    def conv_channels(self) -> int:
        """What a linear layer convolves: its queries, keys and values side by side."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def is_hybrid(self) -> bool:
        """Qwen3-Next: also norms whose weight is stored less one, and a gate on what full attention found."""
        return self.model_type in HYBRID

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str = "config") -> ModelConfig:
        """Builds the value from a parsed config.json. Raises ConfigError naming `source` and the field."""
        return _from_dict(raw, source)

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """Reads a config.json, or the one inside a model folder. Raises ConfigError."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file; give a config.json or the folder that holds one") from None
        except (OSError, ValueError, RecursionError) as error:  # a number of 5,000 digits is a ValueError too
            raise ConfigError(f"{path}: not a readable JSON file ({short(error, 120)}); download it again") from None
        if not isinstance(raw, dict):
            raise ConfigError(f"{path}: holds {type(raw).__name__}, not a JSON object; this is not a model config")
        return _from_dict(raw, str(path))


def _from_dict(raw: Mapping[str, Any], source: str) -> ModelConfig:
    raw = {**raw, **raw["text_config"]} if isinstance(raw.get("text_config"), dict) else raw
    model_type = raw.get("model_type")
    if model_type == "eagle":  # written by speculative/eagle_file.py
        raise ConfigError(
            f"{source}: an EAGLE head, which drafts for a model; give it as --speculate eagle --draft FOLDER"
        )
    if not isinstance(model_type, str) or model_type not in SUPPORTED:
        known = ", ".join(sorted(SUPPORTED))
        raise ConfigError(f"{source}: model_type {short(repr(model_type))} is not supported; minillm knows {known}")
    try:
        return ModelConfig(**read_fields(raw, model_type), raw=dict(raw))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _validate(c: ModelConfig) -> None:
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "num_key_value_heads", "head_dim", "max_position_embeddings"):  # fmt: skip
        check_range(name, getattr(c, name), _LIMIT - 1)
    optional = [("moe_intermediate_size", 1), ("num_experts", 0), ("n_shared_experts", 0), ("first_k_dense_replace", 0),
                ("attention_sinks", 0)]  # fmt: skip
    if c.is_mla:
        optional += [("kv_lora_rank", 1), ("v_head_dim", 1), ("qk_nope_head_dim", 0), ("qk_rope_head_dim", 2)]
        optional += [] if c.q_lora_rank is None else [("q_lora_rank", 1)]
    for name, least in optional:
        if name != "moe_intermediate_size" or c.is_moe:
            check_range(name, getattr(c, name), _LIMIT - 1, least)
    if c.num_attention_heads % c.num_key_value_heads:
        raise ConfigError(
            f"num_attention_heads {c.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {c.num_key_value_heads}, so query heads cannot be grouped"
        )
    if c.rotary_dim % 2:
        name = "qk_rope_head_dim" if c.is_mla else "head_dim"
        raise ConfigError(f"{name} {c.rotary_dim} is odd; rotary embedding turns pairs, so it must be even")
    if c.rms_norm_eps < 0 or c.rope_theta <= 0:
        raise ConfigError(f"rms_norm_eps {c.rms_norm_eps} must be at least 0 and rope_theta {c.rope_theta} above 0")
    if len(c.layer_types) != c.num_hidden_layers:
        raise ConfigError(f"layer_types names {len(c.layer_types)} layers, num_hidden_layers is {c.num_hidden_layers}")
    known = ("full_attention", "sliding_attention", *(["linear_attention"] if c.is_hybrid else []))
    if unknown := set(c.layer_types) - set(known):
        raise ConfigError(f"layer_types holds {sorted(map(str, unknown))}; known: {', '.join(known)}")
    if "sliding_attention" in c.layer_types and (c.sliding_window is None or c.sliding_window < 1):
        raise ConfigError(f"sliding_window is {c.sliding_window}; a sliding layer needs at least 1")
    if c.is_hybrid:
        _validate_hybrid(c)
    if c.is_moe and not 0 < c.num_experts_per_tok <= c.num_experts:
        raise ConfigError(f"num_experts_per_tok {c.num_experts_per_tok} must lie between 1 and {c.num_experts}")
    if c.is_moe:
        _validate_routing(c)


def _validate_routing(c: ModelConfig) -> None:
    check_range("n_group", c.n_group, c.num_experts)
    check_range("topk_group", c.topk_group, c.n_group)
    if c.num_experts % c.n_group:
        raise ConfigError(f"{c.num_experts} experts cannot be divided into n_group {c.n_group} groups of one size")
    reachable = c.topk_group * (c.num_experts // c.n_group)
    if c.num_experts_per_tok > reachable:
        raise ConfigError(
            f"num_experts_per_tok {c.num_experts_per_tok} exceeds the {reachable} experts that "
            f"topk_group {c.topk_group} groups hold"
        )


def _validate_hybrid(c: ModelConfig) -> None:
    for name in ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
                 "linear_conv_kernel_dim"):  # fmt: skip
        check_range(name, getattr(c, name), _LIMIT - 1)
    if c.linear_num_value_heads % c.linear_num_key_heads:
        raise ConfigError(
            f"linear_num_value_heads {c.linear_num_value_heads} is not a multiple of "
            f"linear_num_key_heads {c.linear_num_key_heads}, so value heads cannot be grouped"
        )
    if not c.kv_layers:
        raise ConfigError("layer_types holds linear_attention alone; minillm needs a full_attention layer beside it")
    if not 0 < c.partial_rotary_factor <= 1 or c.rotary_dim < 2 or c.rotary_dim % 2:
        raise ConfigError(
            f"partial_rotary_factor {c.partial_rotary_factor} of head_dim {c.head_dim} turns {c.rotary_dim} numbers; "
            "rotary embedding turns pairs"
        )


FIELD_NAMES = tuple(f.name for f in fields(ModelConfig))
