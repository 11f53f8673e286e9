"""Chapter 05, profiling: the operator worth mending, the cause of a residual, self time.

The right answers come from trying every operator, from a profile recorded here with a fault planted in it, and from
walking a trace one microsecond at a time (chapter_05_residual.py and chapter_05_spans.py hold the other two exercises).
"""

from __future__ import annotations

import functools
import time

from exercises import Exercise, Judge, Mistake

from .chapter_05_residual import RESIDUAL
from .chapter_05_spans import SELF_TIMES


def row(operator: str, seconds: float, bound: float | None, calls: int = 1) -> dict:
    return {"operator": operator, "calls": calls, "seconds": seconds, "bound": bound}


def by_trying(rows: list[dict]) -> tuple:
    """Mends each operator in turn and keeps the shortest step."""
    step = sum(r["seconds"] for r in rows)
    best = (None, step)
    for i, tried in enumerate(rows):
        if tried["bound"] is not None:
            mended = sum(r["seconds"] for j, r in enumerate(rows) if j != i) + tried["bound"]
            if mended < best[1] - 1e-12 * step:
                best = (tried["operator"], mended)
    return best[0], step / best[1]


def compare(slow_operator, rows: list[dict], judge: Judge, otherwise: str) -> None:
    got = slow_operator(rows)
    judge.type(got, tuple)
    judge.equal(len(got), 2, "The result is a pair: name and gain.")
    name, gain = by_trying(rows)
    judge.equal(got[0], name, otherwise)
    judge.close(got[1], gain, f"That is the gain for {name}. {otherwise}")


@functools.cache
def sabotaged() -> tuple[dict, ...]:
    """A profile of this machine: the long operator is at its bound, the short one is twenty times above it."""
    from minillm.analysis import Hardware, OpCost, profile_step
    from minillm.layers import region

    def step():
        with region("gate_up_proj"):
            time.sleep(0.09)
        with region("rotary"):
            time.sleep(0.06)  # the plant

    costs = [OpCost("gate_up_proj", 1, 0, 90e6), OpCost("rotary", 1, 0, 3e6)]  # bytes at 1 GB/s: 90 ms and 3 ms
    table = profile_step(step, costs, Hardware("sleeper", 1, 1e9, {"float32": 1e12}), "float32", repeats=1)
    return tuple(row(r.operator, r.seconds, r.predicted, r.calls) for r in table.rows)


def worked_example(slow_operator, judge: Judge) -> None:
    compare(
        slow_operator,
        [row("norm", 5.0, 3.0), row("matmul", 3.0, 2.0), row("overhead", 2.0, None)],
        judge,
        "Likely mistake: the gain of mending everything, or seconds where the ratio of two steps is asked for.",
    )


def planted_on_this_machine(slow_operator, judge: Judge) -> None:
    compare(
        slow_operator,
        list(sabotaged()),
        judge,
        "In a step recorded here just now, rotary was slowed down. Likely mistake: the longest operator; it is long "
        "because it has much to do, and it runs at its bound.",
    )


def ratio_is_not_loss(slow_operator, judge: Judge) -> None:
    compare(
        slow_operator,
        [row("embed", 0.1, 0.0001), row("lm_head", 9.0, 5.0), row("swiglu", 2.0, 0.5)],
        judge,
        "Likely mistake: the worst ratio; an operator a thousand times above a tiny bound has little to give.",
    )


def calls_are_counted_already(slow_operator, judge: Judge) -> None:
    compare(
        slow_operator,
        [row("norm", 6.0, 1.0, calls=60), row("lm_head", 8.0, 6.0, calls=1)],
        judge,
        "Likely mistake: dividing or multiplying by calls; seconds and bound are for all calls together.",
    )


def overhead_is_no_operator(slow_operator, judge: Judge) -> None:
    compare(
        slow_operator,
        [row("overhead", 50.0, None), row("rotary", 4.0, 1.0), row("attention", 6.0, 5.0)],
        judge,
        "Likely mistake: a row without a bound chosen, or left out of the step; nobody said how short it could be, "
        "and it is still waited for.",
    )


