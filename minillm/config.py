"""What a model is, read from a Hugging Face config.json.

Field names are those of the file, so that a reader who knows one knows the other. Nothing here needs torch:
the cost model, the memory budget and the engine all start from the same frozen value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import ConfigError

# model_type -> what it adds to the plain Llama block
DENSE = {"llama", "mistral", "qwen2", "qwen3"}
EXPERTS = {"mixtral", "qwen3_moe", "deepseek_v3"}
COSTED_ONLY = {"gpt_oss", "gemma3_text", "kimi_k2"}  # sized by the cost model, not run
SUPPORTED = DENSE | EXPERTS | COSTED_ONLY

_LIMIT = 1 << 31  # no dimension of a real model comes near it; a corrupt file does
_MOST_LAYERS = 4096  # each is an entry of layer_types, so a corrupt count would fill the memory


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only transformer. Units: counts, except `rms_norm_eps` and `rope_theta`.

    `head_dim` is the file's own value and falls back to hidden_size / num_attention_heads only if absent
    (Qwen3-0.6B has 1024 / 16 = 64 but head_dim 128). `layer_types[i]` is "full_attention" or "sliding_attention".
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
    layer_types: tuple[str, ...] = ()
    # mixture of experts
    num_experts: int = 0  # routed experts; 0 means every layer is dense
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    n_shared_experts: int = 0
    first_k_dense_replace: int = 0  # the first k layers stay dense (DeepSeek-V3: 3)
    # multi-head latent attention
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None  # set means MLA
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
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
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.num_key_value_heads

    def window(self, layer: int) -> int | None:
        """Tokens visible to a query of this layer, itself included; None means all earlier ones."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def is_expert_layer(self, layer: int) -> bool:
        return self.is_moe and layer >= self.first_k_dense_replace

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
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ConfigError(f"{path}: not a readable JSON file ({error}); download the model again") from None
        if not isinstance(raw, dict):
            raise ConfigError(f"{path}: holds {type(raw).__name__}, not a JSON object; this is not a model config")
        return _from_dict(raw, str(path))


