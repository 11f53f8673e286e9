"""Chapter 13, MXFP4: against a search through the powers of two and the eight magnitudes, in exact fractions."""

from __future__ import annotations

from fractions import Fraction

import torch

from exercises import Exercise, Failed, Judge, Mistake

MAGNITUDES = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
STEPS = torch.tensor([float(m) for m in MAGNITUDES])


def scale_byte(values: list[float]) -> int:
    largest = Fraction(max(abs(v) for v in values))
    if largest == 0:
        return 127
    power = -200
    while Fraction(2) ** (power + 1) <= largest:
        power += 1
    return max(power - 2 + 127, 0)


def nearest(size: Fraction) -> int:
    """Code of the nearest magnitude, the even one of two."""
    return min(range(8), key=lambda code: (abs(MAGNITUDES[code] - size), code % 2))


def by_search(blocks: torch.Tensor) -> tuple[list[int], list[list[int]]]:
    scales = [scale_byte(row) for row in blocks.tolist()]
    codes = [
        [nearest(abs(Fraction(v)) / Fraction(2) ** (byte - 127)) + 8 * (v < 0) for v in row]
        for byte, row in zip(scales, blocks.tolist())
    ]
    return scales, codes


def written(mxfp4, blocks: torch.Tensor, judge: Judge, hint: str, only_scale: bool = False) -> None:
    got = mxfp4(blocks)
    judge.type(got, tuple)
    judge.equal(len(got), 2, "The scale bytes and the codes, in this order.")
    for one, what in zip(got, ("the scale", "the codes")):
        judge.type(one, torch.Tensor, what)
        judge.true(one.dtype == torch.uint8, f"{what} must be uint8, and came as {one.dtype}.")
    scales, codes = by_search(blocks)
    judge.equal(got[0], scales, f"In the scale bytes. Likely mistake: {hint}")
    if only_scale:
        return
    judge.equal(list(got[1].shape), list(blocks.shape), "A code for each weight.")
    mine, right = got[1].long(), torch.tensor(codes)
    wrong = (mine != right) & ~((mine % 8 == 0) & (right % 8 == 0) & (mine <= 8))  # 0 and -0 are one
    if wrong.any():
        i, j = wrong.nonzero()[0].tolist()
        got, want = mine[i, j], right[i, j]
        said = f"{blocks[i, j].item():.6g} in a block of scale byte {scales[i]} got code {got}, expected {want}."
        raise Failed(f"{said} Likely mistake: {hint}")


def block(*values: float) -> torch.Tensor:
    """A block whose scale is 1: a 4 ahead of the values, small ones behind."""
    row = [4.0, *values]
    return torch.tensor([row + [0.0] * (32 - len(row))])


def normal(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))


def the_scale(mxfp4, judge: Judge) -> None:
    hint = "floor of the logarithm, minus 2, plus the bias of 127."
    for largest in (5.0, 1.0, 7.0, 0.02, 300.0, 1e-6, 1e6):
        small = normal(1, 1).abs()
        written(mxfp4, small / small.max() * largest, judge, hint, only_scale=True)


def nearest_magnitudes(mxfp4, judge: Judge) -> None:
    written(mxfp4, block(0.1, 0.3, 0.6, 0.9, 1.1, 1.4, 1.6, 1.9, 2.2, 2.9, 3.3), judge, "not the nearest of the eight.")


def signs(mxfp4, judge: Judge) -> None:
    written(
        mxfp4, block(-0.6, -1.1, -2.9, 0.6), judge, "a negative weight's code is 8 more than that of its magnitude."
    )
    below = -normal(1, 2).abs()
    written(
        mxfp4, 1.3 * below / below.abs().max(), judge, "the largest magnitude of negative weights is not their maximum."
    )


def beyond_six(mxfp4, judge: Judge) -> None:
    row = block(7.9, -7.5, 6.5, 5.5)
    written(mxfp4, row, judge, "what is above 6 saturates at code 7; the scale does not grow for it.")


