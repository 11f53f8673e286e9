"""From the keys of a config.json to the fields of ModelConfig, following what each family really reads.

A key that a family ignores must be ignored here too: a Llama file with a sliding_window has no window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .errors import ConfigError, short

_MOST_LAYERS = 4096
_WINDOWED = {"mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss"}
# Mistral slides in every layer or in none
_LAYER_TYPED = {"qwen2", "qwen3", "qwen3_moe", "qwen3_next", "gemma3_text", "gpt_oss"}
# those that read attention_bias
_BIASED = {"llama", "qwen3", "qwen3_moe", "qwen3_next", "gpt_oss", "gemma3_text", "deepseek_v3", "kimi_k2"}
_LATENT = {"deepseek_v3", "kimi_k2"}
_SILU = (None, "silu", "swish")


def read_fields(raw: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Values for ModelConfig's fields. Raises ConfigError naming the key that is missing or of the wrong kind."""
    activation = raw.get("hidden_act")
    if model_type not in {"gemma3_text", "gpt_oss"} and activation not in _SILU:
        raise ConfigError(f"hidden_act is {short(repr(activation))}; minillm computes silu alone")
    heads, layers = _integer(raw, "num_attention_heads"), _integer(raw, "num_hidden_layers")
    check_range("num_hidden_layers", layers, _MOST_LAYERS)
    hidden = _integer(raw, "hidden_size")
    rope_theta, rope_scaling = _rope(raw)
    mla = raw.get("kv_lora_rank") is not None or model_type in _LATENT
    experts = next((k for k in ("num_experts", "n_routed_experts", "num_local_experts") if raw.get(k)), "num_experts")
    qkv_bias = _qkv_bias(raw, model_type)
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
        "mlp_bias": model_type == "llama" and bool(raw.get("mlp_bias")),
        "qk_norm": model_type in {"qwen3", "qwen3_moe", "qwen3_next", "gemma3_text"},
        "sliding_window": _sliding_window(raw, model_type),
        "attention_sinks": _integer(raw, "attention_sinks", 0),
        "num_experts": _integer(raw, experts, 0),
        "num_experts_per_tok": _integer(raw, "num_experts_per_tok", 0),
        "moe_intermediate_size": _integer(raw, "moe_intermediate_size", 0) or _integer(raw, "intermediate_size"),
        "n_shared_experts": _integer(raw, "n_shared_experts", 0),
        "first_k_dense_replace": _integer(raw, "first_k_dense_replace", 0),
        "eos_token_ids": _ids(raw.get("eos_token_id")),
        "bos_token_id": raw.get("bos_token_id"),
    }
    values.update(_routing(raw, model_type))
    values["layer_types"] = _layer_types(raw, model_type, layers, values["sliding_window"])
    if model_type == "qwen3_next":
        values.update(_hybrid(raw))
    if mla:
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        values.update({name: _integer(raw, name) for name in names})
        values["q_lora_rank"] = None if raw.get("q_lora_rank") is None else _integer(raw, "q_lora_rank")
        values["num_key_value_heads"] = heads
        values["num_nextn_predict_layers"] = _integer(raw, "num_nextn_predict_layers", 0)
        check_range("num_nextn_predict_layers", values["num_nextn_predict_layers"], _MOST_LAYERS, 0)
        values["rope_interleave"] = bool(raw.get("rope_interleave", True))
    return values


def _hybrid(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen3-Next's own keys, with the defaults that its family has where a file leaves them out."""
    defaults = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
                "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "head_dim": 256}  # fmt: skip
    values: dict[str, Any] = {name: _integer(raw, name, default) for name, default in defaults.items()}
    rope = raw.get("rope_parameters") or {}
    share = {"partial_rotary_factor": rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))}
    values["partial_rotary_factor"] = _number(share, "partial_rotary_factor", 0.25)
    if raw.get("num_experts"):
        values["shared_expert_intermediate_size"] = _integer(raw, "shared_expert_intermediate_size", 512)
        check_range("shared_expert_intermediate_size", values["shared_expert_intermediate_size"], 1 << 31)
    return values


