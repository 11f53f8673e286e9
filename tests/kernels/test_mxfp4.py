"""MXFP4 against float64, its formats against torch's and by hand, and against what has gone wrong elsewhere."""

from __future__ import annotations

import pytest
import torch

from kernels import mxfp4
from kernels.launch import KernelError
from tests.kernels import harness


def test_stays_in_bounds():
    harness.check_bounds("kernels.mxfp4")


@pytest.mark.parametrize(("case", "dtype"), harness.trials(mxfp4))
def test_against_float64(case, dtype):
    harness.check(case, dtype)


def test_scales_are_torchs_e8m0():
    """triton#11624: byte 0 is 2⁻¹²⁷ and byte 255 is NaN."""
    every = torch.arange(256, dtype=torch.uint8)
    got, want = mxfp4.scale_values(every), every.view(torch.float8_e8m0fnu).float()
    assert torch.equal(got[:255], want[:255])
    assert got[255].isnan()
    assert got[0] == 2.0**-127


def test_every_code_in_every_place():
    """Row n holds code n everywhere; one input at a time is 1."""
    weight = mxfp4.pack(torch.arange(16)[:, None].repeat(1, 64))
    scale = torch.tensor([[127, 129]], dtype=torch.uint8).repeat(16, 1)
    values = torch.tensor([*mxfp4.VALUES, *(-v for v in mxfp4.VALUES)]).half()
    for k in (0, 1, 31, 32, 63):
        x = torch.zeros(1, 64).half()
        x[0, k] = 1.0
        assert torch.equal(mxfp4.mxfp4(x, weight, scale, backend="triton")[0], values * (1 if k < 32 else 4))


def test_the_low_half_comes_first():
    codes = torch.randint(0, 16, (3, 64), dtype=torch.uint8)
    packed = mxfp4.pack(codes)
    assert torch.equal(packed[:, 0], codes[:, 0] + 16 * codes[:, 1])
    assert torch.equal(mxfp4.unpack(packed), codes)


def test_byte_255_is_nan_in_its_own_outputs_and_nowhere_else():
    weight, scale = mxfp4.pack(torch.full((5, 64), 2)), torch.full((5, 2), 127, dtype=torch.uint8)
    scale[3, 1] = 255
    x = torch.ones(2, 64).half()
    for backend in ("triton", "torch"):
        y = mxfp4.mxfp4(x, weight, scale, backend=backend)
        assert torch.equal(y.isnan(), torch.tensor([False, False, False, True, False]).expand(2, 5))
        assert torch.equal(y[:, :3], torch.full((2, 3), 64.0).half())


def test_byte_0_is_a_small_number_and_not_nan():
    """Powers of two throughout, so that bfloat16 is exact in the interpreter too: 32 · 2¹⁵ · 2⁻¹²⁷ = 2⁻¹⁰⁷."""
    weight, scale = mxfp4.pack(torch.full((3, 32), 2)), torch.zeros(3, 1, dtype=torch.uint8)
    x = torch.full((1, 32), 2.0**15)
    want = torch.full((1, 3), 2.0**-107).bfloat16()
    assert torch.equal(mxfp4.mxfp4(x.bfloat16(), weight, scale, backend="torch"), want)
    assert torch.equal(mxfp4.mxfp4(x.half(), weight, scale, backend="triton"), torch.zeros(1, 3).half())
    if harness.DEVICE == "cpu":
        assert torch.equal(mxfp4.mxfp4(x.bfloat16(), weight, scale, backend="triton"), want)


def test_quantizing_what_the_format_holds_changes_nothing():
    codes, scale = torch.randint(0, 16, (7, 96), dtype=torch.uint8), torch.randint(1, 250, (7, 3), dtype=torch.uint8)
    codes[codes == 8] = 0  # -0 comes back as such, but then a block could hold nothing else
    codes[:, ::32] = 7  # 6 · 2ⁿ is the maximum of every block, and makes its scale 2ⁿ
    back, back_scale = mxfp4.quantize(mxfp4.dequantize(mxfp4.pack(codes), scale))
    assert torch.equal(back_scale, scale)
    assert torch.equal(mxfp4.unpack(back), codes)


def test_ties_go_to_the_even_code():
    middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    w = torch.tensor([[6.0, *middles, *(-m for m in middles)] + [0.0] * 17])
    packed, scale = mxfp4.quantize(w)
    assert mxfp4.dequantize(packed, scale)[0, 1:8].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert torch.equal(mxfp4.dequantize(packed, scale)[0, 8:15], -mxfp4.dequantize(packed, scale)[0, 1:8])


def test_a_block_of_zeros_is_zeros():
    packed, scale = mxfp4.quantize(torch.zeros(2, 64))
    assert torch.equal(mxfp4.dequantize(packed, scale), torch.zeros(2, 64))


def test_quantized_weights_are_as_near_as_the_format_gets():
    """Relative error of a normal distribution with scales rounded down: 0.114."""
    w = torch.randn(64, 4096)
    error = (mxfp4.dequantize(*mxfp4.quantize(w)) - w).norm() / w.norm()
    assert 0.110 < error < 0.118


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.ones(4, 80).half()}, "K is 80, not a multiple of 32; pad it"),
        ({"x": torch.ones(4, 64)}, "x is float32; convert it to one of float16, bfloat16"),
        ({"weight": torch.ones(8, 64, dtype=torch.uint8)}, r"weight has shape \(8, 64\); \(any, 32\) is needed"),
        ({"scale": torch.ones(2, 8, dtype=torch.uint8)}, r"scale has shape \(2, 8\); \(8, 2\) is needed"),
        ({"scale": torch.ones(8, 2).half()}, "scale is float16 but weight is uint8"),
        ({"weight": torch.ones(32, 8, dtype=torch.uint8).t()}, r"call weight.contiguous\(\)"),
    ],
)
def test_wrong_input_is_one_clear_error(arguments, message):
    good = {"x": torch.ones(4, 64).half(), "weight": torch.ones(8, 32, dtype=torch.uint8)}
    good |= {"scale": torch.ones(8, 2, dtype=torch.uint8), "backend": "triton"}
    with pytest.raises(KernelError, match=message):
        mxfp4.mxfp4(**(good | arguments))
