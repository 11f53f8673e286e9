"""Attention over the caches through the Triton kernels: the paged step, and the contiguous cache's prefill.

A step is two kernels a layer: the new keys and values go to their slots, and the queries walk the block tables, by
the split-KV kernel if every sequence brings one token and by the unified one otherwise. Nothing is gathered or padded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import delta_rule
from kernels.flash_attention import HEADS, flash_attention
from kernels.kv_write import kv_write
from kernels.mla_decode import mla_decode
from kernels.paged_attention import MAX_GROUP, paged_attention
from kernels.paged_decode import MAX_HEAD, paged_decode

from .attention import sdpa_attention
from .paging import PagedStep


class TritonStep(PagedStep):
    """PagedStep on kernels. Its sequences must lie end to end, in order, padding rows last."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, scale: float | None = None, keep: Tensor | None = None
    ) -> Tensor:
        window, sinks = self.cache.sight[layer]
        found = self.cache.for_kernels(layer)
        if found is None:
            return super().attend(layer, q, k, v, scale, keep)
        if keep is None and v is None and self._one_each and self._latent_fits():
            return self._attend_latent(layer, q, k, scale)
        grouped = v is not None and keep is None and scale is None and not sinks
        if not grouped or q.shape[2] > MAX_HEAD or q.shape[1] // k.shape[1] > MAX_GROUP:
            return super().attend(layer, q, k, v, scale, keep)
        self._write(layer, k, v)
        step, (keys, values, scales) = self.metadata, found
        tables, lengths = step.block_tables, step.context_lengths
        q16, options = q.to(self.cache.read_dtype), {"window": window, "backend": "triton", **scales}
        if self._one_each:
            out = paged_decode(q16, keys, values, tables, lengths, **options)
        else:
            out = paged_attention(q16, keys, values, step.query_starts, tables, lengths, **options)
        return out.to(q.dtype)

    def delta_rule(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """All sequences in one launch, each from the state in its slot to the next one."""
        if q.shape[2] > delta_rule.MAX_HEAD:
            return super().delta_rule(layer, q, k, v, g, beta)
        step, states = self.metadata, self.cache.states.layers[layer][1]
        out, _ = delta_rule.gated_delta_rule(
            q, k, v, g, beta, states, step.query_starts, step.state_slots, backend="triton"
        )
        return out

    @property
    def _one_each(self) -> bool:
        """One token a sequence, and no padding."""
        return self.metadata.rows == len(self.metadata.sequences)

    def _latent_fits(self) -> bool:
        """Both parts of a row are tiles, so powers of two: 512 and 64 in every published model."""
        config = self.cache.config
        return all(size >= 16 and size & (size - 1) == 0 for size in (config.kv_lora_rank, config.qk_rope_head_dim))

    def _attend_latent(self, layer: int, q: Tensor, row: Tensor, scale: float) -> Tensor:
        self._write(layer, row, None)
        step, rows = self.metadata, self.cache.layers[layer][0][:, :, 0]  # (blocks, block_size, C + P)
        rank = self.cache.config.kv_lora_rank
        q16 = q.to(rows.dtype)
        out = mla_decode(q16, rows, step.block_tables, step.context_lengths, rank, scale, backend="triton")
        return out.to(q.dtype)

    def _write(self, layer: int, k: Tensor, v: Tensor | None) -> None:
        found = self.cache.for_kernels(layer)
        if v is None or found is None:
            super()._write(layer, k, v)
        else:
            keys, values, scales = found
            kv_write(k, v, keys, values, self.metadata.slot_mapping, **scales, backend="triton")


def flash(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, scale: float | None = None, sinks: int = 0
) -> Tensor:
    """sdpa_attention with FlashAttention for more than one query. One query has nothing to tile: the paged kernels
    split its keys over the GPU, and so does torch's own."""
    if q.shape[0] == 1 or sinks or q.shape[2] not in HEADS or v.shape[2] != q.shape[2]:
        return sdpa_attention(q, k, v, window, scale, sinks)
    ends = torch.arange(2, dtype=torch.int32, device=q.device)
    starts = (ends * q.shape[0], ends * k.shape[0])
    return flash_attention(q, k, v, *starts, scale, window, longest=q.shape[0], backend="triton")[0]
