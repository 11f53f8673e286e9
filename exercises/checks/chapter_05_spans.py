"""Chapter 05: self time. The right answers come from asking, for every microsecond, which span is innermost."""

from __future__ import annotations

import random

from exercises import Exercise, Judge, Mistake

STEP = [
    ("block", 0, 40),
    ("attention", 5, 20),
    ("matmul", 6, 4),
    ("softmax", 10, 5),
    ("matmul", 15, 8),
    ("mlp", 25, 15),
    ("matmul", 26, 10),
]


def by_the_microsecond(spans: list[tuple]) -> dict:
    own = {name: 0 for name, _, _ in spans}
    for now in range(max((start + duration for _, start, duration in spans), default=0)):
        around = [span for span in spans if span[1] <= now < span[1] + span[2]]
        if around:
            own[min(around, key=lambda span: span[2])[0]] += 1  # the innermost is the shortest
    return own


def random_trace(seed: int, names: str) -> list[tuple]:
    """Properly nested spans, distinct in (start, duration), some of them touching."""
    rng = random.Random(seed)
    spans: dict[tuple, str] = {}

    def fill(start: int, end: int, depth: int) -> None:
        while start < end and depth < 5:
            start += rng.choice((0, 0, 1, 3))
            duration = rng.randint(1, 12)
            if start + duration > end:
                return
            if (start, duration) not in spans:
                spans[start, duration] = rng.choice(names)
                fill(start, start + duration, depth + 1)
            start += duration

    fill(0, 60, 0)
    return [(name, start, duration) for (start, duration), name in spans.items()]


def compare(self_times, spans: list[tuple], judge: Judge, otherwise: str) -> None:
    got = self_times(spans)
    judge.type(got, dict)
    judge.equal(got, by_the_microsecond(spans), otherwise)


def worked_example(self_times, judge: Judge) -> None:
    compare(
        self_times,
        [("block", 0, 10), ("attention", 2, 5), ("softmax", 3, 1)],
        judge,
        "Likely mistake: whole durations, or the softmax taken from the block as well as from the attention; it is "
        "taken from its parent alone.",
    )


def side_by_side(self_times, judge: Judge) -> None:
    compare(
        self_times,
        [("a", 0, 4), ("b", 6, 3), ("c", 12, 2)],
        judge,
        "Spans one after the other contain nothing. Likely mistake: a span that has ended still taken for a parent.",
    )


def many_children(self_times, judge: Judge) -> None:
    compare(
        self_times,
        [("block", 0, 20), ("norm", 1, 2), ("attention", 4, 8), ("softmax", 5, 3), ("mlp", 13, 5)],
        judge,
        "The mlp starts after both softmax and attention have ended. Likely mistake: only the last open span is "
        "dropped, or only the first child counted.",
    )


def touching_is_not_inside(self_times, judge: Judge) -> None:
    compare(
        self_times,
        [("a", 0, 5), ("b", 5, 5), ("c", 10, 1)],
        judge,
        "b starts at the moment when a ends. Likely mistake: < for <= when spans are closed.",
    )


def names_add_up(self_times, judge: Judge) -> None:
    hint = "Likely mistake: a later span of the same name overwrites an earlier one."
    compare(self_times, STEP, judge, hint)
    compare(self_times, [("f", 0, 9), ("f", 1, 7), ("f", 2, 5)], judge, f"A name inside itself. {hint}")


def any_order(self_times, judge: Judge) -> None:
    hint = "Likely mistake: spans taken in the order of the list."
    compare(self_times, STEP[::-1], judge, hint)
    compare(
        self_times,
        [("inner", 3, 2), ("outer", 3, 6)],
        judge,
        "Both start at 3. Likely mistake: sorted by start alone; the longer one is outside.",
    )


def nothing_of_its_own(self_times, judge: Judge) -> None:
    compare(
        self_times,
        [("outer", 0, 5), ("x", 0, 2), ("y", 2, 3)],
        judge,
        "x and y cover outer to the last microsecond. Likely mistake: a name with 0 left out.",
    )


def random_traces(self_times, judge: Judge) -> None:
    compare(self_times, [], judge, "An empty trace has no names.")
    for seed in range(30):
        spans = random_trace(seed, "abc")
        random.Random(seed).shuffle(spans)
        compare(self_times, spans, judge, "On a random trace. Likely mistake: a case that the small examples missed.")


SELF_TIMES = Exercise(
    name="self_times",
    title="Self time",
    chapter="05",
    difficulty=3,
    minutes=25,
    checks=[
        worked_example,
        side_by_side,
        many_children,
        touching_is_not_inside,
        names_add_up,
        any_order,
        nothing_of_its_own,
        random_traces,
    ],
    mistakes=[
        Mistake("whole durations", "worked_example", edit=("own[stack[-1][0]] -= duration", "pass")),
        Mistake(
            "taken from all above",
            "worked_example",
            edit=(
                "own[stack[-1][0]] -= duration",
                "own.update({n: own[n] - duration for n in {name for name, _ in stack}})",
            ),
        ),
        Mistake(
            "nothing ever ends",
            "side_by_side",
            edit=("while stack and stack[-1][1] <= start:", "while stack and False:"),
        ),
        Mistake("one pop", "many_children", edit=("while stack and", "if stack and")),
        Mistake("touching is inside", "touching_is_not_inside", edit=("stack[-1][1] <= start", "stack[-1][1] < start")),
        Mistake("overwrites", "names_add_up", edit=("own.get(name, 0) + duration", "duration")),
        Mistake("as they come", "any_order", edit=("sorted(spans, key=lambda span: (span[1], -span[2]))", "spans")),
        Mistake("shorter first", "any_order", edit=("(span[1], -span[2])", "span[1:]")),
        Mistake(
            "no zeros",
            "nothing_of_its_own",
            edit=("return own", "return {name: time for name, time in own.items() if time}"),
        ),
        Mistake(
            "three levels deep",
            "random_traces",
            edit=("stack.append((name, start + duration))", "stack = [*stack, (name, start + duration)][-3:]"),
        ),
    ],
    forbids=("minillm.analysis",),
)
