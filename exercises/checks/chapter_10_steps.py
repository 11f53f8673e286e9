"""Chapter 10: steps and idle slots of both policies, and the token budget of one step."""

from __future__ import annotations

import random

from exercises import Exercise, Judge, Mistake

# --- makespan


def played(lengths: list[int], slots: int, continuous: bool) -> tuple[int, int]:
    """Step after step, with chairs."""
    queue, chairs, steps, idle = list(lengths), [0] * slots, 0, 0
    while queue or any(chairs):
        if continuous or not any(chairs):
            for i, left in enumerate(chairs):
                if left == 0 and queue:
                    chairs[i] = queue.pop(0)
        steps += 1
        idle += chairs.count(0)
        chairs = [max(0, left - 1) for left in chairs]
    return steps, idle


def compare(makespan, cases, judge: Judge, otherwise: str) -> None:
    for lengths, slots, continuous in cases:
        got = makespan(lengths, slots, continuous)
        judge.type(got, (tuple, list))
        policy = "continuous" if continuous else "static"
        judge.equal(got, played(lengths, slots, continuous), f"{policy}, {lengths} in {slots} slots. {otherwise}")


def static_waits_for_the_longest(makespan, judge: Judge) -> None:
    compare(
        makespan,
        [([1, 4, 3], 2, False), ([2, 2, 2, 2], 2, False), ([5, 5, 1], 3, False), ([3, 3, 3], 2, False)],
        judge,
        "Likely mistake: a batch lasts as long as its longest member; and what is left over at the end is a batch too.",
    )


def static_keeps_the_order(makespan, judge: Judge) -> None:
    compare(
        makespan,
        [([1, 9, 1, 9], 2, False), ([9, 1, 1, 9, 2, 2], 2, False)],
        judge,
        "Likely mistake: sorted by length, so that the long ones share a batch. Nobody knows the lengths beforehand.",
    )


def continuous_fills_at_once(makespan, judge: Judge) -> None:
    compare(
        makespan,
        [([1, 4, 3], 2, True), ([1, 1, 1, 1], 1, True), ([2, 2, 2, 2], 2, True)],
        judge,
        "Likely mistake: a step lost at each change; who ends in step k frees the slot for step k + 1.",
    )


def continuous_has_a_tail(makespan, judge: Judge) -> None:
    compare(
        makespan,
        [([4, 4, 9], 3, True), ([5, 1], 2, True), ([3], 4, True)],
        judge,
        "Likely mistake: all tokens over the slots. The last long answer runs alone, and one answer takes one slot.",
    )


def continuous_keeps_the_order(makespan, judge: Judge) -> None:
    compare(
        makespan,
        [([1, 2, 2, 7], 2, True), ([3, 1, 1, 1, 6, 2], 2, True)],
        judge,
        "Likely mistake: the longest taken first. That is a better schedule, and needs lengths that nobody knows.",
    )


def nobody_and_random_queues(makespan, judge: Judge) -> None:
    rng = random.Random(10)
    cases = [([], 3, False), ([], 3, True)]
    for _ in range(40):
        lengths = [rng.choice((1, 2, 3, 12)) for _ in range(rng.randint(1, 14))]
        cases.append((lengths, rng.randint(1, 5), rng.random() < 0.5))
    compare(
        makespan, cases, judge, "Likely mistake: a case that the small examples missed, the empty queue among them."
    )


MAKESPAN = Exercise(
    name="makespan",
    title="Static or continuous",
    chapter="10",
    difficulty=2,
    minutes=20,
    checks=[
        static_waits_for_the_longest,
        static_keeps_the_order,
        continuous_fills_at_once,
        continuous_has_a_tail,
        continuous_keeps_the_order,
        nobody_and_random_queues,
    ],
    mistakes=[
        Mistake(
            "whole batches only",
            "static_waits_for_the_longest",
            edit=("range(0, len(lengths), slots)", "range(0, len(lengths) - slots + 1, slots)"),
        ),
        Mistake("sum of a batch", "static_waits_for_the_longest", edit=("sum(max(lengths[", "sum(sum(lengths[")),
        Mistake(
            "idle of the lengths",
            "static_waits_for_the_longest",
            edit=("slots * steps - sum(lengths)", "slots * steps - len(lengths)"),
        ),
        Mistake(
            "sorted batches",
            "static_keeps_the_order",
            edit=(
                "    free = [0] * slots\n",
                "    free = [0] * slots\n    lengths = lengths if continuous else sorted(lengths)\n",
            ),
        ),
        Mistake(
            "a step lost",
            "continuous_fills_at_once",
            edit=(
                "heapq.heappop(free) + length)\n        steps = max(free)",
                "heapq.heappop(free) + length + 1)\n        steps = max(free) - 1",
            ),
        ),
        Mistake(
            "work over slots", "continuous_has_a_tail", edit=("steps = max(free)", "steps = -(-sum(lengths) // slots)")
        ),
        Mistake(
            "longest first",
            "continuous_keeps_the_order",
            edit=("for length in lengths:", "for length in sorted(lengths, reverse=True):"),
        ),
        Mistake(
            "round and round",
            "continuous_keeps_the_order",
            source=(
                "def makespan(lengths, slots, continuous):\n"
                "    if continuous:\n"
                "        steps = max((sum(lengths[i::slots]) for i in range(slots)), default=0)\n"
                "    else:\n"
                "        steps = sum(max(lengths[i : i + slots]) for i in range(0, len(lengths), slots))\n"
                "    return steps, slots * steps - sum(lengths)\n"
            ),
        ),
    ],
    forbids=("minillm.batching", "minillm.analysis"),
)


