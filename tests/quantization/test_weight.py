"""Rounding to nearest: errors on a normal distribution, exact cases, bytes, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm.errors import QuantizationError
from minillm.quantization import QuantizedLinear, parse, quantize_weight
from minillm.quantization import number_formats as nf
from minillm.quantization.kernels import Int8Dynamic, Int8Fixed
from minillm.quantization.linear import works

# Of the size that weights have. With scales that are powers of two the error depends on where the numbers lie within an
# octave: MXFP4's is between .113 and .118.
NORMAL = 0.02 * torch.randn(512, 4096, generator=torch.Generator().manual_seed(0))
# relative root mean square error on a normal distribution
GOLDEN = {
    "int8": 0.0087, "int4-g128": 0.117, "int4-g32": 0.097, "int4-g128-asym": 0.100, "int4-g32-asym": 0.080,
    "mxfp4": 0.114, "nvfp4": 0.095, "fp8": 0.0265, "fp8-tensor": 0.0265, "fp8-block": 0.0265, "fp8-e5m2": 0.053,
}  # fmt: skip
BITS = {
    "int8": 8 + 32 / 4096, "int4-g128": 4.125, "int4-g32": 4.5, "int4-g32-asym": 4.75, "int3-g128": 3.125,
    "mxfp4": 4.25, "nvfp4": 4.5, "fp8-block": 8 + 32 / 128**2, "ternary": 2 + 32 / 4096,
}  # fmt: skip
ALL = sorted({*GOLDEN, *BITS})


@pytest.mark.parametrize("name", GOLDEN)
def test_error_on_a_normal_distribution(name):
    error = (quantize_weight(NORMAL, parse(name)).dequantize() - NORMAL).norm() / NORMAL.norm()
    assert error.item() == pytest.approx(GOLDEN[name], rel=0.02)


def test_mxfp4_with_the_scale_rounded_up():
    blocks = NORMAL.view(512, -1, 32)
    scale = nf.from_e8m0(nf.power_of_two_scale(blocks.abs().amax(-1), round_up=True))[..., None]
    rounded = nf.from_e2m1(nf.to_e2m1(blocks / scale)) * scale
    assert ((rounded - blocks).norm() / blocks.norm()).item() == pytest.approx(0.119, rel=0.02)


@pytest.mark.parametrize("name", BITS)
def test_bits_a_weight(name):
    weight = quantize_weight(NORMAL, parse(name))
    assert weight.bits_per_weight == pytest.approx(BITS[name], abs=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_a_second_rounding_changes_nothing(name):
    """What is on the grid stays: the scale found again is the same, or its codes are."""
    once = quantize_weight(NORMAL[:128, :256], parse(name)).dequantize()
    if name == "ternary":
        return
    twice = quantize_weight(once, parse(name)).dequantize()
    assert (twice - once).norm() <= 0.02 * once.norm()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [0.0, 3.0, -2.5, 1e-30, 1e30])
def test_constant_matrices(name, value):
    """kernels-community 681: an all-zero block must not divide by zero."""
    got = quantize_weight(torch.full((128, 128), value), parse(name)).dequantize()
    assert got.isfinite().all()
    assert got == pytest.approx(torch.full((128, 128), value), rel=0.34, abs=1e-36)


@given(st.integers(0, 2**31), st.sampled_from(["int4-g32", "int4-g32-asym", "int8", "int3-g32"]))
def test_integer_rounding_is_within_a_step(seed, name):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 64, generator=generator) * torch.logspace(-3, 3, 4)[:, None]
    q = quantize_weight(weight, parse(name))
    step = q.scales().repeat_interleave(64 // q.scale.shape[1], dim=1)
    most = 0.52 if q.zero is None else 1.02  # the scale is rounded, so a little more than half; so is a zero point
    assert ((q.dequantize() - weight).abs() <= step * most).all()


REFUSED = {
    "int5-g32": "is not known",
    "int4": "give int4 a group size",
    "int4-g48": "a group size is one of 32, 64, 128",
    "int4-g256": "a group size is one of 32, 64, 128",  # llm-awq issue 21
    "fp8-g128": "only integer formats",
    "fp8-asym": "-asym belongs",
    "int8-block": "belong to fp8",
    "int4-g128-dynamic": "int8 weights alone",
    "gptq-fp8": "gptq works on integer formats",
    "smoothquant-int8": "write smoothquant-int8-dynamic",
}


@pytest.mark.parametrize("name", REFUSED)
def test_names_that_make_no_sense(name):
    with pytest.raises(QuantizationError, match=REFUSED[name]):
        parse(name)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(4, 100), "100 columns, which groups of 64"),
        (torch.ones(4, 96), "use groups of 32"),
        (torch.ones(64), "a matrix"),
        (torch.full((4, 64), torch.nan), "NaN or infinity"),
        (torch.full((4, 64), torch.inf), "NaN or infinity"),
    ],
)
def test_weights_that_do_not_fit(weight, message):
    with pytest.raises(QuantizationError, match=message):
        quantize_weight(weight, parse("int4-g64"))


@pytest.mark.parametrize("name", [*ALL, "int8-dynamic"])
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_kernels_multiply_by_the_dequantized_numbers(name, rows):
    generator = torch.Generator().manual_seed(1)
    weight = quantize_weight(torch.randn(256, 384, generator=generator), parse(name))
    bias = torch.randn(256, generator=generator)
    x = torch.randn(rows, 384, generator=generator)
    x[:, 5] *= 20  # an outlier channel
    seen = x
    if weight.scheme.dynamic:
        codes, scale = Int8Dynamic.prepare(x)
        seen = (codes.float() - 128) * scale
        assert (seen - x).abs().max() <= scale.max() * 0.51
    exact = seen @ weight.dequantize().t() + bias
    error = (QuantizedLinear(weight, bias)(x) - exact).norm() / exact.norm()
    assert error < (1e-6 if weight.scheme.dynamic else 0.005)
    exact = x @ weight.dequantize().t() + bias
    assert torch.allclose(QuantizedLinear(weight, bias, exact=True)(x), exact, rtol=1e-4, atol=1e-3)


def test_int8_sums_do_not_saturate():
    """pytorch issues 44939 and 136746: 211 · 71 + 171 · 107 = 33278 does not fit the int16 of AVX2's pair sums."""
    weight = torch.zeros(16, 64)
    weight[:, :2] = torch.tensor([71.0, 107.0])
    weight[:, 2] = 127.0
    x = torch.zeros(2, 64)
    x[:, :2] = torch.tensor([211.0, 171.0]) / 211 * 127
    got = QuantizedLinear(quantize_weight(weight, parse("int8-dynamic")))(x)
    exact = x @ weight.t()
    assert ((got - exact).abs() <= 0.01 * exact.abs()).all()


