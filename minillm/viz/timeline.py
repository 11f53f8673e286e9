"""Requests over time, drawn from the event log: a Gantt of each one's life, the slots of a batch with their idle ones,
and one step with who computes what in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..analysis.history import COMPUTING, SLO, WAITING, History, Part, histories, idle_slots, judge
from ..events import Event
from .chips import drawable
from .style import BLUE, GREEN, GREY, INK, ORANGE, PAPER, PINK, RED, SKY, figure, tint
from .units import human, number, scale

COLOURS = {
    "queued": tint(GREY, 0.65),
    "prefill": BLUE,
    "decode": GREEN,
    "preempted": tint(ORANGE, 0.35),
    "swapped": tint(SKY, 0.35),
    "recompute": PINK,
    "idle": tint(RED, 0.55),
}
_HATCHED = {"preempted": "////", "swapped": "\\\\\\\\", "idle": "xxx"}
_NAMES = {
    "queued": "queued", "prefill": "prefill", "decode": "decode", "preempted": "preempted, cache lost",
    "swapped": "swapped out", "recompute": "computed again", "idle": "idle slot",
}  # fmt: skip
_MOST_LANES = 60
_MOST_BOXES = 48


def gantt(
    events: Iterable[Event], title: str, slo: SLO | None = None, by: str = "time", select: Sequence[str] | None = None
) -> Figure:
    """One lane a request: queue, prefill chunks, decode, preempted, computed again; a tick at the first token.

    Every step is a box of its own where there are few, so that a long one, which stalls all in it, can be seen.

    slo: adds TTFT and TPOT of each request and whether they were met, in seconds (in steps, if by="step"). select: only
    these requests, in this order; without it the first 60 in order of arrival.
    """
    chosen = _chosen(histories(events, by), select)
    origin, divisor, unit = _axis(chosen, by)
    lanes = [_drawn_parts(history, divisor) for history in chosen]
    with figure(height=1.9 + 0.34 * max(2, len(chosen))) as (fig, ax):
        for lane, history in enumerate(chosen):
            for part in lanes[lane]:
                _bar(ax, lane, part, origin, divisor)
            if history.token_times:
                at = (history.token_times[0] - origin) / divisor
                ax.plot([at, at], [lane - 0.42, lane + 0.42], color=INK, linewidth=1.6, zorder=3)
        ax.set_yticks(range(len(chosen)), [drawable(history.request) for history in chosen])
        ax.set(xlabel=unit, ylabel="request", title=title, ylim=(len(chosen) - 0.4, -0.6))
        ax.set_xlim(left=0)
        ax.grid(False, axis="y")
        if slo is not None:
            _verdicts(ax, chosen, slo, by)
        _legend(fig, {part.kind for parts in lanes for part in parts})
    return fig


def _drawn_parts(history: History, divisor: float) -> list[Part]:
    """Without waits that are too short to be seen."""
    parts = [part for part in history.parts if part.step or part.end - part.start > 1e-3 * divisor]
    return parts if len(parts) <= _MOST_BOXES else merged(parts)


def merged(parts: Sequence[Part]) -> list[Part]:
    """Parts of one kind from successive steps as one; a step in which the request had no turn stays a gap."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and last.kind == part.kind == "decode" and part.step == last.step + 1:
            joined[-1] = last._replace(end=part.end, tokens=last.tokens + part.tokens, step=part.step)
        else:
            joined.append(part)
    return joined


def _chosen(all_of_them: list[History], select: Sequence[str] | None) -> list[History]:
    if select is None:
        return all_of_them[:_MOST_LANES]
    known = {history.request: history for history in all_of_them}
    return [known[name] for name in select]


def _axis(chosen: Sequence[History], by: str) -> tuple[float, float, str]:
    """(where it begins, what to divide by, its label)."""
    edges = [edge for history in chosen for part in history.parts for edge in (part.start, part.end)]
    first = min(edges, default=0.0)
    if by == "step":
        return first, 1.0, "steps"
    divisor, unit = scale([max(edges, default=0.0) - first], "s")
    return first, divisor, f"time ({unit})"


