"""A step as a value: what the scheduler hands to the runner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .block_pool import BlockError
from .request import Request
from .state_slots import StateCopies


class Scheduled(NamedTuple):
    """One request's part of a step: tokens start to start + count, written into the blocks of its table.

    `samples`: it reaches the request's last known token, so that a new one follows. The last of the `count` tokens may
    be `drafts`, guesses of what follows, whose logits are wanted too (speculative/).
    """

    request: Request
    start: int
    count: int
    samples: bool
    copies: tuple[tuple[int, int], ...] = ()  # copy-on-write, (source, target)
    drafts: tuple[int, ...] = ()

    @property
    def known(self) -> int:
        """Tokens of the part that are no guesses."""
        return self.count - len(self.drafts)

    @property
    def rows(self) -> int:
        """Of logits: one after the last known token and one after each draft, or none."""
        return self.samples + len(self.drafts)

    def tokens(self, start: int, end: int) -> list[int]:
        """Ids start to end of the sequence, drafts laid behind what is known."""
        until = self.start + self.known
        ids = self.request.tokens(start, min(end, until))
        return [*ids, *self.drafts[max(0, start - until) : max(0, end - until)]]


@dataclass
class SchedulerOutput:
    """A step. Block copies come before any write, in this order: swap_out, the parts' copies, swap_in."""

    scheduled: list[Scheduled] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)  # (block, host block)
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, block)
    preempted: list[Request] = field(default_factory=list)
    states: StateCopies = field(default_factory=StateCopies)  # forks before any swap

    @property
    def num_tokens(self) -> int:
        return sum(part.count for part in self.scheduled)

    @property
    def prefill_tokens(self) -> int:
        """Tokens in chunks, as opposed to single ones."""
        return sum(part.count for part in self.scheduled if part.known > 1)

    @property
    def copies(self) -> list[tuple[int, int]]:
        return [pair for part in self.scheduled for pair in part.copies]


class Plan:
    """A step being put together."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.parts: dict[Request, Scheduled] = {}
        self.preempted: list[Request] = []

    def add(self, part: Scheduled) -> None:
        if part.count < 1:
            raise BlockError(f"{part.request} has nothing to compute and is scheduled")
        self.parts[part.request] = part
        self.budget -= part.count

    def extend(self, request: Request, drafts: tuple[int, ...]) -> None:
        """Guesses behind a part that was planned."""
        part = self.parts[request]
        self.parts[request] = part._replace(count=part.count + len(drafts), drafts=drafts)
        self.budget -= len(drafts)

    def drop(self, request: Request) -> Scheduled | None:
        """Takes a request out again: it lost its blocks to one that comes before it."""
        part = self.parts.pop(request, None)
        if part is not None:
            self.budget += part.count
        return part
