"""The life of each request, read off the event log: when it waited, what it computed in which step, what it had to
compute again, when its tokens came, and whether that was fast enough.

Figures (viz/timeline.py), the trace export and the notebooks read requests through this; the log itself is written by
scheduler, pool and engine (events.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import RequestError
from ..events import Event

# What a request is doing. Waiting: queued, preempted (its cache is lost), swapped (its cache is in host memory).
WAITING = ("queued", "preempted", "swapped")
COMPUTING = ("prefill", "recompute", "decode")  # recompute: tokens that had been computed before a preemption


class Part(NamedTuple):
    """From `start` to `end` the request did `kind`. In `step` it computed `tokens`, beginning with its token `first`;
    all three are 0 while it waits."""

    kind: str
    start: float
    end: float
    tokens: int = 0
    step: int = 0
    first: int = 0


@dataclass
class History:
    """One sequence. Times are seconds of the log's clock, or steps (see `histories`).

    parts do not overlap and are in order; between two of them the request was running and got no turn.
    added and prompt are None if the log no longer reaches back so far. recomputed counts tokens computed again.
    """

    request: str
    added: float | None = None
    prompt: int | None = None
    cached: int = 0
    parts: list[Part] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    finished: float | None = None
    reason: str | None = None
    num_preemptions: int = 0
    recomputed: int = 0

    @property
    def ttft(self) -> float | None:
        """From arrival in the queue to the first token."""
        return None if self.added is None or not self.token_times else self.token_times[0] - self.added

    @property
    def tpot(self) -> float | None:
        """Time per output token: first token to last, over the number of tokens less one."""
        count = len(self.token_times)
        return (self.token_times[-1] - self.token_times[0]) / (count - 1) if count > 1 else None

    @property
    def longest_gap(self) -> float | None:
        """The longest time between two tokens: what a reader of the stream feels as a stall."""
        gaps = [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]
        return max(gaps) if gaps else None


class SLO(NamedTuple):
    """The longest that time to first token and time per output token may be; None: no promise."""

    ttft: float | None = None
    tpot: float | None = None


class Verdict(NamedTuple):
    """Whether each promise was kept. None: nothing was promised, or there is nothing to judge yet."""

    ttft: bool | None
    tpot: bool | None

    @property
    def met(self) -> bool:
        """No promise broken, and the first one judged if it was made."""
        return self.ttft is not False and self.tpot is not False


def judge(history: History, slo: SLO) -> Verdict:
    """A request that has no token yet has broken the promise once it has been there for longer."""
    ttft = history.ttft
    if ttft is None and history.added is not None and not history.token_times:
        ends = [history.finished] if history.finished is not None else [part.end for part in history.parts]
        waited = max(ends, default=history.added) - history.added
        ttft = waited if slo.ttft is not None and waited > slo.ttft else None
    return Verdict(_kept(ttft, slo.ttft), _kept(history.tpot, slo.tpot))


def _kept(value: float | None, limit: float | None) -> bool | None:
    return None if value is None or limit is None else value <= limit


class StepRecord(NamedTuple):
    """One step of the engine: when, and who computed how many tokens. `counts`: whatever else was noted of it."""

    step: int
    start: float
    end: float
    requests: tuple[str, ...]
    tokens: tuple[int, ...]
    counts: dict[str, int]


def histories(events: Iterable[Event], by: str = "time") -> list[History]:
    """Every sequence in the log, in the order of arrival.

    by: "time" measures in seconds of the log's clock; "step" in steps, where step k lasts from k - 1 to k. A schedule
    that was made without a model has steps and no times worth drawing.
    """
    return _read(events, by).histories


def steps(events: Iterable[Event], by: str = "time") -> list[StepRecord]:
    """Every step in the log."""
    return _read(events, by).steps


def idle_slots(events: Iterable[Event], slots: int) -> tuple[int, int]:
    """(slots in which nobody computed, all slots), summed over the steps."""
    records = steps(events, "step")
    used = sum(len(record.requests) for record in records)
    return slots * len(records) - used, slots * len(records)


def _read(events: Iterable[Event], by: str) -> _Reader:
    if by not in ("time", "step"):
        raise RequestError(f"by is {by!r}; a history is measured by 'time' or by 'step'")
    reader = _Reader(by)
    last = None
    for last in events:
        reader.take(last)
    if last is not None:
        reader.close_step(reader.now(last))
        reader.close_waits(reader.now(last))
    return reader


@dataclass
class _Live:
    """A sequence that has not ended: its history so far, and the integers of its progress."""

    history: History
    waits: tuple[str, float] | None = None  # (kind, since)
    known: int | None = None
    computed: int = 0
    reached: int = 0  # computed at the most, before a preemption or now

    def compute(self, count: int, step: int, start: float, end: float) -> None:
        first, self.computed = self.computed, self.computed + count
        again = max(0, min(self.computed, self.reached) - first)
        self.history.recomputed += again
        self.reached = max(self.reached, self.computed)
        decodes = count == 1 if self.known is None else bool(self.history.token_times) and self.known - first == 1
        kind = "recompute" if again else "decode" if decodes else "prefill"
        self.history.parts.append(Part(kind, start, end, count, step, first))


class _Reader:
    """Takes events one by one. A step ends with its `sampled` event, or where the next step begins."""

    def __init__(self, by: str) -> None:
        self.by_step = by == "step"
        self.histories: list[History] = []
        self.steps: list[StepRecord] = []
        self._live: dict[str, _Live] = {}
        self._open: Event | None = None  # the `scheduled` event of a step that has not ended
        self._in_step: dict[str, _Live] = {}  # who computes in it, or was forked there

    def take(self, event: Event) -> None:
        if self._open is not None and event.step > self._open.step:
            self.close_step(self._open.step if self.by_step else event.time)
        handler = getattr(self, f"_{event.kind}", None)
        if handler is not None:
            handler(event)

    def now(self, event: Event, planning: bool = False) -> float:
        """When it happened. `planning`: before the step's work, so on the axis of steps at its beginning."""
        return (event.step - planning) if self.by_step else event.time

    def _of(self, label: str) -> _Live:
        if label not in self._live:
            self._live[label] = _Live(History(label))
            self.histories.append(self._live[label].history)
        return self._live[label]

    def _added(self, event: Event) -> None:
        history = History(event.request, self.now(event), event.data.get("tokens"))
        self.histories.append(history)
        self._live[event.request] = _Live(history, ("queued", history.added))

    def _admitted(self, event: Event) -> None:
        live = self._of(event.request)
        self._end_wait(live, self.now(event, planning=True))
        live.known, live.computed = event.data["tokens"], event.data["cached"]
        live.reached = max(live.reached, live.computed) if live.history.num_preemptions else live.computed
        if not live.history.num_preemptions:
            live.history.cached = live.computed

    _resumed = _admitted

    def _preempted(self, event: Event) -> None:
        live, swaps = self._of(event.request), event.data["how"] == "swap"
        live.history.num_preemptions += 1
        live.waits = ("swapped" if swaps else "preempted", self.now(event, planning=True))

    def _forked(self, event: Event) -> None:
        parent = self._of(event.request)
        for label in event.data["children"]:
            child = copy(parent)
            child.computed = child.reached = parent.known or 0  # the step that computes the last of them is still open
            child.history = History(label, parent.history.added, parent.history.prompt, parent.history.cached)
            self.histories.append(child.history)
            self._live[label] = self._in_step[label] = child

    def _scheduled(self, event: Event) -> None:
        self._open = event
        self._in_step = {label: self._of(label) for label in event.data["requests"]}

    def _sampled(self, event: Event) -> None:
        now = self.now(event)
        self.close_step(now)
        for label in event.data["requests"]:
            live = self._in_step.get(label) or self._of(label)
            live.history.token_times.append(now)
            if live.known is not None:
                live.known += 1

    def _finished(self, event: Event) -> None:
        live = self._of(event.request)
        self._end_wait(live, self.now(event))
        live.history.finished, live.history.reason = self.now(event), event.data["reason"]
        del self._live[event.request]

    def close_step(self, end: float) -> None:
        event, self._open = self._open, None
        if event is None:
            return
        start, data = self.now(event, planning=True), dict(event.data)
        labels, counts = tuple(data.pop("requests")), tuple(data.pop("tokens"))
        self.steps.append(StepRecord(event.step, start, end, labels, counts, data))
        for label, count in zip(labels, counts, strict=True):
            live = self._in_step[label]
            ended = live.history.finished
            live.compute(count, event.step, start, end if ended is None else max(start, min(end, ended)))

    def _end_wait(self, live: _Live, now: float) -> None:
        if live.waits is not None:
            kind, since = live.waits
            live.waits = None
            if now > since:
                live.history.parts.append(Part(kind, since, now))

    def close_waits(self, now: float) -> None:
        for live in self._live.values():
            self._end_wait(live, now)