def _bar(ax: Axes, lane: int, part: Part, origin: float, divisor: float) -> None:
    thin = part.kind in ("queued", "preempted", "swapped")
    ax.barh(
        lane,
        (part.end - part.start) / divisor,
        left=(part.start - origin) / divisor,
        height=0.36 if thin else 0.72,
        color=COLOURS[part.kind],
        hatch=_HATCHED.get(part.kind),
        edgecolor=PAPER,
        linewidth=0.4,
    )


def _verdicts(ax: Axes, chosen: Sequence[History], slo: SLO, by: str) -> None:
    """Two columns beside the lanes. What was missed is red, and says so."""
    columns = (("TTFT", 1.02, slo.ttft, "ttft"), ("TPOT", 1.225, slo.tpot, "tpot"))
    for name, x, limit, _ in columns:
        head = name if limit is None else f"{name} ≤ {_amount(limit, by)}"
        ax.text(x, -1.0, head, transform=ax.get_yaxis_transform(), size=8.5, va="center", weight="bold")
    for lane, history in enumerate(chosen):
        verdict = judge(history, slo)
        for _, x, _, attribute in columns:
            value, kept = getattr(history, attribute), getattr(verdict, attribute)
            text = "–" if value is None else _amount(value, by)
            words = {True: "met", False: "missed", None: ""}[kept]
            ax.text(
                x,
                lane,
                f"{text} {words}".strip(),
                transform=ax.get_yaxis_transform(),
                size=8.5,
                va="center",
                color=RED if kept is False else INK,
                weight="bold" if kept is False else "normal",
            )


def _amount(value: float, by: str) -> str:
    return f"{number(float(f'{value:.3g}'))} steps" if by == "step" else human(float(f"{value:.3g}"), "s")


def _legend(fig: Figure, kinds: Iterable[str]) -> None:
    shown = [kind for kind in COLOURS if kind in set(kinds)]
    handles = [
        Patch(facecolor=COLOURS[k], hatch=_HATCHED.get(k), edgecolor=PAPER, label=_NAMES[k], linewidth=0.4)
        for k in shown
    ]
    if handles:
        fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))


# --- one step ---


def step_view(events: Iterable[Event], step: int, title: str = "") -> Figure:
    """Who computes what in one step: of each request the tokens in the cache, those of this step, those still to come.

    A request that waits is drawn pale. Requests that have ended, or have not come, leave their lane empty.
    """
    lives = histories(events, "step")[:_MOST_LANES]
    longest = max((_known(life, 1 << 60) for life in lives), default=1)
    total = sum(part.tokens for life in lives for part in life.parts if part.step == step)
    with figure(height=1.9 + 0.36 * max(2, len(lives))) as (fig, ax):
        for lane, life in enumerate(lives):
            _progress(ax, lane, life, step)
        ax.set_yticks(range(len(lives)), [drawable(life.request) for life in lives])
        ax.set(xlabel="tokens of the request", ylabel="request", xlim=(0, 1.2 * longest))
        ax.set(title=title or f"Step {step}: {total} tokens computed", ylim=(len(lives) - 0.4, -0.6))
        ax.grid(False, axis="y")
        handles = [
            Patch(facecolor=tint(GREY, 0.2), label="in the cache"),
            Patch(facecolor=PAPER, edgecolor=GREY, label="still to compute"),
        ]
        handles += [Patch(facecolor=COLOURS[kind], label=_NAMES[kind]) for kind in COMPUTING]
        fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return fig


def _known(life: History, step: int) -> int:
    """Prompt and the tokens drawn before this step."""
    return (life.prompt or 0) + sum(time < step for time in life.token_times)


