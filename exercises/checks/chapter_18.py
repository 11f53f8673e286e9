"""Chapter 18, compilation: what fuses, which calls compile, buckets for a trace, and when compiling has paid.

The right answers come from cutting a string, from comparing every call with every code, from trying all sets of
buckets, and from running both servers request by request.
"""

from __future__ import annotations

import random
import re

from exercises import Exercise, Judge, Mistake

from .chapter_18_shapes import BUCKETS, OUTCOMES

# --- fusion

LETTERS = {"pointwise": "p", "reduction": "r", "column": "c", "matmul": "m"}


def by_cutting(chain: list[str]) -> list[list[int]]:
    """The chain without its views as a string, cut into kernels by a pattern."""
    places = [i for i, kind in enumerate(chain) if kind != "view"]
    word = "".join(LETTERS[chain[i]] for i in places)
    return [places[cut.start() : cut.end()] for cut in re.finditer("m|[pr]*c|[pr]+", word)]


def compare(fuse, chain: list[str], judge: Judge, hint: str) -> None:
    got = fuse(chain)
    judge.type(got, (list, tuple))
    judge.true(all(isinstance(kernel, (list, tuple)) for kernel in got), "each kernel must be a list of positions.")
    judge.equal([list(kernel) for kernel in got], by_cutting(chain), f"for {chain}. {hint}")


def neighbours_share(fuse, judge: Judge) -> None:
    hint = "Likely mistake: a kernel for each operator, or a reduction that ends the kernel it is in."
    compare(fuse, ["pointwise", "pointwise", "pointwise"], judge, hint)
    compare(fuse, ["pointwise", "reduction", "pointwise", "reduction", "pointwise"], judge, hint)


def a_matmul_is_alone(fuse, judge: Judge) -> None:
    hint = "Likely mistake: what follows put into the kernel of a matmul, or the matmul into the one that is open."
    compare(fuse, ["pointwise", "matmul", "pointwise", "pointwise", "matmul", "matmul", "reduction"], judge, hint)


def a_column_ends(fuse, judge: Judge) -> None:
    hint = "A column reduction comes last in its kernel. Likely mistake: treated as a row's, or as if it were alone."
    compare(fuse, ["pointwise", "column", "pointwise"], judge, hint)
    compare(fuse, ["column", "column", "matmul", "column"], judge, hint)


def views_are_nothing(fuse, judge: Judge) -> None:
    hint = (
        "Likely mistake: a view counted, or one that separates its neighbours, or positions of the chain without views."
    )
    compare(fuse, ["view", "pointwise", "view", "reduction", "matmul", "view", "pointwise", "view"], judge, hint)
    compare(fuse, ["view"], judge, hint)
    compare(fuse, [], judge, "An empty chain has no kernels.")


def long_chains(fuse, judge: Judge) -> None:
    rng = random.Random(18)
    for _ in range(30):
        chain = rng.choices(["pointwise", "reduction", "column", "matmul", "view"], k=rng.randint(1, 12))
        compare(fuse, chain, judge, "")


FUSE = Exercise(
    name="fuse",
    title="What becomes one kernel",
    chapter="18",
    difficulty=2,
    minutes=20,
    checks=[neighbours_share, a_matmul_is_alone, a_column_ends, views_are_nothing, long_chains],
    mistakes=[
        Mistake(
            "one kernel an operator",
            "neighbours_share",
            edit=('is_open = kind in ("pointwise", "reduction")', "is_open = False"),
        ),
        Mistake(
            "a reduction ends it",
            "neighbours_share",
            edit=('kind in ("pointwise", "reduction")', 'kind == "pointwise"'),
        ),
        Mistake(
            "joins the matmul", "a_matmul_is_alone", edit=('kind in ("pointwise", "reduction")', 'kind != "column"')
        ),
        Mistake("a matmul joins", "a_matmul_is_alone", edit=('kind == "matmul" or not is_open', "not is_open")),
        Mistake(
            "column as row",
            "a_column_ends",
            edit=('("pointwise", "reduction")', '("pointwise", "reduction", "column")'),
        ),
        Mistake("column alone", "a_column_ends", edit=('kind == "matmul" or', 'kind in ("matmul", "column") or')),
        Mistake(
            "a view separates",
            "views_are_nothing",
            edit=("            continue", "            is_open = False\n            continue"),
        ),
        Mistake(
            "a view is pointwise",
            "views_are_nothing",
            edit=(
                '        if kind == "view":\n            continue\n',
                '        kind = "pointwise" if kind == "view" else kind\n',
            ),
        ),
    ],
    forbids=("minillm.compilation", "torch._inductor", "torch._dynamo"),
)


