"""The linear layer with its epilogue against float64, against torch's own layers, and in every memory layout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels import matmul
from kernels.launch import KernelError
from tests.kernels import harness


def test_stays_in_bounds():
    harness.check_bounds("kernels.matmul")


@pytest.mark.parametrize(("case", "dtype"), harness.trials(matmul))
def test_against_float64(case, dtype):
    harness.check(case, dtype)


def test_the_reference_is_torchs_layers():
    a, b, bias = torch.randn(9, 33).double(), torch.randn(16, 33).double(), torch.randn(16).double()
    linear = F.linear(a, b, bias)
    gate, up = F.linear(a, b[:8], bias[:8]), F.linear(a, b[8:], bias[8:])
    wanted = {"none": linear, "silu": F.silu(linear), "gelu": F.gelu(linear), "swiglu": F.silu(gate) * up}
    for epilogue, want in wanted.items():
        torch.testing.assert_close(matmul.matmul_reference(a, b, bias, epilogue), want)


def test_swiglu_is_the_feed_forward_of_the_model():
    """layers.SwiGLU cuts one matmul's output in two, the gate first."""
    from minillm.layers import SwiGLU

    torch.manual_seed(0)
    layer = SwiGLU(torch.nn.Linear(48, 2 * 33, bias=False), torch.nn.Identity())
    x = torch.randn(5, 48)
    got = matmul.matmul(x, layer.gate_up_proj.weight.detach(), epilogue="swiglu", backend="triton")
    torch.testing.assert_close(got, layer(x).detach())


@pytest.mark.parametrize("a_layout", ["plain", "transposed", "every other column"])
@pytest.mark.parametrize("b_layout", ["plain", "transposed", "every other column"])
def test_each_matrix_has_strides_of_its_own(a_layout, b_layout):
    """LightLLM#1467, TensorRT-LLM#14810: one stride used for all of them."""
    layouts = {
        "plain": lambda x: x,
        "transposed": lambda x: x.t().contiguous().t(),
        "every other column": lambda x: torch.stack((x, torch.full_like(x, float("nan"))), dim=2)[..., 0],
    }
    a, b = torch.randn(17, 81), torch.randn(33, 81)
    got = matmul.matmul(layouts[a_layout](a), layouts[b_layout](b), backend="triton")
    torch.testing.assert_close(got, a @ b.t())


def test_nan_stays_in_its_row_and_column():
    """aiter#5286: what hangs over the end of K turned into NaN everywhere. K = 81 hangs over any tile."""
    a, b = torch.randn(70, 81), torch.randn(70, 81)
    a[3, 80], b[66, 0] = float("nan"), float("inf")
    c = matmul.matmul(a, b, backend="triton")
    broken = torch.zeros(70, 70, dtype=torch.bool)
    broken[3], broken[:, 66] = True, True
    assert torch.equal(~c.isfinite(), broken)


@pytest.mark.parametrize(("rows", "columns"), [(1, 3), (8, 2), (10, 3), (17, 2)])
def test_every_tile_is_made(rows, columns):
    """Programs run in groups of eight rows of tiles (64 by 64 in float32), and the last group may be lower."""
    a, b = torch.randn(rows * 64 - 1, 16), torch.randn(columns * 64 - 1, 16)
    with harness.poisoned():
        c = matmul.matmul(a, b, backend="triton")
    torch.testing.assert_close(c, a @ b.t(), rtol=1e-4, atol=1e-5)


def test_the_sum_is_rounded_once():
    """2048 + 1 is 2048 in float16; a sum in float16 would stay there. silu comes before the rounding too."""
    a = torch.ones(1, 65).half()
    a[0, 0] = 2048
    b = torch.ones(1, 65).half()
    assert matmul.matmul(a, b, backend="triton").item() == 2112
    b[0, 0] = -0.03125  # the sum is 0: -64 + 64
    assert (
        matmul.matmul(a, b, torch.tensor([0.1]).half(), "silu", backend="triton")
        == F.silu(torch.tensor(0.1).half().float()).half()
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"a": torch.ones(4, 31)}, r"b has shape \(6, 32\); \(any, 31\) is needed"),
        ({"a": torch.ones(32)}, r"a has shape \(32,\)"),
        ({"a": torch.ones(4, 32, dtype=torch.int8)}, "a is int8; convert it"),
        ({"b": torch.ones(6, 32).half()}, "b is float16 but a is float32"),
        ({"bias": torch.ones(5)}, r"bias has shape \(5,\); \(6\) is needed"),
        ({"epilogue": "relu"}, "epilogue is 'relu'; use one of none, silu, gelu, swiglu"),
        ({"epilogue": "swiglu", "b": torch.ones(7, 32)}, "the number of rows of b is 7, not a multiple of 2"),
        ({"backend": "cuda"}, "backend is 'cuda'"),
    ],
)
def test_wrong_input_is_one_clear_error(arguments, message):
    with pytest.raises(KernelError, match=message):
        matmul.matmul(**({"a": torch.ones(4, 32), "b": torch.ones(6, 32), "backend": "triton"} | arguments))
