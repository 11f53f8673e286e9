"""Where a step's time goes: torch.profiler's regions beside the cost model's predictions, one row an operator.

The model marks its operators with `torch.profiler.record_function`, under the names of `costs.OPERATORS`. Whatever
part of the wall time no region covers is a row of its own, "overhead": Python, framework, and gaps between kernels.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RequestError
from ..storage import write_atomically
from .costs import OPERATORS, OpCost
from .hardware import Hardware
from .roofline import Prediction, predict_op

OVERHEAD = "overhead"
_STEP = "minillm::step"
_KINETO_SILENT = "6"  # torch's tracer notes every start and stop on stderr; it reads its level when first used


@dataclass(frozen=True)
class Span:
    """A stretch of the timeline, in seconds from the start of the step. `kind` is "operator" for a region of the
    model and "torch" for a torch operator inside or between them."""

    name: str
    start: float
    duration: float
    kind: str


@dataclass(frozen=True)
class ProfileRow:
    """One operator: how often it ran, the seconds it took in all, and what the roofline allows.

    `predicted` and `bound` are None where the cost model knows nothing of it (the overhead), `fraction` is
    predicted / measured, None if either is missing.
    """

    operator: str
    calls: int
    seconds: float
    predicted: float | None
    bound: str | None

    @property
    def fraction(self) -> float | None:
        return None if self.predicted is None or not self.seconds else self.predicted / self.seconds


@dataclass(frozen=True)
class ProfileTable:
    """One profiled step. `seconds` is its wall time under the profiler, `unprofiled_seconds` the median without it:
    the difference is what looking cost."""

    rows: tuple[ProfileRow, ...]
    spans: tuple[Span, ...]
    seconds: float
    unprofiled_seconds: float
    hardware: str

    def row(self, operator: str) -> ProfileRow:
        """The row of `operator`. Raises RequestError if there is none."""
        for row in self.rows:
            if row.operator == operator:
                return row
        raise RequestError(
            f"no operator {operator!r} was profiled; there are {', '.join(r.operator for r in self.rows)}"
        )

    def __str__(self) -> str:
        return _format(self)

    def export_perfetto(self, path: str | Path) -> Path:
        """Writes the timeline in Chrome's trace format (JSON), which ui.perfetto.dev and chrome://tracing open."""
        return _write_json(Path(path), {"displayTimeUnit": "ms", "traceEvents": _trace_events(self)})


