"""Which weights go, and what those that stay become: against brute force and against least squares in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.errors import SparsityError
from minillm.sparsity import Sparsity, parse
from minillm.sparsity.methods import MASK_BLOCK, magnitude, sparsegpt, wanda
from minillm.sparsity.pattern import smallest

NAMES = ("magnitude-0.5", "magnitude-2:4", "magnitude-4:8", "wanda-0.5", "wanda-2:4", "sparsegpt-0.5", "sparsegpt-2:4")


def inputs(tokens: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Correlated, with a few loud channels, as a layer's inputs are."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    x = torch.randn(tokens, columns, generator=generator) @ mix
    return x * torch.rand(columns, generator=generator).pow(3).mul(8).add(0.1)


W = torch.randn(24, 64, generator=torch.Generator().manual_seed(3))
X = inputs(400, 64)


def moments(x: torch.Tensor) -> torch.Tensor:
    return x.t() @ x


def sparse(name: str, weight: torch.Tensor = W, x: torch.Tensor = X) -> torch.Tensor:
    wanted = parse(name)
    if wanted.method == "magnitude":
        return magnitude(weight, wanted)
    return {"wanda": wanda, "sparsegpt": sparsegpt}[wanted.method](weight, moments(x), wanted)


def product_error(changed: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> float:
    return ((changed - weight).double() @ x.double().t()).norm().item()


def test_golden_error_of_2_4_on_a_normal_distribution():
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    got = sparse("magnitude-2:4", weight)
    assert ((got - weight).norm() / weight.norm()).item() == pytest.approx(0.364, rel=0.02)


@given(st.integers(1, 6), st.integers(1, 30), st.integers(0, 9), st.integers(0, 5))
@settings(deadline=None, max_examples=60)
def test_the_smallest_are_exactly_so_many(rows, columns, seed, levels):
    """Ties and all: against a sort of (score, place) pairs."""
    scores = torch.randint(0, levels + 1, (rows, columns), generator=torch.Generator().manual_seed(seed)).float()
    count = (seed * columns) // 9
    got = smallest(scores, count)
    for row, picked in zip(scores.tolist(), got.tolist(), strict=True):
        order = sorted(range(columns), key=lambda j: (row[j], j))
        assert [j for j in range(columns) if picked[j]] == sorted(order[:count])


@pytest.mark.parametrize("name", NAMES)
def test_the_share_is_kept(name):
    got, wanted = sparse(name), parse(name)
    assert (got == 0).float().mean().item() == pytest.approx(0.5, abs=1e-3)
    if wanted.pattern:
        assert ((got.view(24, -1, wanted.group) == 0).sum(-1) == wanted.group // 2).all()
    if wanted.method != "sparsegpt":  # what stays, stays as it is
        assert torch.equal(got[got != 0], W[got != 0])


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_any_share(method, fraction):
    got = sparse(f"{method}-{fraction}")
    assert (got == 0).float().mean().item() == pytest.approx(fraction, abs=0.01)
    if fraction == 0:
        assert torch.allclose(got, W, atol=1e-6)


def test_magnitude_takes_the_smallest_of_the_matrix():
    lost = magnitude(W, parse("magnitude-0.4")) == 0
    assert W[lost].abs().max() < W[~lost].abs().min()


def test_wanda_by_hand():
    """Figure 1 of the paper in small: the loud input saves a small weight; rows are compared with themselves alone."""
    weight = torch.tensor([[4.0, 0.5, -2.0, 1.0], [0.3, 0.1, 0.2, 0.1]])
    x = torch.tensor([[1.0, 6.0, 1.0, 0.0], [0.0, 8.0, 0.0, 1.0]])  # norms 1, 10, 1, 1
    got = wanda(weight, moments(x), parse("wanda-0.5"))
    assert torch.equal(got, torch.tensor([[4.0, 0.5, 0.0, 0.0], [0.3, 0.1, 0.0, 0.0]]))


@pytest.mark.parametrize("name", ["sparsegpt-2:4", "sparsegpt-4:8", "sparsegpt-0.5"])
def test_sparsegpt_is_masked_least_squares(name):
    """Independent: columns are settled in order, each at its mask; after every column the free ones are found anew by
    solving the normal equations of the rest, and masks are chosen from those, by the exact rise of the loss."""
    wanted = parse(name)
    H = moments(X).double()
    H += 0.01 * H.diagonal().mean() * torch.eye(64)
    width = wanted.group if wanted.pattern else MASK_BLOCK
    work, fixed = W.double().clone(), torch.zeros(24, 64, dtype=torch.float64)
    lost = torch.zeros(24, 64, dtype=torch.bool)
    for j in range(64):
        if j % width == 0:
            for column in range(j, min(j + width, 64)):
                # removing w_c with all columns before it settled costs w_c² / [(H from c on)^-1]_cc
                inverse = torch.linalg.inv(H[column:, column:])[0, 0]
                lost[:, column] = False
                work_cost = work[:, column] ** 2 / inverse
                fixed[:, column] = work_cost  # kept here until the column is settled
            block = fixed[:, j : j + width].clone()
            flat = block.view(-1, width if wanted.pattern else block.numel())
            order = flat.argsort(dim=1)[:, : flat.shape[1] // 2]
            lost[:, j : j + width] = torch.zeros_like(flat).scatter_(1, order, 1).view(block.shape).bool()
        fixed[:, j] = torch.where(lost[:, j], 0, work[:, j])
        if j < 63:
            missing = (fixed - W.double())[:, : j + 1]
            solved = torch.linalg.solve(H[j + 1 :, j + 1 :], H[j + 1 :, : j + 1] @ missing.t())
            work[:, j + 1 :] = W.double()[:, j + 1 :] - solved.t()
    got = sparsegpt(W, moments(X), wanted)
    assert torch.equal(got == 0, lost)
    assert torch.allclose(got.double(), fixed, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pattern", ["0.5", "2:4", "4:8"])
def test_better_methods_are_better_on_unseen_inputs(pattern):
    other = torch.randn(400, 400, generator=torch.Generator().manual_seed(4)) @ X / 20
    error = {m: product_error(sparse(f"{m}-{pattern}"), W, other) for m in ("magnitude", "wanda", "sparsegpt")}
    assert max(error["wanda"], error["sparsegpt"]) < 0.9 * error["magnitude"]
    if pattern != "0.5":  # 64 columns are half a mask block, so all zeros are chosen before any error has moved
        assert error["sparsegpt"] < 0.9 * error["wanda"]


def test_sparsegpt_with_dead_and_repeated_inputs():
    x = X.clone()
    x[:, 7] = 0
    x[:, 9] = x[:, 8]
    got = sparsegpt(W, moments(x[:10]), parse("sparsegpt-2:4"), damping=0.0)
    assert got.isfinite().all()
    assert (got[:, 7] == 0).all()


def test_more_columns_than_a_mask_block():
    weight = torch.randn(8, 2 * MASK_BLOCK + 8, generator=torch.Generator().manual_seed(1))
    got = sparse("sparsegpt-0.75", weight, inputs(300, weight.shape[1]))
    for first in range(0, weight.shape[1], MASK_BLOCK):
        part = got[:, first : first + MASK_BLOCK]
        assert int((part == 0).sum()) == round(0.75 * part.numel())


def test_moments_of_nan_are_refused():
    with pytest.raises(SparsityError, match="NaN"):
        sparsegpt(W, torch.full((64, 64), torch.nan), parse("sparsegpt-2:4"))


@pytest.mark.parametrize(
    ("name", "method", "fraction", "pattern"),
    [
        ("wanda-2:4", "wanda", 0.5, "2:4"),
        ("magnitude-0.5", "magnitude", 0.5, None),
        ("sparsegpt-1", "sparsegpt", 1, None),
    ],
)
def test_names(name, method, fraction, pattern):
    assert parse(name) == Sparsity(method, fraction, pattern)
    assert parse(name).name == name


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("wanda", "write one like"),
        ("wnada-2:4", "write one like"),
        ("wanda-1:4", "choose 2:4 or 4:8"),
        ("wanda-1.5", "from 0 to 1"),
        ("wanda--0.5", "write one like"),
        (None, "write one like"),
    ],
)
def test_bad_names(name, told):
    with pytest.raises(SparsityError, match=told):
        parse(name)


@pytest.mark.parametrize("fraction", [-0.1, 1.01, float("nan"), True, "half"])
def test_bad_shares(fraction):
    with pytest.raises(SparsityError, match="from 0 to 1"):
        Sparsity("wanda", fraction)
