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


def causal_mask(queries: int, keys: int, window: int | None = None, device=None, sinks: int = 0) -> Tensor:
    """(T, S) booleans, True where a query may look. `window` counts the query's own token; the first `sinks` tokens
    stay visible behind it (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453, section 3.2)."""
    query = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)[None, :]
    visible = key <= query
    return visible if window is None else visible & ((key > query - window) | (key < sinks))


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, scale: float | None = None, sinks: int = 0,
    sink_logits: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax(q kᵀ / sqrt(D)) v, with the whole (H, T, S) score matrix in memory.

    q (T, H, D), k and v (S, Hkv, D) -> (T, H, D). Source: Vaswani et al. 2017 (arXiv 1706.03762), equation 1.
    sink_logits (H,), learned, take part in the softmax and have no value: a head may look at nothing (gpt-oss).
    """
    (T, H, D), (S, Hkv, _) = q.shape, k.shape
    k = k.repeat_interleave(H // Hkv, dim=1)  # (S, H, D): each key head serves its group of query heads
    v = v.repeat_interleave(H // Hkv, dim=1)
    scores = torch.einsum("thd,shd->hts", q, k) * (D**-0.5 if scale is None else scale)
    scores = scores.masked_fill(~causal_mask(T, S, window, q.device, sinks), -math.inf)
    if sink_logits is not None:
        scores = torch.cat([scores, sink_logits[:, None, None].expand(H, T, 1)], dim=-1)
    return torch.einsum("hts,shd->thd", scores.softmax(dim=-1)[..., :S], v)


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, scale: float | None = None, sinks: int = 0,
    sink_logits: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The same through torch's fused kernel, which never holds the score matrix. Shapes as in naive_attention.

    k and v may be views of a cache of any stride. One query needs no mask, only the right keys; and then a group's
    query heads can stand where queries stand, so that keys are read once instead of copied for each head.
    """
    if sink_logits is not None:
        return _with_sink_logits(q, k, v, causal_mask(len(q), len(k), window, q.device, sinks), scale, sink_logits)
    (T, H, D), (S, Hkv, _), width = q.shape, k.shape, v.shape[-1]
    v = as_wide_as_keys(v, k)
    if window is not None and T == 1:
        k, v, window = last_seen(k, window, sinks), last_seen(v, window, sinks), None
    k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]  # (1, Hkv, S, D)
    if T == 1:
        out = F.scaled_dot_product_attention(q.view(1, Hkv, H // Hkv, D), k, v, scale=scale)
        return out.view(1, H, -1)[..., :width]
    whole = T == S and (window is None or window >= S)
    mask = None if whole else causal_mask(T, S, window, q.device, sinks)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=whole, scale=scale, enable_gqa=Hkv != H
    )
    return out[0].transpose(0, 1)[..., :width]  # (T, H, D)


def as_wide_as_keys(v: Tensor, k: Tensor) -> Tensor:
    """The values of MLA are narrower than its keys, and then torch leaves its fused kernel. Values that are the first
    entries of their keys (absorbed) are wide already; others get zeros. The caller cuts what comes out."""
    if v.shape[-1] >= k.shape[-1]:
        return v
    return k if v.data_ptr() == k.data_ptr() else F.pad(v, (0, k.shape[-1] - v.shape[-1]))


def last_seen(x: Tensor, window: int, sinks: int) -> Tensor:
    """What the last query sees of x (S, Hkv, D), in order."""
    if not sinks:
        return x[-window:]
    return x if x.shape[0] <= window + sinks else torch.cat([x[:sinks], x[-window:]])


def _with_sink_logits(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None, logits: Tensor) -> Tensor:
    """One key more, of zeros, whose score is what the mask adds to it: the sink's logit; its value is zero too."""
    bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -math.inf).expand(q.shape[1], -1, -1)
    bias = torch.cat([bias, logits.to(q.dtype)[:, None, None].expand(-1, q.shape[0], 1)], dim=-1)  # (H, T, S + 1)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, F.pad(k, (0, 0, 0, 0, 0, 1)), F.pad(v, (0, 0, 0, 0, 0, 1))))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None], scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


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
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.gated = gated  # qkv_proj also makes a gate for each number that attention finds (Qwen3-Next)
        self.layer, self.heads, self.kv_heads = layer, config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.qkv_proj, self.o_proj = qkv_proj, o_proj
        self.q_norm, self.k_norm = q_norm, k_norm  # over each head, where the model has them (Qwen3)

    def linears(self) -> list[nn.Module]:
        return [self.qkv_proj, self.o_proj]

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache) -> Tensor:
        """x (T, d) -> (T, d)."""
        T, H, Hkv, D = x.shape[0], self.heads, self.kv_heads, self.head_dim
        with region("qkv_proj"):
            qkv = self.qkv_proj(x).view(T, -1, D)
        qk, v, gate = qkv.split([H + Hkv, Hkv, qkv.shape[1] - H - 2 * Hkv], dim=1)
        if self.q_norm is not None:
            with region("qk_norm"):
                qk = torch.cat([self.q_norm(qk[:, :H]), self.k_norm(qk[:, H:])], dim=1)
        with region("rotary"):
            qk = self.rotate(qk, rotation)  # queries and keys turn alike, so both at once
        with region("attention"):
            out = cache.attend(self.layer, qk[:, :H], qk[:, H:], v)  # (T, H, D)
        if self.gated:
            with region("attn_gate"):
                out = out * gate.sigmoid()
        with region("o_proj"):
            return self.o_proj(out.reshape(T, H * D))
