"""FLOPs and bytes of every operator of one step, from the ModelConfig alone.

What is counted. FLOPs: matrix products exactly (2 a multiply-add; bias additions and softmax are left out, as torch's
own counter does), element-wise operators by their arithmetic. Bytes: each operator reads its inputs and its weights
once and writes its outputs once, with nothing kept in a cache between operators. So the bytes are those that an
unfused implementation must move, and a fused one undercuts the activations but never the weights or the KV cache.

The two residual additions of a block are one operator, `residual`.
"""

from __future__ import annotations

from ..config import ModelConfig
from .attention_costs import NORM_FLOPS, attention_costs
from .delta_costs import delta_costs
from .formats import format_of
from .kv_size import kv_bytes, kv_bytes_per_token
from .op_cost import LOGIT_BYTES, OpCost, Precision, Step, Weights, distinct_experts, total, visible_pairs
from .parameters import expert_layers, kept_format, norms_per_block, parameter_count, weight_bytes

__all__ = [
    "OPERATORS", "OpCost", "Precision", "Step", "distinct_experts", "kv_bytes", "kv_bytes_per_token",
    "parameter_count", "step_costs", "total", "visible_pairs", "weight_bytes",
]  # fmt: skip

# Every name a step can have, in the order in which the operators run.
OPERATORS = (
    "embed", "attn_norm", "qkv_proj", "q_proj", "q_a_proj", "q_a_norm", "q_b_proj", "kv_a_proj", "kv_a_norm",
    "qk_norm", "rotary", "kv_write", "kv_b_proj", "q_absorb", "attention", "v_absorb", "attn_gate", "o_proj",
    "delta_in_proj", "conv", "delta_gates", "delta_rule", "delta_norm", "delta_o_proj", "residual", "ffn_norm",
    "router", "gate_up_proj", "experts", "shared_experts", "swiglu", "down_proj", "final_norm", "lm_head",
)  # fmt: skip

_SWIGLU_FLOPS = 5  # an element: exp, add and divide for the sigmoid, two products


def step_costs(
    config: ModelConfig, step: Step, precision: Precision | None = None, absorbed: bool | None = None
) -> list[OpCost]:
    """Costs of one step, one entry an operator (all layers together), in the order in which they run.

    `absorbed` picks the form of MLA: True, False, or None for the one with fewer FLOPs.
    Raises ConfigError for an unknown number format.
    """
    precision = precision or Precision()
    weights = Weights.of(config, precision)
    ops = [_embed(config, step, precision)]
    ops.append(_norm(config, "attn_norm", step, precision, weights))
    ops += attention_costs(config, step, precision, weights, absorbed)
    ops += delta_costs(config, step, precision, weights)
    ops.append(_residual(config, step, precision))
    ops.append(_norm(config, "ffn_norm", step, precision, weights))
    ops += _ffn(config, step, precision, weights)
    ops.append(_norm(config, "final_norm", step, precision, weights))
    ops.append(_head(config, step, precision, weights))
    return sorted(ops, key=lambda op: OPERATORS.index(op.name))


def _embed(config: ModelConfig, step: Step, precision: Precision) -> OpCost:
    """A gather: one row of the table a token, read and written."""
    kept = "embedding" in precision.keep
    row = (kept_format(precision.weights, precision.kept) if kept else format_of(precision.weights)).tensor_bytes(
        1, config.hidden_size
    )
    return OpCost("embed", 1, 0, step.tokens * row, step.tokens * config.hidden_size * precision.activation_bytes)


def _norm(config: ModelConfig, name: str, step: Step, precision: Precision, weights: Weights) -> OpCost:
    """RMSNorms of one kind; the final one needs only the rows that go on to the head."""
    d, layers = config.hidden_size, config.num_hidden_layers
    count = 1 if name == "final_norm" else norms_per_block(config) // 2 * layers
    normed = step.rows if name == "final_norm" else count * step.tokens
    return OpCost(
        name, count, d * NORM_FLOPS * normed, weights.bytes[name], 2 * normed * d * precision.activation_bytes
    )


def _residual(config: ModelConfig, step: Step, precision: Precision) -> OpCost:
    """The two additions of a block: each reads two rows and writes one."""
    added = 2 * config.num_hidden_layers * step.tokens * config.hidden_size
    return OpCost("residual", 2 * config.num_hidden_layers, added, 0, 3 * added * precision.activation_bytes)


def _ffn(config: ModelConfig, step: Step, precision: Precision, weights: Weights) -> list[OpCost]:
    size, tokens = precision.activation_bytes, step.tokens
    d, wide, sparse = config.hidden_size, config.intermediate_size, expert_layers(config)
    dense = config.num_hidden_layers - sparse
    gated = dense * wide
    ops = []
    if dense:
        ops.append(weights.linear("gate_up_proj", dense, tokens, dense * tokens * (d + 2 * wide) * size))
        ops.append(weights.linear("down_proj", dense, tokens, dense * tokens * (wide + d) * size))
    if sparse:
        ops += _experts(config, step, precision, weights, sparse)
        gated += sparse * (config.num_experts_per_tok * config.moe_intermediate_size + config.shared_width)
    elements = tokens * gated  # gate and up are read, their product is written
    ops.append(OpCost("swiglu", config.num_hidden_layers, _SWIGLU_FLOPS * elements, 0, 3 * elements * size))
    return ops


def _experts(config: ModelConfig, step: Step, precision: Precision, weights: Weights, layers: int) -> list[OpCost]:
    """Router, routed experts (only those that some token chose are read) and shared experts. Each token's copies
    are read again to be summed."""
    size, tokens, d = precision.activation_bytes, step.tokens, config.hidden_size
    wide, chosen, shared = config.moe_intermediate_size, config.num_experts_per_tok, config.shared_width
    read = distinct_experts(config.num_experts, chosen, tokens) / config.num_experts
    copies = layers * tokens * chosen * (3 * d + 3 * wide) + layers * tokens * d
    ops = [
        weights.linear("router", layers, tokens, layers * tokens * (d + config.num_experts) * size),
        weights.linear("experts", layers, tokens, copies * size, share=read),
    ]
    if shared:
        moved = layers * tokens * (2 * d + 3 * shared)
        ops.append(weights.linear("shared_experts", layers, tokens, moved * size))
    return ops


def _head(config: ModelConfig, step: Step, precision: Precision, weights: Weights) -> OpCost:
    """The output projection of the rows that are sampled from; a tied head reads the embedding table."""
    source = "embed" if config.tie_word_embeddings else "lm_head"
    moved = step.rows * (config.hidden_size * precision.activation_bytes + config.vocab_size * LOGIT_BYTES)
    flops = 2 * step.rows * config.vocab_size * config.hidden_size
    return OpCost("lm_head", 1, flops, weights.bytes[source] if step.rows else 0, moved)
