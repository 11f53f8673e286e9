"""int4's newest tokens. Keys are rounded in groups of tokens, so a block waits for its last token; until then, and for
every query within it, its keys and values are what the model computed. That is KIVI's residual, cut at block borders.

    a query at position p sees   tokens of its own block, p // block_size, in full precision
                                 tokens of every block before it as int4

The rule speaks of positions alone. So does what is rounded: whole blocks, from the numbers the model computed. Hence
whole = chunked = token by token, though one of them has the rest of the block at hand and the other has not, and a
prefix found in the cache, which is whole blocks, is what its first owner saw when it had come so far.

    tails (layers, slots, 2, sides, block_size, Hkv, D)

A running sequence has a slot, as it has one for the states of linear layers: copied in a fork, moved in a swap. Block b
lies in half b % 2, so that the block before is still there if drafted tokens are taken back across a border.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention import sdpa_attention
from ..block_pool import BlockError
from ..config import ModelConfig
from ..paging import PagedStep, SequenceStep, StepMetadata, _rows, padded_tables

HALVES = 2


def tails_of(config: ModelConfig, block_size: int, slots: int, dtype: torch.dtype, device) -> Tensor:
    return torch.zeros(_shape(config, block_size, slots), dtype=dtype, device=device)


def tail_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Of one sequence."""
    return math.prod(_shape(config, block_size, 1)) * dtype.itemsize


def _shape(config: ModelConfig, block_size: int, slots: int) -> tuple[int, ...]:
    sides, heads, width = config.kv_shape
    return (len(config.kv_layers), slots, HALVES, sides, block_size, heads, width)


