"""How big a model is: every weight it holds, its parameters by part, the bytes they take.

One table of weights (`weight_table`) is the source of the parameter counts, the weight bytes, the memory budget and
the cost model, so they cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from ..config import ModelConfig
from ..errors import ConfigError
from .formats import Format, format_of
from .kv_size import kv_heads_per_rank

PARTS = ("embedding", "attention", "ffn", "experts", "norms", "head")


@dataclass(frozen=True)
class Weight:
    """One kind of weight tensor.

    `operator` is the operator that reads it, `shape` is (out, in) for a matrix and (n,) for a vector, `count` how many
    the model holds, `active` how many of those one token uses. `split` says what tensor parallelism divides: "rows"
    (out), "columns" (in), "kv" (rows that are whole KV heads), or None for a weight that every rank keeps whole.
    """

    operator: str
    part: str
    shape: tuple[int, ...]
    count: int
    active: int
    split: str | None = None

    @property
    def parameters(self) -> int:
        return prod(self.shape) * self.count

    @property
    def active_parameters(self) -> int:
        return prod(self.shape) * self.active

    def quantizable(self, keep: tuple[str, ...] = ("embedding", "head")) -> bool:
        """Weight quantizers change matrices of the linear layers; vectors, routers and the parts in `keep` stay."""
        return len(self.shape) == 2 and self.operator != "router" and self.part not in keep


def weight_table(config: ModelConfig) -> list[Weight]:
    """Every weight of the model, as `transformers` names count them (buffers, such as the DeepSeek-V3 router's
    correction bias, are not parameters). A tied head is listed under "embedding" alone."""
    d, vocab = config.hidden_size, config.vocab_size
    table = [Weight("embed", "embedding", (vocab, d), 1, 1, "rows")]
    table += _attention(config)
    table += _delta(config)
    table += _dense_ffn(config)
    table += _expert_ffn(config)
    table += _norms(config)
    if not config.tie_word_embeddings:
        table.append(Weight("lm_head", "head", (vocab, d), 1, 1, "rows"))
    return table


def norms_per_block(config: ModelConfig) -> int:
    """Gemma 3 normalises after attention and after the FFN too, so it has four norms a block where others have two."""
    return 4 if config.model_type == "gemma3_text" else 2


def _attention(config: ModelConfig) -> list[Weight]:
    if config.is_mla:
        return _mla(config)
    layers, d, wide = len(config.kv_layers), config.hidden_size, config.head_dim
    heads, keys = config.num_attention_heads * wide, config.num_key_value_heads * wide
    queries = heads * (1 + config.is_hybrid)  # with an output gate for each
    table = [
        Weight("qkv_proj", "attention", (queries, d), layers, layers, "rows"),
        Weight("qkv_proj", "attention", (keys, d), 2 * layers, 2 * layers, "kv"),
        Weight("o_proj", "attention", (d, heads), layers, layers, "columns"),
    ]
    if config.attention_bias:
        table.append(Weight("qkv_proj", "attention", (queries,), layers, layers, "rows"))
        table.append(Weight("qkv_proj", "attention", (keys,), 2 * layers, 2 * layers, "kv"))
    if config.attention_out_bias:
        table.append(Weight("o_proj", "attention", (d,), layers, layers))
    if config.model_type == "gpt_oss":  # one learned sink logit a query head
        table.append(Weight("attention", "attention", (config.num_attention_heads,), layers, layers, "rows"))
    return table


def _delta(config: ModelConfig) -> list[Weight]:
    """Linear layers, Yang et al. 2024 (arXiv 2412.06464), section 3.4; their norm is counted with the norms."""
    layers, d, heads = len(config.linear_layers), config.hidden_size, config.linear_num_value_heads
    values = heads * config.linear_value_head_dim
    if not layers:
        return []

    def each(operator: str, shape: tuple[int, ...], split: str | None = None) -> Weight:
        return Weight(operator, "attention", shape, layers, layers, split)

    return [
        each("delta_in_proj", (config.conv_channels + values + 2 * heads, d), "rows"),
        each("conv", (config.conv_channels * config.linear_conv_kernel_dim,), "rows"),
        each("delta_gates", (2 * heads,), "rows"),
        each("delta_o_proj", (d, values), "columns"),
    ]


def _mla(config: ModelConfig) -> list[Weight]:
    """DeepSeek-V2 (arXiv 2405.04434), section 2.1: low-rank queries, one latent for keys and values."""
    layers, d, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    latent, rope, nope, value = mla_dims(config)
    query = heads * (nope + rope)

    def each(operator: str, shape: tuple[int, ...], split: str | None = None) -> Weight:
        return Weight(operator, "attention", shape, layers, layers, split)

    if config.q_lora_rank is None:
        table = [each("q_proj", (query, d), "rows")]
    else:
        rank = config.q_lora_rank
        table = [each("q_a_proj", (rank, d)), each("q_b_proj", (query, rank), "rows")]
        table += [each("q_a_proj", (rank,))] if config.attention_bias else []
    table += [
        each("kv_a_proj", (latent + rope, d)),
        each("kv_b_proj", (heads * (nope + value), latent), "rows"),
        each("o_proj", (d, heads * value), "columns"),
    ]
    table += [each("kv_a_proj", (latent + rope,))] if config.attention_bias else []
    table += [each("o_proj", (d,))] if config.attention_out_bias else []
    return table


def mla_dims(config: ModelConfig) -> tuple[int, int, int, int]:
    """(d_c, d_rope, d_nope, d_v): latent width, shared rotary key, per-head query-key and value widths."""
    return config.kv_lora_rank or 0, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim


def expert_layers(config: ModelConfig) -> int:
    return sum(config.is_expert_layer(layer) for layer in range(config.num_hidden_layers))


def _dense_ffn(config: ModelConfig) -> list[Weight]:
    layers = config.num_hidden_layers - expert_layers(config)
    d, wide = config.hidden_size, config.intermediate_size
    if not layers:
        return []
    table = [
        Weight("gate_up_proj", "ffn", (2 * wide, d), layers, layers, "rows"),
        Weight("down_proj", "ffn", (d, wide), layers, layers, "columns"),
    ]
    if config.mlp_bias:
        table.append(Weight("gate_up_proj", "ffn", (2 * wide,), layers, layers, "rows"))
        table.append(Weight("down_proj", "ffn", (d,), layers, layers))
    return table


def _expert_ffn(config: ModelConfig) -> list[Weight]:
    layers = expert_layers(config)
    if not layers:
        return []
    d, wide, shared = config.hidden_size, config.moe_intermediate_size, config.shared_width
    experts, chosen = layers * config.num_experts, layers * config.num_experts_per_tok
    table = [
        Weight("router", "experts", (config.num_experts, d), layers, layers),
        Weight("experts", "experts", (2 * wide, d), experts, chosen, "rows"),
        Weight("experts", "experts", (d, wide), experts, chosen, "columns"),
    ]
    if shared:
        table.append(Weight("shared_experts", "experts", (2 * shared, d), layers, layers, "rows"))
        table.append(Weight("shared_experts", "experts", (d, shared), layers, layers, "columns"))
    if config.shared_expert_intermediate_size:  # one number a token scales what the shared expert finds
        table.append(Weight("router", "experts", (1, d), layers, layers))
    if config.model_type == "gpt_oss":  # its router and experts carry biases
        table.append(Weight("router", "experts", (config.num_experts,), layers, layers))
        table.append(Weight("experts", "experts", (2 * wide,), experts, chosen, "rows"))
        table.append(Weight("experts", "experts", (d,), experts, chosen))
    return table


def _norms(config: ModelConfig) -> list[Weight]:
    layers, d = config.num_hidden_layers, config.hidden_size
    pairs = norms_per_block(config) // 2 * layers
    table = [Weight("attn_norm", "norms", (d,), pairs, pairs), Weight("ffn_norm", "norms", (d,), pairs, pairs)]
    if config.qk_norm:
        both = 2 * len(config.kv_layers)
        table.append(Weight("qk_norm", "norms", (config.head_dim,), both, both))
    if linear := len(config.linear_layers):
        table.append(Weight("delta_norm", "norms", (config.linear_value_head_dim,), linear, linear))
    if config.is_mla:
        table.append(Weight("kv_a_norm", "norms", (config.kv_lora_rank or 0,), layers, layers))
        if config.q_lora_rank is not None:
            table.append(Weight("q_a_norm", "norms", (config.q_lora_rank,), layers, layers))
    table.append(Weight("final_norm", "norms", (d,), 1, 1))
    return table


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by part. `experts` holds routed and shared experts and routers. `active` is what one token uses, the
    whole embedding included, as model cards count it; `embedding` and `head` let a reader take either away."""

    embedding: int
    attention: int
    ffn: int
    experts: int
    norms: int
    head: int
    total: int
    active: int
    tied: bool

    def parts(self) -> dict[str, int]:
        return {part: getattr(self, part) for part in PARTS}


