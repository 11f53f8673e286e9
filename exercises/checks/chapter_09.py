"""Chapter 09, the paged cache: slots of a step, where memory is, attention over blocks, an allocator that shares.

The right answers come from tokens written down one by one and from slots marked one by one.
"""

from __future__ import annotations

from exercises import Exercise, Judge, Mistake

from .chapter_09_allocator import ALLOCATOR
from .chapter_09_attention import ATTENTION

# --- slot_mapping


def written_down(tables: list, starts: list, counts: list, size: int, rows: int) -> list[int]:
    """Every slot of every sequence in a row, and from that row the new tokens."""
    packed = []
    for i in range(len(tables)):
        places = [block * size + place for block in tables[i] for place in range(size)]
        packed += places[starts[i] : starts[i] + counts[i]]
    while len(packed) < rows:
        packed.append(-1)
    return packed


def mapped(slot_mapping, case: tuple, judge: Judge, hint: str) -> None:
    got = slot_mapping(*case)
    judge.type(got, list)
    judge.equal(got, written_down(*case), f"for slot_mapping{case}. Likely mistake: {hint}")


def one_prompt(slot_mapping, judge: Judge) -> None:
    mapped(slot_mapping, ([[7, 2, 9]], [0], [10], 4, 10), judge, "the block's number is not multiplied by its size.")
    mapped(slot_mapping, ([[3]], [0], [2], 16, 2), judge, "a whole block is written where two tokens come.")


def positions_count_from_the_start(slot_mapping, judge: Judge) -> None:
    for start, count in ((3, 1), (4, 1), (5, 6), (7, 2)):
        mapped(
            slot_mapping,
            ([[7, 2, 9]], [start], [count], 4, count),
            judge,
            "positions counted from the start of the step, or off by one.",
        )


def sequences_end_to_end(slot_mapping, judge: Judge) -> None:
    mapped(
        slot_mapping,
        ([[7, 2], [5], [1, 8, 3]], [3, 0, 6], [2, 1, 4], 4, 7),
        judge,
        "one table used for all sequences, or tokens not in the order of the sequences.",
    )


def blocks_of_any_size(slot_mapping, judge: Judge) -> None:
    for size in (1, 3, 7, 16):
        case = ([[4, 9, 0, 6] * 6, [2, 8, 3, 5] * 6], [size - 1, 2 * size], [size + 3, 5], size, size + 8)
        mapped(slot_mapping, case, judge, "a block size written as a number; it is the argument block_size.")


def padding_writes_nothing(slot_mapping, judge: Judge) -> None:
    mapped(
        slot_mapping,
        ([[7, 2], [0]], [3, 0], [2, 1], 4, 8),
        judge,
        "padding rows left out, or 0, which is the slot of a real token.",
    )


SLOTS = Exercise(
    name="slot_mapping",
    title="Slot mapping",
    chapter="09",
    difficulty=1,
    minutes=15,
    checks=[
        one_prompt,
        positions_count_from_the_start,
        sequences_end_to_end,
        padding_writes_nothing,
        blocks_of_any_size,
    ],
    mistakes=[
        Mistake("block number alone", "one_prompt", edit=("* block_size + t %", "+ t %")),
        Mistake("by position in the sequence", "one_prompt", edit=("table[t // block_size]", "(t // block_size)")),
        Mistake("place within the sequence", "one_prompt", edit=("+ t % block_size", "+ t")),
        Mistake(
            "counts from zero in each step",
            "positions_count_from_the_start",
            edit=("range(start, start + count)", "range(count)"),
        ),
        Mistake(
            "one token late",
            "positions_count_from_the_start",
            edit=("range(start, start + count)", "range(start + (start > 0), start + count + (start > 0))"),
        ),
        Mistake("the first table for all", "sequences_end_to_end", edit=("table[t //", "tables[0][t //")),
        Mistake(
            "last sequence first",
            "sequences_end_to_end",
            edit=("zip(tables, starts, counts)", "[*zip(tables, starts, counts)][::-1]"),
        ),
        Mistake("no padding", "padding_writes_nothing", edit=(" + [-1] * (rows - len(slots))", "")),
        Mistake("pads with slot 0", "padding_writes_nothing", edit=("[-1] *", "[0] *")),
        Mistake("finds the block by 4", "blocks_of_any_size", edit=("t // block_size", "t // 4")),
        Mistake("finds the place by 4", "blocks_of_any_size", edit=("t % block_size", "t % 4")),
    ],
    forbids=("minillm.paging",),
)