def _from_dict(raw: Mapping[str, Any], source: str) -> ModelConfig:
    raw = {**raw, **raw["text_config"]} if isinstance(raw.get("text_config"), dict) else raw
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in SUPPORTED:
        raise ConfigError(
            f"{source}: model_type {model_type!r} is not supported; minillm knows {', '.join(sorted(SUPPORTED))}"
        )
    try:
        return ModelConfig(**_read_fields(raw, model_type), raw=dict(raw))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _read_fields(raw: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    heads, layers = _integer(raw, "num_attention_heads"), _integer(raw, "num_hidden_layers")
    _check_range("num_hidden_layers", layers, _MOST_LAYERS)
    hidden = _integer(raw, "hidden_size")
    rope_theta, rope_scaling = _rope(raw)
    mla = raw.get("kv_lora_rank") is not None
    experts = next((k for k in ("num_experts", "n_routed_experts", "num_local_experts") if raw.get(k)), "num_experts")
    qkv_bias = bool(raw.get("attention_bias", model_type in {"qwen2", "gpt_oss"}))
    values = {
        "model_type": model_type,
        "vocab_size": _integer(raw, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": _integer(raw, "intermediate_size"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _integer(raw, "num_key_value_heads", heads),
        "head_dim": _integer(raw, "head_dim", hidden // max(heads, 1)),
        "max_position_embeddings": _integer(raw, "max_position_embeddings", 2048),
        "rms_norm_eps": _number(raw, "rms_norm_eps", 1e-6),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", model_type == "gemma3_text")),
        "attention_bias": qkv_bias,
        "attention_out_bias": qkv_bias and model_type != "qwen2",
        "mlp_bias": bool(raw.get("mlp_bias", False)),
        "qk_norm": model_type in {"qwen3", "qwen3_moe", "gemma3_text"},
        "sliding_window": _sliding_window(raw, model_type),
        "num_experts": _integer(raw, experts, 0),
        "num_experts_per_tok": _integer(raw, "num_experts_per_tok", 0),
        "moe_intermediate_size": _integer(raw, "moe_intermediate_size", 0) or _integer(raw, "intermediate_size"),
        "n_shared_experts": _integer(raw, "n_shared_experts", 0),
        "first_k_dense_replace": _integer(raw, "first_k_dense_replace", 0),
        "eos_token_ids": _ids(raw.get("eos_token_id")),
        "bos_token_id": raw.get("bos_token_id"),
    }
    values["layer_types"] = _layer_types(raw, model_type, layers, values["sliding_window"])
    if mla:
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        values.update({name: _integer(raw, name) for name in names})
        values["q_lora_rank"] = None if raw.get("q_lora_rank") is None else _integer(raw, "q_lora_rank")
        values["num_key_value_heads"] = heads
    return values


_ROPE_NUMBERS = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "beta_fast",
                 "beta_slow", "attention_factor"}  # fmt: skip


def _rope(raw: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    """Older files say rope_theta and rope_scaling; transformers 5 writes both into rope_parameters."""
    given = [raw.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    if bad := [value for value in given if not isinstance(value, Mapping)]:
        raise ConfigError(f"rope scaling is {_short(bad[0])}; it must be an object with rope_type and its numbers")
    merged = {**given[0], **given[1]}
    if isinstance(merged.get("full_attention"), dict):  # one set for each layer type: the global one
        merged = dict(merged["full_attention"])
    theta = _number({"rope_theta": merged.pop("rope_theta", raw.get("rope_theta"))}, "rope_theta", 10000.0)
    kind = merged.get("rope_type", merged.get("type", "default"))
    for name in sorted(_ROPE_NUMBERS & merged.keys()):
        if merged[name] is not None and _number(merged, name, 0.0) <= 0:
            raise ConfigError(f"{name} of the rope scaling is {merged[name]!r}; it must be above 0")
    return theta, None if kind == "default" else {**merged, "rope_type": kind}


def _sliding_window(raw: Mapping[str, Any], model_type: str) -> int | None:
    if model_type in {"qwen2", "qwen3", "qwen3_moe"} and not raw.get("use_sliding_window", False):
        return None
    window = raw.get("sliding_window")
    return None if window is None else _integer(raw, "sliding_window")


def _layer_types(raw: Mapping[str, Any], model_type: str, layers: int, window: int | None) -> tuple[str, ...]:
    given = raw.get("layer_types")
    if given is not None:
        if not isinstance(given, list | tuple) or not all(isinstance(kind, str) for kind in given):
            raise ConfigError(f"layer_types is {_short(given)}; it must be a list of names, one for each layer")
        return tuple(given)
    if window is None:
        return ("full_attention",) * layers
    if model_type == "qwen2" or model_type == "qwen3":
        first = _integer(raw, "max_window_layers", layers)
        return tuple("sliding_attention" if i >= first else "full_attention" for i in range(layers))
    every = raw.get("sliding_window_pattern", {"gpt_oss": 2, "gemma3_text": 6}.get(model_type))
    if every is None:
        return ("sliding_attention",) * layers
    _check_range(
        "sliding_window_pattern", _integer({"sliding_window_pattern": every}, "sliding_window_pattern"), _LIMIT
    )
    return tuple("full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers))


def _integer(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"{name} is missing; this is not a whole model config")
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {_short(value)}; it must be a whole number")
    return value


def _number(raw: Mapping[str, Any], name: str, default: float) -> float:
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name} is {_short(value)}; it must be a finite number")
    return float(value)


def _ids(value: Any) -> tuple[int, ...]:
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if bad := [i for i in ids if isinstance(i, bool) or not isinstance(i, int)]:
        raise ConfigError(f"eos_token_id is {_short(bad[0])}; it must be a token id or a list of them")
    return ids


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_range(name: str, value: int, most: int) -> None:
    if not 0 < value <= most:
        raise ConfigError(f"{name} is {value}; it must lie between 1 and {most}")


def _validate(c: ModelConfig) -> None:
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "num_key_value_heads", "head_dim", "max_position_embeddings"):  # fmt: skip
        _check_range(name, getattr(c, name), _LIMIT - 1)
    if c.num_attention_heads % c.num_key_value_heads:
        raise ConfigError(
            f"num_attention_heads {c.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {c.num_key_value_heads}, so query heads cannot be grouped"
        )
    if not c.is_mla and c.head_dim % 2:
        raise ConfigError(f"head_dim {c.head_dim} is odd; rotary embedding turns pairs, so it must be even")
    if c.rms_norm_eps < 0 or c.rope_theta <= 0:
        raise ConfigError(f"rms_norm_eps {c.rms_norm_eps} must be at least 0 and rope_theta {c.rope_theta} above 0")
    if len(c.layer_types) != c.num_hidden_layers:
        raise ConfigError(f"layer_types names {len(c.layer_types)} layers, num_hidden_layers is {c.num_hidden_layers}")
    if unknown := set(c.layer_types) - {"full_attention", "sliding_attention"}:
        raise ConfigError(f"layer_types holds {sorted(map(str, unknown))}; known: full_attention, sliding_attention")
    if "sliding_attention" in c.layer_types and (c.sliding_window is None or c.sliding_window < 1):
        raise ConfigError(f"sliding_window is {c.sliding_window}; a sliding layer needs at least 1")
    if c.is_moe and not 0 < c.num_experts_per_tok <= c.num_experts:
        raise ConfigError(f"num_experts_per_tok {c.num_experts_per_tok} must lie between 1 and {c.num_experts}")


FIELD_NAMES = tuple(f.name for f in fields(ModelConfig))
