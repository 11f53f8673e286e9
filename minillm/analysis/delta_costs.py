"""FLOPs and bytes of linear layers: what a token costs is the same at every length, and so is what is kept."""

from __future__ import annotations

from ..config import ModelConfig
from .kv_size import STATE_ELEMENT_BYTES
from .op_cost import OpCost, Precision, Step, Weights

CHUNK = 32  # tokens, as in delta_rule.py, which needs torch
_NORM_FLOPS = 4  # an element: square, sum, scale, times the weight
_SILU_FLOPS = 4  # an element: exp, add, divide, product
_RECURRENT_MOST = 4  # new tokens that a sequence takes one by one


def delta_costs(config: ModelConfig, step: Step, precision: Precision, weights: Weights) -> list[OpCost]:
    """Operators of all linear layers, in the order in which they run. State read and written counts as `kv_bytes`."""
    c, layers, size = config, len(config.linear_layers), precision.activation_bytes
    if not layers:
        return []
    rows, sequences = layers * step.tokens, layers * len(step.new)
    keys, heads = c.linear_num_key_heads * c.linear_key_head_dim, c.linear_num_value_heads
    values, channels, taps = heads * c.linear_value_head_dim, c.conv_channels, c.linear_conv_kernel_dim
    state, small = values * c.linear_key_head_dim, 2 * heads  # of a sequence; a and b of a token
    made, element = channels + values + small, STATE_ELEMENT_BYTES

    def op(name: str, flops: float, activations: float, kept: float = 0) -> OpCost:
        return OpCost(name, layers, flops, weights.bytes.get(name, 0), activations, kept)

    return [
        weights.linear("delta_in_proj", layers, step.tokens, rows * (c.hidden_size + made) * size),
        op("conv", rows * channels * (2 * taps + _SILU_FLOPS), 2 * rows * channels * size,
           2 * sequences * (taps - 1) * channels * element),
        op("delta_gates", rows * (2 * keys * _NORM_FLOPS + small * _SILU_FLOPS), 2 * rows * (2 * keys + small) * size),
        op("delta_rule", layers * sum(delta_flops(c, new) for new in step.new),
           rows * (2 * keys + 2 * values + small) * size, 2 * sequences * state * element),
        op("delta_norm", rows * values * (_NORM_FLOPS + _SILU_FLOPS + 1), 3 * rows * values * size),
        weights.linear("delta_o_proj", layers, step.tokens, rows * (values + c.hidden_size) * size),
    ]  # fmt: skip


def delta_flops(config: ModelConfig, tokens: int) -> int:
    """Of one layer's delta rule over `tokens` new tokens of a sequence.

    Token by token 7·Hv·Dk·Dv: the decay, and a product and a sum each for what the state holds, what is written and
    what is read. In chunks of C tokens 6·Hv·Dk·Dv, in matrix products, and 4·C·Hv·(Dk + Dv) for two triangles.
    """
    heads, dk, dv = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    if tokens <= _RECURRENT_MOST:
        return 7 * tokens * heads * dk * dv
    return tokens * heads * (6 * dk * dv + 4 * min(tokens, CHUNK) * (dk + dv))
