"""Attention: first as the formula says it, then as one fused call, then as the layer of a model.

Queries are the last T of S tokens: query i stands at position S - T + i and sees the keys up to and including its
own ("causal, aligned bottom-right"). With T = S that is prefill, with T = 1 decode, between them a chunk.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .layers import RMSNorm, apply_rotary, region


def causal_mask(queries: int, keys: int, window: int | None = None, device=None) -> Tensor:
    """(T, S) booleans, True where a query may look. `window` counts the query's own token."""
    query = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)[None, :]
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def naive_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None, scale: float | None = None) -> Tensor:
    """softmax(q kᵀ / sqrt(D)) v, with the whole (H, T, S) score matrix in memory.

    q (T, H, D), k and v (S, Hkv, D) -> (T, H, D). Source: Vaswani et al. 2017 (arXiv 1706.03762), equation 1.
    """
    (T, H, D), (S, Hkv, _) = q.shape, k.shape
    k = k.repeat_interleave(H // Hkv, dim=1)  # (S, H, D): each key head serves its group of query heads
    v = v.repeat_interleave(H // Hkv, dim=1)
    scores = torch.einsum("thd,shd->hts", q, k) * (D**-0.5 if scale is None else scale)
    scores = scores.masked_fill(~causal_mask(T, S, window, q.device), -math.inf)
    return torch.einsum("hts,shd->thd", scores.softmax(dim=-1), v)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None, scale: float | None = None) -> Tensor:
    """The same through torch's fused kernel, which never holds the score matrix. Shapes as in naive_attention.

    k and v may be views of a cache of any stride. One query needs no mask, only the right keys; and then a group's
    query heads can stand where queries stand, so that keys are read once instead of copied for each head.
    """
    (T, H, D), (S, Hkv, _) = q.shape, k.shape
    if window is not None and T == 1:
        k, v, window = k[-window:], v[-window:], None
    k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]  # (1, Hkv, S, D)
    if T == 1:
        out = F.scaled_dot_product_attention(q.view(1, Hkv, H // Hkv, D), k, v, scale=scale)
        return out.view(1, H, v.shape[-1])
    whole = T == S and (window is None or window >= S)
    mask = None if whole else causal_mask(T, S, window, q.device)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=whole, scale=scale, enable_gqa=Hkv != H
    )
    return out[0].transpose(0, 1)  # (T, H, D)


class Attention(nn.Module):
    """Multi-head, grouped-query (Hkv < H) or multi-query (Hkv = 1) attention of one layer.

    q, k and v share their input, so one matrix makes all three. The cache does the attending: it holds the keys and
    values of earlier tokens, and this layer never learns how.
    Source: Shazeer 2019 (arXiv 1911.02150) for multi-query, Ainslie et al. 2023 (arXiv 2305.13245) for grouped.
    """

    rotate = staticmethod(apply_rotary)  # a backend may have its own: see triton_layers.py

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        qkv_proj: nn.Module,
        o_proj: nn.Module,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.heads, self.kv_heads = layer, config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.qkv_proj, self.o_proj = qkv_proj, o_proj
        self.q_norm, self.k_norm = q_norm, k_norm  # over each head, where the model has them (Qwen3)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache) -> Tensor:
        """x (T, d) -> (T, d)."""
        T, H, Hkv, D = x.shape[0], self.heads, self.kv_heads, self.head_dim
        with region("qkv_proj"):
            qkv = self.qkv_proj(x).view(T, H + 2 * Hkv, D)
        qk, v = qkv[:, : H + Hkv], qkv[:, H + Hkv :]
        if self.q_norm is not None:
            with region("qk_norm"):
                qk = torch.cat([self.q_norm(qk[:, :H]), self.k_norm(qk[:, H:])], dim=1)
        with region("rotary"):
            qk = self.rotate(qk, rotation)  # queries and keys turn alike, so both at once
        with region("attention"):
            out = cache.attend(self.layer, qk[:, :H], qk[:, H:], v)  # (T, H, D)
        with region("o_proj"):
            return self.o_proj(out.reshape(T, H * D))