def zero_is_a_bound(slow_operator, judge: Judge) -> None:
    compare(
        slow_operator,
        [row("a", 4.0, 0.0), row("b", 3.0, 1.0)],
        judge,
        "A bound of 0 is not None. Likely mistake: `if row['bound']`, which is false for 0.0 too.",
    )


def all_else_stays_as_it_is(slow_operator, judge: Judge) -> None:
    compare(
        slow_operator,
        [row("a", 2.0, 3.0), row("b", 5.0, 1.0)],
        judge,
        "a is below its bound, and the step takes 7 s. Likely mistake: a bound counted where seconds were measured.",
    )


def nothing_to_win(slow_operator, judge: Judge) -> None:
    for rows in ([row("down_proj", 2.0, 3.0), row("norm", 1.0, 1.0), row("overhead", 1.0, None)], []):
        got = slow_operator(rows)
        judge.equal(
            got,
            (None, 1.0),
            "Every operator is at or below its bound (a matrix that stayed in a cache can be). Likely mistake: one is "
            "chosen all the same.",
        )


def first_of_equals(slow_operator, judge: Judge) -> None:
    compare(
        slow_operator,
        [row("a", 4.0, 2.0), row("b", 3.0, 1.0), row("c", 9.0, 8.0)],
        judge,
        "Likely mistake: among equals the earlier row wins.",
    )


CHOSEN = 'key=lambda row: row["seconds"] - row["bound"]'

TARGET = Exercise(
    name="slow_operator",
    title="Find the planted slow operator",
    chapter="05",
    difficulty=2,
    minutes=20,
    checks=[
        worked_example,
        planted_on_this_machine,
        ratio_is_not_loss,
        calls_are_counted_already,
        overhead_is_no_operator,
        zero_is_a_bound,
        all_else_stays_as_it_is,
        nothing_to_win,
        first_of_equals,
    ],
    mistakes=[
        Mistake("seconds won, not the ratio", "worked_example", edit=("step / (step - won)", "won")),
        Mistake(
            "the operator vanishes",
            "worked_example",
            edit=('= worst["seconds"] - worst["bound"]', '= worst["seconds"]'),
        ),
        Mistake("the longest", "planted_on_this_machine", edit=(CHOSEN, 'key=lambda row: row["seconds"]')),
        Mistake("the worst ratio", "ratio_is_not_loss", edit=(CHOSEN, 'key=lambda row: row["seconds"] / row["bound"]')),
        Mistake(
            "by the call",
            "calls_are_counted_already",
            edit=(CHOSEN, 'key=lambda row: (row["seconds"] - row["bound"]) / row["calls"]'),
        ),
        Mistake(
            "overhead has a bound of zero",
            "overhead_is_no_operator",
            source="""
def slow_operator(rows):
    step = sum(row["seconds"] for row in rows)
    known = [(row["seconds"] - (row["bound"] or 0), row["operator"]) for row in rows]
    won, name = max(known, default=(0, None), key=lambda pair: pair[0])
    return (name, step / (step - won)) if won > 0 else (None, 1.0)
""",
        ),
        Mistake("no bound of zero", "zero_is_a_bound", edit=('row["bound"] is not None', 'row["bound"]')),
        Mistake(
            "nothing is faster than its bound",
            "all_else_stays_as_it_is",
            edit=('sum(row["seconds"] for', 'sum(max(row["seconds"], row["bound"] or 0) for'),
        ),
        Mistake("no way out", "nothing_to_win", edit=('and row["seconds"] > row["bound"]', "")),
        Mistake("the last of equals", "first_of_equals", edit=("max(known,", "max(known[::-1],")),
    ],
    forbids=("minillm.analysis",),
)

EXERCISES = [TARGET, RESIDUAL, SELF_TIMES]