def _progress(ax: Axes, lane: int, life: History, step: int) -> None:
    here = life.added is not None and life.added < step and (life.finished is None or life.finished >= step)
    if not here:
        return
    before = [part for part in life.parts if part.start < step - 1]
    now = next((part for part in life.parts if part.start <= step - 1 < part.end), None)
    last = next((part for part in reversed(before) if part.step), None)
    cached = last.first + last.tokens if last else 0
    if now is not None and now.step:
        cached = now.first
    elif now is not None and now.kind != "swapped":
        cached = 0
    known, waits = _known(life, step), now is not None and now.kind in WAITING
    ax.barh(lane, known, height=0.66, color=PAPER, edgecolor=tint(GREY, 0.5) if waits else GREY)
    ax.barh(lane, cached, height=0.66, color=tint(GREY, 0.6 if waits else 0.2))
    words = _NAMES[now.kind] if waits else "" if now is None else f"+{now.tokens}"
    if now is not None and now.step:
        ax.barh(lane, now.tokens, left=cached, height=0.66, color=COLOURS[now.kind])
    ax.annotate(words, (known, lane), (6, 0), textcoords="offset points", va="center", size=9)


# --- slots of a batch ---


def slot_timeline(logs: Mapping[str, Iterable[Event]], slots: int, title: str, names: bool = True) -> Figure:
    """Panels over one axis of steps, one a log: who sits in which slot of the batch, and which slots are idle.

    A request keeps the lowest slot that was free when it came. names: write each one's name into its bar.
    """
    panels = {name: list(events) for name, events in logs.items()}
    seats = {name: seating(events, slots) for name, events in panels.items()}
    longest = max(len(rows) for rows in seats.values())
    height = 1.2 + len(panels) * (0.85 + 0.24 * slots)
    with figure(height, rows=len(panels), sharex=True, squeeze=False) as (fig, axes):
        fig.suptitle(title, x=0.01, ha="left", weight="bold", size=13)
        for ax, (name, rows) in zip(axes[:, 0], seats.items(), strict=True):
            for slot in range(slots):
                for first, last, who, kind in _runs([row[slot] for row in rows]):
                    _seat(ax, slot, first, last, who if names else "", kind)
            idle, total = idle_slots(panels[name], slots)
            ax.set_title(
                f"{name}: {len(rows)} steps, {idle} of {total} slots idle ({100 * idle / total:.0f}%)", size=11
            )
            ax.set(ylabel="slot", xlim=(0, longest), ylim=(slots - 0.45, -0.55), yticks=range(slots))
            ax.grid(False, axis="y")
        axes[-1, 0].set_xlabel("steps")
        kinds = {seat[1] if seat else "idle" for rows in seats.values() for row in rows for seat in row}
        _legend(fig, kinds)
    return fig


def seating(events: Iterable[Event], slots: int) -> list[list[tuple[str, str] | None]]:
    """For each step and slot, (request, kind of work), or None where the slot is idle."""
    turns: dict[int, dict[str, str]] = {}
    ends: dict[str, int] = {}
    for history in histories(events, "step"):
        for part in history.parts:
            if part.step:
                turns.setdefault(part.step, {})[history.request] = part.kind
                ends[history.request] = part.step
    seats: list[str | None] = [None] * slots
    rows = []
    for step in range(min(turns, default=1), max(turns, default=0) + 1):
        here = turns.get(step, {})
        seats = [who if who in here else None for who in seats]
        for who in here:
            if who not in seats:
                seats[seats.index(None)] = who
        rows.append([(who, here[who]) if who else None for who in seats])
    return rows


def _runs(column: Sequence[tuple[str, str] | None]) -> list[tuple[int, int, str, str]]:
    """(first, last + 1, request, kind) of equal neighbours."""
    runs: list[tuple[int, int, str, str]] = []
    for step, seat in enumerate(column):
        who, kind = seat or ("", "idle")
        if runs and runs[-1][1:] == (step, who, kind):
            runs[-1] = (runs[-1][0], step + 1, who, kind)
        else:
            runs.append((step, step + 1, who, kind))
    return runs


def _seat(ax: Axes, slot: int, first: int, last: int, who: str, kind: str) -> None:
    ax.barh(
        slot,
        last - first,
        left=first,
        height=0.8,
        color=COLOURS[kind],
        hatch=_HATCHED.get(kind),
        edgecolor=PAPER,
        linewidth=0.6,
    )
    if who and kind == "decode":
        ax.text((first + last) / 2, slot, drawable(who), ha="center", va="center", size=7.5, color=PAPER, clip_on=True)
