"""Chapter 05: what a residual is made of. The right answers are cases worked out by hand."""

from __future__ import annotations

from exercises import Exercise, Judge, Mistake

TOY = {"peak": 20.0, "bandwidth": 10.0, "start": 1.0}
CPU = {"peak": 1e11, "bandwidth": 2e10, "start": 2e-6}  # ridge 5 FLOP/byte
GPU = {"peak": 1e15, "bandwidth": 3e12, "start": 5e-6}


def expect(explain_residual, args: tuple, cause: str, explained: float, judge: Judge, otherwise: str) -> None:
    """args: flops, bytes, calls, measured, machine."""
    got = explain_residual(*args)
    judge.type(got, tuple)
    judge.equal(len(got), 2, "The result is a pair: cause and share.")
    judge.equal(got[0], cause, otherwise)
    judge.close(got[1], explained / args[3], f"The share of the time that is explained. {otherwise}")


def worked_example(explain_residual, judge: Judge) -> None:
    expect(
        explain_residual,
        (40.0, 50.0, 3, 10.0, TOY),
        "memory",
        8.0,
        judge,
        "Memory takes 5 s, compute 2 s, starting 3 s. Likely mistake: memory and compute added up, though they "
        "overlap; starting left out; or measured over explained.",
    )


def seconds_are_compared(explain_residual, judge: Judge) -> None:
    expect(
        explain_residual,
        (4e9, 1e9, 30, 0.06, CPU),
        "memory",
        0.05 + 6e-5,
        judge,
        "4e9 FLOPs at 1e11 are 40 ms, 1e9 bytes at 2e10 are 50 ms. Likely mistake: FLOPs compared with bytes.",
    )
    expect(
        explain_residual,
        (6e9, 1e9, 30, 0.08, CPU),
        "compute",
        0.06 + 6e-5,
        judge,
        "6e9 FLOPs at 1e11 are 60 ms, 1e9 bytes at 2e10 are 50 ms. Likely mistake: bytes always win.",
    )


def every_call_is_started(explain_residual, judge: Judge) -> None:
    expect(
        explain_residual,
        (1e6, 5e5, 360, 1e-3, CPU),
        "overhead",
        2.5e-5 + 7.2e-4,
        judge,
        "360 calls at 2 microseconds are 720. Likely mistake: one start for all the calls.",
    )
    expect(
        explain_residual,
        (1e6, 5e5, 360, 2e-3, GPU),
        "overhead",
        5e5 / 3e12 + 1.8e-3,
        judge,
        "On a fast device the same calls are nearly all of it. Likely mistake: a start of your own instead of the "
        "machine's.",
    )


def the_largest_of_three(explain_residual, judge: Judge) -> None:
    expect(
        explain_residual,
        (40.0, 30.0, 4, 8.0, TOY),
        "overhead",
        7.0,
        judge,
        "Starting takes 4 s, memory 3 s, compute 2 s. Likely mistake: starting held against memory and compute "
        "together; each of the three stands for itself.",
    )


def more_than_all_of_it(explain_residual, judge: Judge) -> None:
    expect(
        explain_residual,
        (40.0, 50.0, 3, 5.0, TOY),
        "memory",
        8.0,
        judge,
        "8 s are explained and 5 s were measured: it was faster than the three times allow, and the share says so "
        "with 1.6. Likely mistake: a share cut off at 1.",
    )


def some_remain_unexplained(explain_residual, judge: Judge) -> None:
    expect(
        explain_residual,
        (40.0, 50.0, 3, 17.0, TOY),
        "unexplained",
        8.0,
        judge,
        "17 s are more than twice the 8 that are explained. Likely mistake: always naming the largest of the three.",
    )


def twice_the_sum(explain_residual, judge: Judge) -> None:
    expect(
        explain_residual,
        (40.0, 50.0, 3, 15.0, TOY),
        "memory",
        8.0,
        judge,
        "15 s are less than twice the 8 that are explained. Likely mistake: measured held against the largest time "
        "alone, here 5 s.",
    )
    expect(
        explain_residual,
        (40.0, 50.0, 3, 16.0, TOY),
        "memory",
        8.0,
        judge,
        "16 s are exactly twice what is explained, not more. Likely mistake: >= for >.",
    )


def equals_go_in_order(explain_residual, judge: Judge) -> None:
    hint = "Likely mistake: between equals, memory comes before compute and compute before overhead."
    expect(explain_residual, (100.0, 50.0, 5, 12.0, TOY), "memory", 10.0, judge, hint)
    expect(explain_residual, (100.0, 10.0, 5, 12.0, TOY), "compute", 10.0, judge, hint)


RESIDUAL = Exercise(
    name="explain_residual",
    title="Explain a residual",
    chapter="05",
    difficulty=3,
    minutes=20,
    checks=[
        worked_example,
        seconds_are_compared,
        every_call_is_started,
        the_largest_of_three,
        more_than_all_of_it,
        some_remain_unexplained,
        twice_the_sum,
        equals_go_in_order,
    ],
    mistakes=[
        Mistake(
            "memory and compute in turn",
            "worked_example",
            edit=('max(times["memory"], times["compute"])', '(times["memory"] + times["compute"])'),
        ),
        Mistake(
            "starting is hidden too",
            "worked_example",
            edit=('max(times["memory"], times["compute"]) + times["overhead"]', "max(times.values())"),
        ),
        Mistake("upside down", "worked_example", edit=("explained / measured", "measured / explained")),
        Mistake(
            "bytes against FLOPs",
            "seconds_are_compared",
            edit=(
                "max(times, key=times.get) if",
                '("overhead" if times["overhead"] > max(times["memory"], times["compute"]) else '
                '"memory" if bytes_moved > flops else "compute") if',
            ),
        ),
        Mistake("one start", "worked_example", edit=('calls * machine["start"]', 'machine["start"]')),
        Mistake(
            "two microseconds for everybody",
            "every_call_is_started",
            edit=('calls * machine["start"]', 'calls * (machine["start"] if machine["start"] > 1e-3 else 2e-6)'),
        ),
        Mistake(
            "overhead against the two together",
            "the_largest_of_three",
            edit=(
                "max(times, key=times.get) if",
                '("overhead" if times["overhead"] > times["memory"] + times["compute"] else '
                '"memory" if times["memory"] >= times["compute"] else "compute") if',
            ),
        ),
        Mistake(
            "cut off at one", "more_than_all_of_it", edit=("explained / measured", "min(1.0, explained / measured)")
        ),
        Mistake(
            "always a culprit",
            "some_remain_unexplained",
            edit=(' if measured <= 2 * explained else "unexplained"', ""),
        ),
        Mistake("twice the largest", "twice_the_sum", edit=("2 * explained", "2 * max(times.values())")),
        Mistake("twice is too much", "twice_the_sum", edit=("measured <= 2", "measured < 2")),
        Mistake(
            "the last of equals",
            "equals_go_in_order",
            edit=("max(times, key=times.get)", "max(reversed(times), key=times.get)"),
        ),
    ],
    forbids=("minillm.analysis",),
)
