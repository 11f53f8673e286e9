"""Chapter 03's last exercise: top-p. The right answers come from exact fractions and Python's own sort."""

from __future__ import annotations

import random
from fractions import Fraction

import torch

from exercises import Exercise, Judge, Mistake


def exact(parts: list[int], whole: int, p: Fraction) -> list[float]:
    """Top-p of the probabilities parts / whole, without a rounding anywhere."""
    chosen: list[int] = []
    for i in sorted(range(len(parts)), key=lambda i: (-parts[i], i)):
        if Fraction(sum(parts[j] for j in chosen), whole) >= p:
            break
        chosen.append(i)
    mass = sum(parts[i] for i in chosen)
    return [parts[i] / mass if i in chosen else 0.0 for i in range(len(parts))]


def compared(top_p, parts: list[int], p: float, judge: Judge, otherwise: str) -> None:
    """`parts` sum to a power of two, so that every partial sum is exact in float64 too."""
    whole = sum(parts)
    got = top_p(torch.tensor(parts, dtype=torch.float64) / whole, p)
    judge.close(got, torch.tensor(exact(parts, whole, Fraction(p)), dtype=torch.float64), otherwise)


def worked_by_hand(top_p, judge: Judge) -> None:
    compared(
        top_p,
        [1, 4, 2, 1],
        0.625,
        judge,
        "for [.125, .5, .25, .125] and 0.625. Likely mistake: the token that crosses p left out, no scaling to one, "
        "or the sorted order returned instead of each token at its own id.",
    )


def reaching_p_is_enough(top_p, judge: Judge) -> None:
    hint = "Likely mistake: one token too many; where the sum is exactly p, p has been reached."
    compared(top_p, [2, 1, 1], 0.5, judge, f"for [.5, .25, .25] and 0.5. {hint}")
    compared(top_p, [1, 4, 2, 1], 0.75, judge, f"for [.125, .5, .25, .125] and 0.75. {hint}")


def one_always_survives(top_p, judge: Judge) -> None:
    compared(
        top_p, [1, 4, 8, 3], 2.0**-20, judge, "for a tiny p. Likely mistake: nothing kept; the favourite always stays."
    )


def ties_go_to_the_lower_id(top_p, judge: Judge) -> None:
    compared(
        top_p,
        [1] * 64,
        0.5,
        judge,
        "for 64 equal tokens and 0.5. Likely mistake: all that are as probable as the last one kept, or a sort that is "
        "not stable.",
    )


def one_keeps_everything(top_p, judge: Judge) -> None:
    probs = torch.tensor([1e-18, 0.75, 1e-18, 0.25], dtype=torch.float64)  # the running sum is 1 before the last two
    got = top_p(probs, 1.0)
    judge.close(got, probs, "for p = 1.", rtol=1e-9, atol=0)


def equals_exact_arithmetic(top_p, judge: Judge) -> None:
    draw = random.Random(3)
    for _ in range(60):
        cuts = sorted(draw.choices(range(1025), k=draw.randint(1, 30)))
        parts = [b - a for a, b in zip([0, *cuts], [*cuts, 1024], strict=True)]
        compared(top_p, parts, draw.randint(1, 1023) / 1024, judge, "on random distributions.")


def in_float64(top_p, judge: Judge) -> None:
    probs = torch.tensor([1, 5, 3, 7], dtype=torch.float64) / 16
    for p in (0.75, 1.0):
        got = top_p(probs, p)
        judge.type(got, torch.Tensor)
        judge.true(
            got.dtype == torch.float64,
            f"the dtype is {got.dtype}, must be torch.float64. Likely mistake: a new tensor takes float32 unless told.",
        )
    hint = "Likely mistake: computed in float32, which cannot tell these sums from p."
    for parts in ([2**39 + 1, 2**39 - 1], [2**39 - 1, 2**39 + 1]):
        compared(top_p, parts, 0.5 + 2.0**-41, judge, f"for a half and a trace, and p of half the trace more. {hint}")


_IN_PLACE = """
def top_p(probs, p):
    order = probs.argsort(descending=True, stable=True)
    sums = probs[order].cumsum(0)
    probs[order[1:][sums[:-1] >= p]] = 0
    return probs / probs.sum()
"""

_ALL_EQUALS = """
def top_p(probs, p):
    ordered = probs.sort(descending=True).values
    before = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)[:-1]])
    last = ordered[int((before < p).sum()) - 1] if p < 1 else 0
    kept = torch.where(probs >= last, probs, 0.0)
    return kept / kept.sum()
"""

_THRESHOLD = """
def top_p(probs, p):
    kept = torch.where(probs >= (1 - p) * probs.max(), probs, 0.0)
    return kept / kept.sum()
"""

_NEW_TENSOR = """
def top_p(probs, p):
    kept, total = torch.zeros(len(probs)), 0.0
    for i in sorted(range(len(probs)), key=lambda i: -probs[i].item()):
        if total >= p and p < 1:
            break
        kept[i] = probs[i]
        total += probs[i].item()
    return kept / kept.sum()
"""

TOP_P = Exercise(
    name="top_p",
    title="Top-p",
    chapter="03",
    difficulty=3,
    minutes=20,
    checks=[
        worked_by_hand,
        reaching_p_is_enough,
        one_always_survives,
        ties_go_to_the_lower_id,
        in_float64,
        one_keeps_everything,
        equals_exact_arithmetic,
    ],
    mistakes=[
        Mistake("the crossing token left out", "worked_by_hand", edit=("(before < p)", "(ordered.cumsum(0) < p)")),
        Mistake("no scaling", "worked_by_hand", edit=("return kept / kept.sum()", "return kept")),
        Mistake("sorted order", "worked_by_hand", edit=("kept[order[:count]]", "kept[:count]")),
        Mistake("from the bottom up", "worked_by_hand", edit=("descending=True", "descending=False")),
        Mistake("in place", "worked_by_hand", source=_IN_PLACE),
        Mistake("a threshold on each token", "reaching_p_is_enough", source=_THRESHOLD),
        Mistake("one too many", "reaching_p_is_enough", edit=("(before < p)", "(before <= p)")),
        Mistake(
            "the crossing token only if it fits",
            "one_always_survives",
            edit=("count = int((before < p).sum())", "count = int((before[1:] < p).sum()) + (p > 0.01)"),
        ),
        Mistake("all of the equals", "ties_go_to_the_lower_id", source=_ALL_EQUALS),
        Mistake("float32 comes back", "in_float64", source=_NEW_TENSOR),
        Mistake(
            "float32 in between",
            "in_float64",
            edit=("ordered.cumsum(0)", "ordered.float().cumsum(0)"),
        ),
        Mistake("p = 1 cuts", "one_keeps_everything", edit=("if p >= 1:", "if p > 1:")),
        Mistake(
            "p = 1 gives the argument back",
            "in_float64",
            edit=("        return probs / probs.sum()", "        return probs"),
        ),
    ],
    forbids=("minillm.sampling", "transformers"),
    fresh=True,
)
