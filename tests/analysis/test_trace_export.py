"""Promise: the exported file is a trace in Google's documented format, and says what the scheduler did.

The format's rules are written down here as a validator. It is held against a trace that torch's profiler writes, which
Perfetto is known to open, and against faults planted one by one.
"""

from __future__ import annotations

import json
import math
from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.analysis.history import SLO, histories
from minillm.analysis.trace_export import ENGINE, REQUESTS, save_trace, trace
from minillm.batching import Scheduler, SchedulerConfig
from minillm.request import Request
from tests.schedules import Job, play
from tests.shadow import ShadowRunner

PHASES = set("BEXiICbnesftPNODMVvRc()")
CROWD = [Job(9, 12), Job(6, 12), Job(5, 9, 1), Job(14, 5, 3, n=2), Job(7, 9, 4, abort=7)]
SMALL_POOL = {"num_blocks": 12, "watermark": 0.0, "max_num_batched_tokens": 12}


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def faults(made: dict) -> list[str]:
    """What the format forbids: "Trace Event Format", JSON object format and the sections of each phase."""
    found = []
    if not isinstance(made.get("traceEvents"), list):
        return ["traceEvents is no list"]
    if made.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        found.append("displayTimeUnit is neither ms nor ns")
    for event in made["traceEvents"]:
        found += _event_faults(event)
    return found or _overlaps(made["traceEvents"])


def _event_faults(event: dict) -> list[str]:
    phase = event.get("ph")
    if phase not in PHASES:
        return [f"phase {phase!r}"]
    found = [f"{phase} without {key}" for key in ("name", "pid") if key not in event]
    if phase != "M" and not is_number(event.get("ts")):
        found.append(f"{phase} at {event.get('ts')!r}")
    if phase == "X" and not (is_number(event.get("dur")) and event["dur"] >= 0):
        found.append(f"X lasting {event.get('dur')!r}")
    if phase in "Xi" and "tid" not in event:
        found.append(f"{phase} on no thread")
    if phase == "i" and event.get("s", "t") not in ("g", "p", "t"):
        found.append(f"scope {event['s']!r}")
    args = event.get("args", {})
    if phase == "C" and not (args and all(is_number(value) for value in args.values())):
        found.append(f"counter of {args!r}")
    if phase == "M" and event.get("name") in ("process_name", "thread_name") and not isinstance(args.get("name"), str):
        found.append("a name that is no string")
    return found


def _overlaps(events: list[dict]) -> list[str]:
    """Slices of one thread lie one after the other or one within the other."""
    found, open_until = [], {}
    for event in sorted((e for e in events if e.get("ph") == "X"), key=lambda e: (e["ts"], -e["dur"])):
        stack = open_until.setdefault((event["pid"], event["tid"]), [])
        end = event["ts"] + event["dur"]
        while stack and stack[-1] <= event["ts"] + 1e-6:
            stack.pop()
        if stack and end > stack[-1] + 1e-2:
            found.append(f"{event['name']} reaches out of the slice that it began in")
        stack.append(end)
    return found


def of(made: dict, phase: str, name: str | None = None, pid: int | None = None) -> list[dict]:
    return [
        e for e in made["traceEvents"] if e["ph"] == phase and name in (None, e["name"]) and pid in (None, e.get("pid"))
    ]


def tracks(made: dict) -> dict[str, int]:
    return {e["args"]["name"]: e["tid"] for e in of(made, "M", "thread_name", REQUESTS)}


# --- the validator itself


def test_a_trace_of_torchs_profiler_is_valid(tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(8) @ torch.ones(8)
    profiler.export_chrome_trace(str(tmp_path / "t.json"))
    assert faults(json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))) == []


def first(made, phase):
    return of(made, phase)[0]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda m: m.update(traceEvents={}), "no list"),
        (lambda m: m.update(displayTimeUnit="s"), "displayTimeUnit"),
        (lambda m: first(m, "X").update(ph="Y"), "phase"),
        (lambda m: first(m, "X").pop("name"), "without name"),
        (lambda m: first(m, "X").pop("tid"), "no thread"),
        (lambda m: first(m, "X").update(ts="0"), "at '0'"),
        (lambda m: first(m, "i").update(ts=float("nan")), "at nan"),
        (lambda m: first(m, "X").update(dur=-1), "lasting -1"),
        (lambda m: of(m, "X", "prefill")[0].update(dur=of(m, "X", "prefill")[0]["dur"] + 5), "reaches out"),
        (lambda m: first(m, "C").update(args={}), "counter of"),
        (lambda m: first(m, "C").update(args={"a": "3"}), "counter of"),
        (lambda m: first(m, "i").update(s="x"), "scope"),
        (lambda m: first(m, "M").update(args={"name": 3}), "no string"),
    ],
)
def test_the_validator_finds_a_planted_fault(change, fault):
    made = deepcopy(trace(play(CROWD, **SMALL_POOL).events))
    change(made)
    assert any(fault in text for text in faults(made))