def _routing(raw: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Which layers have experts and how these are chosen, with each family's own defaults. A key that a family does not
    read is left alone: Mixtral always makes weights sum to 1."""
    values: dict[str, Any] = {}
    if model_type in {"deepseek_v3", "kimi_k2"}:
        if (scoring := raw.get("scoring_func") or "sigmoid") != "sigmoid":
            raise ConfigError(f"scoring_func is {short(repr(scoring))}; {model_type} chooses its experts by sigmoid")
        defaults = (8, 4, 2.5) if model_type == "deepseek_v3" else (1, 1, 1.0)
        values["n_group"] = _integer(raw, "n_group", defaults[0])
        values["topk_group"] = _integer(raw, "topk_group", defaults[1])
        values["routed_scaling_factor"] = _number(raw, "routed_scaling_factor", defaults[2])
        values |= {"scoring_func": "sigmoid", "norm_topk_prob": bool(raw.get("norm_topk_prob", True))}
    if model_type in {"qwen3_moe", "qwen3_next"}:
        values["norm_topk_prob"] = bool(raw.get("norm_topk_prob", model_type == "qwen3_next"))
        dense = raw.get("mlp_only_layers") or []
        if not isinstance(dense, list | tuple) or any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
            raise ConfigError(f"mlp_only_layers is {short(repr(dense))}; it must be a list of layer numbers")
        values["mlp_only_layers"] = tuple(dense)
        values["decoder_sparse_step"] = _integer(raw, "decoder_sparse_step", 1)
        check_range("decoder_sparse_step", values["decoder_sparse_step"], _MOST_LAYERS)
    return values


def _qkv_bias(raw: Mapping[str, Any], model_type: str) -> bool:
    """Qwen2 always has biases on q, k and v, Mistral never; the others say."""
    if model_type not in _BIASED:
        return model_type == "qwen2"
    return bool(raw.get("attention_bias", model_type == "gpt_oss"))


# rope_type -> the numbers it needs
_ROPE_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
_ROPE_MAY = ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale",
             "mscale_all_dim")  # fmt: skip


def _rope(raw: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    """Older files say rope_theta and rope_scaling; transformers 5 writes both into rope_parameters."""
    given = [raw.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    if bad := [value for value in given if not isinstance(value, Mapping)]:
        raise ConfigError(f"rope scaling is {short(repr(bad[0]))}; it must be an object with rope_type and its numbers")
    merged = {**given[0], **given[1]}
    if isinstance(merged.get("full_attention"), dict):  # one set for each layer type: the global one
        merged = dict(merged["full_attention"])
    theta = _number({"rope_theta": merged.pop("rope_theta", raw.get("rope_theta"))}, "rope_theta", 10000.0)
    kind = merged.get("rope_type", merged.get("type", "default"))
    if kind == "default":
        return theta, None
    _check_rope(kind, merged, theta)
    return theta, {**merged, "rope_type": kind}


def _check_rope(kind: Any, scaling: Mapping[str, Any], theta: float) -> None:
    """Numbers of the kinds that minillm computes; another kind can still be sized, and is refused when it is run."""
    if kind == "divisors" and not isinstance(scaling.get("divisors"), tuple):
        raise ConfigError("rope_scaling of type 'divisors' exists in GGUF files alone; write the type it came from")
    needed = _ROPE_NEEDS.get(kind, ()) if isinstance(kind, str) else ()
    for name in needed:
        if scaling.get(name) is None:
            raise ConfigError(f"rope_scaling of type {kind!r} lacks {name}; download the config again")
    for name in (*needed, *(_ROPE_MAY if needed else ())):
        if scaling.get(name) is not None and not 0 < _number(scaling, name, 0.0) < 1e12:
            raise ConfigError(f"{name} of the rope scaling is {short(repr(scaling[name]))}; it must be above 0")
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise ConfigError(
            f"high_freq_factor {scaling['high_freq_factor']} of the rope scaling must be above "
            f"low_freq_factor {scaling['low_freq_factor']}"
        )
    if kind == "yarn" and theta <= 1:
        raise ConfigError(f"rope_theta is {theta}; YaRN takes its logarithm, so it must be above 1")


def _sliding_window(raw: Mapping[str, Any], model_type: str) -> int | None:
    if model_type not in _WINDOWED:
        return None
    if model_type in {"qwen2", "qwen3", "qwen3_moe"} and not raw.get("use_sliding_window", False):
        return None
    window = raw.get("sliding_window")
    return None if window is None else _integer(raw, "sliding_window")


def _layer_types(raw: Mapping[str, Any], model_type: str, layers: int, window: int | None) -> tuple[str, ...]:
    given = raw.get("layer_types")
    if given is not None and model_type in _LAYER_TYPED:
        if not isinstance(given, list | tuple) or not all(isinstance(kind, str) for kind in given):
            raise ConfigError(f"layer_types is {short(repr(given))}; it must be a list of names, one for each layer")
        return tuple(given)
    if model_type == "qwen3_next":
        every = _integer(raw, "full_attention_interval", 4)
        check_range("full_attention_interval", every, layers)
        return tuple("linear_attention" if (i + 1) % every else "full_attention" for i in range(layers))
    if window is None:
        return ("full_attention",) * layers
    if model_type == "qwen2" or model_type == "qwen3":
        first = _integer(raw, "max_window_layers", layers)
        return tuple("sliding_attention" if i >= first else "full_attention" for i in range(layers))
    every = raw.get("sliding_window_pattern", {"gpt_oss": 2, "gemma3_text": 6}.get(model_type))
    if every is None:
        return ("sliding_attention",) * layers
    every = _integer({"sliding_window_pattern": every}, "sliding_window_pattern")
    check_range("sliding_window_pattern", every, layers)
    return tuple("full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers))


def _integer(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"{name} is missing; this is not a whole model config")
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {short(repr(value))}; it must be a whole number")
    return value


def _number(raw: Mapping[str, Any], name: str, default: float) -> float:
    value = raw.get(name)
    value = default if value is None else value
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:  # a whole number beyond the range of floats
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{name} is {short(repr(value))}; it must be a finite number")
    return number


def _ids(value: Any) -> tuple[int, ...]:
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if bad := [i for i in ids if isinstance(i, bool) or not isinstance(i, int)]:
        raise ConfigError(f"eos_token_id is {short(repr(bad[0]))}; it must be a token id or a list of them")
    return ids


def check_range(name: str, value: int, most: int, least: int = 1) -> None:
    """Raises ConfigError unless least <= value <= most."""
    if not least <= value <= most:
        raise ConfigError(f"{name} is {short(repr(value))}; it must lie between {least} and {most}")
