"""The cache's memory cut into blocks, and who holds which. Integers only: the tensors are in paging.py.

A block is in one of three states, and free + held + cached = total after every call:

free      nobody holds it and its contents are worth nothing
held      at least one sequence has it in its block table; `ref_counts` says how many
cached    nobody holds it, but it is published: a later prompt may take it back

Block 0, the null block, is in none of them. It stands where a table needs an entry and there is nothing to see: the
padding of a short table, and blocks that fell out of a sliding window.
Source: Kwon et al. 2023, "Efficient memory management for large language model serving with PagedAttention".
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .errors import EngineError
from .events import EventLog

NULL = 0


class BlockError(RuntimeError):
    """The pool was used against its rules: a fault in the engine, never in a request."""


class LRU:
    """Gives up the block that was released longest ago."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int) -> None:
        self._order[block] = None

    def remove(self, block: int) -> None:
        del self._order[block]

    def pop(self) -> int:
        return self._order.popitem(last=False)[0]

    def used(self, block: int) -> None:
        """Each release moves a block to the end, so a use needs no note."""

    def __contains__(self, block: int) -> bool:
        return block in self._order

    def __iter__(self):
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)


class LFU:
    """Gives up the block used least often, oldest first among equals, with ageing.

    A block's rank is its number of uses plus `age`, the rank of the last block given up. What was popular long ago
    is thereby overtaken. Source: Arlitt et al. 2000, "Evaluating content management techniques for Web proxy
    caches", LFU with dynamic ageing.
    """

    def __init__(self) -> None:
        self.age = 0
        self._uses: Counter[int] = Counter()
        self._heap: list[tuple[int, int, int]] = []
        self._live: dict[int, tuple[int, int, int]] = {}
        self._clock = 0

    def add(self, block: int) -> None:
        self._clock += 1
        entry = (self.age + self._uses[block], self._clock, block)
        self._live[block] = entry
        heapq.heappush(self._heap, entry)

    def remove(self, block: int) -> None:
        del self._live[block]  # its entry in the heap is passed over when it surfaces
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)

    def pop(self) -> int:
        while True:
            entry = heapq.heappop(self._heap)
            if self._live.get(entry[2]) == entry:
                break
        self.age = entry[0]
        del self._live[entry[2]], self._uses[entry[2]]
        return entry[2]

    def used(self, block: int) -> None:
        self._uses[block] += 1

    def __contains__(self, block: int) -> bool:
        return block in self._live

    def __iter__(self):
        return iter(self._live)

    def __len__(self) -> int:
        return len(self._live)


EVICTION = {"lru": LRU, "lfu": LFU}


