"""Qwen3-Next's two kinds of attention layers, from its tensors to the modules that run them.

Its files keep what one key head needs side by side; here queries, keys, values and gates are blocks of rows of one
matrix, so that a product is cut into them without a copy. Rows of a quantized matrix move with their scales.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .attention import Attention
from .config import ModelConfig
from .delta_net import GatedDeltaNet
from .layers import RMSNorm

Take = Callable[..., Tensor]  # take(name, *shape): a tensor of this layer


def row_blocks(heads: int, sizes: list[int]) -> list[Tensor]:
    """For a file's matrix that has `sizes` rows of each block, side by side, head by head: the rows of each block."""
    rows = torch.arange(heads * sum(sizes)).view(heads, sum(sizes))
    return [block.flatten() for block in rows.split(sizes, dim=1)]


def delta_blocks(c: ModelConfig) -> tuple[list[Tensor], list[Tensor]]:
    """row_blocks of in_proj_qkvz (query, key, values, gates of a key head) and of in_proj_ba."""
    share = c.linear_num_value_heads // c.linear_num_key_heads  # value heads that a key head serves
    values = share * c.linear_value_head_dim
    heads = c.linear_num_key_heads
    qkvz = row_blocks(heads, [c.linear_key_head_dim, c.linear_key_head_dim, values, values])
    return qkvz, row_blocks(heads, [share, share])


def _cut(weight, blocks: list[Tensor]) -> list:
    """A tensor, or a quantized matrix, as its blocks."""
    if isinstance(weight, Tensor):
        return [weight[rows] for rows in blocks]
    return [weight.map_rows(lambda t, rows=rows: t[rows], len(rows)) for rows in blocks]


def hybrid_attention(c: ModelConfig, layer: int, take: Take, norm, make_linear) -> nn.Module:
    """The layer's token mixer. `norm(name, size)` and `make_linear(parts, bias)` as in transformer.py."""
    if c.layer_types[layer] == "linear_attention":
        return _delta_net(c, layer, take, make_linear)
    return _gated_attention(c, layer, take, norm, make_linear)


def _gated_attention(c: ModelConfig, layer: int, take: Take, norm, make_linear) -> Attention:
    """The file's q_proj makes, head by head, a query and then its gate."""
    H, Hkv, D, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.hidden_size

    def parts(kind: str, *columns: int) -> list[Tensor]:
        """Rows of q, k, v, gates of one kind of tensor, weight or bias."""
        q, gate = _cut(take(f"self_attn.q_proj.{kind}", 2 * H * D, *columns), row_blocks(H, [D, D]))
        k, v = (take(f"self_attn.{name}_proj.{kind}", Hkv * D, *columns) for name in "kv")
        return [q, k, v, gate]

    bias = torch.cat(parts("bias")) if c.attention_bias else None
    out_bias = take("self_attn.o_proj.bias", d) if c.attention_out_bias else None
    return Attention(
        c,
        layer,
        make_linear(parts("weight", d), bias),
        make_linear([take("self_attn.o_proj.weight", d, H * D)], out_bias),
        norm("self_attn.q_norm", D),
        norm("self_attn.k_norm", D),
        gated=True,
    )


def _delta_net(c: ModelConfig, layer: int, take: Take, make_linear) -> GatedDeltaNet:
    """The file's in_proj_qkvz makes, key head by key head, its query, its key, and values and gates of the value heads
    that it serves; in_proj_ba likewise."""
    d, Hv, Dv = c.hidden_size, c.linear_num_value_heads, c.linear_value_head_dim
    parts = []  # q, k, v, z, b, a
    for name, blocks in zip(("in_proj_qkvz", "in_proj_ba"), delta_blocks(c), strict=True):
        parts += _cut(take(f"linear_attn.{name}.weight", sum(map(len, blocks)), d), blocks)
    return GatedDeltaNet(
        c,
        layer,
        make_linear(parts, None),
        make_linear([take("linear_attn.out_proj.weight", d, Hv * Dv)], None),
        take("linear_attn.conv1d.weight", c.conv_channels, 1, c.linear_conv_kernel_dim).squeeze(1),
        take("linear_attn.A_log", Hv),
        take("linear_attn.dt_bias", Hv),
        RMSNorm(take("linear_attn.norm.weight", Dv), c.rms_norm_eps),
    )
