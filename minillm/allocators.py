"""Three ways to give out cache memory, behind one interface, to be compared under one trace.

    start(id, prompt, longest) -> bool   room for a sequence of `prompt` tokens that may grow to `longest`
    append(id) -> bool                   one token more
    free(id)

ContiguousAllocator needs one run of slots for a whole sequence, so it must know how long it will get: the maximum
(what engines reserved before paging), the next power of two, or the true length, which only an oracle knows.
PagedAllocator takes a block when one is needed. Slots only: no engine runs here, and nothing is computed.
Source: Kwon et al. 2023 (arXiv 2309.06180), section 6 and figure 2, whose three baselines these are.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from .block_pool import BlockPool
from .errors import EngineError


@dataclass(frozen=True)
class Waste:
    """Where the slots are: used + reserved + internal + free = capacity.

    reserved   for tokens that the sequence will still bring
    internal   given to a sequence that will never use them
    free       nobody's; `largest` is their longest run, and what a request could not get although it was free is
               external fragmentation
    """

    capacity: int
    used: int
    reserved: int
    internal: int
    free: int
    largest: int

    @property
    def share(self) -> float:
        """Of the allocated slots, the share without a token in it now."""
        allocated = self.capacity - self.free
        return 1 - self.used / allocated if allocated else 0.0


RESERVES: dict[str, Callable[[int, int], int]] = {
    "maximum": lambda longest, most: most,
    "power-of-two": lambda longest, most: min(most, 1 << (longest - 1).bit_length()),
    "exact": lambda longest, most: longest,
}


@dataclass
class _Sequence:
    length: int
    longest: int
    start: int
    size: int


class ContiguousAllocator:
    """First fit on a line of `capacity` slots; each sequence gets one run of the size that `reserve` says."""

    def __init__(self, capacity: int, max_model_len: int, reserve: str = "maximum") -> None:
        if reserve not in RESERVES:
            raise EngineError(f"reserve {reserve!r} is not known; choose one of {', '.join(RESERVES)}")
        self.capacity, self.max_model_len, self.reserve = capacity, max_model_len, reserve
        self._sequences: dict[str, _Sequence] = {}
        self._taken: list[tuple[int, int]] = []  # (start, size), sorted

    def start(self, name: str, prompt: int, longest: int) -> bool:
        size = RESERVES[self.reserve](longest, self.max_model_len)
        place = next((start for start, gap in self._gaps() if gap >= size), None)
        if place is None:
            return False
        insort(self._taken, (place, size))
        self._sequences[name] = _Sequence(prompt, longest, place, size)
        return True

    def append(self, name: str) -> bool:
        sequence = self._sequences[name]
        if sequence.length == sequence.size:
            return False
        sequence.length += 1
        return True

    def free(self, name: str) -> None:
        sequence = self._sequences.pop(name)
        self._taken.remove((sequence.start, sequence.size))

    def _gaps(self) -> list[tuple[int, int]]:
        """(start, size) of each free run."""
        gaps, end = [], 0
        for start, size in [*self._taken, (self.capacity, 0)]:
            if start > end:
                gaps.append((end, start - end))
            end = start + size
        return gaps

    def waste(self) -> Waste:
        gaps = [size for _, size in self._gaps()]
        return _waste(self.capacity, self._sequences, {n: s.size for n, s in self._sequences.items()}, gaps)


class PagedAllocator:
    """Blocks of `block_size` slots from a BlockPool, one when the last is full. Nothing is external: any block fits."""

    def __init__(self, capacity: int, block_size: int = 16) -> None:
        self.pool = BlockPool(1 + capacity // block_size, block_size)
        self._sequences: dict[str, _Sequence] = {}
        self.tables: dict[str, list[int]] = {}

    def start(self, name: str, prompt: int, longest: int) -> bool:
        blocks = self.pool.blocks_for(prompt)
        if blocks > self.pool.available:
            return False
        self.tables[name] = self.pool.allocate(blocks, name)
        self._sequences[name] = _Sequence(prompt, longest, 0, 0)
        return True

    def append(self, name: str) -> bool:
        sequence, table = self._sequences[name], self.tables[name]
        if sequence.length == len(table) * self.pool.block_size:
            if not self.pool.available:
                return False
            table += self.pool.allocate(1, name)
        sequence.length += 1
        return True

    def free(self, name: str) -> None:
        del self._sequences[name]
        self.pool.release(self.tables.pop(name), name)

    def waste(self) -> Waste:
        size = self.pool.block_size
        held = {name: len(table) * size for name, table in self.tables.items()}
        free = self.pool.available * size
        return _waste(self.pool.total * size, self._sequences, held, [free])


def _waste(capacity: int, sequences: dict[str, _Sequence], sizes: dict[str, int], gaps: list[int]) -> Waste:
    used = sum(s.length for s in sequences.values())
    needed = sum(min(sizes[name], s.longest) for name, s in sequences.items())
    allocated = sum(sizes.values())
    return Waste(capacity, used, needed - used, allocated - needed, capacity - allocated, max(gaps, default=0))
