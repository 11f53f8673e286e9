"""Prompt lookup: what followed the last few tokens when they stood in this sequence before. Costs next to nothing.

Summaries, corrections, code being edited and structured output repeat their input; free text seldom does.
Source: Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2023 (arXiv 2304.04487) for the idea.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from .proposal import NOTHING, Context, Proposal, Proposer


@dataclass
class _Index:
    """Of one sequence: where each run of n tokens last ended, among those that something followed."""

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    done: int = 0  # runs that end before this token are in


class NGram(Proposer):
    """Looks for the last n tokens, from the longest n to the shortest, at their latest earlier place."""

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self.longest, self.shortest = longest, shortest
        self._indices: dict[Hashable, _Index] = {}

    def propose(self, contexts: Sequence[Context]) -> list[Proposal]:
        return [self._propose(context) for context in contexts]

    def _propose(self, context: Context) -> Proposal:
        tokens, index = context.token_ids, self._indices.setdefault(context.key, _Index())
        for end in range(index.done, len(tokens) - 1):
            for n in range(self.shortest, min(self.longest, end + 1) + 1):
                index.ends[tuple(tokens[end + 1 - n : end + 1])] = end
        index.done = max(index.done, len(tokens) - 1)
        for n in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            end = index.ends.get(tuple(tokens[-n:]))
            if end is not None:
                return Proposal(_continued(tokens, end + 1, context.count))
        return NOTHING

    def forget(self, key: Hashable) -> None:
        self._indices.pop(key, None)


def _continued(tokens: list[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start` on; past the end, what was copied is copied on, as a period goes on."""
    found = len(tokens)
    tokens = list(tokens)
    for at in range(start, start + count):
        tokens.append(tokens[at])
    return tokens[found:]
