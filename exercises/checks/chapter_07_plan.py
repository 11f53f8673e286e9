"""Chapter 07, which tiles a block of queries visits. The right answer looks at each pair of query and key."""

from __future__ import annotations

from exercises import Exercise, Judge, Mistake


def pair_by_pair(queries: int, keys: int, block_m: int, block_n: int, window: int | None) -> list[list]:
    def sees(i: int, j: int) -> bool:
        position = keys - queries + i
        return j < keys and j <= position and (window is None or j > position - window)

    plan = []
    for start in range(0, queries, block_m):
        block, row = range(start, min(start + block_m, queries)), []
        for first in range(0, keys, block_n):
            pairs = [sees(i, j) for i in block for j in range(first, first + block_n)]
            if any(pairs):
                row.append((first, not all(pairs)))
        plan.append(row)
    return plan


def planned(tile_plan, case: tuple, judge: Judge, hint: str) -> None:
    got = tile_plan(*case)
    judge.type(got, list)
    judge.equal(got, pair_by_pair(*case), f"for tile_plan{case}. Likely mistake: {hint}")


def square(tile_plan, judge: Judge) -> None:
    hint = "tiles right of the diagonal are not visited, those on it are masked, and those left of it are whole."
    for case in ((8, 8, 4, 4, None), (12, 12, 4, 4, None), (6, 6, 1, 1, None)):
        planned(tile_plan, case, judge, hint)


def blocks_and_tiles_differ(tile_plan, judge: Judge) -> None:
    hint = "the block's last query decides what is visited, its first one what is whole."
    for case in ((12, 12, 6, 2, None), (12, 12, 2, 6, None), (15, 15, 3, 5, None), (15, 15, 5, 3, None)):
        planned(tile_plan, case, judge, hint)


def queries_come_last(tile_plan, judge: Judge) -> None:
    hint = "query i stands at position keys - queries + i (bottom right), not at i."
    for case in ((4, 6, 2, 2, None), (4, 16, 2, 4, None), (1, 9, 1, 3, None), (3, 12, 3, 4, None)):
        planned(tile_plan, case, judge, hint)


def odd_ends(tile_plan, judge: Judge) -> None:
    hint = "the last block has fewer queries, and a tile that reaches past the last key needs a mask."
    for case in ((5, 5, 4, 2, None), (7, 13, 4, 4, None), (2, 7, 8, 3, None), (3, 13, 2, 4, None)):
        planned(tile_plan, case, judge, hint)


def windows(tile_plan, judge: Judge) -> None:
    hint = "the first query of a block reaches furthest back; a tile that the last one sees in part needs a mask."
    for window in (1, 2, 3, 4, 5, 7, 8, 30):
        for case in ((16, 16, 4, 4), (12, 12, 2, 4), (9, 20, 4, 3)):
            planned(tile_plan, (*case, window), judge, hint)


def more_queries_than_keys(tile_plan, judge: Judge) -> None:
    hint = "a query at a negative position sees nothing; its block may have no tiles, but it has an entry."
    for case in ((8, 3, 2, 2, None), (8, 3, 2, 2, 1), (5, 0, 2, 2, None), (0, 4, 2, 2, None)):
        planned(tile_plan, case, judge, hint)


PLAN = Exercise(
    name="tile_plan",
    title="Which tiles",
    chapter="07",
    difficulty=3,
    minutes=25,
    checks=[
        square,
        blocks_and_tiles_differ,
        queries_come_last,
        odd_ends,
        windows,
        more_queries_than_keys,
    ],
    mistakes=[
        Mistake("visits everything", "square", edit=("range(begin, high + 1, block_n)", "range(begin, keys, block_n)")),
        Mistake("masks everything", "square", edit=("first + block_n - 1 > low", "True")),
        Mistake("masks nothing", "square", edit=("(first, future or past)", "(first, False)")),
        Mistake("one key too few is whole", "square", edit=("first + block_n - 1 > low", "first + block_n > low")),
        Mistake(
            "the first query decides what is visited", "blocks_and_tiles_differ",
            edit=("range(begin, high + 1, block_n)", "range(begin, low + 1, block_n)"),
        ),
        Mistake(
            "the last query decides what is whole", "square",
            edit=("first + block_n - 1 > low", "first + block_n - 1 > high"),
        ),
        Mistake(
            "masks the last tile alone", "square",
            edit=("first + block_n - 1 > low", "first + block_n > high"),
        ),
        Mistake("hung from the top left", "queries_come_last", edit=("low = keys - queries + start", "low = start")),
        Mistake("a full last block", "odd_ends", edit=("min(low + block_m, keys) - 1", "low + block_m - 1")),
        Mistake(
            "no window on the left", "windows",
            edit=("0 if window is None else max(low - window + 1, 0) // block_n * block_n", "0"),
        ),
        Mistake(
            "the last query reaches back", "windows",
            edit=("max(low - window + 1, 0)", "max(high - window + 1, 0)"),
        ),
        Mistake("a tile that starts anywhere", "windows", edit=(" // block_n * block_n", "")),
        Mistake("the window's edge is whole", "windows", edit=("future or past", "future")),
        Mistake("a window of one more", "windows", edit=("first <= high - window", "first < high - window")),
        Mistake(
            "blocks without tiles left out", "more_queries_than_keys",
            edit=("plan.append(tiles)", "plan += [tiles] if tiles else []"),
        ),
    ],
)  # fmt: skip
