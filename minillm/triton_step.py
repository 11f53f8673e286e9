"""Attention over the caches through the Triton kernels: the paged step, and the contiguous cache's prefill.

A step is three kernels a layer: the new keys and values go to their slots, and the queries walk the block tables, by
the split-KV kernel if every sequence brings one token and by the unified one otherwise. Nothing is gathered or padded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.flash_attention import HEADS, flash_attention
from kernels.kv_write import kv_write
from kernels.paged_attention import MAX_GROUP, paged_attention
from kernels.paged_decode import MAX_HEAD, paged_decode

from .attention import sdpa_attention
from .paging import PagedStep


class TritonStep(PagedStep):
    """PagedStep on kernels. Its sequences must lie end to end, in order, padding rows last."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (T, H, D), k and v (T, Hkv, D) of the packed tokens -> (T, H, D); rows of no sequence give 0."""
        if q.shape[2] > MAX_HEAD or q.shape[1] // k.shape[1] > MAX_GROUP:
            return super().attend(layer, q, k, v)
        self._write(layer, k, v)
        step, (keys, values) = self.metadata, self.cache.layers[layer]
        window, tables, lengths = self.cache.config.window(layer), step.block_tables, step.context_lengths
        q16 = q.to(keys.dtype)
        if step.rows == len(step.sequences):  # one token each, and no padding
            out = paged_decode(q16, keys, values, tables, lengths, window=window, backend="triton")
        else:
            starts = step.query_starts
            out = paged_attention(q16, keys, values, starts, tables, lengths, window=window, backend="triton")
        return out.to(q.dtype)

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        kv_write(k, v, *self.cache.layers[layer], self.metadata.slot_mapping, backend="triton")


def flash(q: Tensor, k: Tensor, v: Tensor, window: int | None = None, scale: float | None = None) -> Tensor:
    """sdpa_attention with FlashAttention for more than one query. One query has nothing to tile: the paged kernels
    split its keys over the GPU, and so does torch's own."""
    if q.shape[0] == 1 or q.shape[2] not in HEADS or v.shape[2] != q.shape[2]:
        return sdpa_attention(q, k, v, window, scale)
    ends = torch.arange(2, dtype=torch.int32, device=q.device)
    starts = (ends * q.shape[0], ends * k.shape[0])
    return flash_attention(q, k, v, *starts, scale, window, longest=q.shape[0], backend="triton")[0]
