"""Chapter 16, speculative decoding: one position's verdict, tokens a step, prompt lookup, a chain verified greedily.

The right answers come from whole grids of random numbers, from every way in which a chain can end, from strings, and
from decoding one token at a time.
"""

from __future__ import annotations

import itertools
import math
import random

from exercises import Exercise, Judge, Mistake

from .chapter_16_chain import LOOK_UP, VERIFY

# --- keep_or_replace

GRID = [(i + 0.5) / 200 for i in range(200)]
P, Q = [0.4, 0.3, 0.05, 0.25, 0.0], [0.1, 0.2, 0.5, 0.0, 0.2]


def verdict(keep_or_replace, judge: Judge, draft: int, u: float, v: float, p=P, q=Q) -> int:
    got = keep_or_replace(p, q, draft, u, v)
    judge.type(got, int)
    judge.true(0 <= int(got) < len(p), f"{got} is no token of a vocabulary of {len(p)}.")
    return int(got)


def wanted_drafts_stay(keep_or_replace, judge: Judge) -> None:
    for draft in (0, 1):
        for u in (0.0, 0.5, 0.999):
            hint = "a draft that the target wants at least as much as the draft did is always kept."
            got = verdict(keep_or_replace, judge, draft, u, 0.9)
            judge.equal(got, draft, f"for draft {draft}, p {P[draft]}, q {Q[draft]}, u {u}. Likely mistake: {hint}")


def kept_as_often_as_it_should(keep_or_replace, judge: Judge) -> None:
    kept = sum(verdict(keep_or_replace, judge, 2, u, 0.3) == 2 for u in GRID)
    hint = "the ratio upside down, or every draft refused (or kept) that the target likes less."
    judge.equal(kept, 20, f"kept, of 200 values of u, where p is 0.05 and q is 0.5. Likely mistake: {hint}")
    kept = sum(verdict(keep_or_replace, judge, 4, u, 0.3) == 4 for u in [0.0, *GRID])
    judge.equal(
        kept, 0, "kept, where the target gives the draft no chance. Likely mistake: <= in place of <; u can be 0."
    )


def what_comes_out_is_the_target(keep_or_replace, judge: Judge) -> None:
    """Over all drafts, by their chance, and grids of u and v."""
    rng, grid = random.Random(16), GRID[::5]
    cases = [(P, Q)]
    for size in (2, 3, 6):
        cases.append(
            tuple([x / sum(row) for x in row] for row in ([rng.random() ** 2 for _ in range(size)] for _ in "pq"))
        )
    for p, q in cases:
        came = [0.0] * len(p)
        for draft, u, v in itertools.product(range(len(p)), grid, grid):
            if q[draft] > 0:
                came[verdict(keep_or_replace, judge, draft, u, v, p, q)] += q[draft] / len(grid) ** 2
        hint = (
            "a replacement drawn from p itself, from |p - q|, from max(0, p - q) without dividing by its sum, or with "
            "u again, which is large whenever a draft was refused."
        )
        off = max(abs(a - b) for a, b in zip(came, p, strict=True))
        judge.true(
            off < 0.03, f"Tokens come {off:.3f} off the target's p, over all drafts, u and v. Likely mistake: {hint}"
        )


def numbers_at_their_ends(keep_or_replace, judge: Judge) -> None:
    got = verdict(keep_or_replace, judge, 1, 0.9, 0.0, [0.0, 0.2, 0.8], [0.0, 0.7, 0.3])
    judge.equal(got, 2, "for p [0, 0.2, 0.8], q [0, 0.7, 0.3], draft 1, u 0.9, v 0. Likely mistake: >= in place of >.")


