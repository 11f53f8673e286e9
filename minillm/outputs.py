"""What a caller gets back, under vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .sampling import SampledToken
from .tokenizer import Tokenizer


class Logprob(NamedTuple):
    """Log of a token's probability, before bias, penalties, temperature and cuts; rank among the listed."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One of the n answers, as it stood when this was made. `finish_reason` is stop, length, abort or error.

    It shares the growing lists of its sequence and remembers how long they were, so making one costs nothing.
    """

    index: int
    count: int  # tokens so far
    finish_reason: str | None
    stop_reason: str | int | None
    _tokens: Sequence[SampledToken] = field(repr=False)
    _pieces: Sequence[str] = field(repr=False)  # the text that became certain with each token
    _times: Sequence[float] = field(repr=False)
    _tokenizer: Tokenizer = field(repr=False)

    @property
    def text(self) -> str:
        return self.text_from(0)

    def text_from(self, token: int) -> str:
        """The text that became certain from the given token on: what a stream sends next."""
        return "".join(self._pieces[token : self.count])

    @property
    def tokens(self) -> list[SampledToken]:
        return list(self._tokens[: self.count])

    @property
    def token_ids(self) -> list[int]:
        """Every token drawn, a stop or end token too."""
        return [token.id for token in self._tokens[: self.count]]

    @property
    def token_times(self) -> list[float]:
        """When each token was drawn, in seconds of the engine's clock."""
        return list(self._times[: self.count])

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """For each token {id: Logprob} of itself and the likeliest; None if they were not asked for."""
        if not self.count or self._tokens[0].logprob is None:
            return None
        return [self._logprobs(token) for token in self._tokens[: self.count]]

    def _logprobs(self, token: SampledToken) -> dict[int, Logprob]:
        ranked = [(i, value, rank) for rank, (i, value) in enumerate(token.top_logprobs, 1)]
        if all(i != token.id for i, _, _ in ranked):
            ranked.insert(0, (token.id, token.logprob, None))
        return {i: Logprob(value, rank, self._tokenizer.decode([i])) for i, value, rank in ranked}

    @property
    def cumulative_logprob(self) -> float | None:
        if not self.count or self._tokens[0].logprob is None:
            return None
        return sum(token.logprob for token in self._tokens[: self.count])

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Seconds of the engine's clock, and counts."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True)
class RequestOutput:
    """A request as it stood after a step. `error` says why, where finish_reason is "error"."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int | None = None
    error: str | None = None
