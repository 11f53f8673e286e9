"""Chapter 13, rounding in groups: against every weight taken by itself, in exact fractions."""

from __future__ import annotations

from fractions import Fraction

import torch

from exercises import Exercise, Judge, Mistake


def one_group(values: list[float], symmetric: bool) -> tuple[list[int], float, int]:
    """(codes, scale, zero) of one group. The scale is a float32, as the learner's is; the rest is exact."""
    low, high = (-8, 7) if symmetric else (0, 15)
    smallest, largest = min([0.0, *values]), max([0.0, *values])
    reach = max(-smallest, largest) if symmetric else torch.tensor(largest).sub(smallest).item()
    if reach == 0:
        return [0] * len(values), 1.0, 0
    scale = (torch.tensor(reach) / (7 if symmetric else 15)).item()
    zero = 0 if symmetric else round(Fraction(-smallest) / Fraction(scale))
    codes = [min(max(round(Fraction(v) / Fraction(scale)) + zero, low), high) for v in values]
    return codes, scale, zero


def by_hand(weight: torch.Tensor, group: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes, scales, zeros = [], [], []
    for row in weight.tolist():
        parts = [one_group(row[i : i + group], symmetric) for i in range(0, len(row), group)]
        codes.append([code for part in parts for code in part[0]])
        scales.append([part[1] for part in parts])
        zeros.append([part[2] for part in parts])
    return torch.tensor(codes), torch.tensor(scales), torch.tensor(zeros)


def rounded(quantize_groups, weight: torch.Tensor, group: int, symmetric: bool, judge: Judge, hint: str) -> None:
    got = quantize_groups(weight, group, symmetric)
    judge.type(got, tuple)
    judge.equal(len(got), 3, "Codes, scale and zero, in this order.")
    want = by_hand(weight, group, symmetric)
    for what, i in (("the scales", 1), ("the zeros", 2), ("the codes", 0)):
        judge.type(got[i], torch.Tensor, what)
        kind = "symmetric" if symmetric else "asymmetric"
        where = f"In {what} of {tuple(weight.shape)} in {kind} groups of {group}. Likely mistake: {hint}"
        judge.close(got[i].double(), want[i].double(), where, rtol=1e-6, atol=1e-9)
    for what, i in (("codes", 0), ("zero", 2)):
        judge.true(got[i].dtype == torch.int32, f"{what} is {got[i].dtype}, must be torch.int32.")


def normal(rows: int, columns: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) + shift


def symmetric_row(quantize_groups, judge: Judge) -> None:
    hint = "the scale is the largest magnitude over 7, and a code is w / scale rounded."
    rounded(quantize_groups, torch.tensor([[7.0, -3.6, 0.4, 1.0]]), 4, True, judge, hint)
    rounded(
        quantize_groups, torch.tensor([[1.0, -7.0, 3.3, 0.2]]), 4, True, judge, hint + " Magnitude: signs do not count."
    )


def groups_of_their_own(quantize_groups, judge: Judge) -> None:
    rows = torch.logspace(-2, 2, 5)[:, None]
    hint = "one scale for the whole row or tensor; each group of each row has its own."
    rounded(quantize_groups, normal(5, 24, 1) * rows, 8, True, judge, hint)
    rounded(quantize_groups, normal(3, 12, 2) * rows[:3], 4, True, judge, hint)


def ties_to_even(quantize_groups, judge: Judge) -> None:
    weight = torch.tensor([[7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.5]])
    rounded(
        quantize_groups,
        weight,
        8,
        True,
        judge,
        "ties go to the even code, as torch.round has it; floor(x + 0.5) does not.",
    )


def with_a_zero_point(quantize_groups, judge: Judge) -> None:
    hint = "zero is round(-smallest / scale), added to the rounded weight."
    rounded(quantize_groups, torch.tensor([[-2.0, 13.0, 6.2, 3.0]]), 4, False, judge, hint)
    rounded(quantize_groups, normal(4, 32, 3), 16, False, judge, hint)


def range_holds_zero(quantize_groups, judge: Judge) -> None:
    hint = "a group whose weights are all on one side: widen the range to 0, or the zero point is no code."
    rounded(quantize_groups, normal(2, 16, 4, shift=9.0), 8, False, judge, hint)
    rounded(quantize_groups, normal(2, 16, 5, shift=-9.0), 8, False, judge, hint)


def codes_stay_in_range(quantize_groups, judge: Judge) -> None:
    hint = "round(w / scale) + zero can be 16, and must be 15 then."
    weight = torch.tensor([[-0.5, 14.5, 3.0, 7.0], [-1.5, 13.5, 2.0, 5.0]])
    rounded(quantize_groups, weight, 4, False, judge, hint)
    rounded(quantize_groups, normal(40, 8, 6), 8, False, judge, hint)


def groups_of_zeros(quantize_groups, judge: Judge) -> None:
    weight = normal(2, 12, 7)
    weight[0, 4:8] = 0
    for symmetric in (True, False):
        rounded(quantize_groups, weight, 4, symmetric, judge, "a group of zeros: 0 / 0. Its scale is 1.")


GROUPS = Exercise(
    name="quantize_groups",
    title="Rounding in groups",
    chapter="13",
    difficulty=2,
    minutes=25,
    checks=[
        symmetric_row,
        groups_of_their_own,
        ties_to_even,
        with_a_zero_point,
        range_holds_zero,
        codes_stay_in_range,
        groups_of_zeros,
    ],
    mistakes=[
        Mistake(
            "largest, not largest magnitude",
            "symmetric_row",
            edit=("grouped.abs().amax(-1) / 7", "grouped.amax(-1) / 7"),
        ),
        Mistake("over 8", "symmetric_row", edit=("amax(-1) / 7", "amax(-1) / 8")),
        Mistake(
            "cut instead of rounded",
            "symmetric_row",
            edit=("(grouped / scale[..., None]).round()", "(grouped / scale[..., None]).trunc()"),
        ),
        Mistake(
            "one scale for all",
            "groups_of_their_own",
            edit=(
                "scale = torch.where(reach > 0, reach, 1)",
                "scale = torch.where(reach > 0, reach, 1).amax().expand_as(reach)",
            ),
        ),
        Mistake(
            "half up",
            "ties_to_even",
            edit=("(grouped / scale[..., None]).round()", "(grouped / scale[..., None] + 0.5).floor()"),
        ),
        Mistake("the sign of zero", "with_a_zero_point", edit=("(-smallest / scale)", "(smallest / scale)")),
        Mistake("range over 16", "with_a_zero_point", edit=("- smallest) / 15", "- smallest) / 16")),
        Mistake(
            "zero inside the rounding",
            "with_a_zero_point",
            edit=(
                "(-smallest / scale).round()",
                "(-smallest / scale)",
            ),
        ),
        Mistake(
            "range from the smallest weight",
            "range_holds_zero",
            edit=("grouped.amin(-1).clamp(max=0)", "grouped.amin(-1)"),
        ),
        Mistake(
            "range to the largest weight",
            "range_holds_zero",
            edit=("grouped.amax(-1).clamp(min=0)", "grouped.amax(-1)"),
        ),
        Mistake("no clamp", "codes_stay_in_range", edit=(".clamp(low, high)", "")),
        Mistake("divides by zero", "groups_of_zeros", edit=("torch.where(reach > 0, reach, 1)", "reach")),
    ],
    forbids=("minillm.quantization",),
)
