"""W8A16 against float64, against torch's 16-bit matmul, and against what has gone wrong elsewhere."""

from __future__ import annotations

import pytest
import torch

from kernels import w8a16
from kernels.launch import KernelError
from tests.kernels import harness


def test_stays_in_bounds():
    harness.check_bounds("kernels.w8a16")


@pytest.mark.parametrize(("case", "dtype"), harness.trials(w8a16))
def test_against_float64(case, dtype):
    harness.check(case, dtype)


def test_every_int8_arrives():
    """The bit trick holds from -128 to 127, in each of the two paths."""
    weight = torch.arange(-128, 128, dtype=torch.int8)[:, None].repeat(1, 32)
    x = torch.zeros(2, 32).half()
    x[:, 5] = 1.0
    for rows in (x[:1], x):
        y = w8a16.w8a16(rows, weight, torch.ones(256), backend="triton")
        assert torch.equal(y, torch.arange(-128.0, 128.0).half().expand_as(y))


@pytest.mark.parametrize("splits", [1, 2, 3, 5])
def test_splits_whatever_their_number_give_the_same_sum(splits):
    """aiter#5286: K / splits was no multiple of BLOCK_K, and the last tile of each split read NaN."""
    x, weight = torch.randn(3, 401).half(), torch.randint(-128, 128, (20, 401), dtype=torch.int8)
    scale = torch.rand(20) / 128
    with harness.poisoned():
        y = w8a16.w8a16(x, weight, scale, splits=splits, backend="triton")
    torch.testing.assert_close(y, w8a16.w8a16_reference(x, weight, scale))


def test_the_scale_comes_after_the_dot():
    """2⁻²⁶ is zero in float16, and so would be a weight of 1 that met it before the sum over 2¹⁸ did."""
    x = torch.full((2, 256), 1024.0, dtype=torch.float16)
    weight = torch.full((16, 256), 1, dtype=torch.int8)
    y = w8a16.w8a16(x, weight, torch.full((16,), 2.0**-26), backend="triton")
    assert torch.equal(y, torch.full((2, 16), 2.0**-8, dtype=torch.float16))


def test_sums_leave_float16_behind():
    """256 · 127 · 60 is 1.95 million, thirty times what float16 holds."""
    x, weight = torch.full((2, 256), 60.0).half(), torch.full((16, 256), 127, dtype=torch.int8)
    y = w8a16.w8a16(x, weight, torch.full((16,), 2.0**-8), backend="triton")
    assert torch.equal(y, torch.full((2, 16), 256 * 127 * 60 / 256).half())


def test_quantized_weights_are_as_near_as_int8_gets():
    """The relative error of normally distributed rows of 4096 in int8 is 0.0087."""
    weight = torch.randn(64, 4096)
    q, scale = w8a16.quantize(weight)
    error = (q * scale[:, None] - weight).norm() / weight.norm()
    assert 0.0080 < error < 0.0095
    assert w8a16.quantize(torch.zeros(2, 8))[0].abs().sum() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight": torch.ones(8, 33, dtype=torch.int8)}, r"weight has shape \(8, 33\); \(any, 32\) is needed"),
        ({"weight": torch.ones(8, 32)}, "weight is float32; convert it to one of int8"),
        ({"scale": torch.ones(7)}, r"scale has shape \(7,\)"),
        ({"scale": torch.ones(8).half()}, "scale is float16"),
        ({"x": torch.ones(4, 32)}, "x is float32; convert it to one of float16, bfloat16"),
        ({"x": torch.ones(32).half()}, r"x has shape \(32,\); \(any, any\) is needed"),
        ({"weight": torch.ones(32, 8, dtype=torch.int8).t()}, r"call weight.contiguous\(\)"),
        ({"splits": 0}, "splits is 0"),
    ],
)
def test_wrong_input_is_one_clear_error(arguments, message):
    good = {"x": torch.ones(4, 32).half(), "weight": torch.ones(8, 32, dtype=torch.int8), "scale": torch.ones(8)}
    with pytest.raises(KernelError, match=message):
        w8a16.w8a16(**(good | {"backend": "triton"} | arguments))