@dataclass(frozen=True)
class Occupancy:
    """Counts of blocks, and of token slots within the held ones. `waste` is the share of held slots without a token."""

    total: int
    free: int
    cached: int
    held: int
    held_slots: int
    used_slots: int

    @property
    def waste(self) -> float:
        return 1 - self.used_slots / self.held_slots if self.held_slots else 0.0


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens, the null block included.

    `on_evict(block)` is called when a published block is taken for new contents, before it is handed out.
    """

    def __init__(self, num_blocks: int, block_size: int, eviction: str = "lru", events: EventLog | None = None) -> None:
        if num_blocks < 2 or block_size < 1:
            raise EngineError(
                f"{num_blocks} blocks of {block_size} tokens hold nothing: block 0 is reserved, so give at least two"
            )
        if eviction not in EVICTION:
            raise EngineError(f"eviction {eviction!r} is not known; choose one of {', '.join(EVICTION)}")
        self.num_blocks, self.block_size, self.events = num_blocks, block_size, events
        self.ref_counts = [0] * num_blocks
        self.published = [False] * num_blocks
        self.on_evict: Callable[[int], None] = lambda block: None
        self._free = list(range(num_blocks - 1, NULL, -1))  # a stack: low ids first, warm ones again
        self._cached = EVICTION[eviction]()
        self.evictions = self.copies = 0

    @property
    def total(self) -> int:
        """Blocks that can hold tokens."""
        return self.num_blocks - 1

    @property
    def available(self) -> int:
        """Blocks that can be allocated now: the free ones and the cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def counts(self) -> dict[str, int]:
        """Blocks by state."""
        return {"held": self.total - self.available, "cached": len(self._cached), "free": len(self._free)}

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocate(self, count: int, owner: str | None = None) -> list[int]:
        """Takes `count` blocks, free ones first, then those whose contents are worth least."""
        if count > self.available:
            raise BlockError(f"{count} blocks wanted, {self.available} available: ask before allocating")
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self.ref_counts[block] = 1
        if self.events is not None and count:
            self.events.append("allocated", owner, blocks=blocks)
        return blocks

    def _evict(self) -> int:
        block = self._cached.pop()
        self.published[block] = False
        self.evictions += 1
        self.on_evict(block)
        if self.events is not None:
            self.events.append("evicted", block=block)
        return block

    def share(self, blocks: Sequence[int], owner: str | None = None) -> None:
        """One more holder for each: of a running sequence's blocks, or of cached ones, which keep their key."""
        if self.events is not None and blocks:
            self.events.append("shared", owner, blocks=list(blocks))
        for block in blocks:
            if block == NULL:
                continue
            if self.ref_counts[block] == 0:
                self._cached.remove(block)
            self.ref_counts[block] += 1
            if self.published[block]:
                self._cached.used(block)

    def release(self, blocks: Sequence[int], owner: str | None = None) -> None:
        """One holder fewer for each block of a table. Last first, so that a chain's tail is given up before its head:
        a head without its tail can still be hit, a tail without its head never."""
        for block in reversed(blocks):
            if block == NULL:
                continue
            if self.ref_counts[block] <= 0:
                raise BlockError(f"block {block} was released more often than it was taken")
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._cached.add(block) if self.published[block] else self._free.append(block)
        if self.events is not None and blocks:
            self.events.append("released", owner, blocks=list(blocks))

    def is_shared(self, block: int) -> bool:
        return self.ref_counts[block] > 1

    def publish(self, block: int) -> None:
        """The block is written to its end and a prefix cache knows it: keep its contents when it is released."""
        if self.ref_counts[block] == 0:
            raise BlockError(f"block {block} is published while nobody holds it")
        self.published[block] = True
        self._cached.used(block)
        if self.events is not None:
            self.events.append("published", block=block)

    def withdraw(self, block: int) -> None:
        """The prefix cache forgot the block: its contents are worth nothing from here on."""
        self.published[block] = False
        if self.events is not None:
            self.events.append("withdrawn", block=block)
        if self.ref_counts[block] == 0:
            self._cached.remove(block)
            self._free.append(block)

    def copy_on_write(self, block: int, owner: str | None = None) -> int:
        """A block of its own for a holder that wants to write into a shared one; the caller copies the contents."""
        (own,) = self.allocate(1, owner)
        self.ref_counts[block] -= 1
        self.copies += 1
        if self.events is not None:
            self.events.append("copied", owner, pairs=[(block, own)])
        return own

    def occupancy(self, tables: Iterable[tuple[Sequence[int], int]] = ()) -> Occupancy:
        """Exact counts. `tables` gives (block table, tokens written) of each holder; a shared block counts once."""
        filled: dict[int, int] = {}
        for blocks, tokens in tables:
            for index, block in enumerate(blocks):
                if block != NULL:
                    here = min(self.block_size, max(0, tokens - index * self.block_size))
                    filled[block] = max(here, filled.get(block, 0))
        held = self.total - self.available
        return Occupancy(
            self.total, len(self._free), len(self._cached), held, held * self.block_size, sum(filled.values())
        )

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Walks every block and compares with the tables of all holders. Raises BlockError at the first fault."""
        holders = Counter(block for table in tables for block in table if block != NULL)
        free, cached = Counter(self._free), Counter(self._cached)
        for block in range(1, self.num_blocks):
            wanted = holders[block]
            if self.ref_counts[block] != wanted:
                raise BlockError(f"block {block} counts {self.ref_counts[block]} holders, the tables say {wanted}")
            states = free[block] + cached[block] + (wanted > 0)
            if states != 1:
                raise BlockError(f"block {block} is in {states} of the states free, cached and held")
            if wanted == 0 and self.published[block] != (block in self._cached):
                raise BlockError(f"block {block} has contents to keep and lies among the free, or the other way round")
        if free[NULL] or cached[NULL] or self.published[NULL]:
            raise BlockError("the null block was given away")
