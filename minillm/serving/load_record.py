"""One request before it is sent, and the same one after: what every file of the load generator speaks of."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from ..errors import MinillmError

MOST_TOKENS = 10_000_000  # of one prompt or one answer; also of what a server may claim
MOST_REQUESTS = 10_000_000  # of one load
LONGEST_S = 1e12  # any time or interval; the year 9999 is 2.5e11 s from 1970


class LoadError(MinillmError):
    """A load that cannot be run: a bad option, a damaged trace, a server that is not there."""


class TraceRequest(NamedTuple):
    """A request of a trace or of a made-up workload.

    arrival_s: seconds from the start of the run, when it is meant to arrive. prompt_tokens, output_tokens: lengths.
    hash_ids: names of the prompt's blocks; equal names stand for equal tokens, so a prefix cache can hit.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def check_seed(seed: int) -> None:
    if seed < 0:
        raise LoadError(f"seed is {seed}; it must be a whole number, 0 or more")


def count_of(value: object) -> int | None:
    """A number of tokens that came from outside; None if it is none, or above MOST_TOKENS."""
    good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS
    return value if good else None


OK, REFUSED, FAILED, CUT, TIMEOUT = "ok", "refused", "failed", "cut", "timeout"
STATUSES = (OK, REFUSED, FAILED, CUT, TIMEOUT)


class RequestRecord(NamedTuple):
    """What happened to one request. All times are seconds from the start of the run, on one monotonic clock.

    status: "ok"; "refused" (HTTP 429 or 503: the server says that it is full); "cut" (the stream ended before its
    end); "timeout"; "failed" (all else). chunk_times: when each chunk that carried tokens came. chunk_tokens: how many
    tokens each carried, empty if the server did not say and they cannot be told. token_source: "usage" is the
    server's own count of output tokens, "chunks" is the number of chunks, for servers that send no usage.
    cached_tokens: of the prompt's, those that the server says came from its prefix cache.
    """

    index: int
    intended_s: float
    sent_s: float
    end_s: float
    status: str = OK
    prompt_tokens: int = 0
    output_tokens: int = 0
    chunk_times: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] = ()
    token_source: str = "usage"
    max_tokens: int = 0
    cached_tokens: int = 0
    http_status: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    streamed: bool = True
    warmup: bool = False

    @property
    def ok(self) -> bool:
        return self.status == OK

    @property
    def ttft_s(self) -> float | None:
        """First token minus *intended* arrival: queueing counts, wherever it happens. None without a token."""
        return self.chunk_times[0] - self.intended_s if self.chunk_times else None

    @property
    def e2el_s(self) -> float | None:
        """Last token minus intended arrival. None without a token."""
        return self.chunk_times[-1] - self.intended_s if self.chunk_times else None

    @property
    def tpot_s(self) -> float | None:
        """(E2EL − TTFT) / (n − 1), one value a request; None below two tokens."""
        if self.output_tokens < 2 or not self.chunk_times:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """The gaps between consecutive tokens, or between chunks where a chunk carries several tokens."""
        return [late - early for early, late in pairwise(self.chunk_times)]
