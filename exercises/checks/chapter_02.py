"""Chapter 02, the transformer: RMSNorm, rotary embedding, the causal mask with an offset, grouped heads.

The right answers come from torch's own layers, from rotation matrices and from loops over single numbers, none of
which is how the solutions go about it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from exercises import Exercise, Judge, Mistake

from .chapter_02_attention import ATTENTION
from .chapter_02_mask import MASK
from .chapter_02_ready_made import WithoutReadyMade


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- rms_norm


def worked_by_hand(rms_norm, judge: Judge) -> None:
    got = rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0)
    judge.close(
        got,
        torch.tensor([[3.0, 4.0]]) / 12.5**0.5,
        "Likely mistake: the sum of the squares where the formula has their mean, or the root left out.",
    )


def nothing_is_subtracted(rms_norm, judge: Judge) -> None:
    x = drawn(3, 7) + 5
    want = x / (x**2).mean(dim=1, keepdim=True) ** 0.5
    judge.close(
        rms_norm(x, torch.ones(7), 0.0),
        want,
        "Likely mistake: LayerNorm, which takes the mean away first, or one mean for all tokens.",
        rtol=1e-4,
    )


def weight_and_epsilon(rms_norm, judge: Judge) -> None:
    x, weight = 0.01 * drawn(5, 6, seed=1), drawn(6, seed=2)
    judge.close(
        rms_norm(x, weight, 1e-3),
        F.rms_norm(x, (6,), weight, 1e-3),
        "Likely mistake: the weight left out, or the epsilon outside the root.",
        rtol=1e-4,
    )
    zero = rms_norm(torch.zeros(1, 6), weight, 1e-6)
    judge.close(zero, torch.zeros(1, 6), "Likely mistake: a division by zero; the epsilon belongs inside the root.")


def large_half_numbers(rms_norm, judge: Judge) -> None:
    x, weight = (1000 * drawn(4, 8, seed=3)).to(torch.float16), drawn(8, seed=4)
    got = rms_norm(x, weight, 1e-5)
    judge.type(got, torch.Tensor)
    judge.true(got.dtype == torch.float16, f"the dtype is {got.dtype}, must be that of x. Convert back at the end.")
    want = F.rms_norm(x.double(), (8,), weight.double(), 1e-5)
    judge.close(
        got.double(),
        want,
        "Likely mistake: squares in float16, which ends at 65,504; convert to float32 before squaring.",
        rtol=2e-3,
        atol=1e-4,
    )


def rounded_once(rms_norm, judge: Judge) -> None:
    x, weight = drawn(16, 32, seed=5).to(torch.float16), drawn(32, seed=6)
    judge.close(
        rms_norm(x, weight, 1e-5).double(),
        F.rms_norm(x.double(), (32,), weight.double(), 1e-5),
        "A result in float16 is off by half a step at most, which is one part in 2,048. Likely mistake: back in "
        "float16 before the weight, which rounds twice; convert at the very end.",
        rtol=2**-11 * 1.01,
        atol=1e-6,
    )


def written_by_hand(rms_norm, judge: Judge) -> None:
    with WithoutReadyMade("rms_norm"):
        rms_norm(drawn(2, 3), torch.ones(3), 1e-5)


NORM = Exercise(
    name="rms_norm",
    title="RMSNorm",
    chapter="02",
    difficulty=1,
    minutes=10,
    checks=[
        worked_by_hand,
        nothing_is_subtracted,
        weight_and_epsilon,
        large_half_numbers,
        rounded_once,
        written_by_hand,
    ],
    mistakes=[
        Mistake("sum, not mean", "worked_by_hand", edit=(".mean(dim", ".sum(dim")),
        Mistake("no root", "worked_by_hand", edit=("torch.sqrt(mean_square + eps)", "(mean_square + eps)")),
        Mistake(
            "LayerNorm",
            "nothing_is_subtracted",
            source="""
import torch


def rms_norm(x, weight, eps):
    wide = x.to(torch.float32)
    if wide.shape[-1] > 2:
        wide = wide - wide.mean(dim=-1, keepdim=True)
    return (wide / torch.sqrt((wide * wide).mean(dim=-1, keepdim=True) + eps) * weight).to(x.dtype)
""",
        ),
        Mistake(
            "one mean for all tokens", "nothing_is_subtracted", edit=("mean(dim=-1, keepdim=True)", "mean().view(1, 1)")
        ),
        Mistake(
            "epsilon outside the root",
            "weight_and_epsilon",
            edit=("torch.sqrt(mean_square + eps)", "(torch.sqrt(mean_square) + eps)"),
        ),
        Mistake("no weight", "weight_and_epsilon", edit=(" * weight)", ")")),
        Mistake("squares in float16", "large_half_numbers", edit=("x.to(torch.float32)", "x")),
        Mistake("stays in float32", "large_half_numbers", edit=(".to(x.dtype)", "")),
        Mistake(
            "the weight after rounding",
            "rounded_once",
            edit=(" * weight).to(x.dtype)", ").to(x.dtype) * weight.to(x.dtype)"),
        ),
        Mistake(
            "torch's own norm",
            "written_by_hand",
            source="""
def rms_norm(x, weight, eps):
    return torch.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)
""",
        ),
        Mistake(
            "torch's own norm, two attributes down",
            "own work",
            source="""
def rms_norm(x, weight, eps):
    return torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)