def each_block_its_own(mxfp4, judge: Judge) -> None:
    blocks = normal(6, 3) * torch.logspace(-3, 3, 6)[:, None]
    written(mxfp4, blocks, judge, "one scale for all blocks.")


def ties_to_the_even_code(mxfp4, judge: Judge) -> None:
    ties = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
    hint = "halfway between two the even code is taken, for both signs."
    written(mxfp4, block(*ties), judge, hint)
    written(mxfp4, block(*(-t for t in ties)), judge, hint)


def around_powers_of_two(mxfp4, judge: Judge) -> None:
    powers = 2.0 ** torch.arange(-20, 21, dtype=torch.float32)
    below = torch.nextafter(powers, torch.zeros(()))
    above = torch.nextafter(powers, torch.full((), torch.inf))
    largest = torch.cat([below, powers, above])
    blocks = largest[:, None] * torch.linspace(1, -0.9, 32)
    hint = "just below a power of two log2 rounds up to it; frexp is exact."
    written(mxfp4, blocks, judge, hint, only_scale=True)


def zeros_and_dust(mxfp4, judge: Judge) -> None:
    blocks = torch.zeros(3, 32)
    blocks[1, 3], blocks[2, 5] = 1.0, -1e-38
    hint = "a block of zeros has the byte 127 (a scale of 1), and below 2^-127 the byte stays 0."
    written(mxfp4, blocks, judge, hint)


MXFP4 = Exercise(
    name="mxfp4",
    title="MXFP4",
    chapter="13",
    difficulty=3,
    minutes=25,
    checks=[
        the_scale,
        nearest_magnitudes,
        signs,
        beyond_six,
        each_block_its_own,
        ties_to_the_even_code,
        around_powers_of_two,
        zeros_and_dust,
    ],
    mistakes=[
        Mistake(
            "largest to 6 whatever it takes",
            "the_scale",
            edit=(
                "_, exponent = torch.frexp(largest)",
                "exponent = torch.ceil(torch.log2(largest / 6)).int() + 3",
            ),
        ),
        Mistake("frexp's exponent as it is", "the_scale", edit=("exponent - 1 - 2", "exponent - 2")),
        Mistake("no bias", "the_scale", edit=("(power + 127).to", "(power % 256).to")),
        Mistake(
            "rounds down",
            "nearest_magnitudes",
            edit=("(0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)", "(0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)"),
        ),
        Mistake("evenly spaced", "nearest_magnitudes", edit=("1.75, 2.5, 3.5, 5.0)", "1.75, 2.25, 2.75, 3.25)")),
        Mistake("no signs", "signs", edit=("codes + 8 * (blocks < 0).to(torch.uint8)", "codes")),
        Mistake("largest, not largest magnitude", "signs", edit=("blocks.abs().amax(dim=1)", "blocks.amax(dim=1)")),
        Mistake(
            "wraps beyond 6",
            "beyond_six",
            edit=(
                "    codes = codes + 8 *",
                "    codes = torch.where(size > 7, 0, codes) + 8 *",
            ),
        ),
        Mistake(
            "one scale for all",
            "each_block_its_own",
            edit=(
                "largest = blocks.abs().amax(dim=1)",
                "largest = blocks.abs().amax().expand(len(blocks))",
            ),
        ),
        Mistake(
            "ties up",
            "ties_to_the_even_code",
            edit=("size > middle if below % 2 == 0 else size >= middle", "size >= middle"),
        ),
        Mistake(
            "ties down",
            "ties_to_the_even_code",
            edit=("size > middle if below % 2 == 0 else size >= middle", "size > middle"),
        ),
        Mistake(
            "log2",
            "around_powers_of_two",
            edit=(
                "_, exponent = torch.frexp(largest)",
                "exponent = torch.log2(largest).floor().nan_to_num(neginf=-127).int() + 1",
            ),
        ),
        Mistake("byte below zero", "zeros_and_dust", edit=(".clamp(min=-127)", "")),
        Mistake("zeros by the least scale", "zeros_and_dust", edit=("exponent - 1 - 2, 0)", "exponent - 1 - 2, -127)")),
    ],
    forbids=("minillm.quantization",),
)
