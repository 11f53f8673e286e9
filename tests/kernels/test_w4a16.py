"""W4A16 against float64, its layout by hand, and against what has gone wrong elsewhere."""

from __future__ import annotations

import pytest
import torch

from kernels import w4a16
from kernels.launch import KernelError
from tests.kernels import harness


def test_stays_in_bounds():
    harness.check_bounds("kernels.w4a16")


@pytest.mark.parametrize(("case", "dtype"), harness.trials(w4a16))
def test_against_float64(case, dtype):
    harness.check(case, dtype)


def test_the_layout_is_the_one_drawn():
    q = torch.arange(64).reshape(1, 64) % 16
    packed = w4a16.pack(q, 32)
    assert packed.shape == (1, 32)
    assert packed[0, 3] == 3 | (19 % 16) << 4  # group 0: q[3] and q[19]
    assert packed[0, 16 + 5] == (37 % 16) | (53 % 16) << 4  # group 1: q[32 + 5] and q[32 + 21]


@pytest.mark.parametrize("group", w4a16.GROUPS)
def test_unpacking_undoes_packing(group):
    q = torch.randint(0, 16, (5, 2 * group), dtype=torch.uint8)
    assert torch.equal(w4a16.unpack(w4a16.pack(q, group), group), q)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("group", w4a16.GROUPS)
def test_every_weight_meets_its_own_input_scale_and_zero_point(rows, group):
    """llm-awq#21: with group 256 some did not. One input at a time is 1, and y is the weight itself."""
    K = 2 * group
    q = torch.arange(3 * K).reshape(3, K) * 7 % 16
    scale = torch.tensor([[1.0, 2.0], [4.0, 8.0], [16.0, 0.5]]).half()
    zero = torch.tensor([[0, 15], [8, 3], [1, 14]], dtype=torch.uint8)
    want = ((q.unflatten(1, (2, group)) - zero[:, :, None]) * scale[:, :, None]).flatten(1).half()
    for k in (0, 1, group // 2 - 1, group // 2, group - 1, group, K - 1):
        x = torch.zeros(rows, K).half()
        x[:, k] = 1.0
        y = w4a16.w4a16(x, w4a16.pack(q, group), scale, zero, group, backend="triton")
        assert torch.equal(y, want[:, k].expand(rows, 3))


@pytest.mark.parametrize("splits", [1, 2, 3, 4, 7])
def test_splits_whatever_their_number_give_the_same_sum(splits):
    """aiter#5286: K / splits was no multiple of BLOCK_K, and the last tile of each split read NaN."""
    weight, scale, zero = w4a16.quantize(torch.randn(20, 5 * 64).half(), 64, symmetric=False)
    x = torch.randn(3, 5 * 64).half()
    with harness.poisoned():
        y = w4a16.w4a16(x, weight, scale, zero, 64, splits=splits, backend="triton")
    torch.testing.assert_close(y, w4a16.w4a16_reference(x, weight, scale, zero, 64))


@pytest.mark.parametrize("rows", [1, 2])
def test_sums_leave_float16_behind(rows):
    """Each group adds 128 · 7 · 512 = 458,752, seven times what float16 holds, before its scale of 2⁻⁸."""
    weight = w4a16.pack(torch.full((16, 256), 15), 128)
    x, scale = torch.full((rows, 256), 512.0).half(), torch.full((16, 2), 2.0**-8).half()
    y = w4a16.w4a16(x, weight, scale, backend="triton")
    assert torch.equal(y, torch.full((rows, 16), 2 * 128 * 7 * 512 / 256).half())


@pytest.mark.parametrize(
    ("group", "symmetric", "error"), [(128, True, 0.117), (32, True, 0.097), (128, False, 0.100), (32, False, 0.080)]
)
def test_quantized_weights_are_as_near_as_four_bits_get(group, symmetric, error):
    """Relative error of a normal distribution, to 6%."""
    weight = torch.randn(64, 4096)
    packed, scale, zero = w4a16.quantize(weight, group, symmetric)
    got = w4a16.w4a16_reference(torch.eye(4096), packed, scale, zero, group).t()
    assert abs(float((got - weight).norm() / weight.norm()) / error - 1) < 0.06


def test_a_group_of_zeros_stays_zero():
    for symmetric in (True, False):
        packed, scale, zero = w4a16.quantize(torch.zeros(2, 64).half(), 32, symmetric)
        y = w4a16.w4a16_reference(torch.ones(1, 64).half(), packed, scale, zero, 32)
        assert torch.equal(y, torch.zeros(1, 2).half())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.ones(4, 72).half()}, "K is 72, not a multiple of 32; pad it"),
        ({"group": 48}, "group is 48; use one of 32, 64, 128, 256"),
        ({"group": 64}, r"scale has shape \(8, 2\); \(8, 1\) is needed"),
        ({"weight": torch.ones(8, 64, dtype=torch.uint8)}, r"weight has shape \(8, 64\); \(any, 32\) is needed"),
        ({"weight": torch.ones(8, 32, dtype=torch.int8)}, "weight is int8; convert it to one of uint8"),
        ({"zero": torch.ones(8, 1, dtype=torch.uint8)}, "zero has shape"),
        ({"zero": torch.ones(8, 2).half()}, "zero is float16 but weight is uint8"),
        ({"scale": torch.ones(8, 2)}, "scale is float32 but x is float16"),
        ({"x": torch.ones(4, 64)}, "x is float32; convert it to one of float16, bfloat16"),
        ({"weight": torch.ones(32, 8, dtype=torch.uint8).t()}, r"call weight.contiguous\(\)"),
        ({"splits": 0}, "splits is 0"),
    ],
)
def test_wrong_input_is_one_clear_error(arguments, message):
    good = {"x": torch.ones(4, 64).half(), "weight": torch.ones(8, 32, dtype=torch.uint8), "scale": torch.ones(8, 2)}
    good |= {"scale": good["scale"].half(), "group": 32, "backend": "triton"}
    with pytest.raises(KernelError, match=message):
        w4a16.w4a16(**(good | arguments))
