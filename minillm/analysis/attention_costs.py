"""FLOPs and bytes of attention: projections, rotary, cache write and the attention itself, for GQA and for MLA."""

from __future__ import annotations

from collections import Counter

from ..config import ModelConfig
from .kv_size import kv_layer_row_bytes
from .op_cost import OpCost, Precision, Step, Weights, total
from .parameters import mla_dims

NORM_FLOPS = 4  # an element: square, sum, scale, times the weight
ROTARY_FLOPS = 3  # an element: two products and a sum
GATE_FLOPS = 4  # an element: exp, add, divide, product


def attention_costs(
    config: ModelConfig, step: Step, precision: Precision, weights: Weights, absorbed: bool | None = None
) -> list[OpCost]:
    """Operators from the block's normed input to the output projection, in the order in which they run.

    MLA has two forms of the same arithmetic, `absorbed` or expanded; None takes the one with fewer FLOPs, which is
    expanded for a long prompt and absorbed for decode.
    """
    if not config.is_mla:
        return _grouped(config, step, precision, weights)
    if absorbed is None:
        forms = [_latent(config, step, precision, weights, form) for form in (True, False)]
        return min(forms, key=lambda ops: total(ops).flops)
    return _latent(config, step, precision, weights, absorbed)


def _windows(config: ModelConfig) -> Counter[int | None]:
    """window -> number of layers that have it. Attention sinks count as a window that is longer by so many."""
    return Counter(config.visible(layer) for layer in config.kv_layers)


def _pairs(config: ModelConfig, step: Step) -> int:
    return sum(layers * step.pairs(window) for window, layers in _windows(config).items())


def _keys(config: ModelConfig, step: Step) -> int:
    return sum(layers * step.keys(window) for window, layers in _windows(config).items())


def _grouped(config: ModelConfig, step: Step, precision: Precision, weights: Weights) -> list[OpCost]:
    layers, d, size = len(config.kv_layers), config.hidden_size, precision.activation_bytes
    queries = config.num_attention_heads * config.head_dim
    gates = queries if config.is_hybrid else 0
    rotated = queries + config.num_key_value_heads * config.head_dim
    rows = layers * step.tokens
    qkv = queries + 2 * config.num_key_value_heads * config.head_dim
    ops = [weights.linear("qkv_proj", layers, step.tokens, rows * (d + qkv + gates) * size)]
    if config.qk_norm:
        ops.append(_elementwise(config, "qk_norm", rows * rotated, size, NORM_FLOPS, weights.bytes["qk_norm"]))
    ops.append(_elementwise(config, "rotary", rows * rotated, size, ROTARY_FLOPS))
    ops.append(_kv_write(config, step, precision, rows * (qkv - queries) * size))
    ops.append(
        OpCost(
            "attention",
            layers,
            4 * queries * _pairs(config, step),
            weights.bytes.get("attention", 0),
            2 * rows * queries * size,
            _keys(config, step) * kv_layer_row_bytes(config, precision.kv),
        )
    )
    if gates:
        ops.append(OpCost("attn_gate", layers, GATE_FLOPS * rows * gates, 0, 3 * rows * gates * size))
    ops.append(weights.linear("o_proj", layers, step.tokens, rows * (queries + d) * size))
    return ops


def _elementwise(config: ModelConfig, name: str, elements: int, size: float, flops: int, weights: int = 0) -> OpCost:
    """Reads and writes each element once."""
    return OpCost(name, len(config.kv_layers), flops * elements, weights, 2 * elements * size)


def _kv_write(config: ModelConfig, step: Step, precision: Precision, read: float) -> OpCost:
    written = sum(layers * step.written(window) for window, layers in _windows(config).items())
    row = kv_layer_row_bytes(config, precision.kv)
    return OpCost("kv_write", len(config.kv_layers), 0, 0, read, written * row)


