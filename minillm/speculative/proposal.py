"""What stands between those who guess and the one who checks: a context in, a proposal out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from torch import Tensor

from ..sampling import SamplingParams


class Context(NamedTuple):
    """What a proposer sees of one sequence. `key` names it between calls; `count` is the most tokens wanted.

    The id lists are read, never kept; between two calls with one key they only grow.
    """

    key: Hashable
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    params: SamplingParams
    count: int
    sequence: int = 0

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt_ids, *self.output_ids]


class Proposal(NamedTuple):
    """A chain of drafts: token i is meant to follow the sequence and the drafts before it.

    probs (k, V) float64 are the distributions that they were drawn from, the very numbers used for drawing: a draft
    drawn in one precision and judged in another comes from neither. None: nothing was drawn, the guess was certain.
    """

    tokens: list[int]
    probs: Tensor | None = None


NOTHING = Proposal([])


class Proposer:
    """One for an engine. Subclasses guess; they may keep something for each key and are told when it has ended."""

    needs_hidden = False  # of the target, row by row: see eagle.py

    def propose(self, contexts: Sequence[Context]) -> list[Proposal]:
        """A proposal for each, of at most its `count` tokens, perhaps of none."""
        raise NotImplementedError

    def observe(self, key: Hashable, start: int, tokens: Sequence[int], hidden: Tensor) -> None:
        """The target's hidden states (T, d) of the sequence's tokens from position `start` on, all of them certain.

        Rows may come again, after the target computed them twice, and rows may be left out, where the target took them
        from a cache. Copy what is to be kept: `hidden` is a view of a step."""

    def fork(self, key: Hashable, child: Hashable) -> None:
        """A second sequence goes on from the tokens of the first that were observed."""

    def forget(self, key: Hashable) -> None:
        """The sequence has ended, or what is kept of it can no longer be relied on."""
