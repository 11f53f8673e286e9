"""Chapter 02, the causal mask with an offset: which key may a query see."""

from __future__ import annotations

from exercises import Exercise, Judge, Mistake


def by_positions(queries: int, keys: int, window: int | None) -> list[list[bool]]:
    """One pair at a time: the positions that the query at `here` may see."""
    rows = []
    for here in range(keys - queries, keys):
        first = 0 if window is None else max(0, here - window + 1)
        rows.append([key in range(first, here + 1) for key in range(keys)])
    return rows


def booleans_of_the_right_shape(causal_mask, judge: Judge) -> None:
    import torch

    got = causal_mask(2, 5)
    judge.type(got, torch.Tensor)
    judge.true(got.dtype == torch.bool, f"the dtype is {got.dtype}, must be torch.bool.")
    judge.equal(list(got.shape), [2, 5], "The shape is (queries, keys).")


def sees_itself_and_the_past(causal_mask, judge: Judge) -> None:
    for size in (1, 2, 5):
        judge.equal(
            causal_mask(size, size),
            by_positions(size, size, None),
            "Likely mistake: a query sees itself too, or True and False are exchanged.",
        )


def queries_are_the_last_tokens(causal_mask, judge: Judge) -> None:
    judge.equal(
        causal_mask(1, 6),
        [[True] * 6],
        "Likely mistake: no offset. A single query is the last token, and sees everything that is remembered.",
    )
    for queries, keys in ((2, 4), (3, 7), (4, 5)):
        judge.equal(
            causal_mask(queries, keys),
            by_positions(queries, keys, None),
            "Likely mistake: the offset; query i stands at position keys − queries + i.",
        )


def window_counts_itself(causal_mask, judge: Judge) -> None:
    judge.equal(
        causal_mask(3, 3, 1), by_positions(3, 3, 1), "Likely mistake: with a window of 1 a query sees itself alone."
    )
    for queries, keys, window in ((2, 4, 2), (5, 5, 3), (3, 9, 4), (2, 3, 10)):
        judge.equal(
            causal_mask(queries, keys, window),
            by_positions(queries, keys, window),
            "Likely mistake: the window's far end, or one counted from the end of the text, not from the query.",
        )


MASK = Exercise(
    name="causal_mask",
    title="A causal mask with an offset",
    chapter="02",
    difficulty=2,
    minutes=15,
    checks=[
        booleans_of_the_right_shape,
        sees_itself_and_the_past,
        queries_are_the_last_tokens,
        window_counts_itself,
    ],
    mistakes=[
        Mistake(
            "a number mask", "booleans_of_the_right_shape", edit=("return visible", "return visible.to(torch.float32)")
        ),
        Mistake("blind to itself", "sees_itself_and_the_past", edit=("key <= query", "key < query")),
        Mistake("looks ahead", "sees_itself_and_the_past", edit=("key <= query", "key >= query")),
        Mistake(
            "no offset",
            "queries_are_the_last_tokens",
            edit=("torch.arange(keys - queries, keys)", "torch.arange(queries)"),
        ),
        Mistake(
            "offset of the keys alone",
            "queries_are_the_last_tokens",
            source="""
import torch


def causal_mask(queries, keys, window=None):
    visible = torch.ones(queries, keys, dtype=torch.bool).tril()
    if window is not None:
        visible &= torch.ones(queries, keys, dtype=torch.bool).triu(1 - window)
    return visible
""",
        ),
        Mistake("window too wide", "window_counts_itself", edit=("query - key < window", "query - key <= window")),
        Mistake("window ignored", "window_counts_itself", edit=("if window is not None", "if False")),
        Mistake(
            "one window for all queries",
            "window_counts_itself",
            edit=("query - key < window", "keys - 1 - key < window"),
        ),
        Mistake(
            "the package's own",
            "own work",
            source="""
import minillm.attention


def causal_mask(queries, keys, window=None):
    return minillm.attention.causal_mask(queries, keys, window)
""",
        ),
    ],
    forbids=("minillm.attention",),
)
