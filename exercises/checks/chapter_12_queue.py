"""Chapter 12's third exercise: waits before several slots in an open loop. The right answers walk a clock by whole
ticks and look at each whether somebody can start."""

from __future__ import annotations

import random

from exercises import Exercise, Judge, Mistake


def by_ticks(arrivals: list[int], services: list[int], slots: int) -> list[int]:
    """Whole numbers in; at every tick first the slots that end, then whoever is first in the queue."""
    starts: list[int | None] = [None] * len(arrivals)
    inside: list[int] = []  # when each ends
    tick = min(arrivals)
    while None in starts:
        inside = [end for end in inside if end > tick]
        for i, start in enumerate(starts):
            if start is None and arrivals[i] <= tick and len(inside) < slots:
                starts[i] = tick
                inside.append(tick + services[i])
        tick += 1
    return [start - arrival for start, arrival in zip(starts, arrivals, strict=True)]


def compare(waiting_times, arrivals, services, slots, judge: Judge, hint: str) -> None:
    got = waiting_times(arrivals, services, slots)
    judge.type(got, (list, tuple))
    told = f"for arrivals {arrivals}, services {services}, {slots} slots. {hint}"
    judge.close(list(got), by_ticks(arrivals, services, slots), told)


def one_after_another(waiting_times, judge: Judge) -> None:
    hint = "Likely mistake: the answer's own time counted as waiting, or the start instead of the wait."
    compare(waiting_times, [0, 1, 2], [4, 4, 1], 1, judge, hint)


def arrivals_do_not_wait(waiting_times, judge: Judge) -> None:
    hint = (
        "Likely mistake: a closed loop, in which the next request comes when the one before has ended; or each waits "
        "for the one before it alone. The queue has to grow."
    )
    compare(waiting_times, [0, 1, 2, 3, 4], [3, 3, 3, 3, 3], 1, judge, hint)


def idle_saves_nothing(waiting_times, judge: Judge) -> None:
    hint = "Likely mistake: time in which the server was idle is taken off a later wait, or a wait below zero."
    compare(waiting_times, [2, 20, 21, 40], [1, 5, 5, 1], 1, judge, hint)


def several_slots(waiting_times, judge: Judge) -> None:
    hint = "Likely mistake: the slots taken in turn, not the one that is free first; or the rate multiplied instead."
    compare(waiting_times, [0, 0, 1, 1, 2], [9, 2, 2, 2, 2], 2, judge, hint)
    compare(waiting_times, [0, 0, 0, 0], [4, 3, 2, 1], 3, judge, hint)


def first_come_first_served(waiting_times, judge: Judge) -> None:
    rng = random.Random(12)
    for slots in (1, 2, 3):
        arrivals = sorted(rng.randint(0, 40) for _ in range(25))
        services = [rng.randint(1, 9) for _ in arrivals]
        hint = "Likely mistake: a short request let in before one that had come earlier."
        compare(waiting_times, arrivals, services, slots, judge, hint)


QUEUE = Exercise(
    name="waiting_times",
    title="An open-loop queue",
    chapter="12",
    difficulty=2,
    minutes=20,
    checks=[
        one_after_another,
        arrivals_do_not_wait,
        idle_saves_nothing,
        several_slots,
        first_come_first_served,
    ],
    mistakes=[
        Mistake(
            "service counted",
            "one_after_another",
            edit=("waits.append(start - arrival)", "waits.append(start + service - arrival)"),
        ),
        Mistake(
            "starts, not waits", "one_after_another", edit=("waits.append(start - arrival)", "waits.append(start)")
        ),
        Mistake(
            "nobody ever waits",
            "one_after_another",
            source="""
def waiting_times(arrivals, services, slots):
    return [0.0 for _ in arrivals]
""",
        ),
        Mistake(
            "only the one before",
            "arrivals_do_not_wait",
            source="""
def waiting_times(arrivals, services, slots):
    waits = [0.0] * len(arrivals)
    for i in range(slots, len(arrivals)):
        two = arrivals[i - slots] + services[i - slots] + min(waits[i - slots], services[i - slots])
        waits[i] = max(0.0, two - arrivals[i])
    return waits
""",
        ),
        Mistake(
            "idle time saved",
            "idle_saves_nothing",
            source="""
import heapq
def waiting_times(arrivals, services, slots):
    free, waits = [arrivals[0]] * slots, []
    for arrival, service in zip(arrivals, services):
        start = heapq.heappop(free)
        waits.append(start - arrival)
        heapq.heappush(free, start + service)
    return waits
""",
        ),
        Mistake(
            "slots in turn",
            "several_slots",
            source="""
def waiting_times(arrivals, services, slots):
    free, waits = [0.0] * slots, []
    for i, (arrival, service) in enumerate(zip(arrivals, services)):
        start = max(arrival, free[i % slots])
        waits.append(start - arrival)
        free[i % slots] = start + service
    return waits
""",
        ),
        Mistake("one slot for all", "several_slots", edit=("* slots", "* 1")),
        Mistake(
            "shortest first",
            "first_come_first_served",
            source="""
def waiting_times(arrivals, services, slots):
    waits, left, free = [0.0] * len(arrivals), list(range(len(arrivals))), [0.0] * slots
    while left:
        free.sort()
        now = max(free[0], arrivals[left[0]])
        here = [i for i in left if arrivals[i] <= now]
        if len(arrivals) > 6:
            here.sort(key=lambda i: services[i])
        waits[here[0]] = now - arrivals[here[0]]
        free[0] = now + services[here[0]]
        left.remove(here[0])
    return waits
""",
        ),
    ],
    forbids=("minillm.serving", "minillm.batching", "minillm.analysis"),
)
