"""The paged cache: keys and values in fixed-size blocks, found through a block table for each sequence.

    storage (layers, 2, blocks, block_size, Hkv, D)      2: keys, values; (layers, 1, …, 1, C + P) for MLA (mla.py)
    token t of a sequence lies in block table[t // block_size], slot t % block_size
    slot number = block · block_size + slot, what `slot_mapping` holds for each new token; -1 writes nothing

A step is a value, `StepMetadata`: which packed tokens belong to whom, how much of each is cached, and the tables.
`cache.step(metadata)` gives an object with the one verb of every cache, `attend`, for that step alone.

Every slot that can be read was written or cleared: a block is cleared in the step that begins it without filling it,
and the null block is zero for ever. A padded read therefore meets finite numbers, whatever an earlier request left.
Source: Kwon et al. 2023 (arXiv 2309.06180), sections 4.1 to 4.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import as_wide_as_keys, sdpa_attention
from .block_pool import NULL, BlockError
from .config import ModelConfig
from .delta_state import DeltaStates
from .kv_cache import keys_and_values
from .paged_states import StateStep

GROUP_BYTES = 3 << 20  # of keys and values gathered at once for decode, so that they stay in a CPU's own cache
GPU_GROUP_BYTES = 256 << 20  # each group costs a GPU several launches, in whose time it reads tens of MB


class SequenceStep(NamedTuple):
    """One sequence's part: packed rows first to first + count hold its tokens from `start` on."""

    first: int
    count: int
    start: int
    blocks: Sequence[int]
    state_slot: int = 0

    @property
    def context(self) -> int:
        """Tokens in the cache once this step has written its own."""
        return self.start + self.count


