"""A model taken apart into what a checkpoint names: stacked matrices by their rows, experts one by one.

The inverse of what transformer.py, mla.py, hybrid.py and moe_loading.py do with a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from ..attention import Attention
from ..config import ModelConfig
from ..delta_net import GatedDeltaNet
from ..errors import QuantizationError
from ..hybrid import delta_blocks, row_blocks
from ..layers import Linear, RMSNorm, SwiGLU
from ..mla import LatentAttention, LowRankQueries, interleaved
from ..moe import Expert, ExpertLayer
from ..moe_loading import NAMES
from ..transformer import Transformer
from .linear import QuantizedLinear
from .weight import QuantizedWeight

Parts = Iterator[tuple[str, QuantizedWeight | Tensor]]
Order = Callable[[Tensor], Tensor]


def named_parts(model: Transformer) -> Parts:
    """(Hugging Face's name, tensor or quantized matrix) of everything but the embedding.

    A QuantizedWeight goes by its module's name, a plain tensor by its own. Raises QuantizationError for matrices packed
    for this CPU.
    """
    c = model.config
    for i, block in enumerate(model.blocks):
        prefix = f"model.layers.{i}."
        if isinstance(block.attention, GatedDeltaNet):
            yield from _delta_net(c, block.attention, f"{prefix}linear_attn.")
        else:
            latent = isinstance(block.attention, LatentAttention)
            parts = _latent if latent else _gated_attention if c.is_hybrid else _attention
            yield from parts(c, block.attention, f"{prefix}self_attn.")
        experts = isinstance(block.mlp, ExpertLayer)
        yield from (_experts(c, block.mlp, prefix) if experts else _dense(c, block.mlp, f"{prefix}mlp."))
        yield from _norms(c, prefix, input_layernorm=block.attn_norm, post_attention_layernorm=block.ffn_norm)
    yield from _norms(c, "model.", norm=model.final_norm)
    if isinstance(model.lm_head, QuantizedLinear) or not c.tie_word_embeddings:
        yield from _rows_of(model.lm_head, "", {"lm_head": c.vocab_size})


def _attention(c: ModelConfig, at: Attention, prefix: str) -> Parts:
    queries, keys = at.heads * at.head_dim, at.kv_heads * at.head_dim
    yield from _rows_of(at.qkv_proj, prefix, {"q_proj": queries, "k_proj": keys, "v_proj": keys})
    yield from _rows_of(at.o_proj, prefix, {"o_proj": c.hidden_size})
    yield from _norms(c, prefix, q_norm=at.q_norm, k_norm=at.k_norm)


def _gated_attention(c: ModelConfig, at: Attention, prefix: str) -> Parts:
    """Qwen3-Next's: gates are the last rows here, and beside their head's query in the file."""
    H, Hkv, D = at.heads, at.kv_heads, at.head_dim
    rows = torch.arange((2 * H + 2 * Hkv) * D)
    q, k, v, gate = rows.split([H * D, Hkv * D, Hkv * D, H * D])
    yield from _picked(
        at.qkv_proj, prefix, {"q_proj": _filed([q, gate], row_blocks(H, [D, D])), "k_proj": k, "v_proj": v}
    )
    yield from _rows_of(at.o_proj, prefix, {"o_proj": c.hidden_size})
    yield from _norms(c, prefix, q_norm=at.q_norm, k_norm=at.k_norm)


def _delta_net(c: ModelConfig, net: GatedDeltaNet, prefix: str) -> Parts:
    qkvz, ba = delta_blocks(c)
    blocks = [*qkvz, *ba]
    rows = list(torch.arange(sum(map(len, blocks))).split([len(block) for block in blocks]))
    filed = {"in_proj_qkvz": _filed(rows[:4], qkvz), "in_proj_ba": _filed(rows[4:], ba)}
    yield from _picked(net.in_proj, prefix, filed)
    yield from _rows_of(net.o_proj, prefix, {"out_proj": c.hidden_size})
    yield f"{prefix}conv1d.weight", net.conv_weight.data.unsqueeze(1)
    yield f"{prefix}A_log", net.A_log.data
    yield f"{prefix}dt_bias", net.dt_bias.data
    yield f"{prefix}norm.weight", net.norm.weight.data  # this one is stored as it is


def _filed(rows: list[Tensor], blocks: list[Tensor]) -> Tensor:
    """For each row of a file's matrix, which of ours it is: `rows`, by block, are the `blocks` of the file."""
    return torch.cat(rows)[torch.cat(blocks).argsort()]


def _latent(c: ModelConfig, at: LatentAttention, prefix: str) -> Parts:
    """Rows that the rotary embedding turns go back to where the file has them."""
    heads, row = c.num_attention_heads, c.kv_lora_rank + c.qk_rope_head_dim
    width = heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
    if isinstance(at.queries, LowRankQueries):
        yield from _rows_of(at.queries.q_a_proj, prefix, {"q_a_proj": c.q_lora_rank})
        yield from _norms(c, prefix, q_a_layernorm=at.queries.q_a_norm)
        yield from _rows_of(at.queries.q_b_proj, prefix, {"q_b_proj": width}, _as_filed(c, heads))
    else:
        yield from _rows_of(at.queries.q_proj, prefix, {"q_proj": width}, _as_filed(c, heads))
    yield from _rows_of(at.kv_a_proj, prefix, {"kv_a_proj_with_mqa": row}, _as_filed(c, 1))
    yield from _norms(c, prefix, kv_a_layernorm=at.kv_a_norm)
    yield from _rows_of(at.kv_b_proj, prefix, {"kv_b_proj": heads * (c.qk_nope_head_dim + c.v_head_dim)})
    yield from _rows_of(at.o_proj, prefix, {"o_proj": c.hidden_size})


def _as_filed(c: ModelConfig, heads: int) -> Order | None:
    return (lambda t: interleaved(t, heads, c.qk_rope_head_dim)) if c.rope_interleave else None


def _dense(c: ModelConfig, mlp: SwiGLU, prefix: str) -> Parts:
    names = NAMES["mlp"]
    yield from _pair(mlp, prefix, names, c.intermediate_size, c.hidden_size)


def _experts(c: ModelConfig, layer: ExpertLayer, prefix: str) -> Parts:
    """The router is a plain matrix: it is never quantized."""
    home = "block_sparse_moe" if c.model_type == "mixtral" else "mlp"
    prefix, names = f"{prefix}{home}.", NAMES[home]
    yield f"{prefix}gate.weight", layer.router.gate.weight.data
    if layer.router.correction is not None:
        yield f"{prefix}gate.e_score_correction_bias", layer.router.correction
    for e, expert in enumerate(layer.experts):
        yield from _pair(expert, f"{prefix}experts.{e}.", names, c.moe_intermediate_size, c.hidden_size)
    if layer.shared is not None:
        name = "shared_experts" if layer.shared.gate is None else "shared_expert"
        yield from _pair(layer.shared.expert, f"{prefix}{name}.", NAMES["mlp"], c.shared_width, c.hidden_size)
        if layer.shared.gate is not None:
            yield f"{prefix}shared_expert_gate.weight", layer.shared.gate.weight.data


def _pair(layer: SwiGLU | Expert, prefix: str, names: tuple[str, str, str], width: int, hidden: int) -> Parts:
    gate, up, down = names
    yield from _rows_of(layer.gate_up_proj, prefix, {gate: width, up: width})
    yield from _rows_of(layer.down_proj, prefix, {down: hidden})


def _norms(c: ModelConfig, prefix: str, **norms: RMSNorm | None) -> Parts:
    for name, norm in norms.items():
        if norm is not None:  # Qwen3-Next stores w - 1
            yield f"{prefix}{name}.weight", norm.weight.data - 1 if c.is_hybrid else norm.weight.data


def _rows_of(layer: nn.Module, prefix: str, rows: dict[str, int], order: Order | None = None) -> Parts:
    """A matrix as its parts, which follow each other by rows; `order` puts rows where the file has them."""
    first, as_it_is = 0, len(rows) == 1 and order is None
    for name, count in rows.items():
        yield from _part(layer, prefix + name, count, None if as_it_is else _cut(first, first + count, order))
        first += count


def _picked(layer: nn.Module, prefix: str, rows: dict[str, Tensor]) -> Parts:
    """The same for parts whose rows lie anywhere."""
    for name, index in rows.items():
        yield from _part(layer, prefix + name, len(index), lambda tensor, index=index: tensor[index])


def _part(layer: nn.Module, name: str, count: int, cut: Order | None) -> Parts:
    """`count` rows that `cut` takes from the matrix and its bias; None takes all as they are."""
    if not isinstance(layer, QuantizedLinear | Linear):
        raise QuantizationError(f"{name} is packed for this CPU; quantize a float32 model")
    taken = cut or (lambda tensor: tensor)
    if isinstance(layer, QuantizedLinear):
        yield name, layer.weight if cut is None else layer.weight.map_rows(cut, count)
    else:
        yield f"{name}.weight", taken(layer.weight.data)
    if layer.bias is not None:
        yield f"{name}.bias", taken(layer.bias.data)


def _cut(first: int, last: int, order: Order | None) -> Order:
    return (lambda tensor: tensor[first:last]) if order is None else (lambda tensor: order(tensor[first:last]))
