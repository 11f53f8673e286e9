"""Learning merges: join the most frequent pair of neighbours in the text, again and again (Sennrich et al. 2016).

Each merge changes only the words that hold its pair, so pair counts are updated there and never taken anew. Among
pairs of equal count the one with the smaller ids wins, left id first: bytes in GPT-2's order, then older merges.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from .vocabulary import BYTE_TO_CHAR

BYTES = tuple(bytes([byte]) for byte in BYTE_TO_CHAR)  # the bytes in the order of their ids, 0 to 255

Pair = tuple[int, int]


class Merge(NamedTuple):
    """One learned merge: the two tokens it joins, and how often they stood side by side."""

    left: bytes
    right: bytes
    count: int

    @property
    def token(self) -> bytes:
        return self.left + self.right


def learn_merges(words: Mapping[str, int]) -> Iterator[Merge]:
    """Merges in the order they are learned, until no pair is left. `words`: word -> times it occurs."""
    tokens = list(BYTES)
    index = _PairIndex(words)
    while (found := index.most_frequent()) is not None:
        count, (left, right) = found
        yield Merge(tokens[left], tokens[right], count)
        index.merge((left, right), len(tokens))
        tokens.append(tokens[left] + tokens[right])


class _PairIndex:
    """Counts of all pairs, the words each occurs in, and a heap to find the largest.

    The heap holds an entry for every value a count has had; an entry that no longer agrees with `counts` is skipped.
    `where` may name a word that has lost the pair since; merging leaves such a word as it is.
    """

    def __init__(self, words: Mapping[str, int]) -> None:
        id_of = {token: i for i, token in enumerate(BYTES)}
        self.words = [[id_of[bytes([byte])] for byte in word.encode()] for word in words]
        self.times = list(words.values())
        self.counts: Counter[Pair] = Counter()
        self.where: defaultdict[Pair, set[int]] = defaultdict(set)
        for i, word in enumerate(self.words):
            for pair in pairwise(word):
                self.counts[pair] += self.times[i]
                self.where[pair].add(i)
        self.heap = [(-count, pair) for pair, count in self.counts.items()]
        heapq.heapify(self.heap)

    def most_frequent(self) -> tuple[int, Pair] | None:
        while self.heap:
            negative, pair = self.heap[0]
            if self.counts.get(pair) == -negative:
                return -negative, pair
            heapq.heappop(self.heap)
        return None

    def merge(self, pair: Pair, new: int) -> None:
        change: Counter[Pair] = Counter()
        for i in self.where.pop(pair):
            old, self.words[i] = self.words[i], join(self.words[i], pair, new)
            for gone in pairwise(old):
                change[gone] -= self.times[i]
            for came in pairwise(self.words[i]):
                change[came] += self.times[i]
                self.where[came].add(i)
        for changed, difference in change.items():
            self._add(changed, difference)

    def _add(self, pair: Pair, difference: int) -> None:
        if difference:
            self.counts[pair] += difference
            if self.counts[pair]:
                heapq.heappush(self.heap, (-self.counts[pair], pair))
            else:
                del self.counts[pair]


def join(word: list[int], pair: Pair, new: int) -> list[int]:
    """The word with each occurrence of the pair, from the left, replaced by `new`."""
    joined: list[int] = []
    i = 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            joined.append(new)
            i += 2
        else:
            joined.append(word[i])
            i += 1
    return joined
