"""add + RMSNorm against float64, against torch's own operator, and against what has gone wrong elsewhere."""

from __future__ import annotations

import pytest
import torch

from kernels import rms_norm
from kernels.launch import KernelError
from tests.kernels import harness


def test_stays_in_bounds():
    harness.check_bounds("kernels.rms_norm")


@pytest.mark.parametrize(("case", "dtype"), harness.trials(rms_norm))
def test_against_float64(case, dtype):
    harness.check(case, dtype)


def test_the_reference_is_torchs_operator():
    x, w = torch.randn(9, 81, dtype=torch.float64), torch.randn(81, dtype=torch.float64)
    want = torch.nn.functional.rms_norm(x, (81,), w, 1e-5)
    torch.testing.assert_close(rms_norm.rms_norm(x.float(), w.float(), 1e-5, backend="torch"), want.float())
    torch.testing.assert_close(rms_norm.rms_norm_reference(x, w - 1, 1e-5, gemma=True), want)


def test_the_sum_is_rounded_before_the_norm():
    """2048 + 1 is 2048 in float16; a norm of the unrounded 2049 would not belong to the residual that is stored."""
    x = torch.full((1, 32), 2048.0, dtype=torch.float16)
    x[0, ::2] = 1.0
    weight = torch.ones(32, dtype=torch.float16)
    y, h = rms_norm.rms_norm(x, weight, 1e-6, torch.ones_like(x), backend="triton")
    assert torch.equal(h[0, 1::2], torch.full_like(h[0, 1::2], 2048.0))
    assert torch.equal(y, rms_norm.rms_norm(h, weight, 1e-6, backend="triton"))


def test_llama_rounds_before_the_weight_and_gemma_after():
    """The row (1, 7) has root mean square 5, so it normalises to 0.2 and 1.4, which float16 has to round."""
    x, w = torch.tensor([1.0, 7.0]).half().repeat(3, 32), torch.randn(64).half()
    twice = (x.float() / 5).half() * w
    once = (x.float() / 5 * (1 + w.float())).half()
    assert torch.equal(rms_norm.rms_norm(x, w, 0.0, backend="triton"), twice)
    assert torch.equal(rms_norm.rms_norm(x, w, 0.0, gemma=True, backend="triton"), once)
    assert not torch.equal((x.float() / 5 * w.float()).half(), twice)


def test_every_tensor_has_strides_of_its_own():
    """LightLLM#1467, TensorRT-LLM#14810: one stride used for all of them."""
    x, residual = torch.randn(6, 3, 49), torch.randn(3, 6, 49).transpose(0, 1)
    weight = torch.randn(49)
    got = rms_norm.rms_norm(x, weight, 1e-6, residual, backend="triton")
    for mine, want in zip(got, rms_norm.rms_norm_reference(x, weight, 1e-6, residual), strict=True):
        torch.testing.assert_close(mine, want)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight": torch.ones(31)}, r"weight has shape \(31,\); \(32\) is needed"),
        ({"weight": torch.ones(32).half()}, "weight is float16 but x is float32"),
        ({"x": torch.ones(4, 32, dtype=torch.int32)}, "x is int32; convert it"),
        ({"x": torch.ones(32)}, "x has 1 dimensions"),
        ({"residual": torch.ones(5, 32)}, "residual has shape"),
        ({"x": torch.ones(32, 4).t()}, r"x has stride 4 in its last dimension; call x.contiguous\(\)"),
        ({"backend": "cuda"}, "backend is 'cuda'; use one of auto, triton, torch"),
    ],
)
def test_wrong_input_is_one_clear_error(arguments, message):
    good = {"x": torch.ones(4, 32), "weight": torch.ones(32), "backend": "triton"}
    with pytest.raises(KernelError, match=message):
        rms_norm.rms_norm(**(good | arguments))
