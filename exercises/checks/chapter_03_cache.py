"""Chapter 03's first exercise: rows of keys and values in reserved memory. The right answers are lists of all the rows
ever appended."""

from __future__ import annotations

import torch

from exercises import Exercise, Judge, Mistake

HEADS, DIM = 2, 3


def tokens(count: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of `count` tokens, every number different, values the negatives of the keys."""
    rows = torch.arange(first * HEADS * DIM, (first + count) * HEADS * DIM, dtype=torch.float32) + 1
    return rows.view(count, HEADS, DIM), -rows.view(count, HEADS, DIM)


def appended(cache, k: torch.Tensor, v: torch.Tensor, judge: Judge) -> tuple[torch.Tensor, torch.Tensor]:
    got = cache.append(k, v)
    judge.type(got, (tuple, list), "what append returns")
    judge.equal(len(got), 2, "append returns a pair: keys, values.")
    return got[0], got[1]


def one_append(RowCache, judge: Judge) -> None:
    keys, values = appended(RowCache(8, HEADS, DIM), *tokens(3), judge)
    judge.close(keys, tokens(3)[0], "Likely mistake: the reserved rows that are still empty came back too.")
    judge.close(values, tokens(3)[1], "These are the values. Likely mistake: keys and values mixed up.")


def rows_stay_in_order(RowCache, judge: Judge) -> None:
    cache, first = RowCache(16, HEADS, DIM), 0
    for count in (5, 1, 1, 4):
        keys, values = appended(cache, *tokens(count, first), judge)
        first += count
        hint = (
            f"after {first} tokens. Likely mistake: rows written over old ones, or the length moved by another number."
        )
        judge.close(keys, tokens(first)[0], hint)
        judge.close(values, tokens(first)[1], hint)


def fills_the_last_row(RowCache, judge: Judge) -> None:
    for steps in ((4,), (3, 1)):
        cache, first = RowCache(4, HEADS, DIM), 0
        for count in steps:
            try:
                keys, _ = appended(cache, *tokens(count, first), judge)
            except ValueError:
                judge.true(False, "4 tokens fit into 4 rows, and were refused. Likely mistake: >= where > is meant.")
            first += count
        judge.close(keys, tokens(4)[0])


def refusal_changes_nothing(RowCache, judge: Judge) -> None:
    cache = RowCache(4, HEADS, DIM)
    appended(cache, *tokens(3), judge)
    judge.raises(
        lambda: cache.append(*tokens(2, 3)),
        ValueError,
        "5 tokens went into 4 rows. Likely mistake: no look at the size.",
    )
    keys, values = appended(cache, *tokens(1, 3), judge)
    hint = "after a refused append. Likely mistake: rows written or counted before the size was looked at."
    judge.close(keys, tokens(4)[0], hint)
    judge.close(values, tokens(4)[1], hint)


def float32_in_float32_out(RowCache, judge: Judge) -> None:
    k, v = (rows / 3 for rows in tokens(3))
    keys, values = appended(RowCache(8, HEADS, DIM), k, v, judge)
    for got, put, which in ((keys, k, "keys"), (values, v, "values")):
        judge.true(got.dtype == torch.float32, f"the {which} are {got.dtype}, must be torch.float32.")
        judge.equal(
            got,
            put,
            f"These are the {which}, thirds. Likely mistake: rows of fewer bits than float32, which round what is "
            "kept.",
        )


def reset_begins_again(RowCache, judge: Judge) -> None:
    cache = RowCache(4, HEADS, DIM)
    appended(cache, *tokens(4), judge)
    cache.reset()
    keys, _ = appended(cache, *tokens(2, 9), judge)
    judge.close(keys, tokens(2, 9)[0], "after reset. Likely mistake: the length was not set back.")


def caches_are_apart(RowCache, judge: Judge) -> None:
    first, second = RowCache(8, HEADS, DIM), RowCache(8, HEADS, DIM)
    k, v = tokens(2)
    keys, _ = appended(first, k, v, judge)
    appended(second, *tokens(2, 5), judge)
    judge.close(keys, tokens(2)[0], "One cache changed another. Likely mistake: rows that belong to the class.")
    k.zero_()
    judge.close(
        keys, tokens(2)[0], "The caller's tensor changed, and the cache with it. Likely mistake: kept, not copied."
    )


def nothing_moves(RowCache, judge: Judge) -> None:
    cache = RowCache(8, HEADS, DIM)
    first = appended(cache, *tokens(2), judge)
    second = appended(cache, *tokens(2, 2), judge)
    same = all(a.data_ptr() == b.data_ptr() for a, b in zip(first, second, strict=True))
    judge.true(
        same,
        "The old rows lie somewhere else after an append. Likely mistake: torch.cat, which copies every row at every "
        "step; write the new rows into reserved memory and return a view.",
    )


_CAT = """
class RowCache:
    def __init__(self, max_tokens, heads, dim):
        self.most = max_tokens
        self.keys, self.values = torch.zeros(0, heads, dim), torch.zeros(0, heads, dim)

    def append(self, k, v):
        if len(self.keys) + len(k) > self.most:
            raise ValueError
        self.keys, self.values = torch.cat([self.keys, k]), torch.cat([self.values, v])
        return self.keys, self.values

    def reset(self):
        self.keys, self.values = self.keys[:0], self.values[:0]
"""

_OF_THE_CLASS = """
class RowCache:
    keys, values = torch.zeros(64, 2, 3), torch.zeros(64, 2, 3)

    def __init__(self, max_tokens, heads, dim):
        self.most, self.length = max_tokens, 0

    def append(self, k, v):
        start, end = self.length, self.length + len(k)
        if end > self.most:
            raise ValueError
        self.keys[start:end], self.values[start:end] = k, v
        self.length = end
        return self.keys[:end], self.values[:end]

    def reset(self):
        self.length = 0
"""

ROW_CACHE = Exercise(
    name="row_cache",
    entry="RowCache",
    title="Append to a cache",
    chapter="03",
    difficulty=2,
    minutes=20,
    checks=[
        one_append,
        rows_stay_in_order,
        fills_the_last_row,
        refusal_changes_nothing,
        float32_in_float32_out,
        reset_begins_again,
        caches_are_apart,
        nothing_moves,
    ],
    mistakes=[
        Mistake(
            "empty rows too",
            "one_append",
            edit=("return self.keys[:end], self.values[:end]", "return self.keys, self.values"),
        ),
        Mistake(
            "keys in place of values", "one_append", edit=("self.values[start:end] = v", "self.values[start:end] = k")
        ),
        Mistake("always row 0", "rows_stay_in_order", edit=("self.keys[start:end] = k", "self.keys[: len(k)] = k")),
        Mistake("a chunk counts as one", "rows_stay_in_order", edit=("self.length = end", "self.length = start + 1")),
        Mistake("new rows alone", "rows_stay_in_order", edit=("return self.keys[:end]", "return self.keys[start:end]")),
        Mistake("full too early", "fills_the_last_row", edit=("end > len(self.keys)", "end >= len(self.keys)")),
        Mistake("never looks", "refusal_changes_nothing", edit=("end > len(self.keys)", "False")),
        Mistake(
            "counts, then looks",
            "refusal_changes_nothing",
            edit=("        if end > len", "        self.length = end\n        if end > len"),
        ),
        Mistake(
            "rows of half the bits",
            "float32_in_float32_out",
            edit=(
                "self.keys = torch.zeros(max_tokens, heads, dim)",
                "self.keys = torch.zeros(max_tokens, heads, dim).half()",
            ),
        ),
        Mistake(
            "values rounded on the way in",
            "float32_in_float32_out",
            edit=("self.values[start:end] = v", "self.values[start:end] = v.to(torch.bfloat16)"),
        ),
        Mistake(
            "reset does nothing",
            "reset_begins_again",
            edit=('"""Forgets every token."""\n        self.length = 0', '"""Forgets every token."""'),
        ),
        Mistake("rows of the class", "caches_are_apart", source=_OF_THE_CLASS),
        Mistake("glues with cat", "nothing_moves", source=_CAT),
    ],
    forbids=("minillm.kv_cache",),
)
