"""SwiGLU against float64 and against what has gone wrong elsewhere."""

from __future__ import annotations

import pytest
import torch

from kernels import swiglu
from kernels.launch import KernelError
from tests.kernels import harness


def test_stays_in_bounds():
    harness.check_bounds("kernels.swiglu")


@pytest.mark.parametrize(("case", "dtype"), harness.trials(swiglu))
def test_against_float64(case, dtype):
    harness.check(case, dtype)


def test_the_reference_is_the_formula():
    gate, up = torch.randn(7, 33, dtype=torch.float64), torch.randn(7, 33, dtype=torch.float64)
    torch.testing.assert_close(swiglu.swiglu_reference(gate, up), gate / (1 + (-gate).exp()) * up)


def test_extremes_stay_finite():
    """exp(-g) is infinite at g = -100; the limit is 0, not NaN."""
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]])
    y = swiglu.swiglu(gate, torch.ones_like(gate), backend="triton")
    torch.testing.assert_close(y.cpu(), torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e4]]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"up": torch.ones(4, 31)}, r"up has shape \(4, 31\); \(4, 32\) is needed"),
        ({"up": torch.ones(4, 32).half()}, "up is float16 but gate is float32; convert one of them"),
        ({"gate": torch.ones(32)}, r"gate has shape \(32,\); \(any, any\) is needed"),
        ({"gate": torch.ones(32, 4).t()}, "gate has stride 4 in its last dimension"),
        ({"gate": torch.ones(4, 32, dtype=torch.float64)}, "gate is float64; convert it to one of"),
    ],
)
def test_wrong_input_is_one_clear_error(arguments, message):
    good = {"gate": torch.ones(4, 32), "up": torch.ones(4, 32), "backend": "triton"}
    with pytest.raises(KernelError, match=message):
        swiglu.swiglu(**(good | arguments))
