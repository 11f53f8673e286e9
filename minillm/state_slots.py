"""Who owns which state of constant size: integers, as in block_pool.py. The tensors and the copies are the runner's.

A model with linear layers keeps one state a running sequence (delta_state.py), in a slot. A request gets its slot when
it is admitted and gives it back when it ends or is preempted; a fork gets its own with a copy; a request swapped out
takes a slot of the host's. Slot 0 is nobody's, as block 0 is: padding of a step may point there.

Nothing is cleared here. A sequence that begins at token 0 begins from zero, which the cache sees to (paging.py), so a
slot may be handed on as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .block_pool import BlockError
from .request import Request

Pair = tuple[int, int]


@dataclass
class StateCopies:
    """Of one step, in the order in which they must be made: forks, then out, then in."""

    forks: list[Pair] = field(default_factory=list)  # (slot, slot)
    swap_out: list[Pair] = field(default_factory=list)  # (slot, host slot)
    swap_in: list[Pair] = field(default_factory=list)  # (host slot, slot)


class StateSlots:
    """`total` slots, and as many in host memory; with 0, for a model without states, every call does nothing.

    The scheduler admits no more sequences than there are slots, so `take` finds one.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.free, self.host_free = ([*range(total, 0, -1)] for _ in range(2))
        self.copies = StateCopies()

    def take(self, request: Request) -> None:
        """A slot for a sequence that begins, or begins again, at token 0."""
        if self.total:
            request.state_slot = self.free.pop()

    def release(self, request: Request) -> None:
        if request.state_slot:
            self.free.append(request.state_slot)
            request.state_slot = 0

    def fork(self, parent: Request, child: Request) -> None:
        """The child goes on from the parent's state, copied before either computes again."""
        if self.total:
            self.take(child)
            self.copies.forks.append((parent.state_slot, child.state_slot))

    @property
    def can_swap_out(self) -> bool:
        return not self.total or bool(self.host_free)

    def swap_out(self, request: Request) -> None:
        """Plans the copy to the host; `release` follows."""
        if self.total:
            request.host_slot = self.host_free.pop()
            self.copies.swap_out.append((request.state_slot, request.host_slot))

    def swap_in(self, request: Request) -> None:
        if self.total:
            self.take(request)
            self.copies.swap_in.append((request.host_slot, request.state_slot))
            self.release_host(request)  # the step's own swaps to the host were planned before

    def release_host(self, request: Request) -> None:
        if request.host_slot:
            self.host_free.append(request.host_slot)
            request.host_slot = 0

    def take_copies(self) -> StateCopies:
        """Those of the step that was just planned."""
        copies, self.copies = self.copies, StateCopies()
        return copies

    def check(self, running: Sequence[Request], waiting: Sequence[Request]) -> None:
        """Every slot is free or one running request's, and likewise on the host. Raises BlockError."""
        held, hosted = [r.state_slot for r in running], [r.host_slot for r in waiting if r.host_slot]
        wrong = sorted(self.free + held) != [*range(1, self.total + 1)] if self.total else any(held)
        if wrong or any(r.state_slot for r in waiting) or any(r.host_slot for r in running):
            raise BlockError("a state slot has two owners, or none")
        if sorted(self.host_free + hosted) != [*range(1, self.total + 1)]:
            raise BlockError("a state slot in host memory has two owners, or none")