def begin_tails(tails: Tensor, metadata: StepMetadata) -> None:
    """Clears the halves in which a decode begins a block, so that its padded reads meet finite numbers.

    Raises BlockError unless every sequence has a slot of its own.
    """
    size, slots = metadata.block_size, [s.state_slot for s in metadata.sequences]
    if 0 in slots or len(set(slots)) < len(slots):
        raise BlockError(f"the step's sequences have state slots {slots}; each needs one of its own, above 0")
    for s in metadata.sequences:
        if s.count == 1 and s.start % size == 0:
            tails[:, s.state_slot, s.start // size % HALVES] = 0


class _TailGroup(NamedTuple):
    """Decodes attended together: (B,) slots, halves and places of their newest tokens, tables of the blocks before."""

    rows: slice | Tensor
    size: int
    tables: Tensor
    mask: Tensor
    slots: Tensor
    halves: Tensor
    places: Tensor
    filled: Tensor  # those whose token ends a block
    blocks: Tensor  # and that block


class TailStep(PagedStep):
    """PagedStep for int4."""

    one_at_a_time = False

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, scale: float | None = None, keep: Tensor | None = None
    ) -> Tensor:
        out = self._empty(layer, q)
        window, sinks = self.cache.sight[layer]
        for s in self._chunks:
            self._attend_chunk(layer, s, q, k, v, scale, out)
        for group in self._decode_groups(window, sinks):
            self._keep_newest(layer, group, k, v)
            out[group.rows] = self._attend_group(layer, q, group, scale)
        return out

    # --- a chunk of one sequence ---

    def _attend_chunk(self, layer: int, s: SequenceStep, q, k, v, scale: float | None, out: Tensor) -> None:
        """Block after block of its queries: before each the block's own numbers stand in the keys, after it the rounded
        ones."""
        size, rows = self.cache.block_size, slice(s.first, s.first + s.count)
        begin = s.start // size
        new = self._from_block_start(layer, s, torch.stack([k[rows], v[rows]]))  # (2, tokens from the block's start, …)
        full = new.shape[1] // size
        self._store(layer, s, new, full)
        blocks = torch.tensor(s.blocks[: begin + full], dtype=torch.int32, device=q.device)
        rounded = [side.flatten(0, 1) for side in self.cache.take(layer, blocks)]
        room = new.shape[1] - full * size  # of the block that is not full
        keys, values = (torch.cat([side, side.new_zeros(room, *side.shape[1:])]) for side in rounded)
        for i in range(-(-new.shape[1] // size)):
            here = slice((begin + i) * size, min((begin + i + 1) * size, s.context))
            keys[here], values[here] = new[:, i * size : (i + 1) * size]
            first = max(here.start, s.start)
            self._attend_block(layer, s, q, keys, values, range(first, here.stop), scale, out)
            if i < full:
                keys[here], values[here] = rounded[0][here], rounded[1][here]

    def _attend_block(self, layer, s, q, keys, values, positions: range, scale, out) -> None:
        window, sinks = self.cache.sight[layer]
        each = 1 if self.one_at_a_time else len(positions)
        for p in range(positions.start, positions.stop, each):
            rows, end = slice(s.first + p - s.start, s.first + p - s.start + each), p + each
            seen = sdpa_attention(q[rows].to(keys.dtype), keys[:end], values[:end], window, scale, sinks)
            out[rows] = seen.to(q.dtype)

    def _from_block_start(self, layer: int, s: SequenceStep, new: Tensor) -> Tensor:
        """new (2, T, Hkv, D) behind those tokens of its first block that came before."""
        size = self.cache.block_size
        before = self.cache.tails[layer][s.state_slot, s.start // size % HALVES, :, : s.start % size]
        return torch.cat([before, new.to(before.dtype)], dim=1)

    def _store(self, layer: int, s: SequenceStep, new: Tensor, full: int) -> None:
        """Rounds the blocks that are full, and keeps the last one and what lies behind it."""
        size, begin = self.cache.block_size, s.start // self.cache.block_size
        tails = self.cache.tails[layer][s.state_slot]
        if full:
            blocks = torch.tensor(s.blocks[begin : begin + full], device=new.device)
            self.cache.write_blocks(layer, blocks, *new[:, : full * size].unflatten(1, (full, size)))
            tails[(begin + full - 1) % HALVES] = new[:, (full - 1) * size : full * size]
        rest, half = new[:, full * size :], tails[(begin + full) % HALVES]
        half[:, : rest.shape[1]], half[:, rest.shape[1] :] = rest, 0  # a later padded read meets finite numbers

    # --- decodes ---

    def _keep_newest(self, layer: int, group: _TailGroup, k: Tensor, v: Tensor) -> None:
        tails = self.cache.tails[layer]
        new = torch.stack([k[group.rows], v[group.rows]], dim=1).to(tails.dtype)  # (B, 2, Hkv, D)
        tails[group.slots, group.halves, :, group.places] = new
        if len(group.filled):
            whole = tails[group.slots[group.filled], group.halves[group.filled]]  # (N, 2, block_size, Hkv, D)
            self.cache.write_blocks(layer, group.blocks, *whole.unbind(1))

    def _read_group(self, layer: int, group: _TailGroup) -> tuple[Tensor, Tensor]:
        """The blocks before, rounded, then each sequence's own as it is."""
        own = self.cache.tails[layer][group.slots, group.halves].unbind(1)  # (B, block_size, Hkv, D) each
        if not len(group.tables):
            return own
        before = self.cache.take(layer, group.tables)
        return tuple(
            torch.cat([old.unflatten(0, (group.size, -1)).flatten(1, 2), new], dim=1)
            for old, new in zip(before, own, strict=True)
        )

    def _group(self, members: list[SequenceStep], window: int | None, sinks: int) -> _TailGroup:
        device, size = self.metadata.device, self.cache.block_size
        position = torch.tensor([s.start for s in members], device=device)[:, None]
        own = position // size * size  # where its block begins
        tables = padded_tables([s.blocks[: s.start // size] for s in members], device)
        before = torch.arange(tables.shape[1] * size, device=device).expand(len(members), -1)
        token = torch.cat([before, own + torch.arange(size, device=device)], dim=1)
        seen = (token < own) | (token <= position) & (torch.arange(token.shape[1], device=device) >= before.shape[1])
        if window is not None:
            seen &= (token > position - window) | (token < sinks)
        mask = torch.zeros(seen.shape, dtype=self.cache.read_dtype, device=device).masked_fill_(~seen, float("-inf"))
        filled = [i for i, s in enumerate(members) if s.context % size == 0]
        integers = (
            [s.state_slot for s in members], [s.start // size % HALVES for s in members],
            [s.start % size for s in members], filled, [members[i].blocks[members[i].start // size] for i in filled],
        )  # fmt: skip
        rows = _rows([s.first for s in members], device)
        tensors = (torch.tensor(i, dtype=torch.int64, device=device) for i in integers)
        return _TailGroup(rows, len(members), tables.flatten(), mask[:, None, None, :], *tensors)


class ExactTailStep(TailStep):
    """One query at a time, each sequence by itself."""

    one_by_one = True  # of linear layers
    one_at_a_time = True

    def __init__(self, cache, metadata: StepMetadata) -> None:
        super().__init__(cache, metadata)
        self._chunks, self._decodes = metadata.sequences, []
