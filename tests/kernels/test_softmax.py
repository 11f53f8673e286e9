"""Softmax and log-sum-exp against float64, against torch's own operators, and on rows that have no maximum."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import softmax
from kernels.launch import KernelError
from tests.kernels import harness


def test_stays_in_bounds():
    harness.check_bounds("kernels.softmax")


@pytest.mark.parametrize(("case", "dtype"), harness.trials(softmax))
def test_against_float64(case, dtype):
    harness.check(case, dtype)


def test_the_reference_is_torchs_operators():
    x = torch.randn(9, 81, dtype=torch.float64) * 20
    y, lse = softmax.softmax_reference(x)
    torch.testing.assert_close(y, x.softmax(dim=-1))
    torch.testing.assert_close(lse, x.logsumexp(dim=-1))


def test_the_base_is_e():
    """Eight equal logits: the log-sum-exp is c + log 8, in base 2 it would be (c + 3)."""
    y, lse = softmax.softmax(torch.full((2, 8), 5.0), backend="triton")
    assert torch.equal(y, torch.full_like(y, 0.125))
    torch.testing.assert_close(lse, torch.full_like(lse, 5 + math.log(8)))


@pytest.mark.parametrize("columns", [64, 2 * softmax.MAX_BLOCK])
def test_a_masked_row_gives_zeros(columns):
    """TensorRT-LLM#17477: the fully masked row got weights. Its neighbours are what they are alone."""
    x = torch.randn(3, columns)
    x[1] = float("-inf")
    with harness.poisoned():
        y, lse = softmax.softmax(x, backend="triton")
    assert (y[1] == 0).all()
    assert lse[1] == float("-inf")
    for row in (0, 2):
        alone = softmax.softmax(x[row : row + 1], backend="triton")
        assert torch.equal(y[row], alone[0][0])
        assert lse[row] == alone[1][0]


@pytest.mark.parametrize("at", [0, softmax.MAX_BLOCK - 1, softmax.MAX_BLOCK, softmax.MAX_BLOCK + 16])
def test_nan_reaches_every_column_from_any_block(at):
    x = torch.randn(1, softmax.MAX_BLOCK + 17)
    x[0, at] = float("nan")
    y, lse = softmax.softmax(x, backend="triton")
    assert y.isnan().all()
    assert lse.isnan().all()


def test_the_maximum_may_come_last():
    """Online: the sum of the first block is rescaled by exp(-200), which is 0 in float32."""
    x = torch.zeros(1, softmax.MAX_BLOCK + 2)
    x[0, -2:] = 200.0
    y, lse = softmax.softmax(x, backend="triton")
    assert y[0, -2:].tolist() == [0.5, 0.5]
    assert (y[0, :-2] == 0).all()
    torch.testing.assert_close(lse.item(), 200 + math.log(2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.ones(4, 32, dtype=torch.int32)}, "x is int32; convert it"),
        ({"x": torch.ones(4, 32, dtype=torch.float64)}, "x is float64; convert it"),
        ({"x": torch.ones(32)}, r"x has shape \(32,\)"),
        ({"x": torch.ones(4, 0)}, "a row needs at least one column"),
        ({"x": torch.ones(32, 4).t()}, r"x has stride 4 in its last dimension; call x.contiguous\(\)"),
        ({"backend": "cuda"}, "backend is 'cuda'; use one of auto, triton, torch"),
    ],
)
def test_wrong_input_is_one_clear_error(arguments, message):
    with pytest.raises(KernelError, match=message):
        softmax.softmax(**({"x": torch.ones(4, 32), "backend": "triton"} | arguments))
