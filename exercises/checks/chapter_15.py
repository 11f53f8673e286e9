"""Chapter 15, sparsity: a packed row, Wanda's mask, a column removed, bytes of four formats.

The right answers come from one long string of bits, from rows sorted in plain Python, from least squares on the inputs
themselves, and from formats written out piece by piece.
"""

from __future__ import annotations

import random

import torch

from exercises import Exercise, Judge, Mistake

from .chapter_15_bytes import BYTES
from .chapter_15_obs import OBS

# --- pack_row


def written(row: list[float]) -> tuple[list[float], list[int]]:
    """The packed form as one long string of bits, cut into bytes."""
    values, bits = [], ""
    for start in range(0, len(row), 4):
        group = row[start : start + 4]
        taken = [place for place in range(4) if group[place] != 0]
        for place in range(4):
            if len(taken) < 2 and place not in taken:
                taken.append(place)
        left, right = min(taken), max(taken)
        values += [group[left], group[right]]
        bits = f"{right:02b}{left:02b}" + bits  # later groups stand higher
    bits = "0" * (-len(bits) % 8) + bits
    return values, [int(bits[end - 8 : end], 2) for end in range(len(bits), 0, -8)]


def packed(pack_row, row: list[float], judge: Judge, hint: str) -> None:
    got = pack_row(row)
    judge.parts(got, "values", "indices")
    want = written(row)
    for name, mine, right in zip(("values", "indices"), got, want, strict=True):
        judge.type(mine, (list, tuple), name)
        judge.equal(mine, right, f"({name}) for pack_row({row}). Likely mistake: {hint}")


def one_pair(pack_row, judge: Judge) -> None:
    hint = "the two places exchanged, or not two bits apart; that of the left number stands in the low two bits."
    packed(pack_row, [0.0, 5.0, 0.0, 6.0], judge, hint)


def two_groups_a_byte(pack_row, judge: Judge) -> None:
    hint = (
        "the two groups of a byte exchanged (the left one belongs into the low four bits), a byte for each group, or "
        "places counted from the start of the row."
    )
    packed(pack_row, [5.0, 6.0, 0.0, 0.0, 0.0, 0.0, 7.0, -8.0], judge, hint)
    packed(pack_row, [5.0, 0.0, 6.0, 0.0, 0.0, 7.0, 8.0, 0.0] * 2, judge, hint)


def half_a_byte_left(pack_row, judge: Judge) -> None:
    hint = "the last of an odd number of groups lost; it has a byte of its own, whose upper half is 0."
    packed(pack_row, [1.0, 2.0, 0.0, 0.0, 0.0, 3.0, 4.0, 0.0, 0.0, 5.0, 0.0, 6.0], judge, hint)
    packed(pack_row, [], judge, "a row of no groups has no values and no bytes.")


def fewer_than_two(pack_row, judge: Judge) -> None:
    hint = (
        "a group with one number or none not filled up, filled up from the right instead of from the left, or its "
        "places out of order."
    )
    for group in ([0.0, 0.0, 0.0, 9.0], [9.0, 0.0, 0.0, 0.0], [0.0, 9.0, 0.0, 0.0], [0.0] * 4):
        packed(pack_row, group, judge, hint)


def any_row(pack_row, judge: Judge) -> None:
    rng = random.Random(15)
    for _ in range(30):
        row = []
        for _ in range(rng.randint(1, 7)):
            group = [0.0] * 4
            for place in rng.sample(range(4), rng.choice((0, 1, 2, 2, 2))):
                group[place] = rng.choice((-1, 1)) * rng.randint(1, 9) / 2
            row += group
        packed(pack_row, row, judge, "a case that small rows do not show: many groups, some of them not full.")