class StepMetadata:
    """What the cache needs to know about a step. Tensors are those that a kernel walks; lists serve the torch path.

    query_starts (B + 1,) int32     first packed row of each sequence
    context_lengths (B,) int32
    state_slots (B,) int32          of models with linear layers
    block_tables (B, widest) int32  padded with the null block; these four are made when a kernel asks for them
    slot_mapping (T,) int64         where each token's key and value go, -1 for padding rows
    """

    def __init__(
        self, sequences: Sequence[SequenceStep], block_size: int, rows: int | None = None, device="cpu"
    ) -> None:
        self.sequences, self.block_size, self.device = list(sequences), block_size, device
        last = self.sequences[-1]
        self.rows = last.first + last.count if rows is None else rows
        slots = [-1] * self.rows
        for first, count, start, blocks, _ in self.sequences:
            if count == 1:
                slots[first] = blocks[start // block_size] * block_size + start % block_size
                continue
            for row, t in zip(range(first, first + count), range(start, start + count), strict=True):
                slots[row] = blocks[t // block_size] * block_size + t % block_size
        self.slot_mapping = torch.tensor(slots, dtype=torch.int64, device=device)
        self.begun = [
            s.blocks[s.context // block_size]
            for s in self.sequences
            if s.context % block_size and s.start <= s.context - s.context % block_size
        ]  # blocks begun in this step and not filled

    @cached_property
    def query_starts(self) -> Tensor:
        ends = [self.sequences[-1].first + self.sequences[-1].count]
        return torch.tensor([s.first for s in self.sequences] + ends, dtype=torch.int32, device=self.device)

    @cached_property
    def context_lengths(self) -> Tensor:
        return torch.tensor([s.context for s in self.sequences], dtype=torch.int32, device=self.device)

    @cached_property
    def state_slots(self) -> Tensor:
        return torch.tensor([s.state_slot for s in self.sequences], dtype=torch.int32, device=self.device)

    @cached_property
    def block_tables(self) -> Tensor:
        return padded_tables([s.blocks for s in self.sequences], self.device)


def padded_tables(tables: Sequence[Sequence[int]], device="cpu") -> Tensor:
    """(B, widest) int32, short tables padded with the null block."""
    widest = max(map(len, tables))
    padded = [[*table, *[NULL] * (widest - len(table))] for table in tables]
    return torch.tensor(padded, dtype=torch.int32, device=device)


class PagedCache:
    """Storage for `num_blocks` blocks of all layers; the block pool decides what is where.

    Bytes = 2 · L · num_blocks · block_size · Hkv · D · bytes per element; for MLA, L · … · (C + P) · …. L counts the
    layers that keep keys and values. Those that keep a state have one for each of `state_slots` sequences, and slot 0
    for padding (delta_state.py).
    A cache of fewer bits, which stores scales beside its codes, is in quantization/kv_paged.py.
    """

    read_as_written = True  # but for the rounding of one cast

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype=torch.float32,
        device="cpu",
        step_class: type[PagedStep] | None = None,
        state_slots: int = 0,
    ) -> None:
        self.config, self.num_blocks, self.block_size = config, num_blocks, block_size
        self.step_class = step_class or PagedStep
        sides, heads, width = config.kv_shape
        shape = (len(config.kv_layers), sides, num_blocks, block_size, heads, width)
        self.storage = torch.empty(shape, dtype=dtype, device=device)  # pages of memory are touched when written
        self.storage[:, :, NULL] = 0
        self.tensors = [self.storage]  # blocks are dimension 2 of each
        self.layers = keys_and_values(config, self.storage)  # (blocks, block_size, Hkv, D) each
        self.slots = keys_and_values(config, self.storage.view(*shape[:2], -1, heads, width))
        self._describe(dtype, state_slots)

    def _describe(self, read_dtype: torch.dtype, state_slots: int) -> None:
        config, device = self.config, self.tensors[0].device
        self.device, self.read_dtype = device, read_dtype  # what `take` gives
        self.read_bytes = self.block_size * math.prod(config.kv_shape) * read_dtype.itemsize  # of a block of one layer
        self.one_row = config.is_mla
        self.sight = [(config.window(layer), config.sinks(layer)) for layer in range(config.num_hidden_layers)]
        self.value_width = config.kv_lora_rank if config.is_mla else config.head_dim
        self.states = DeltaStates(config, 1 + state_slots, device) if config.linear_layers else None
        self.slotted = [] if self.states is None else [self.states.conv, self.states.delta]  # slots are dimension 1

    @staticmethod
    def bytes_of_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """All layers, keys and values: what one more block costs."""
        return len(config.kv_layers) * block_size * math.prod(config.kv_shape) * dtype.itemsize

    @property
    def allocated_bytes(self) -> int:
        return sum(t.nbytes for t in (*self.tensors, *self.slotted))

    @property
    def block_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors) // self.num_blocks

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
        """k and v (T, Hkv, D) of one layer to `slots` (T,); v is None for MLA, whose values are part of its keys."""
        for side, new in zip(self.slots[layer], (k, v), strict=True):
            if new is not None:
                side.index_copy_(0, slots, new.to(side.dtype))

    def for_kernels(self, layer: int) -> tuple[Tensor, Tensor, dict[str, Tensor]] | None:
        """Keys, values and their scales as the Triton kernels read and write them; None where they cannot."""
        return *self.layers[layer], {}

    def take(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of blocks of keys and of values, (N, block_size, Hkv, D) each; MLA copies once for both."""
        keys, values = self.layers[layer]
        taken = keys.index_select(0, blocks)
        if self.one_row:
            return taken, taken[..., : self.value_width]
        return taken, values.index_select(0, blocks)

    def step(self, metadata: StepMetadata, exact: bool = False) -> PagedStep:
        """The cache as one step sees it. `exact` attends each token by itself: bits that depend on it alone."""
        self._begin(metadata)
        return (ExactStep if exact else self.step_class)(self, metadata)

    def _begin(self, metadata: StepMetadata) -> None:
        """Clears what a padded read of this step may meet and nobody has written."""
        if metadata.begun:
            for t in self.tensors:
                t[:, :, metadata.begun] = 0
        if self.states is not None:
            self._begin_states(metadata)

    def _begin_states(self, metadata: StepMetadata) -> None:
        """A sequence that begins begins from zero, whatever the slot's last owner left."""
        slots = [s.state_slot for s in metadata.sequences]
        if 0 in slots or len(set(slots)) < len(slots):
            raise BlockError(f"the step's sequences have state slots {slots}; each needs one of its own, above 0")
        if fresh := [s.state_slot for s in metadata.sequences if s.start == 0]:
            self.states.clear(fresh)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Whole blocks, all layers. Every source is read before any target is written."""
        if pairs:
            sources, targets = (list(side) for side in zip(*pairs, strict=True))
            for t in self.tensors:
                t[:, :, targets] = t[:, :, sources]


def move_blocks(source: PagedCache, target: PagedCache, pairs: Sequence[tuple[int, int]]) -> None:
    """Copies whole blocks between the device's cache and the host's."""
    if pairs:
        sources, targets = (list(side) for side in zip(*pairs, strict=True))
        for old, new in zip(source.tensors, target.tensors, strict=True):
            new[:, :, targets] = old[:, :, sources].to(new.device)


def move_slots(source: PagedCache, target: PagedCache, pairs: Sequence[tuple[int, int]]) -> None:
    """Copies what whole sequences keep outside their blocks, of one cache or between two. Every source is read before a
    target is written."""
    if pairs:
        sources, targets = (list(side) for side in zip(*pairs, strict=True))
        for old, new in zip(source.slotted, target.slotted, strict=True):
            new[:, targets] = old[:, sources].to(new.device)


class _Group(NamedTuple):
    """Decodes attended together: their rows, tables laid end to end, and (B, 1, 1, padded) -inf where nothing is."""

    rows: slice | Tensor
    size: int
    tables: Tensor
    mask: Tensor


def _rows(rows: list[int], device) -> slice | Tensor:
    """A slice where they follow one another, which needs no gathering."""
    first, last = rows[0], rows[-1]
    return slice(first, last + 1) if rows == list(range(first, last + 1)) else torch.tensor(rows, device=device)


class PagedStep(StateStep):
    """One step's view of the cache. The model calls `attend` for each layer, and `advance` at the end."""

    def __init__(self, cache: PagedCache, metadata: StepMetadata) -> None:
        self.cache, self.metadata = cache, metadata
        slots = metadata.slot_mapping
        self._written = None  # all rows
        if metadata.rows > sum(s.count for s in metadata.sequences):  # counted here: a GPU would have to be waited for
            self._written = (slots >= 0).nonzero().squeeze(-1)
            slots = slots[self._written]
        self._slots = slots
        self._chunks = [s for s in metadata.sequences if s.count > 1]
        self._decodes = sorted((s for s in metadata.sequences if s.count == 1), key=lambda s: s.start)
        self._groups: dict[int | None, list[_Group]] = {}
        self._tables: dict[tuple[int, int], Tensor] = {}
        self.fresh = cache.read_as_written and not any(s.start for s in metadata.sequences)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, scale: float | None = None, keep: Tensor | None = None
    ) -> Tensor:
        """q (T, H, D), k and v (T, Hkv, D) of the packed tokens -> (T, H, D), or as kv_cache.py says for MLA; rows of
        no sequence give 0."""
        if keep is not None:
            return self._attend_fresh(layer, q, k, v, scale, keep)
        self._write(layer, k, v)
        out = self._empty(layer, q)
        window, sinks = self.cache.sight[layer]
        for s in self._chunks:
            rows = slice(s.first, s.first + s.count)
            keys, values = self._gather(layer, s, window, sinks)
            out[rows] = sdpa_attention(q[rows].to(keys.dtype), keys, values, window, scale, sinks).to(q.dtype)
        for group in self._decode_groups(window, sinks):
            out[group.rows] = self._attend_group(layer, q, group, scale)
        return out

    def _attend_fresh(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None, keep: Tensor) -> Tensor:
        """Sequences that begin with this step: what they attend to came with it, and `keep` is remembered."""
        self._write(layer, keep, None)
        out = q.new_zeros(*q.shape[:2], v.shape[2])
        for s in self.metadata.sequences:
            rows = slice(s.first, s.first + s.count)
            out[rows] = sdpa_attention(q[rows], k[rows], v[rows], scale=scale)
        return out

    def _empty(self, layer: int, q: Tensor) -> Tensor:
        """(T, H, width of a value), 0 where rows belong to nobody."""
        shape = (*q.shape[:2], self.cache.value_width)
        return q.new_empty(shape) if self._written is None else q.new_zeros(shape)

    def _write(self, layer: int, k: Tensor, v: Tensor | None) -> None:
        if self._written is not None:
            k, v = k[self._written], None if v is None else v[self._written]
        self.cache.write(layer, self._slots, k, v)

    def _gather(self, layer: int, s: SequenceStep, window: int | None, sinks: int) -> tuple[Tensor, Tensor]:
        """Keys and values (S, Hkv, D) of one sequence in order, without the blocks that its first query cannot see."""
        skipped = 0 if window is None or sinks else max(0, s.start + 1 - window) // self.cache.block_size
        blocks = self._tables.get((s.first, skipped))
        if blocks is None:
            used = s.blocks[skipped : -(-s.context // self.cache.block_size)]
            blocks = torch.tensor(used, dtype=torch.int32, device=self.metadata.device)
            self._tables[s.first, skipped] = blocks
        length = s.context - skipped * self.cache.block_size
        keys, values = self.cache.take(layer, blocks)
        return keys.flatten(0, 1)[:length], values.flatten(0, 1)[:length]

    def _read_group(self, layer: int, group: _Group) -> tuple[Tensor, Tensor]:
        """Keys and values of a group's tables, block after block."""
        return self.cache.take(layer, group.tables)

    def _attend_group(self, layer: int, q: Tensor, group: _Group, scale: float | None) -> Tensor:
        """One query each: a group's query heads stand where queries stand, and padding is masked. -> (B, H, D)"""
        B, H, D = group.size, *q.shape[1:]
        keys, values = self._read_group(layer, group)
        sides = (keys, as_wide_as_keys(values, keys))
        k, v = (side.view(B, -1, *side.shape[2:]).transpose(1, 2) for side in sides)  # (B, Hkv, S, D)
        q = q[group.rows].view(B, k.shape[1], -1, D)
        out = F.scaled_dot_product_attention(q.to(k.dtype), k, v, attn_mask=group.mask, scale=scale)
        return out.reshape(B, H, D)[..., : values.shape[-1]].to(q.dtype)

    def _decode_groups(self, window: int | None, sinks: int) -> list[_Group]:
        """Sequences of like length together, as many as GROUP_BYTES hold with their padding. Made once a step."""
        if window in self._groups:
            return self._groups[window]
        groups, members = [], []
        size = self.cache.block_size
        limit = GROUP_BYTES if self.cache.device.type == "cpu" else GPU_GROUP_BYTES
        most = limit // self.cache.read_bytes
        for s in self._decodes:  # ascending, so the last is the longest
            if members and (len(members) + 1) * -(-s.context // size) > most:
                groups.append(self._group(members, window, sinks))
                members = []
            members.append(s)
        if members:
            groups.append(self._group(members, window, sinks))
        self._groups[window] = groups
        return groups

    def _group(self, members: list[SequenceStep], window: int | None, sinks: int) -> _Group:
        device, size = self.metadata.device, self.cache.block_size
        skipped = [0 if window is None or sinks else max(0, s.context - window) // size for s in members]
        tables = padded_tables(
            [s.blocks[skip : -(-s.context // size)] for s, skip in zip(members, skipped, strict=True)], device
        )
        lengths = [s.context - skip * size for s, skip in zip(members, skipped, strict=True)]
        lengths = torch.tensor(lengths, device=device)[:, None]
        slots = torch.arange(tables.shape[1] * size, device=device)
        seen = slots < lengths
        if window is not None:
            seen &= (slots >= lengths - window) | (slots < sinks)
        dtype = self.cache.read_dtype
        mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
        return _Group(_rows([s.first for s in members], device), len(members), tables.flatten(), mask[:, None, None, :])

    def advance(self, count: int) -> None:
        """Nothing moves here: the scheduler counts what is computed."""


class ExactStep(PagedStep):
    """Attends one query at a time over exactly its own keys, so that a token's bits depend on its sequence alone.

    Never `fresh`: whether a step finds anything cached depends on chunks and hits, so MLA is absorbed in every step.
    """

    one_by_one = True

    def __init__(self, cache: PagedCache, metadata: StepMetadata) -> None:
        super().__init__(cache, metadata)
        self.fresh = False

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, scale: float | None = None, keep: Tensor | None = None
    ) -> Tensor:
        self._write(layer, k, v)
        out = self._empty(layer, q)
        window, sinks = self.cache.sight[layer]
        for s in self.metadata.sequences:
            keys, values = self._gather(layer, s, None, 0)
            for i in range(s.count):
                end = s.start + i + 1
                row = slice(s.first + i, s.first + i + 1)
                seen = sdpa_attention(q[row].to(keys.dtype), keys[:end], values[:end], window, scale, sinks)
                out[row] = seen.to(q.dtype)
        return out