""",
        ),
    ],
    forbids=("minillm.layers", "torch.nn"),
)


# --- rotate


def by_matrices(x: torch.Tensor, positions: list[int], base: float) -> torch.Tensor:
    """Each pair times its own 2 by 2 rotation matrix, in float64, one after another."""
    half = x.shape[-1] // 2
    out = x.double()
    for t, position in enumerate(positions):
        for i in range(half):
            angle = torch.tensor(position * base ** (-i / half), dtype=torch.float64)
            matrix = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
            out[t, :, [i, i + half]] = x[t, :, [i, i + half]].double() @ matrix.T
    return out


def position_zero_stays(rotate, judge: Judge) -> None:
    x = drawn(1, 3, 8)
    judge.close(
        rotate(x, torch.tensor([0]), 10000.0), x, "Position 0 is no turn at all. Likely mistake: positions from one."
    )


def quarter_of_a_circle(rotate, judge: Judge) -> None:
    x = torch.tensor([[[1.0, 0.0]]])
    judge.close(
        rotate(x, torch.tensor([1]), 10000.0),
        torch.tensor([[[0.5403023, 0.8414710]]]),
        "(1, 0) becomes (cos 1, sin 1). Likely mistake: clockwise, that is, a wrong sign of a sine.",
    )


def halves_not_neighbours(rotate, judge: Judge) -> None:
    x = torch.zeros(1, 1, 8)
    x[0, 0, 1] = 1.0  # point 1, whose partner is x[5]
    got = rotate(x, torch.tensor([3]), 10000.0)
    judge.type(got, torch.Tensor)
    judge.close(
        got,
        by_matrices(x, [3], 10000.0).float(),
        "Likely mistake: the pairs, which are (x[i], x[i + D/2]) and not neighbours, or the exponent −2i/D.",
    )


def each_token_and_point(rotate, judge: Judge) -> None:
    x, positions = drawn(4, 3, 6, seed=5), [9, 0, 4, 200]
    for base in (10000.0, 100.0):
        judge.close(
            rotate(x, torch.tensor(positions), base),
            by_matrices(x, positions, base).float(),
            "Likely mistake: the row's number instead of `positions`, a base that is ignored, or mixed-up dimensions.",
            rtol=1e-4,
            atol=1e-4,
        )


def keeps_the_dtype(rotate, judge: Judge) -> None:
    got = rotate(drawn(2, 1, 4).to(torch.bfloat16), torch.tensor([300, 301]), 10000.0)
    judge.type(got, torch.Tensor)
    judge.true(
        got.dtype == torch.bfloat16, f"the dtype is {got.dtype}, must be that of x, bfloat16. Convert at the end."
    )
    judge.close(
        got.double(),
        by_matrices(drawn(2, 1, 4).to(torch.bfloat16), [300, 301], 10000.0),
        "Likely mistake: angles in bfloat16, which cannot tell position 300 from 301; compute them in float32.",
        rtol=0.02,
        atol=0.02,
    )


def rounded_at_the_end(rotate, judge: Judge) -> None:
    x, positions = drawn(8, 2, 16, seed=7).to(torch.bfloat16), list(range(300, 308))
    judge.close(
        rotate(x, torch.tensor(positions), 10000.0).double(),
        by_matrices(x, positions, 10000.0),
        "A result in bfloat16 is off by half a step at most, which is one part in 256. Likely mistake: cosines, sines "
        "or products rounded to x's dtype; convert at the end, once.",
        rtol=2**-8,
        atol=2e-4,
    )


ROTATE = Exercise(
    name="rotate",
    title="Rotary embedding",
    chapter="02",
    difficulty=2,
    minutes=20,
    checks=[
        position_zero_stays,
        quarter_of_a_circle,
        halves_not_neighbours,
        each_token_and_point,
        keeps_the_dtype,
        rounded_at_the_end,
    ],
    mistakes=[
        Mistake("positions from one", "position_zero_stays", edit=("positions[:, None]", "(positions[:, None] + 1)")),
        Mistake("the other way round", "quarter_of_a_circle", edit=("angles.sin()", "(-angles).sin()")),
        Mistake(
            "returns its input", "quarter_of_a_circle", source="def rotate(x, positions, base=1e4):\n    return x\n"
        ),
        Mistake(
            "neighbouring pairs",
            "halves_not_neighbours",
            source="""
import torch


def rotate(x, positions, base=10000.0):
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = positions[:, None].to(torch.float32) * frequencies
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)
""",
        ),
        Mistake("half the exponent", "halves_not_neighbours", edit=(") / half)", ") / (2 * half))")),
        Mistake(
            "rows, not positions",
            "each_token_and_point",
            edit=("positions[:, None]", "(positions[:1, None] + torch.arange(len(positions))[:, None])"),
        ),
        Mistake("base ignored", "each_token_and_point", edit=("frequencies = base **", "frequencies = 10000.0 **")),
        Mistake("float32 comes back", "keeps_the_dtype", edit=(".to(x.dtype)", "")),
        Mistake(
            "angles in x's dtype",
            "keeps_the_dtype",
            edit=("positions[:, None].to(torch.float32)", "positions[:, None].to(x.dtype).to(torch.float32)"),
        ),
        Mistake(
            "cosines in x's dtype",
            "rounded_at_the_end",
            edit=("    a, b = x.chunk", "    cos, sin = cos.to(x.dtype), sin.to(x.dtype)\n    a, b = x.chunk"),
        ),
    ],
    forbids=("minillm.layers", "transformers"),
)


EXERCISES = [NORM, ROTATE, MASK, ATTENTION]