PACK = Exercise(
    name="pack_row",
    title="Pack a row as 2:4",
    chapter="15",
    difficulty=2,
    minutes=25,
    checks=[one_pair, two_groups_a_byte, half_a_byte_left, fewer_than_two, any_row],
    mistakes=[
        Mistake("places exchanged", "one_pair", edit=("left | right << 2", "right | left << 2")),
        Mistake("three bits apart", "one_pair", edit=("left | right << 2", "left | right << 3")),
        Mistake(
            "places among all columns",
            "two_groups_a_byte",
            edit=(
                "left, right = sorted(places[:2])",
                "left, right = sorted(places[:2])\n        left, right = left + start, right + start",
            ),
        ),
        Mistake(
            "groups exchanged", "one_pair", edit=("halves[i] | halves[i + 1] << 4", "halves[i] << 4 | halves[i + 1]")
        ),
        Mistake(
            "a byte a group",
            "two_groups_a_byte",
            edit=(
                "halves[i] | halves[i + 1] << 4 for i in range(0, len(halves), 2)",
                "halves[i] for i in range(len(halves) if len(halves) > 2 or halves[-1] else 1)",
            ),
        ),
        Mistake(
            "last group lost",
            "half_a_byte_left",
            edit=("        halves.append(0)", "        halves = halves[:-1] or [*halves, 0]"),
        ),
        Mistake(
            "filled up from the right",
            "fewer_than_two",
            edit=("[p for p in range(4) if group[p] == 0]", "[p for p in (3, 2, 1, 0) if group[p] == 0]"),
        ),
        Mistake(
            "places unsorted", "fewer_than_two", edit=("left, right = sorted(places[:2])", "left, right = places[:2]")
        ),
    ],
    forbids=("minillm.sparsity",),
)


# --- wanda_mask


def kept(weight: torch.Tensor, x: torch.Tensor, count: int) -> torch.Tensor:
    """Row by row in plain Python; exact fractions of the score's square, so that no rounding decides."""
    norms = [sum(v * v for v in column) for column in x.t().double().tolist()]
    mask = torch.ones(weight.shape, dtype=torch.bool)
    for i, row in enumerate(weight.double().tolist()):
        order = sorted(range(len(row)), key=lambda j: row[j] * row[j] * norms[j])
        mask[i, order[:count]] = False
    return mask


def masked(wanda_mask, weight: torch.Tensor, x: torch.Tensor, sparsity: float, judge: Judge, hint: str) -> None:
    got = wanda_mask(weight, x, sparsity)
    judge.type(got, torch.Tensor)
    judge.true(got.dtype == torch.bool, f"a mask is of type bool, and this one of {got.dtype}.")
    count = int(sparsity * weight.shape[1])
    judge.equal(got.tolist(), kept(weight, x, count).tolist(), f"at sparsity {sparsity}. Likely mistake: {hint}")


