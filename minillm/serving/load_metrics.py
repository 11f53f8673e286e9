"""What a run was like: TTFT, TPOT, ITL, E2EL, throughput and goodput, each defined once.

TTFT     first token − intended arrival; queueing counts
TPOT     (E2EL − TTFT) / (n − 1), one value a request, of those with two tokens or more
ITL      gaps between a request's consecutive tokens, pooled over requests
E2EL     last token − intended arrival
goodput  requests a second that met every SLO; a refused or failed request is a miss

n is the server's own count of output tokens. Where a chunk carries several tokens, ITL are gaps between chunks
(`itl_unit` says "chunk"), and TPOT still divides by tokens. Percentiles interpolate linearly between order statistics
(type 7 of Hyndman and Fan, 1996; numpy's default): P99 of fewer than a hundred values is nearly the largest. Latencies
are of the requests that ended well. `load_definitions` has what other tools call by these names.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from .load_record import STATUSES, LoadError, RequestRecord

LATE_S = 0.02  # a client that sends later than this measures itself


class SLO(NamedTuple):
    """Limits in milliseconds on each single request; None is no limit. A request of one token meets any TPOT."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    @classmethod
    def parse(cls, text: str) -> SLO:
        """ "ttft=500,tpot=50,e2el=3000", any of them; "e2e" is e2el. Raises LoadError."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            name = {"e2e": "e2el"}.get(name, name)
            try:
                limits[f"{name}_ms"] = float(value)
            except ValueError:
                limits[f"{name}_ms"] = math.nan
            if f"{name}_ms" not in cls._fields or not 0 < limits[f"{name}_ms"] < math.inf:
                raise LoadError(f"SLO {text!r}: write ttft=500,tpot=50,e2el=3000, any of them, in milliseconds")
        return cls(**limits)

    def met_by(self, record: RequestRecord) -> bool:
        """True if the request ended well and within every limit."""
        if not record.ok or record.ttft_s is None:
            return False
        values = (record.ttft_s, record.tpot_s or 0.0, record.e2el_s)
        return all(limit is None or 1e3 * value <= limit for limit, value in zip(self, values, strict=True))

    @property
    def any(self) -> bool:
        return any(limit is not None for limit in self)


class Spread(NamedTuple):
    """Mean and percentiles in milliseconds of `count` values; NaN of none."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Spread:
        values = sorted(1e3 * value for value in seconds)
        if not values:
            return cls(0, *[math.nan] * 4)
        return cls(len(values), math.fsum(values) / len(values), *(percentile(values, q) for q in (50, 95, 99)))


class Summary(NamedTuple):
    """One run in numbers. Warm-up requests are in none of them but `warmup`.

    window_s: from the first intended arrival to the last end. offered_rate: intended arrivals a second.
    good_fraction: of all measured requests, refused and failed ones among them.
    """

    requests: int
    warmup: int
    statuses: dict[str, int]
    window_s: float
    offered_rate: float
    request_rate: float
    output_token_rate: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread
    e2el_ms: Spread
    itl_unit: str
    token_source: str
    slo: SLO
    good: int
    goodput: float
    good_fraction: float
    max_in_flight: int
    send_delay_ms: Spread
    backlogged: bool
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; a number that is not there is None."""
        return {name: _plain(value) for name, value in self._asdict().items()}


def percentile(values: Sequence[float], q: float) -> float:
    """Of ascending values; q from 0 to 100. Linear between the two order statistics around rank q/100 · (n − 1)."""
    place = q / 100 * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


def measured(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Without the warm-up."""
    return [record for record in records if not record.warmup]


def summarize(records: Sequence[RequestRecord], slo: SLO | None = None, closed: bool = False) -> Summary:
    """The numbers of a run. closed: a closed loop, in which no backlog can form."""
    slo = slo or SLO()
    rows = measured(records)
    done = [row for row in rows if row.ok]
    start = min((row.intended_s for row in rows), default=0.0)
    window = max((row.end_s for row in rows), default=0.0) - start
    good = sum(map(slo.met_by, rows))
    statuses = Counter(row.status for row in rows)
    values = {
        "requests": len(rows),
        "warmup": len(records) - len(rows),
        "statuses": {status: statuses[status] for status in STATUSES},
        "window_s": window,
        "offered_rate": _offered_rate(rows),
        "request_rate": _per(len(done), window),
        "output_token_rate": _per(sum(row.output_tokens for row in done), window),
        "prompt_tokens": sum(row.prompt_tokens for row in done),
        "cached_tokens": sum(row.cached_tokens for row in done),
        "output_tokens": sum(row.output_tokens for row in done),
        "ttft_ms": Spread.of(row.ttft_s for row in done if row.ttft_s is not None),
        "tpot_ms": Spread.of(row.tpot_s for row in done if row.tpot_s is not None),
        "itl_ms": Spread.of(gap for row in done for gap in row.itl_s),
        "e2el_ms": Spread.of(row.e2el_s for row in done if row.e2el_s is not None),
        "itl_unit": "token" if all(max(row.chunk_tokens, default=0) == 1 for row in done) else "chunk",
        "token_source": "usage" if all(row.token_source == "usage" for row in done) else "chunks",
        "slo": slo,
        "good": good,
        "goodput": _per(good, window),
        "good_fraction": good / len(rows) if rows else math.nan,
        "max_in_flight": max((count for _, count in in_flight(rows)), default=0),
        "send_delay_ms": Spread.of(row.sent_s - row.intended_s for row in rows),
        "backlogged": not closed and is_backlogged(rows),
    }
    return Summary(**values, warnings=tuple(_warnings(values, rows, done)))