# --- split_budget


def handed_out(missing: list[int], budget: int, threshold: int) -> list[int]:
    """Token by token, as one would deal cards: each time to the first who may have one more."""
    counts = [0] * len(missing)
    while budget:
        wants = [
            (left > 1, i)
            for i, left in enumerate(missing)
            if counts[i] < left and not (threshold and counts[i] >= threshold)
        ]
        if not wants:
            break
        counts[min(wants)[1]] += 1
        budget -= 1
    return counts


def deal(split_budget, cases, judge: Judge, otherwise: str) -> None:
    for missing, budget, threshold in cases:
        got = split_budget(missing, budget, threshold)
        judge.type(got, list)
        judge.equal(
            got,
            handed_out(missing, budget, threshold),
            f"{missing}, budget {budget}, threshold {threshold}. {otherwise}",
        )


def all_fits(split_budget, judge: Judge) -> None:
    deal(
        split_budget,
        [([1, 1, 1], 8, 0), ([1, 5, 1], 16, 0), ([], 4, 0)],
        judge,
        "The budget is large enough for all. Likely mistake: a threshold of 0 taken for a limit of 0.",
    )


def decodes_come_first(split_budget, judge: Judge) -> None:
    deal(
        split_budget,
        [([9, 1, 1], 4, 0), ([1, 9, 1, 5], 8, 0), ([30, 1], 8, 0)],
        judge,
        "Likely mistake: served in the order of the list, so that a prompt eats the budget of those who are answering.",
    )


def never_over_budget(split_budget, judge: Judge) -> None:
    deal(
        split_budget,
        [([1, 1, 1, 1], 2, 0), ([1, 1, 7], 2, 0), ([5], 0, 0), ([1, 1], 0, 0)],
        judge,
        "Likely mistake: the budget not counted down, or decodes taken to cost nothing.",
    )


def a_prompt_is_cut_to_what_is_left(split_budget, judge: Judge) -> None:
    deal(
        split_budget,
        [([1, 20], 8, 0), ([6, 9], 10, 0), ([20, 3], 8, 0)],
        judge,
        "Likely mistake: a prompt that does not fit whole is passed over. Cutting it is the point of chunked prefill.",
    )


def the_threshold_is_for_each(split_budget, judge: Judge) -> None:
    deal(
        split_budget,
        [([1, 9, 1, 5], 8, 4), ([9, 9, 9], 20, 4), ([6, 2], 20, 4)],
        judge,
        "Likely mistake: the threshold ignored, or shared by all prompts; each prompt may have that many.",
    )


def random_steps(split_budget, judge: Judge) -> None:
    rng = random.Random(3)
    cases = []
    for _ in range(60):
        missing = [rng.choice((1, 1, 2, 5, 17)) for _ in range(rng.randint(1, 7))]
        cases.append((missing, rng.randint(1, 24), rng.choice((0, 0, 1, 3, 6))))
    deal(split_budget, cases, judge, "Likely mistake: a case that the small examples missed.")


SPLIT = Exercise(
    name="split_budget",
    title="Split the budget",
    chapter="10",
    difficulty=2,
    minutes=20,
    checks=[
        all_fits,
        decodes_come_first,
        never_over_budget,
        a_prompt_is_cut_to_what_is_left,
        the_threshold_is_for_each,
        random_steps,
    ],
    mistakes=[
        Mistake("zero is a limit", "all_fits", edit=("threshold or missing[i])", "threshold)")),
        Mistake("as they stand", "decodes_come_first", edit=("decodes + prompts", "range(len(missing))")),
        Mistake("prompts first", "decodes_come_first", edit=("decodes + prompts", "prompts + decodes")),
        Mistake("budget for ever", "decodes_come_first", edit=("budget -= counts[i]", "pass")),
        Mistake(
            "decodes are free",
            "decodes_come_first",
            edit=("budget -= counts[i]", "budget -= counts[i] if missing[i] > 1 else 0"),
        ),
        Mistake(
            "decodes always run",
            "never_over_budget",
            edit=(
                "counts[i] = min(missing[i], budget, threshold or missing[i])",
                "counts[i] = 1 if missing[i] == 1 else min(missing[i], max(0, budget), threshold or missing[i])",
            ),
        ),
        Mistake(
            "whole or not at all",
            "decodes_come_first",
            edit=(
                "counts[i] = min(missing[i], budget, threshold or missing[i])",
                "counts[i] = missing[i] if missing[i] <= budget else 0",
            ),
        ),
        Mistake(
            "only the first is cut",
            "a_prompt_is_cut_to_what_is_left",
            edit=(
                "counts[i] = min(missing[i], budget, threshold or missing[i])",
                "counts[i] = min(missing[i], budget, threshold or missing[i]) "
                "if missing[i] <= budget or i == (prompts or [0])[0] else 0",
            ),
        ),
        Mistake("no threshold", "the_threshold_is_for_each", edit=("threshold or missing[i])", "missing[i])")),
        Mistake(
            "one threshold for all",
            "the_threshold_is_for_each",
            edit=(
                "    for i in decodes + prompts:\n",
                "    budget = min(budget, len(decodes) + (threshold or budget))\n    for i in decodes + prompts:\n",
            ),
        ),
    ],
    forbids=("minillm.batching",),
)
