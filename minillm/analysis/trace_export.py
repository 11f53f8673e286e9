"""The event log as a file that ui.perfetto.dev and chrome://tracing open.

One track a request (queue, prefill chunks, decode, preempted, computed again), one track of steps, and counters:
requests running and waiting, tokens of each step, blocks held, cached and free. Open https://ui.perfetto.dev and drop
the file on it; it stays in the browser.
Source: Google, "Trace Event Format", JSON object format. Times are microseconds from the log's first event.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..events import Event
from .history import SLO, WAITING, History, Part, StepRecord, histories, judge, steps

ENGINE, REQUESTS = 1, 2  # the two processes of the picture
STEPS = 1  # the engine's thread
_BLOCKS = ("held", "cached", "free")
# names of the reserved colours of the trace viewer; Perfetto picks its own by name
_COLOURS = {"queued": "grey", "preempted": "terrible", "swapped": "bad", "recompute": "terrible", "decode": "good"}


def trace(events: Iterable[Event], slo: SLO | None = None) -> dict[str, Any]:
    """The log as a trace: a dictionary that `json.dump` writes. `slo` adds each request's verdict to its track."""
    kept = list(events)
    clock = _Clock(kept[0].time if kept else 0.0)
    out: list[dict[str, Any]] = [_name("process", ENGINE, 0, "engine"), _name("process", REQUESTS, 0, "requests")]
    out.append(_name("thread", ENGINE, STEPS, "steps"))
    for record in steps(kept):
        out += _step(record, clock)
    lives = histories(kept)
    for tid, history in enumerate(lives, 1):
        out += _request(history, tid, clock, slo)
    out += _levels("waiting", [(p.start, p.end) for h in lives for p in h.parts if p.kind in WAITING], clock)
    out += _levels("running", [stay for h in lives for stay in _stays(h)], clock)
    out += _marks(kept, clock)
    return {"traceEvents": out, "displayTimeUnit": "ms"}


def save_trace(events: Iterable[Event], path: str | Path, slo: SLO | None = None) -> int:
    """Writes the trace as JSON; returns how many trace events it has."""
    made = trace(events, slo)
    with Path(path).open("w", encoding="utf-8") as file:
        json.dump(made, file, allow_nan=False)
    return len(made["traceEvents"])


class _Clock:
    """Seconds of the log to microseconds of the trace, to the nanosecond, so that neighbours still touch."""

    def __init__(self, origin: float) -> None:
        self.origin = origin

    def at(self, seconds: float) -> float:
        return round(1e6 * (seconds - self.origin), 3)

    def span(self, start: float, end: float) -> dict[str, float]:
        return {"ts": self.at(start), "dur": round(self.at(end) - self.at(start), 3)}


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _step(record: StepRecord, clock: _Clock) -> list[dict[str, Any]]:
    """A slice of the steps' track, and the counters as they stand when it begins."""
    here = {"pid": ENGINE, "tid": STEPS}
    shares = dict(zip(record.requests, record.tokens, strict=True))
    total = sum(record.tokens)
    args = {"step": record.step, "requests": len(shares), "tokens": total, "shares": shares}
    made = [
        {"ph": "X", "name": f"step of {total} tokens", "cat": "step", **here, **clock.span(record.start, record.end)}
    ]
    made[0]["args"] = args
    made.append(_counter("tokens", clock.at(record.start), {"tokens": total}))
    if all(name in record.counts for name in _BLOCKS):
        made.append(_counter("blocks", clock.at(record.start), {name: record.counts[name] for name in _BLOCKS}))
    return made


def _counter(name: str, ts: float, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": ENGINE, "tid": 0, "ts": ts, "args": values}


def _stays(history: History) -> list[tuple[float, float]]:
    """When it was running: from the end of each wait, or its first work, to the next wait or its end."""
    stays: list[tuple[float, float]] = []
    begun: float | None = None
    for part in history.parts:
        if part.kind in WAITING and begun is not None:
            stays.append((begun, part.start))
            begun = None
        elif part.kind not in WAITING and begun is None:
            begun = part.start
    if begun is not None:
        stays.append((begun, history.parts[-1].end))
    return stays


def _levels(name: str, intervals: list[tuple[float, float]], clock: _Clock) -> list[dict[str, Any]]:
    """A counter of how many intervals there are at each moment at which that changes."""
    changes: Counter[float] = Counter({0.0: 0})
    for start, end in intervals:
        changes[clock.at(start)] += 1
        changes[clock.at(end)] -= 1
    made, level = [], 0
    for ts in sorted(changes):
        level += changes[ts]
        made.append(_counter(name, ts, {name: level}))
    return made


def _request(history: History, tid: int, clock: _Clock, slo: SLO | None) -> list[dict[str, Any]]:
    made = [_name("thread", REQUESTS, tid, history.request)]
    made.append({"ph": "M", "name": "thread_sort_index", "pid": REQUESTS, "tid": tid, "args": {"sort_index": tid}})
    made += [_slice(part, tid, clock) for part in history.parts]
    if history.token_times:
        made.append(_mark("first token", tid, clock.at(history.token_times[0]), _verdict(history, slo)))
    if history.finished is not None:
        args = {"reason": history.reason, "tokens": len(history.token_times), "computed again": history.recomputed}
        made.append(_mark("finished", tid, clock.at(history.finished), args | _verdict(history, slo)))
    return made


def _slice(part: Part, tid: int, clock: _Clock) -> dict[str, Any]:
    waits = part.kind in WAITING
    made = {"ph": "X", "name": part.kind, "cat": "waiting" if waits else "computing", "pid": REQUESTS, "tid": tid}
    made |= clock.span(part.start, part.end)
    made["args"] = {} if waits else {"tokens": part.tokens, "step": part.step}
    if part.kind in _COLOURS:
        made["cname"] = _COLOURS[part.kind]
    return made


def _mark(name: str, tid: int, ts: float, args: dict[str, Any], pid: int = REQUESTS) -> dict[str, Any]:
    return {"ph": "i", "s": "t", "name": name, "cat": "mark", "pid": pid, "tid": tid, "ts": ts, "args": args}


def _verdict(history: History, slo: SLO | None) -> dict[str, Any]:
    args = {"ttft_s": history.ttft, "tpot_s": history.tpot}
    if slo is not None:
        kept = judge(history, slo)
        args |= {"ttft": _words(kept.ttft), "tpot": _words(kept.tpot)}
    return {name: value for name, value in args.items() if value is not None}


def _words(kept: bool | None) -> str | None:
    return None if kept is None else "met" if kept else "missed"


def _marks(events: Iterable[Event], clock: _Clock) -> list[dict[str, Any]]:
    """What happened to the blocks, on the steps' track."""
    made = []
    for event in events:
        if event.kind in ("preempted", "evicted", "offloaded", "reloaded", "refused"):
            args = {name: _plain(value) for name, value in {"request": event.request, **event.data}.items()}
            made.append(_mark(event.kind, STEPS, clock.at(event.time), args, ENGINE))
    return made


def _plain(value: Any) -> Any:
    """As JSON reads it back: pairs are lists there."""
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value