def _latent(config: ModelConfig, step: Step, precision: Precision, weights: Weights, absorbed: bool) -> list[OpCost]:
    """Multi-head latent attention, DeepSeek-V2 (arXiv 2405.04434), section 2.1."""
    layers, d, size = config.num_hidden_layers, config.hidden_size, precision.activation_bytes
    heads = config.num_attention_heads
    latent, rope, _, value = mla_dims(config)
    rows = layers * step.tokens
    ops = _latent_queries(config, step, weights, size)
    ops.append(weights.linear("kv_a_proj", layers, step.tokens, rows * (d + latent + rope) * size))
    ops.append(_elementwise(config, "kv_a_norm", rows * latent, size, NORM_FLOPS, weights.bytes["kv_a_norm"]))
    ops.append(_elementwise(config, "rotary", rows * (heads + 1) * rope, size, ROTARY_FLOPS))
    ops.append(_kv_write(config, step, precision, rows * (latent + rope) * size))
    ops += (_absorbed if absorbed else _expanded)(config, step, precision, weights)
    ops.append(weights.linear("o_proj", layers, step.tokens, rows * (heads * value + d) * size))
    return ops


def _latent_queries(config: ModelConfig, step: Step, weights: Weights, size: float) -> list[OpCost]:
    layers, d, rank = config.num_hidden_layers, config.hidden_size, config.q_lora_rank
    rows = layers * step.tokens
    query = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    if rank is None:
        return [weights.linear("q_proj", layers, step.tokens, rows * (d + query) * size)]
    return [
        weights.linear("q_a_proj", layers, step.tokens, rows * (d + rank) * size),
        _elementwise(config, "q_a_norm", rows * rank, size, NORM_FLOPS, weights.bytes["q_a_norm"]),
        weights.linear("q_b_proj", layers, step.tokens, rows * (rank + query) * size),
    ]


def _expanded(config: ModelConfig, step: Step, precision: Precision, weights: Weights) -> list[OpCost]:
    """Every latent of the context is turned back into keys and values, which attention then reads as activations."""
    layers, heads, size = config.num_hidden_layers, config.num_attention_heads, precision.activation_bytes
    _, rope, nope, value = mla_dims(config)
    keys, rows = _keys(config, step), layers * step.tokens
    expanded = keys * heads * (nope + value) * size
    expand = OpCost(
        "kv_b_proj",
        layers,
        2 * keys * weights.matrix_parameters["kv_b_proj"] // layers,
        weights.bytes["kv_b_proj"],
        expanded,
        keys * kv_layer_row_bytes(config, precision.kv),
    )
    attend = OpCost(
        "attention",
        layers,
        2 * heads * (nope + rope + value) * _pairs(config, step),
        0,
        rows * heads * (nope + rope + value) * size + expanded,
    )
    return [expand, attend]


def _absorbed(config: ModelConfig, step: Step, precision: Precision, weights: Weights) -> list[OpCost]:
    """The expansion moves to the query and to the output, so attention reads the latents as they are: one KV head
    whose key is latent and rotary key together and whose value is the latent."""
    layers, heads, size = config.num_hidden_layers, config.num_attention_heads, precision.activation_bytes
    latent, rope, nope, value = mla_dims(config)
    rows = layers * step.tokens
    kv_b = weights.bytes["kv_b_proj"]
    for_keys = kv_b * nope // (nope + value)

    def absorb(name: str, width: int, size_bytes: int) -> OpCost:
        activations = rows * heads * (width + latent) * size
        return OpCost(name, layers, 2 * rows * heads * width * latent, size_bytes, activations)

    attend = OpCost(
        "attention",
        layers,
        2 * heads * (2 * latent + rope) * _pairs(config, step),
        0,
        rows * heads * (2 * latent + rope) * size,
        _keys(config, step) * kv_layer_row_bytes(config, precision.kv),
    )
    return [absorb("q_absorb", nope, for_keys), attend, absorb("v_absorb", value, kv_b - for_keys)]
