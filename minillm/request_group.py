"""The text side of requests under way: tokens, pieces of text, times. The scheduler knows their integers."""

from __future__ import annotations

from dataclasses import dataclass, field

from .generate import take_token
from .outputs import CompletionOutput, RequestMetrics, RequestOutput
from .request import Request
from .sampling import SampledToken
from .stopping import StopChecker
from .tokenizer import StreamDecoder, Tokenizer


@dataclass
class SequenceText:
    """One sequence on its way from token ids to an answer."""

    request: Request
    decoder: StreamDecoder
    checker: StopChecker
    tokenizer: Tokenizer
    tokens: list[SampledToken] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def push(self, token: SampledToken, now: float) -> None:
        emission = take_token(self.checker, self.decoder, token.id)
        self.tokens.append(token)
        self.pieces.append(emission.text)
        self.times.append(now)
        self.finish_reason, self.stop_reason = emission.finish_reason, emission.stop_reason

    def release_text(self) -> None:
        """Cut short from outside: what was held back, waiting for a stop string or half a character, is due now."""
        if self.pieces:
            self.pieces[-1] += self.checker.flush(self.decoder.flush()).text

    def output(self) -> CompletionOutput:
        return CompletionOutput(
            self.request.sequence,
            len(self.tokens),
            self.finish_reason,
            self.stop_reason,
            self.tokens,
            self.pieces,
            self.times,
            self.tokenizer,
        )


@dataclass
class RequestGroup:
    """The n sequences of one request."""

    request_id: str
    prompt: str | None
    first: Request
    metrics: RequestMetrics
    sequences: list[SequenceText] = field(default_factory=list)
    error: str | None = None
    cut_short: bool = False  # from outside: sequences that it has not forked yet will not come

    @property
    def finished(self) -> bool:
        complete = self.cut_short or self.first.width == 1
        return complete and all(s.finish_reason is not None for s in self.sequences)

    def output(self) -> RequestOutput:
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.first.prompt_token_ids,
            [s.output() for s in self.sequences],
            self.finished,
            self.metrics,
            self.first.num_cached,
            self.error,
        )
