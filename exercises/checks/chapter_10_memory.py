"""Chapter 10: admission with memory, and who gives way. The right answers come from a shelf of blocks with names on."""

from __future__ import annotations

import random

from exercises import Exercise, Judge, Mistake

# --- admit


def shelved(waiting, running, slots, free, block_size, budget) -> list[int]:
    """Block by block: first what is owed is set aside, then each newcomer takes blocks until it has a place for each
    of its tokens."""
    shelf = ["free"] * free
    for known, held in running:
        places = held * block_size
        while places < known and "free" in shelf:
            shelf[shelf.index("free")] = "owed"
            places += block_size
        if places < known:
            return []  # not even what is owed is there
    seats, admitted = slots - len(running), []
    for known in waiting:
        places, taken = 0, []
        while places < known and "free" in shelf:
            taken.append(shelf.index("free"))
            shelf[taken[-1]] = "taken"
            places += block_size
        if seats < 1 or budget < 1 or places < known:
            break
        tokens = 0
        while tokens < known and budget:
            tokens, budget = tokens + 1, budget - 1
        admitted.append(tokens)
        seats -= 1
    return admitted


def compare(admit, cases, judge: Judge, otherwise: str) -> None:
    for case in cases:
        got = admit(*case)
        judge.type(got, list)
        names = ("waiting", "running", "slots", "free", "block_size", "budget")
        shown = ", ".join(f"{name} {value}" for name, value in zip(names, case))
        judge.equal(got, shelved(*case), f"{shown}. {otherwise}")


def room_for_all(admit, judge: Judge) -> None:
    compare(
        admit,
        [([6, 9, 2], [], 8, 20, 4, 100), ([], [(4, 1)], 8, 5, 4, 10)],
        judge,
        "There is room for everybody. Likely mistake: who comes in computes all its tokens if the budget allows it.",
    )


def blocks_are_rounded_up(admit, judge: Judge) -> None:
    compare(
        admit,
        [([5], [], 8, 1, 4, 100), ([8], [], 8, 2, 4, 100), ([9], [], 8, 2, 4, 100)],
        judge,
        "Likely mistake: 5 tokens need two blocks of 4, and 8 tokens need two as well.",
    )


def no_overtaking(admit, judge: Judge) -> None:
    compare(
        admit,
        [([4, 40, 4], [], 8, 5, 4, 100), ([50, 1, 1], [], 8, 6, 4, 100)],
        judge,
        "Likely mistake: a small request slips past a large one that does not fit, which may wait for ever.",
    )


def what_is_owed_is_not_given_away(admit, judge: Judge) -> None:
    compare(
        admit,
        [([8], [(20, 2)], 8, 4, 4, 50), ([8], [(20, 2), (9, 1)], 8, 6, 4, 50), ([8], [(20, 2)], 8, 5, 4, 50)],
        judge,
        "Likely mistake: the blocks that a running prefill still needs given to newcomers; they would preempt it next.",
    )


def each_debt_is_whole_blocks(admit, judge: Judge) -> None:
    compare(
        admit,
        [([8], [(5, 1)] * 3, 8, 4, 4, 50), ([8], [(5, 1)] * 3, 8, 5, 4, 50), ([4], [(7, 1), (6, 1)], 8, 2, 4, 50)],
        judge,
        "Likely mistake: debts added up in tokens or parts of blocks; each request is owed whole blocks of its own.",
    )


def too_many_held_are_no_gift(admit, judge: Judge) -> None:
    compare(
        admit,
        [([9], [(4, 3)], 8, 2, 4, 50), ([8], [(4, 3), (12, 2)], 8, 2, 4, 50)],
        judge,
        "A running request holds more blocks than it needs. Likely mistake: a negative debt, counted as free blocks.",
    )


def promised_once(admit, judge: Judge) -> None:
    compare(
        admit,
        [([8, 8], [], 8, 3, 4, 50), ([12, 12], [], 8, 5, 4, 50), ([4, 4, 4], [], 8, 2, 4, 50)],
        judge,
        "Likely mistake: each newcomer held against all free blocks, those promised to the one before it included.",
    )


def a_prompt_is_cut(admit, judge: Judge) -> None:
    compare(
        admit,
        [([20], [], 8, 7, 4, 6), ([12, 12], [], 8, 6, 4, 16), ([9], [(4, 1)], 8, 6, 4, 2)],
        judge,
        "The budget does not reach. Likely mistake: a prompt that does not fit whole is kept outside.",
    )


