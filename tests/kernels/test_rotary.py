"""Rotary embedding against float64, against the model's own, and against complex numbers."""

from __future__ import annotations

import pytest
import torch

from kernels import rotary
from kernels.launch import KernelError
from minillm.layers import apply_rotary
from tests.kernels import harness


def test_stays_in_bounds():
    harness.check_bounds("kernels.rotary")


@pytest.mark.parametrize(("case", "dtype"), harness.trials(rotary))
def test_against_float64(case, dtype):
    harness.check(case, dtype)


def test_half_split_is_what_the_model_does():
    x, (cos, sin) = torch.randn(5, 3, 64), rotary.angles(5, 32, harness.DEVICE)
    doubled = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
    torch.testing.assert_close(rotary.rotary_reference(x, cos, sin), apply_rotary(x, doubled))


def test_interleaved_is_multiplication_by_a_complex_number():
    x, (cos, sin) = torch.randn(5, 3, 34), rotary.angles(5, 17, harness.DEVICE)
    turned = torch.view_as_complex(x.unflatten(-1, (17, 2))) * torch.complex(cos, sin)[:, None]
    torch.testing.assert_close(rotary.rotary_reference(x, cos, sin, True), torch.view_as_real(turned).flatten(-2))


@pytest.mark.parametrize("interleaved", [False, True])
def test_in_place_writes_x_and_nothing_beside_it(interleaved):
    """q is a slice of one matmul's output; its neighbours k and v must come through untouched."""
    qkv = torch.randn(4, 5, 32)
    before, (cos, sin) = qkv.clone(), rotary.angles(4, 8, harness.DEVICE)
    q = qkv[:, 1:3]
    got = rotary.rotary(q, cos, sin, interleaved, inplace=True, backend="triton")
    assert got.data_ptr() == q.data_ptr()
    torch.testing.assert_close(q, rotary.rotary_reference(before[:, 1:3], cos, sin, interleaved))
    assert torch.equal(qkv[:, [0, 3, 4]], before[:, [0, 3, 4]])


def test_columns_past_the_rotary_dim_are_copied_bit_for_bit():
    x, (cos, sin) = torch.randn(3, 2, 80), rotary.angles(3, 10, harness.DEVICE)
    assert torch.equal(rotary.rotary(x, cos, sin, backend="triton")[..., 20:], x[..., 20:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.ones(4, 32)}, r"x has shape \(4, 32\)"),
        ({"cos": torch.ones(3, 16)}, r"cos has shape \(3, 16\); \(4, any\) is needed"),
        ({"sin": torch.ones(4, 8)}, r"sin has shape \(4, 8\); \(4, 16\) is needed"),
        ({"cos": torch.ones(4, 16).half()}, "cos is float16; convert it to one of float32"),
        ({"cos": torch.ones(4, 17), "sin": torch.ones(4, 17)}, "cos has 17 pairs but x has heads of 32"),
        ({"x": torch.ones(4, 32, 2).transpose(1, 2)}, "x has stride 2 in its last dimension"),
    ],
)
def test_wrong_input_is_one_clear_error(arguments, message):
    good = {"x": torch.ones(4, 2, 32), "cos": torch.ones(4, 16), "sin": torch.ones(4, 16), "backend": "triton"}
    with pytest.raises(KernelError, match=message):
        rotary.rotary(**(good | arguments))