# --- the export


jobs = st.lists(
    st.builds(
        Job,
        prompt=st.integers(1, 20),
        max_tokens=st.integers(1, 9),
        arrival=st.integers(0, 9),
        n=st.sampled_from([1, 1, 3]),
        abort=st.one_of(st.none(), st.none(), st.integers(9, 15)),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(drawn=jobs, preemption=st.sampled_from(["recompute", "swap"]), keep=st.sampled_from([None, 40]))
def test_any_log_becomes_a_valid_trace(drawn, preemption, keep):
    scheduler = play(drawn, keep=keep, preemption=preemption, num_host_blocks=20, **SMALL_POOL)
    made = trace(scheduler.events, SLO(0.1, 0.02))
    assert faults(made) == []
    assert json.loads(json.dumps(made, allow_nan=False)) == made


def test_one_track_a_request_and_its_slices_are_its_life():
    scheduler = play(CROWD, **SMALL_POOL)
    made = trace(scheduler.events)
    lives = {life.request: life for life in histories(scheduler.events)}
    assert list(tracks(made)) == list(lives)
    for name, tid in tracks(made).items():
        slices = [e for e in of(made, "X", pid=REQUESTS) if e["tid"] == tid]
        assert [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in slices] == [
            (p.kind, pytest.approx(1e6 * p.start), pytest.approx(1e6 * p.end)) for p in lives[name].parts
        ]


def test_steps_are_a_track_of_their_own_with_the_shares_of_each_request():
    shares = []
    scheduler = play(
        CROWD, lambda s, output: shares.append({p.request.label: p.count for p in output.scheduled}), **SMALL_POOL
    )
    assert [e["args"]["shares"] for e in of(trace(scheduler.events), "X", pid=ENGINE)] == shares


def level(made, name, series, ts):
    """The counter's value at a moment: the last one set."""
    return next(e["args"][series] for e in reversed(of(made, "C", name)) if e["ts"] <= ts + 1e-3)


def test_counters_are_what_the_scheduler_had_at_each_step():
    truth = []

    def each(scheduler, output):
        o = scheduler.pool.occupancy()
        truth.append((len(scheduler.running), len(scheduler.waiting), o.held, o.cached, o.free))

    scheduler = play([job._replace(n=1, abort=None) for job in CROWD], each, **SMALL_POOL)
    assert any(waiting for _, waiting, *_ in truth)
    made = trace(scheduler.events)
    begins = [e["ts"] for e in of(made, "X", pid=ENGINE)]
    got = [(level(made, "running", "running", ts), level(made, "waiting", "waiting", ts)) for ts in begins]
    assert got == [pair[:2] for pair in truth]
    blocks = [tuple(e["args"][name] for name in ("held", "cached", "free")) for e in of(made, "C", "blocks")]
    assert blocks == [row[2:] for row in truth]
    assert {sum(row) for row in blocks} == {scheduler.pool.total}


def test_preemptions_and_evictions_are_marked_on_the_steps():
    scheduler = play(CROWD, **SMALL_POOL)
    made = trace(scheduler.events)
    assert scheduler.events.of("preempted")
    for kind in ("preempted", "evicted"):
        assert len(of(made, "i", kind, ENGINE)) == len(scheduler.events.of(kind))


def test_the_verdict_stands_at_the_first_token_and_at_the_end():
    made = trace(play([Job(4, 3), Job(4, 3)], max_num_seqs=1).events, SLO(0.03, 1.0))
    assert [e["args"]["ttft"] for e in of(made, "i", "first token")] == ["met", "missed"]
    assert [e["args"]["tpot"] for e in of(made, "i", "finished")] == ["met", "met"]


def test_a_saved_trace_is_the_file_that_is_read(tmp_path):
    scheduler = play(CROWD, **SMALL_POOL)
    count = save_trace(scheduler.events, tmp_path / "trace.json")
    read = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert read == trace(scheduler.events)
    assert len(read["traceEvents"]) == count > 50


def test_an_empty_log_is_an_empty_trace():
    assert faults(trace([])) == []


def test_names_that_json_must_escape_survive():
    scheduler = Scheduler(SchedulerConfig(num_blocks=9, block_size=4))
    scheduler.add(Request('a"b\\ü\n', [1, 2]))
    ShadowRunner(scheduler).step()
    assert 'a"b\\ü\n' in tracks(json.loads(json.dumps(trace(scheduler.events))))