CHILD = """
import torch
from minillm.quantization import QuantizedLinear, parse, quantize_weight
for name in ("int8", "int8-dynamic"):
    layer = QuantizedLinear(quantize_weight(torch.randn(96, 64), parse(name)))
    for rows in (1, 3, 40, 300):
        layer(torch.randn(rows, 64))
print("done")
"""


def test_no_multiply_is_left_to_reference_code():
    """oneDNN computes what it has no kernel for with a plain loop, correctly and hundreds of times slower: without AMX,
    signed codes times signed codes."""
    child = subprocess.run(
        [sys.executable, "-c", CHILD], env={**os.environ, "ONEDNN_VERBOSE": "1"}, capture_output=True, text=True
    )
    assert child.stdout.rstrip().endswith("done"), child.stderr
    multiplies = [line for line in child.stdout.splitlines() if "exec,cpu,matmul" in line]
    assert multiplies or not works(Int8Fixed)
    assert [line for line in multiplies if ",ref" in line] == []


def test_a_kernel_that_is_wrong_or_hopelessly_slow_is_not_chosen():
    class Saturates(Int8Fixed):
        def __call__(self, x):
            return super().__call__(x).clamp(max=600)

    class Crawls(Int8Fixed):
        def __call__(self, x):
            time.sleep(0.05)
            return super().__call__(x)

    assert not works(Saturates)
    assert not works(Crawls)


def test_a_token_does_not_depend_on_its_batch():
    weight = quantize_weight(NORMAL[:64, :256], parse("int8-dynamic"))
    layer, x = QuantizedLinear(weight), NORMAL[100:117, :256].clone()
    x[0] *= 1000  # one loud token must not coarsen the others' scale
    assert torch.equal(layer(x)[1:], layer(x[1:]))