def profile_step(
    fn: Callable[[], object],
    costs: Iterable[OpCost],
    hardware: Hardware,
    dtype: Any = "bfloat16",
    repeats: int = 3,
    device: str = "cpu",
) -> ProfileTable:
    """Runs `fn` (one step) once to warm up, `repeats` times plain and `repeats` times under the profiler.

    The profiled run with the median wall time is the one told. `costs` are those of `step_costs` for the same step;
    `dtype` is that of the arithmetic. Raises RequestError if fn enters no region that the cost model knows.
    """
    if repeats < 1:
        raise RequestError(f"repeats is {repeats}; profile at least 1 run")
    fn()
    plain = sorted(_wall_seconds(fn, device) for _ in range(repeats))[repeats // 2]
    runs = sorted((_profiled(fn, device) for _ in range(repeats)), key=lambda run: run[0])
    seconds, spans = runs[len(runs) // 2]
    regions = [span for span in spans if span.kind == "operator"]
    if not regions:
        raise RequestError("the profiled step entered no region; mark operators with minillm.layers.region(name)")
    rows = _rows(regions, costs, hardware, dtype, seconds)
    return ProfileTable(tuple(rows), tuple(spans), seconds, plain, hardware.name)


def _synchronise(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def _wall_seconds(fn: Callable[[], object], device: str) -> float:
    _synchronise(device)
    start = time.perf_counter()
    fn()
    _synchronise(device)
    return time.perf_counter() - start


def _profiled(fn: Callable[[], object], device: str) -> tuple[float, list[Span]]:
    """(wall seconds, spans in order of their start) of one run under the profiler."""
    from torch.profiler import ProfilerActivity, profile, record_function

    os.environ.setdefault("KINETO_LOG_LEVEL", _KINETO_SILENT)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    _synchronise(device)
    with profile(activities=activities, acc_events=True) as profiler, record_function(_STEP):
        fn()
        _synchronise(device)
    events = [event for event in profiler.events() if event.device_type.name == "CPU"]
    step = next(event for event in events if event.name == _STEP)
    spans = [_span(event, step, device) for event in events if _inside(event, step)]
    return step.time_range.elapsed_us() / 1e6, sorted(spans, key=lambda span: (span.start, -span.duration))


def _inside(event: Any, step: Any) -> bool:
    within = step.time_range.start <= event.time_range.start and event.time_range.end <= step.time_range.end
    return within and event.name != _STEP and (event.name in OPERATORS or event.name.startswith("aten::"))


def _span(event: Any, step: Any, device: str) -> Span:
    """On a GPU a region lasts as long as the kernels that it launched, not as long as launching them took."""
    kind = "operator" if event.name in OPERATORS else "torch"
    microseconds = event.device_time_total if device == "cuda" else event.time_range.elapsed_us()
    return Span(event.name, (event.time_range.start - step.time_range.start) / 1e6, microseconds / 1e6, kind)


def _rows(
    regions: Sequence[Span], costs: Iterable[OpCost], hardware: Hardware, dtype: Any, seconds: float
) -> list[ProfileRow]:
    measured: dict[str, list[float]] = {}
    for span in regions:
        measured.setdefault(span.name, []).append(span.duration)
    predictions = {op.name: predict_op(op, hardware, dtype) for op in _merged(costs, set(measured))}
    rows = [
        _row(name, measured.get(name, []), predictions.get(name))
        for name in OPERATORS
        if name in measured or name in predictions
    ]
    covered = sum(map(sum, measured.values()))
    return [*rows, ProfileRow(OVERHEAD, 1, max(0.0, seconds - covered), None, None)]


def _row(name: str, durations: Sequence[float], prediction: Prediction | None) -> ProfileRow:
    if prediction is None:
        return ProfileRow(name, len(durations), sum(durations), None, None)
    return ProfileRow(name, len(durations), sum(durations), prediction.seconds, prediction.bound)


def _merged(costs: Iterable[OpCost], measured: set[str]) -> list[OpCost]:
    """The cache writes inside `attend`, so where the model has no region of that name its cost is attention's; and
    where all layers have experts, SwiGLU runs inside theirs."""
    ops = {op.name: op for op in costs}
    if "kv_write" in ops and "kv_write" not in measured and "attention" in ops:
        ops["attention"] += ops.pop("kv_write")
    if "swiglu" in ops and "swiglu" not in measured and "experts" in ops:
        ops["experts"] += ops.pop("swiglu")
    return list(ops.values())


def _format(table: ProfileTable) -> str:
    lines = [f"{'operator':<15}{'calls':>6}{'ms':>10}{'share':>8}{'roofline ms':>13}{'bound':>9}{'reached':>9}"]
    for row in table.rows:
        share = f"{row.seconds / table.seconds:.1%}"
        predicted = "-" if row.predicted is None else f"{row.predicted * 1e3:.3f}"
        reached = "-" if row.fraction is None else f"{row.fraction:.0%}"
        lines.append(
            f"{row.operator:<15}{row.calls:>6}{row.seconds * 1e3:>10.3f}{share:>8}{predicted:>13}"
            f"{row.bound or '-':>9}{reached:>9}"
        )
    lines.append(f"{'step':<21}{table.seconds * 1e3:>10.3f}   ({table.unprofiled_seconds * 1e3:.3f} unprofiled)")
    return "\n".join(lines)


def _trace_events(table: ProfileTable) -> list[dict[str, Any]]:
    """Complete events (ph X), times in microseconds: regions on one track, torch operators on another."""
    tracks = {"operator": 1, "torch": 2}
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "minillm step"}}]
    for kind, track in tracks.items():
        events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": track, "args": {"name": kind}})
    rows = {row.operator: row for row in table.rows}
    for span in table.spans:
        event = {"name": span.name, "cat": span.kind, "ph": "X", "pid": 1, "tid": tracks[span.kind],
                 "ts": span.start * 1e6, "dur": span.duration * 1e6}  # fmt: skip
        if span.kind == "operator" and rows[span.name].bound is not None:
            event["args"] = {"bound": rows[span.name].bound, "roofline_us": rows[span.name].predicted * 1e6}
        events.append(event)
    return events


def _write_json(path: Path, value: Any) -> Path:
    """Raises RequestError if the place cannot be written; nothing half-written is left behind."""
    text = json.dumps(value)
    try:
        write_atomically(path, lambda file: file.write(text.encode()))
    except OSError as error:
        raise RequestError(f"{path} cannot be written ({error.strerror}); choose another place") from None
    return path
