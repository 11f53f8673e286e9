"""Right answers to chapter 10 that go about it another way than the solutions do: every one of them must pass."""

import pytest

from exercises import registry
from exercises.child import execute
from exercises.grade import grade

ANSWERS = {
    "makespan": """
def makespan(lengths, slots, continuous):
    waiting, inside, steps, used = list(lengths), [], 0, 0
    while waiting or inside:
        if continuous or not inside:
            room = slots - len(inside)
            inside, waiting = inside + waiting[:room], waiting[room:]
        steps, used = steps + 1, used + len(inside)
        inside = [left - 1 for left in inside if left > 1]
    return [steps, steps * slots - used]
""",
    "split_budget": """
def split_budget(missing, budget, threshold):
    order = sorted(range(len(missing)), key=lambda i: missing[i] != 1)
    got = {}
    for i in order:
        most = missing[i] if threshold == 0 else min(missing[i], threshold)
        got[i] = most if most <= budget else budget
        budget = budget - got[i]
    return [got[i] for i in range(len(missing))]
""",
    "admit": """
def admit(waiting, running, slots, free, block_size, budget):
    from math import ceil
    for known, held in running:
        free -= max(ceil(known / block_size), held) - held
    if not waiting or slots <= len(running) or budget < 1 or ceil(waiting[0] / block_size) > free:
        return []
    blocks, now = ceil(waiting[0] / block_size), min(budget, waiting[0])
    inside = [(1, 1)] * (len(running) + 1)
    return [now, *admit(waiting[1:], inside, slots, free - blocks, block_size, budget - now)]
""",
    "give_way": """
def give_way(running, asker, needed, free):
    place = [name for name, *_ in running].index(asker)
    gone = []
    for i in range(len(running) - 1, place - 1, -1):
        if free + sum(running[j][1] for j in range(i + 1, len(running))) >= needed:
            return gone
        gone += [(running[i][0], running[i][2] + running[i][3])]
    return gone
""",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_another_right_answer_passes(name):
    exercise = registry.find("10", name)
    namespace, errors = execute([ANSWERS[name]])
    assert errors == {}
    outcome = grade(exercise, namespace[exercise.entry])
    assert outcome.passed, outcome