def drawn(rows: int, columns: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    loud = torch.rand(columns, generator=generator).pow(2) * 10 + 0.1
    return torch.randn(rows, columns, generator=generator), torch.randn(tokens, columns, generator=generator) * loud


def quiet_inputs_alike(wanda_mask, judge: Judge) -> None:
    """All inputs equally loud, one row: plain magnitude."""
    weight, x = torch.tensor([[3.0, -1.0, -4.0, 2.0]]), torch.eye(4)
    hint = "True where a weight goes instead of where it stays, or weights compared with their signs."
    masked(wanda_mask, weight, x, 0.5, judge, hint)


def loud_inputs_count(wanda_mask, judge: Judge) -> None:
    weight = torch.tensor([[5.0, 1.0, 4.0, 2.0]])
    x = torch.tensor([[1.0, 9.0, 1.0, 0.5], [1.0, -9.0, 0.0, 0.5]])
    masked(
        wanda_mask, weight, x, 0.5, judge, "inputs not looked at, summed with their signs, or taken a token at a time."
    )


def the_length_not_the_sum(wanda_mask, judge: Judge) -> None:
    """Many small inputs against one large: sums, means and maxima say otherwise than lengths."""
    x = torch.tensor([[1.0, 3.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    masked(wanda_mask, torch.tensor([[1.0, 1.0]]), x, 0.5, judge, "a sum, mean or maximum of magnitudes for ||x||.")
    x = torch.tensor([[1.0, 1.5], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    masked(wanda_mask, torch.tensor([[1.0, 1.0]]), x, 0.5, judge, "a sum, mean or maximum of magnitudes for ||x||.")
    x = torch.tensor([[2.0, 1.0], [0.0, 0.0]])
    hint = "the norm squared and the weight not, or the other way round."
    masked(wanda_mask, torch.tensor([[1.0, 1.9]]), x, 0.5, judge, hint)
    hint = "the norm squared and the weight not, or the other way round."
    masked(wanda_mask, torch.tensor([[1.0, 2.1]]), x, 0.5, judge, hint)


def each_row_alone(wanda_mask, judge: Judge) -> None:
    weight, x = drawn(5, 8, 6, 1)
    weight[2] *= 100
    masked(wanda_mask, weight, x, 0.5, judge, "one order for the whole matrix; scores compete within a row.")


def any_share(wanda_mask, judge: Judge) -> None:
    for seed, sparsity in enumerate((0.0, 0.3, 0.5, 0.77, 1.0)):
        weight, x = drawn(4, 11, 9, seed)
        masked(wanda_mask, weight, x, sparsity, judge, "a number other than int(sparsity · columns) for each row.")


def close_scores(wanda_mask, judge: Judge) -> None:
    weight = 1 + torch.tensor([[3.0, 1.0, 0.0, 2.0]]) / 4096
    hint = "scores in fewer bits than float32, in which these are all alike, or infinite."
    for loudness in (1.0, 1e5):
        masked(wanda_mask, weight, torch.full((2, 4), loudness), 0.5, judge, hint)


WANDA = Exercise(
    name="wanda_mask",
    title="Wanda's mask",
    chapter="15",
    difficulty=2,
    minutes=15,
    checks=[quiet_inputs_alike, loud_inputs_count, the_length_not_the_sum, each_row_alone, any_share, close_scores],
    mistakes=[
        Mistake(
            "scores in float16",
            "close_scores",
            edit=("scores.argsort(dim=1)", "scores.half().argsort(dim=1, stable=True)"),
        ),
        Mistake("signs kept", "quiet_inputs_alike", edit=("weight.abs()", "weight")),
        Mistake(
            "the mask of what goes",
            "quiet_inputs_alike",
            edit=("scatter_(1, lost, False)", "scatter_(1, lost, False).logical_not()"),
        ),
        Mistake("the largest go", "quiet_inputs_alike", edit=("argsort(dim=1)", "argsort(dim=1, descending=True)")),
        Mistake(
            "inputs not looked at", "loud_inputs_count", edit=("weight.abs() * x.norm(dim=0)", "weight.abs() * 1.0")
        ),
        Mistake("inputs summed", "loud_inputs_count", edit=("x.norm(dim=0)", "x.sum(dim=0)")),
        Mistake("mean magnitude", "the_length_not_the_sum", edit=("x.norm(dim=0)", "x.abs().mean(dim=0)")),
        Mistake("largest magnitude", "the_length_not_the_sum", edit=("x.norm(dim=0)", "x.abs().amax(dim=0)")),
        Mistake("norm squared", "the_length_not_the_sum", edit=("x.norm(dim=0)", "x.norm(dim=0) ** 2")),
        Mistake(
            "one order for the whole matrix",
            "each_row_alone",
            source="""
def wanda_mask(weight, x, sparsity):
    scores = weight.abs() * x.norm(dim=0)
    lost = scores.flatten().argsort()[: int(sparsity * weight.shape[1]) * weight.shape[0]]
    return torch.ones(weight.numel(), dtype=torch.bool).scatter_(0, lost, False).view(weight.shape)
""",
        ),
        Mistake("always half", "any_share", edit=("int(sparsity * weight.shape[1])", "weight.shape[1] // 2")),
    ],
    forbids=("minillm.sparsity",),
)


EXERCISES = [PACK, WANDA, OBS, BYTES]