KEEP = Exercise(
    name="keep_or_replace",
    title="Keep or replace",
    chapter="16",
    difficulty=2,
    minutes=20,
    checks=[wanted_drafts_stay, kept_as_often_as_it_should, what_comes_out_is_the_target, numbers_at_their_ends],
    mistakes=[
        Mistake("only if u is small", "wanted_drafts_stay", edit=("u * q[draft] < p[draft]", "u < p[draft]")),
        Mistake("ratio upside down", "wanted_drafts_stay", edit=("u * q[draft] < p[draft]", "u * p[draft] < q[draft]")),
        Mistake(
            "a biased acceptance",
            "kept_as_often_as_it_should",
            edit=("u * q[draft] < p[draft]", "q[draft] <= p[draft]"),
        ),
        Mistake("zero slips through", "kept_as_often_as_it_should", edit=("q[draft] < p", "q[draft] <= p")),
        Mistake("replaced from p", "what_comes_out_is_the_target", edit=("max(0.0, a - b)", "a")),
        Mistake("distance both ways", "what_comes_out_is_the_target", edit=("max(0.0, a - b)", "abs(a - b)")),
        Mistake("not divided by the sum", "what_comes_out_is_the_target", edit=("v * sum(left)", "v")),
        Mistake("one number for both", "what_comes_out_is_the_target", edit=("v * sum(left)", "u * sum(left)")),
        Mistake("a token of no mass", "numbers_at_their_ends", edit=("running > v", "running >= v")),
    ],
    forbids=("minillm.speculative", "minillm.sampling"),
)


# --- tokens_per_step


def by_every_ending(rates: list) -> float:
    """Each way in which drafts would be kept or not, its chance, and the tokens that it gives."""
    expected = 0.0
    for way in itertools.product((True, False), repeat=len(rates)):
        chance = math.prod(rate if kept else 1 - rate for rate, kept in zip(rates, way, strict=True))
        expected += chance * ([*way, False].index(False) + 1)
    return expected


def counted(tokens_per_step, rates: list, judge: Judge, hint: str) -> None:
    got = tokens_per_step(rates)
    judge.type(got, (float, int))
    judge.close(got, by_every_ending(rates), f"for tokens_per_step({rates}). Likely mistake: {hint}")


def certain_and_hopeless(tokens_per_step, judge: Judge) -> None:
    counted(tokens_per_step, [1.0, 1.0, 1.0], judge, "the bonus token left out: all kept gives one token more.")
    counted(tokens_per_step, [0.0, 0.0], judge, "a refused draft is replaced, so a step gives at least one token.")


def no_drafts(tokens_per_step, judge: Judge) -> None:
    counted(tokens_per_step, [], judge, "without drafts it is plain decoding, one token a step.")


def chains_break(tokens_per_step, judge: Judge) -> None:
    hint = "the rates added up: a draft counts only if every one before it was kept."
    counted(tokens_per_step, [0.5, 0.5], judge, hint)
    counted(tokens_per_step, [0.8] * 5, judge, hint)


def places_differ(tokens_per_step, judge: Judge) -> None:
    hint = "one rate used for all places; each place has its own, and their order matters."
    counted(tokens_per_step, [0.9, 0.6, 0.2, 0.7], judge, hint)
    counted(tokens_per_step, [0.7, 0.2, 0.6, 0.9], judge, hint)


TOKENS = Exercise(
    name="tokens_per_step",
    title="Tokens a step",
    chapter="16",
    difficulty=1,
    minutes=10,
    checks=[certain_and_hopeless, no_drafts, chains_break, places_differ],
    mistakes=[
        Mistake(
            "no bonus", "certain_and_hopeless", edit=("expected, reached = 1.0, 1.0", "expected, reached = 0.0, 1.0")
        ),
        Mistake(
            "rates added",
            "chains_break",
            edit=("reached *= rate", "reached = rate"),
        ),
        Mistake(
            "all or nothing",
            "chains_break",
            source="def tokens_per_step(rates):\n    reached = 1.0\n    for rate in rates:\n        reached *= rate\n"
            "    return 1.0 + len(rates) * reached\n",
        ),
        Mistake(
            "mean rate",
            "places_differ",
            edit=("reached *= rate", "reached *= sum(rates) / len(rates)"),
        ),
        Mistake(
            "formula divides by zero",
            "certain_and_hopeless",
            source=(
                "def tokens_per_step(rates):\n    a = rates[0] if rates else 0.0\n"
                "    return (1 - a ** (len(rates) + 1)) / (1 - a)\n"
            ),
        ),
        Mistake("backwards", "places_differ", edit=("for rate in rates:", "for rate in reversed(rates):")),
    ],
    forbids=("minillm.speculative", "minillm.analysis"),
)

EXERCISES = [KEEP, TOKENS, LOOK_UP, VERIFY]