def parameter_count(config: ModelConfig) -> ParameterCount:
    """Counts parameters from the config alone, as `sum(p.numel() for p in model.parameters())` would."""
    parts = dict.fromkeys(PARTS, 0)
    table = weight_table(config)
    for weight in table:
        parts[weight.part] += weight.parameters
    active = sum(weight.active_parameters for weight in table)
    return ParameterCount(**parts, total=sum(parts.values()), active=active, tied=config.tie_word_embeddings)


def weight_bytes(
    config: ModelConfig,
    weights: Any = "bfloat16",
    kept: Any | None = None,
    keep: tuple[str, ...] = ("embedding", "head"),
    tensor_parallel: int = 1,
) -> int:
    """Bytes of all weights (of one rank of `tensor_parallel`), scales and zero points included.

    Linear layers are stored as `weights`. Vectors, routers and the parts in `keep` are stored as `kept`; by default
    that is `weights` too if it has 16 bits or more, else bfloat16, since quantizers leave them alone.
    Raises ConfigError for an unknown format or part.
    """
    if unknown := set(keep) - set(PARTS):
        raise ConfigError(f"keep names {sorted(unknown)}; parts of a model are {', '.join(PARTS)}")
    formats = {True: format_of(weights), False: kept_format(weights, kept)}
    total = 0
    for weight in weight_table(config):
        rows, columns = _rank_shape(config, weight, tensor_parallel)
        total += formats[weight.quantizable(keep)].tensor_bytes(rows, columns) * weight.count
    return total


def kept_format(weights: Any, kept: Any | None) -> Format:
    """Format of what weight quantization leaves alone."""
    linear = format_of(weights)
    return format_of(kept if kept is not None else linear if linear.bits >= 16 else "bfloat16")


def _rank_shape(config: ModelConfig, weight: Weight, ranks: int) -> tuple[int, int]:
    rows, columns = weight.shape if len(weight.shape) == 2 else (1, weight.shape[0])
    if len(weight.shape) == 1 and weight.split:
        return 1, _share(config, weight, columns, ranks)
    if weight.split == "columns":
        return rows, -(-columns // ranks)
    return (_share(config, weight, rows, ranks) if weight.split else rows), columns


def _share(config: ModelConfig, weight: Weight, size: int, ranks: int) -> int:
    if weight.split == "kv":  # whole heads: more ranks than KV heads means copies, not slices
        return size // config.num_key_value_heads * kv_heads_per_rank(config, ranks)
    return -(-size // ranks)
