"""One sequence on its way through the engine. Its progress is integers; everything else is arithmetic on them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from numbers import Integral

from .errors import RequestError, short
from .prefix_cache import Prefix
from .sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again, with tokens of its own
    FINISHED = "finished"


class Request:
    """A sequence: token ids known, tokens computed, and the blocks that hold them.

    num_computed    tokens whose keys and values are in the cache
    num_tokens      tokens known: prompt and output; a step computes some of the difference
    width           sequences it stands for: n until its prompt is computed and it forks, then 1
    block_ids       block table; entry i holds tokens i · block_size onwards
    host_blocks     the same in host memory while swapped out, else None
    state_slot      where its state of constant size is while it runs, and host_slot while swapped out; 0 for none
    drafts          guesses of what follows, for the next step alone; none of them is a token yet
    label           its name in the event log: the request's id, with /1, /2 and so on for further sequences of it
    order           what the queues are sorted by: the lowest runs first and is preempted last

    Prefill, a chunk of it, recomputing after preemption and decode differ only in these numbers.
    """

    __slots__ = (
        "block_ids", "drafts", "finish_reason", "host_blocks", "host_slot", "label", "num_cached", "num_computed",
        "num_preemptions",
        "num_prompt", "num_published", "num_tokens", "order", "output_token_ids", "params", "prefix", "priority",
        "prompt_token_ids", "request_id", "sequence", "state_slot", "status",
        "width",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        priority: int = 0,
        extra_keys: Sequence[tuple] = (),
    ) -> None:
        if isinstance(priority, bool) or not isinstance(priority, Integral):
            raise RequestError(f"priority is {short(repr(priority))}; it must be a whole number, lower runs first")
        self.request_id, self.params, self.priority = request_id, params or SamplingParams(), priority
        self.prompt_token_ids, self.output_token_ids = list(prompt_token_ids), []
        self.prefix = Prefix.of(extra_keys)
        self.num_prompt = self.num_tokens = len(self.prompt_token_ids)
        self.num_computed = self.num_published = self.num_preemptions = 0
        self.num_cached: int | None = None  # tokens found in the prefix cache at the first admission
        self.width, self.sequence = self.params.n, 0
        self.label = request_id
        self.status = RequestStatus.WAITING
        self.finish_reason: str | None = None
        self.block_ids: list[int] = []
        self.host_blocks: list[int] | None = None
        self.state_slot = self.host_slot = 0
        self.drafts: tuple[int, ...] = ()  # guesses for the next step, of what follows
        self.order = (0, 0, 0)

    def tokens(self, start: int, end: int) -> list[int]:
        """Ids start to end of prompt and output laid end to end."""
        cut = self.num_prompt
        if end <= cut:
            return self.prompt_token_ids[start:end]
        if start >= cut:
            return self.output_token_ids[start - cut : end - cut]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - cut]

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    def append(self, token_id: int) -> None:
        self.output_token_ids.append(token_id)
        self.num_tokens += 1

    def fork(self, sequence: int) -> Request:
        """A sequence of the same request that has computed the same tokens in the same blocks."""
        child = Request.__new__(Request)
        for name in Request.__slots__:
            setattr(child, name, getattr(self, name))
        child.output_token_ids = list(self.output_token_ids)
        child.block_ids, child.prefix = list(self.block_ids), self.prefix.copy()
        child.label = f"{self.request_id}/{sequence}"
        child.sequence, child.order = sequence, (self.order[0], self.order[1], sequence)
        return child

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}/{self.sequence}, {self.status.value}, {self.num_computed}/{self.num_tokens})"
        )
