"""GPTQ, AWQ, HQQ, SmoothQuant and rotations, against least squares in float64 and against what they promise."""

from __future__ import annotations

import pytest
import torch

from minillm.errors import QuantizationError
from minillm.quantization import parse, quantize_weight
from minillm.quantization.awq import GRID, clipped, search_scale
from minillm.quantization.calibration import InputStatistics
from minillm.quantization.gptq import gptq, inverse_factor
from minillm.quantization.hqq import NORM, hqq
from minillm.quantization.rotation import hadamard, rotation
from minillm.quantization.smoothquant import smoothing
from minillm.quantization.weight import integer_codes, integer_scales


def inputs(tokens: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Correlated, with a few loud channels, as a layer's inputs are."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    x = torch.randn(tokens, columns, generator=generator) @ mix
    return x * torch.rand(columns, generator=generator).pow(3).mul(8).add(0.1)


def moments(x: torch.Tensor) -> torch.Tensor:
    return x.t() @ x


def product_error(rounded: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> float:
    return ((rounded - weight).double() @ x.double().t()).norm().item()


W = torch.randn(24, 64, generator=torch.Generator().manual_seed(3))
X = inputs(400, 64)


@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_is_least_squares_column_by_column(act_order):
    """Independent: after each column is fixed, the best others are found anew by solving the normal equations."""
    scheme, damping = parse("int4-g64"), 0.01
    H = moments(X).double()
    H += damping * H.diagonal().mean() * torch.eye(64)
    order = moments(X).diagonal().argsort(descending=True) if act_order else torch.arange(64)
    scale, _ = integer_scales(W, scheme)
    fixed = torch.zeros(24, 64, dtype=torch.float64)
    work = W.double().clone()
    codes = torch.zeros(24, 64)
    for step, j in enumerate(order.tolist()):
        codes[:, j] = integer_codes(work[:, j : j + 1].float(), scale, None, scheme)[:, 0]
        fixed[:, j] = codes[:, j].double() * scale[:, 0].double()
        done, left = order[: step + 1], order[step + 1 :]
        if len(left):  # minimise tr(D H D^T) over the free columns, D = W' - W, given the fixed ones
            missing = (fixed - W.double())[:, done]
            work[:, left] = (
                W.double()[:, left] - torch.linalg.solve(H[left][:, left], H[left][:, done] @ missing.t()).t()
            )
    got = gptq(W, moments(X), scheme, damping, act_order)
    assert torch.equal(got.codes().float() - 8, codes)


@pytest.mark.parametrize("name", ["int4-g32", "int4-g32-asym", "int3-g64", "int8"])
def test_gptq_beats_rounding_on_its_inputs(name):
    scheme = parse(name)
    # judged on inputs it has not seen, of the same kind
    other = torch.randn(400, 400, generator=torch.Generator().manual_seed(4)) @ X / 20
    plain = product_error(quantize_weight(W, scheme).dequantize(), W, other)
    for act_order in (False, True):
        assert product_error(gptq(W, moments(X), scheme, act_order=act_order).dequantize(), W, other) < 0.95 * plain


def test_gptq_with_dead_and_repeated_inputs():
    """AutoGPTQ issue 708: moments that are singular, with channels that never fire."""
    x = X.clone()
    x[:, 7] = 0
    x[:, 9] = x[:, 8]
    got = gptq(W, moments(x[:10]), parse("int4-g64"), damping=0.0).dequantize()
    assert got.isfinite().all()
    assert (got[:, 7] == 0).all()


def test_the_factor_is_that_of_the_inverse():
    H = moments(X).double() + torch.eye(64)
    U = inverse_factor(H, 0.0)
    assert torch.allclose(U.t() @ U, torch.linalg.inv(H), rtol=1e-8)
    assert torch.equal(U, U.triu())


def test_moments_of_nan_are_refused():
    with pytest.raises(QuantizationError, match="NaN"):
        gptq(W, torch.full((64, 64), torch.nan), parse("int4-g64"))


def statistics(x: torch.Tensor) -> InputStatistics:
    found = InputStatistics.empty(x.shape[1])
    for part in x.split(130):
        found.add(part)
    return found


def test_awq_takes_the_best_of_its_grid():
    """Independent: every exponent tried on the inputs themselves."""
    scheme, mean = parse("int4-g32"), X.abs().mean(0)
    errors = {}
    for i in range(GRID):
        s = mean.clamp(min=1e-4).pow(i / GRID)
        s = s / (s.max() * s.min()).sqrt()
        errors[i / GRID] = product_error(quantize_weight(W * s, scheme).dequantize() / s, W, X)
    s, r = search_scale(W, statistics(X), scheme)
    assert r == min(errors, key=errors.get) > 0
    assert errors[r] < 0.9 * errors[0.0]
    assert (s > 0).all()


def test_clipping_never_costs_more_than_it_saves():
    scheme = parse("int4-g32")
    block = torch.block_diag(*(moments(X)[i : i + 32, i : i + 32] for i in (0, 32)))
    plain, narrow = quantize_weight(W, scheme).dequantize() - W, clipped(W, block, scheme).dequantize() - W
    assert (((narrow @ block) * narrow).sum(1) <= ((plain @ block) * plain).sum(1) * 1.0001).all()


def test_hqq_lowers_the_norm_it_minimises():
    heavy = torch.rand(24, 64, generator=torch.Generator().manual_seed(5)) < 0.03
    weight = torch.where(heavy, 4 * W, W)  # a few large weights, which the norm forgives
    scheme = parse("hqq-int4-g32")
    plain = quantize_weight(weight, parse("int4-g32-asym")).dequantize() - weight
    better = hqq(weight, scheme).dequantize() - weight
    assert better.abs().pow(NORM).mean() < 0.98 * plain.abs().pow(NORM).mean()


def test_smoothing_evens_out_both_sides():
    s = smoothing(W, X.abs().amax(0))
    activations, weights = X.abs().amax(0) / s, (W * s).abs().amax(0)
    assert torch.allclose(activations, weights, rtol=1e-3)  # alpha = 1/2 makes them equal


@pytest.mark.parametrize("size", [64, 96, 576])
def test_rotations_are_orthogonal(size):
    Q = rotation(size)
    assert torch.allclose(Q @ Q.t(), torch.eye(size, dtype=torch.float64), atol=1e-12)
    assert Q.abs().max() < 1


def test_hadamard_is_flat():
    assert torch.equal(hadamard(64).abs(), torch.full((64, 64), 0.125, dtype=torch.float64))
    with pytest.raises(QuantizationError, match="power of two"):
        hadamard(12)
