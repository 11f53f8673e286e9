"""Speculation inside the engine: drafts before a step is planned, verification after it was computed.

A request that decodes asks the scheduler for 1 + k tokens instead of one, and gets what is left of the step's budget
and blocks. Rejected drafts leave keys behind in slots that no later step reads before it has written them.

A proposer that reads the target's hidden states gets those of a step before the next one is drafted for. Certain are
the rows that count as computed by then: all that were known, and of the drafts those that were kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from ..errors import short
from ..request import Request
from ..sampling import SampledToken, SamplingState
from ..step_plan import Scheduled, SchedulerOutput
from .proposal import Context, Proposal
from .speculator import Speculator
from .verification import verify

_Rows = tuple[int, list[int], Tensor]  # position of the first, tokens, hidden states


class BatchSpeculation:
    """What an engine with speculation holds. Sequences are told apart by their Request."""

    def __init__(
        self,
        speculator: Speculator,
        max_sequence: int,
        vocab_size: int,
        eos_ids: Iterable[int],
        most: int | None = None,
    ) -> None:
        """`most` bounds the drafts of a step, where a cache cannot take more back."""
        self.speculator, self.max_sequence, self.most = speculator, max_sequence, most
        self.vocab_size, self.eos_ids = vocab_size, tuple(eos_ids)
        self.failed: str | None = None  # why there are no drafts any more
        self._proposals: dict[Request, Proposal] = {}
        self._seen: dict[Request, list[_Rows]] = {}  # of one step
        self._forks: list[tuple[Request, Request]] = []  # in that step

    @property
    def stats(self):
        return self.speculator.stats

    def draft(self, running: Sequence[Request]) -> None:
        """Guesses for each that decodes. They are never needed: if the proposer fails, it is given up with a warning,
        and decoding goes on without it. An interrupt is passed on, and the next call begins anew."""
        for request in running:
            request.drafts = ()
        seen, self._seen, forks, self._forks = self._seen, {}, self._forks, []
        if self.failed is not None:
            return
        decoding = [r for r in running if r.num_tokens - r.num_computed == 1 and r.width == 1]
        contexts = [self._context(request, len(decoding)) for request in decoding]
        try:
            self._show(running, seen, forks)
            proposals = self.speculator.propose(contexts)
        except BaseException as error:
            for request in running:
                self.speculator.proposer.forget(request)  # what it holds may be half of a step
            if not isinstance(error, Exception):
                raise
            self.failed = f"{type(error).__name__}: {short(error, 160)}"
            warnings.warn(f"drafting failed ({self.failed}); going on without speculation", stacklevel=2)
            return
        self._proposals = dict(zip(decoding, proposals, strict=True))
        for request, proposal in self._proposals.items():
            request.drafts = tuple(proposal.tokens)

    def see(self, part: Scheduled, start: int, hidden: Tensor) -> None:
        """For the runner: hidden (T, d) of the part's tokens from `start` on. Which are certain is known later."""
        if self.failed is None:
            tokens = part.tokens(start, start + len(hidden))
            self._seen.setdefault(part.request, []).append((start, tokens, hidden))

    def fork(self, parent: Request, child: Request) -> None:
        """The child goes on from the parent's prompt, which this step has computed."""
        self._forks.append((parent, child))

    def _show(self, running: Sequence[Request], seen: Mapping[Request, list[_Rows]], forks) -> None:
        """To the proposer: all that is certain, and then whose sequence begins as another's."""
        for request in running:
            for start, tokens, hidden in seen.get(request, ()):
                if (certain := request.num_computed - start) > 0:
                    self.speculator.proposer.observe(request, start, tokens[:certain], hidden[:certain])
        for parent, child in forks:
            if child in running:
                self.speculator.proposer.fork(parent, child)

    def _context(self, request: Request, sequences: int) -> Context:
        room = self.max_sequence - request.num_tokens - 1
        if request.params.max_tokens is not None:
            room = min(room, request.params.max_tokens - len(request.output_token_ids) - 1)
        room = room if self.most is None else min(room, self.most)
        count = self.speculator.length(request, room, sequences)
        ids = request.prompt_token_ids, request.output_token_ids
        return Context(request, *ids, request.params, count, request.sequence)

    def verify(self, request: Request, logits: Tensor, drafted: int) -> list[SampledToken]:
        """logits (drafted + 1, V) of a request whose first `drafted` drafts were computed. Raises SamplingError."""
        proposal = self._proposals[request]
        probs = None if proposal.probs is None else proposal.probs[:drafted]
        state = SamplingState(request.prompt_token_ids, request.output_token_ids, request.sequence)
        cut = Proposal(proposal.tokens[:drafted], probs)
        tokens = verify(logits, cut, request.params, state, self.vocab_size, self.eos_ids)
        self.speculator.record(request, drafted, len(tokens) - 1)
        return tokens

    def note_plain(self, requests: Iterable[Request]) -> None:
        """Those whose next token is drawn as without speculation."""
        for request in requests:
            self.speculator.record(request, 0, 0)

    def observe(self, output: SchedulerOutput, seconds: float) -> None:
        """What a step took, if it only decoded."""
        if all(part.known == 1 for part in output.scheduled):
            self.speculator.price.observe(seconds, output.num_tokens)

    def forget(self, request: Request) -> None:
        self._proposals.pop(request, None)
        self._seen.pop(request, None)
        self._forks = [pair for pair in self._forks if request not in pair]
        self.speculator.forget(request)