def slots_and_budget_end(admit, judge: Judge) -> None:
    compare(
        admit,
        [
            ([2, 2, 2], [(4, 1)], 3, 20, 4, 50),
            ([2, 2], [(4, 1), (4, 1)], 2, 20, 4, 50),
            ([4, 4, 4], [], 8, 20, 4, 8),
            ([4], [], 8, 20, 4, 0),
            ([5, 5, 5], [], 8, 20, 4, 8),
            ([6, 9, 2], [(10, 2)], 8, 6, 4, 10),
        ],
        judge,
        "Likely mistake: running requests occupy slots too; and who could compute nothing in this step stays outside.",
    )


def random_queues(admit, judge: Judge) -> None:
    rng = random.Random(11)
    cases = []
    for _ in range(60):
        size = rng.randint(1, 5)
        running = [(rng.randint(1, 30), rng.randint(1, 4)) for _ in range(rng.randint(0, 4))]
        owed = sum(max(0, -(-known // size) - held) for known, held in running)
        waiting = [rng.choice((1, 4, 7, 16)) for _ in range(rng.randint(0, 6))]
        cases.append((waiting, running, rng.randint(1, 8), owed + rng.randint(0, 12), size, rng.randint(0, 30)))
    compare(admit, cases, judge, "Likely mistake: a case that the small examples missed.")


ADMIT = Exercise(
    name="admit",
    title="Admission",
    chapter="10",
    difficulty=3,
    minutes=25,
    checks=[
        room_for_all,
        blocks_are_rounded_up,
        no_overtaking,
        what_is_owed_is_not_given_away,
        each_debt_is_whole_blocks,
        too_many_held_are_no_gift,
        promised_once,
        a_prompt_is_cut,
        slots_and_budget_end,
        random_queues,
    ],
    mistakes=[
        Mistake(
            "names, not tokens", "room_for_all", edit=("admitted.append(min(known, budget))", "admitted.append(1)")
        ),
        Mistake(
            "rounded down",
            "blocks_are_rounded_up",
            edit=("needed = -(-known // block_size)", "needed = known // block_size"),
        ),
        Mistake(
            "one too many",
            "blocks_are_rounded_up",
            edit=("needed = -(-known // block_size)", "needed = known // block_size + 1"),
        ),
        Mistake("overtaking", "no_overtaking", edit=("            break\n", "            continue\n")),
        Mistake(
            "nothing is owed",
            "what_is_owed_is_not_given_away",
            edit=("for known, held in running)", "for known, held in [])"),
        ),
        Mistake(
            "debts in parts of blocks",
            "each_debt_is_whole_blocks",
            edit=("max(0, -(-known // block_size) - held)", "max(0, known / block_size - held)"),
        ),
        Mistake(
            "negative debt",
            "too_many_held_are_no_gift",
            edit=("max(0, -(-known // block_size) - held)", "(-(-known // block_size) - held)"),
        ),
        Mistake("promised to all", "promised_once", edit=("free -= needed", "free -= 0")),
        Mistake(
            "the last one's blocks",
            "promised_once",
            edit=("free -= needed", "free = free if len(admitted) == 1 else free - needed"),
        ),
        Mistake("slots of newcomers", "slots_and_budget_end", edit=("len(running) + len(admitted)", "len(admitted)")),
        Mistake("one slot more", "slots_and_budget_end", edit=(">= slots", "> slots")),
        Mistake("in with nothing", "slots_and_budget_end", edit=("or budget == 0 ", "")),
        Mistake("whole or not at all", "a_prompt_is_cut", edit=("budget == 0", "budget < known")),
    ],
    forbids=("minillm.batching", "minillm.block_pool"),
)


# --- give_way

THREE = [("a", 3, 10, 2), ("b", 2, 5, 3), ("c", 1, 4, 0)]


def by_the_shelf(running, asker, needed, free) -> list[tuple[str, int]]:
    """Blocks with their owners' names on; whoever stands last is struck out until the asker can be served."""
    shelf = [""] * free + [name for name, blocks, _, _ in running for _ in range(blocks)]
    texts = {name: ["prompt"] * prompt + ["output"] * outputs for name, _, prompt, outputs in running}
    inside, gone = [name for name, *_ in running], []
    while shelf.count("") < needed and asker in inside:
        last = inside.pop()
        shelf = ["" if owner == last else owner for owner in shelf]
        gone.append((last, len(texts[last])))
    return gone


def judged(give_way, cases, judge: Judge, otherwise: str) -> None:
    for case in cases:
        got = give_way(*case)
        judge.type(got, list)
        running, asker, needed, free = case
        judge.equal(got, by_the_shelf(*case), f"{asker} needs {needed}, {free} free, running {running}. {otherwise}")


def enough_is_free(give_way, judge: Judge) -> None:
    judged(
        give_way,
        [(THREE, "a", 2, 2), (THREE, "b", 1, 5), (THREE, "c", 0, 0)],
        judge,
        "Likely mistake: somebody preempted though there was room, exactly enough included.",
    )


def the_last_gives_way(give_way, judge: Judge) -> None:
    judged(
        give_way,
        [(THREE, "a", 1, 0), (THREE, "b", 1, 0), ([("a", 4, 9, 0), ("b", 1, 6, 0)], "a", 1, 0)],
        judge,
        "Likely mistake: the first preempted, or the largest. The last in order is, so that the first always advances.",
    )


def prompt_and_outputs(give_way, judge: Judge) -> None:
    running = [("a", 3, 10, 2), ("b", 4, 5, 9)]
    judged(
        give_way,
        [(running, "a", 1, 0), (running, "a", 4, 0)],
        judge,
        "Likely mistake: only the prompt is computed again. The tokens already drawn are part of the text by now.",
    )


def no_more_than_needed(give_way, judge: Judge) -> None:
    judged(
        give_way,
        [(THREE, "a", 2, 1), (THREE, "a", 3, 0), (THREE, "a", 3, 2)],
        judge,
        "Likely mistake: a victim's blocks not counted as free, so that more are preempted than needed; or too few.",
    )


def the_asker_may_be_the_last(give_way, judge: Judge) -> None:
    judged(
        give_way,
        [(THREE, "c", 2, 0), (THREE, "b", 2, 0), (THREE, "b", 9, 0), (THREE, "a", 9, 0)],
        judge,
        "Likely mistake: the asker spared, or those before it preempted for it; in its turn it gives way itself.",
    )


def random_crowds(give_way, judge: Judge) -> None:
    rng = random.Random(5)
    cases = []
    for _ in range(60):
        running = [
            (name, rng.randint(1, 5), rng.randint(1, 20), rng.randint(0, 20)) for name in "abcdef"[: rng.randint(1, 6)]
        ]
        cases.append((running, rng.choice(running)[0], rng.randint(0, 9), rng.randint(0, 3)))
    judged(give_way, cases, judge, "Likely mistake: a case that the small examples missed.")


GIVE_WAY = Exercise(
    name="give_way",
    title="Give way and come back",
    chapter="10",
    difficulty=3,
    minutes=20,
    checks=[
        enough_is_free,
        the_last_gives_way,
        prompt_and_outputs,
        no_more_than_needed,
        the_asker_may_be_the_last,
        random_crowds,
    ],
    mistakes=[
        Mistake("exactly enough is not", "enough_is_free", edit=("free >= needed", "free > needed")),
        Mistake("the first gives way", "the_last_gives_way", edit=("in reversed(running):", "in running:")),
        Mistake(
            "the largest gives way",
            "the_last_gives_way",
            edit=("in reversed(running):", "in sorted(running, key=lambda r: -r[1]):"),
        ),
        Mistake("the prompt alone", "prompt_and_outputs", edit=("(name, prompt + outputs)", "(name, prompt)")),
        Mistake(
            "what was computed", "the_last_gives_way", edit=("(name, prompt + outputs)", "(name, prompt + outputs - 1)")
        ),
        Mistake("blocks forgotten", "the_last_gives_way", edit=("free += blocks", "free += 0")),
        Mistake("one is enough", "no_more_than_needed", edit=("        if name == asker:\n", "        if True:\n")),
        Mistake(
            "the asker is spared",
            "the_asker_may_be_the_last",
            edit=("        victims.append(", "        if name == asker:\n            break\n        victims.append("),
        ),
        Mistake(
            "on to the front", "the_asker_may_be_the_last", edit=("        if name == asker:\n", "        if False:\n")
        ),
    ],
    forbids=("minillm.batching", "minillm.block_pool"),
)