def _per(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else math.nan


def _offered_rate(rows: Sequence[RequestRecord]) -> float:
    times = [row.intended_s for row in rows]
    return _per(len(times) - 1, max(times) - min(times)) if len(times) > 1 else math.nan


def in_flight(records: Iterable[RequestRecord]) -> list[tuple[float, int]]:
    """(time, requests that have arrived and not ended) at every change, in time order. Waiting ones count."""
    changes: Counter[float] = Counter()
    for record in records:
        changes[record.intended_s] += 1
        changes[record.end_s] -= 1
    steps, count = [], 0
    for moment in sorted(changes):
        count += changes[moment]
        steps.append((moment, count))
    return steps


def is_backlogged(records: Sequence[RequestRecord]) -> bool:
    """True if the queue was still growing when arrivals ended, so that longer runs would give longer latencies.

    Both must hold, over quarters of the arrivals' time: the mean number in flight grew from the second to the third
    and to the last, by half at least; and the median latency of the last quarter's requests is 1.5 times that of the
    second's. Fewer than 20 requests give no verdict. Requests that all come at once are a backlog by design. On
    simulated queues (Poisson arrivals, equal service, 100 requests) it speaks in 1 run of 100 at half load, in 10 at
    80%, in 92 at 150%: near full load only a longer run can tell.
    """
    rows = sorted(records, key=lambda row: row.intended_s)
    if len(rows) < 20:
        return False
    start, end = rows[0].intended_s, rows[-1].intended_s
    if end == start:
        return True
    cuts = [start + part * (end - start) / 4 for part in range(5)]
    load = [_mean_in_flight(rows, a, b) for a, b in pairwise(cuts[1:])]
    grew = load[0] < load[1] < load[2] and load[2] >= 1.5 * load[0] and load[2] - load[0] >= 1
    early = sorted(row.end_s - row.intended_s for row in rows if cuts[1] <= row.intended_s < cuts[2])
    late = sorted(row.end_s - row.intended_s for row in rows if cuts[3] <= row.intended_s)
    return bool(grew and early and late and percentile(late, 50) >= 1.5 * percentile(early, 50))


def _mean_in_flight(rows: Sequence[RequestRecord], start: float, end: float) -> float:
    held = math.fsum(max(0.0, min(row.end_s, end) - max(row.intended_s, start)) for row in rows)
    return held / (end - start)


def _warnings(values: dict[str, Any], rows: Sequence[RequestRecord], done: Sequence[RequestRecord]) -> Iterable[str]:
    if not rows:
        yield "no request was measured"
        return
    if bad := len(rows) - len(done):
        why = ", ".join(f"{count} {status}" for status, count in values["statuses"].items() if count and status != "ok")
        yield f"{bad} of {len(rows)} requests have no latency ({why}); percentiles are of the others alone"
    if values["backlogged"]:
        yield "backlogged: the queue was still growing at the end, so latencies measure the length of the run"
    if values["send_delay_ms"].p99 > 1e3 * LATE_S:
        yield f"the client sent late (P99 {values['send_delay_ms'].p99:.0f} ms after the intended arrival)"
    if 0 < len(done) < 100:
        yield f"{len(done)} requests ended well: a P99 of fewer than 100 is nearly the largest value"
    if any(row.token_source == "chunks" for row in done):
        yield "the server sends no usage: tokens are counted as chunks, which may carry several"
    elif values["itl_unit"] == "chunk":
        yield "chunks carry several tokens: ITL is between chunks; TPOT counts tokens"
    if any(not row.streamed for row in done):
        yield "some answers were not streamed: their TTFT is their E2EL"
    if short := sum(row.output_tokens < row.max_tokens for row in done):
        yield f"{short} answers ended before the tokens asked for; give ignore_eos if the server knows it"


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if isinstance(value, tuple):
        return list(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