# --- break-even


def by_running(compile_s: int, before_s: int, after_s: int, tokens: int) -> int | None:
    """Both servers, request by request, in whole ticks."""
    ours, theirs = compile_s, 0
    for requests in range(2000):
        if ours <= theirs:
            return requests
        ours += after_s * (tokens - 1)
        theirs += before_s * (tokens - 1)
    return None


def compare_requests(break_even, case: tuple, judge: Judge, hint: str) -> None:
    got, want = break_even(*case), by_running(*case)
    told = f"for compile_s, before_s, after_s, tokens = {case}. {hint}"
    if want is None:
        judge.true(got is None, f"{got!r} {told} It is never paid back: None.")
        return
    judge.type(got, int)
    judge.equal(got, want, told)


def the_first_token_is_prefill(break_even, judge: Judge) -> None:
    hint = "Likely mistake: a step for every token; the first comes out of prefill. Or tokens left out altogether."
    compare_requests(break_even, (60, 4, 2, 4), judge, hint)


def whole_requests(break_even, judge: Judge) -> None:
    hint = "Likely mistake: rounded down, or one more than needed where it comes out even."
    compare_requests(break_even, (61, 4, 2, 11), judge, hint)
    compare_requests(break_even, (100, 4, 2, 11), judge, hint)
    compare_requests(break_even, (3, 9, 2, 40), judge, hint)


def never(break_even, judge: Judge) -> None:
    compare_requests(break_even, (5, 2, 2, 10), judge, "Nothing is saved.")
    compare_requests(break_even, (5, 2, 3, 10), judge, "A step became slower.")
    compare_requests(break_even, (5, 4, 2, 1), judge, "A request of one token has no decode step.")


def for_nothing(break_even, judge: Judge) -> None:
    compare_requests(break_even, (0, 4, 2, 9), judge, "Compiling took no time.")
    compare_requests(break_even, (0, 4, 4, 9), judge, "Compiling took no time, and saved none.")
    got = break_even(0, 2, 3, 9)
    judge.true(got is None, f"{got!r} for a step that became slower. It loses from the first request on: None.")


BREAK_EVEN = Exercise(
    name="break_even",
    title="Break-even",
    chapter="18",
    difficulty=1,
    minutes=15,
    checks=[the_first_token_is_prefill, whole_requests, never, for_nothing],
    mistakes=[
        Mistake("a step for each token", "the_first_token_is_prefill", edit=("(tokens - 1)", "tokens")),
        Mistake("tokens left out", "the_first_token_is_prefill", edit=(" * (tokens - 1)", "")),
        Mistake("rounded down", "whole_requests", edit=("math.ceil(compile_s / saved)", "int(compile_s // saved)")),
        Mistake(
            "one too many",
            "whole_requests",
            edit=("math.ceil(compile_s / saved)", "int(compile_s // saved) + (compile_s != 60)"),
        ),
        Mistake("slower pays", "never", edit=("(before_s - after_s)", "abs(before_s - after_s)")),
        Mistake("infinity for never", "never", edit=("if saved > 0 else None", 'if saved > 0 else float("inf")')),
        Mistake("free but never", "for_nothing", edit=("compile_s == 0 and before_s >= after_s", "False")),
        Mistake("free and slower", "for_nothing", edit=(" and before_s >= after_s", "")),
    ],
    forbids=("minillm.compilation",),
)

EXERCISES = [FUSE, OUTCOMES, BUCKETS, BREAK_EVEN]