# --- account

NAMES = ("used", "reserved", "internal", "free", "largest")


def marked(capacity: int, runs: list) -> dict[str, int]:
    """Each slot gets a letter, then letters are counted."""
    line = ["free"] * capacity
    for start, size, written, final in runs:
        for i in range(size):
            line[start + i] = "used" if i < written else "reserved" if i < final else "internal"
    holes = "".join("." if mark == "free" else "x" for mark in line).split("x")
    return {**{name: line.count(name) for name in NAMES[:4]}, "largest": max(map(len, holes))}


def accounted(account, capacity: int, runs: list, names: tuple, judge: Judge, hint: str) -> None:
    got = account(capacity, runs)
    judge.type(got, dict)
    judge.equal(sorted(got), sorted(NAMES), "These must be the names in the dictionary.")
    want = marked(capacity, runs)
    for name in names:
        judge.equal(got[name], want[name], f"for {name} of account({capacity}, {runs}). Likely mistake: {hint}")


def one_run(account, judge: Judge) -> None:
    hint = "reserved and internal mixed up: reserved will be filled by this request, internal never."
    accounted(account, 10, [(0, 10, 3, 7)], NAMES[:4], judge, hint)
    accounted(account, 12, [(0, 10, 3, 7)], NAMES[:4], judge, hint)
    accounted(account, 10, [(0, 10, 4, 4)], NAMES[:4], judge, hint)


def several_runs(account, judge: Judge) -> None:
    runs = [(0, 8, 5, 8), (10, 6, 1, 2), (20, 4, 4, 4)]
    accounted(account, 24, runs, NAMES[:4], judge, "only one of the runs counted.")


def holes_between(account, judge: Judge) -> None:
    accounted(
        account,
        30,
        [(2, 8, 5, 8), (16, 6, 1, 2), (26, 2, 1, 1)],
        NAMES,
        judge,
        "free slots added up, where the longest stretch side by side is asked for.",
    )


def holes_at_both_ends(account, judge: Judge) -> None:
    hint = "the hole before the first run, or the one behind the last, was forgotten."
    accounted(account, 20, [(9, 6, 1, 2)], NAMES, judge, hint)
    accounted(account, 20, [(3, 6, 1, 2)], NAMES, judge, hint)
    accounted(account, 20, [], NAMES, judge, hint)
    accounted(account, 6, [(0, 6, 1, 2)], NAMES, judge, "a hole where there is none.")


def any_order(account, judge: Judge) -> None:
    accounted(
        account,
        40,
        [(30, 5, 2, 4), (4, 6, 1, 2), (16, 8, 8, 8)],
        NAMES,
        judge,
        "runs taken as if they came sorted.",
    )


ACCOUNT = Exercise(
    name="account",
    title="Where the slots are",
    chapter="09",
    difficulty=2,
    minutes=20,
    checks=[one_run, several_runs, holes_between, holes_at_both_ends, any_order],
    mistakes=[
        Mistake(
            "all that is not written is reserved",
            "one_run",
            edit=("final - written for _, _,", "size - written for _, size,"),
        ),
        Mistake("reserved counts from the start", "one_run", edit=("sum(final - written", "sum(final")),
        Mistake(
            "internal counts what will come",
            "one_run",
            edit=("sum(size - final for _, size, _, final", "sum(size - written for _, size, written, final"),
        ),
        Mistake(
            "reserved slots are free",
            "one_run",
            edit=("capacity - used - reserved - internal", "capacity - used - internal"),
        ),
        Mistake(
            "the last run alone",
            "several_runs",
            edit=("sum(written for _, _, written, _ in runs)", "sum(written for _, _, written, _ in runs[-1:])"),
        ),
        Mistake("all holes together", "holes_between", edit=("max(largest, start - end)", "largest + start - end")),
        Mistake("the last hole", "holes_between", edit=("max(largest, start - end)", "start - end")),
        Mistake(
            "nothing behind the last",
            "holes_at_both_ends",
            edit=("[*sorted(runs), (capacity, 0, 0, 0)]", "sorted(runs)"),
        ),
        Mistake("unsorted", "any_order", edit=("sorted(runs)", "runs")),
    ],
    forbids=("minillm.allocators",),
)


EXERCISES = [SLOTS, ACCOUNT, ATTENTION, ALLOCATOR]
