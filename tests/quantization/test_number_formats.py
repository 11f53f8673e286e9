"""Every value of the small formats, and rounding to the nearest of them, against tables and brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given
from hypothesis import strategies as st

from minillm.quantization import number_formats as nf


def brute(x: float) -> float:
    """Nearest E2M1 value, ties to the even code, by looking at all of them."""
    best = min(range(8), key=lambda code: (abs(abs(x) - nf.E2M1[code]), code % 2))
    return math.copysign(nf.E2M1[best], x)


@given(st.floats(-9, 9, width=32))
def test_e2m1_is_the_nearest_value(x):
    assert nf.from_e2m1(nf.to_e2m1(torch.tensor([x]))).item() == brute(x)


def test_e2m1_ties_go_to_the_even_code():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert nf.from_e2m1(nf.to_e2m1(ties)).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert nf.from_e2m1(nf.to_e2m1(-ties)).tolist() == [-0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0]
    assert nf.from_e2m1(nf.to_e2m1(torch.tensor([1e9, -7.0]))).tolist() == [6.0, -6.0]


def test_e2m1_agrees_with_gguf():
    """Its MXFP4 block: one E8M0 byte, then 32 codes."""
    block = np.zeros((1, 17), dtype=np.uint8)
    block[0, 0] = 128  # gguf halves the table's doubled values, so 128 means 2
    block[0, 1:] = np.arange(16)
    theirs = quants.dequantize(block, GGMLQuantizationType.MXFP4)[0, :16]
    assert theirs.tolist() == (nf.from_e2m1(torch.arange(16, dtype=torch.uint8)) * 2).tolist()


def test_float8_saturates_where_torch_does_not():
    x = torch.tensor([1e6, -1e6, 448.0, 460.0])
    assert nf.to_float8(x).float().tolist() == [448.0, -448.0, 448.0, 448.0]
    assert nf.to_float8(x, nf.E5M2).float().tolist()[:2] == [57344.0, -57344.0]


def test_every_e8m0_byte():
    """triton issue 11624: bytes 0 and 255."""
    value = nf.from_e8m0(torch.arange(256, dtype=torch.uint8))
    assert value[0].item() == 2.0**-127
    assert value[255].isnan()
    assert value[1:255].tolist() == [2.0 ** (b - 127) for b in range(1, 255)]


@pytest.mark.parametrize(
    ("largest", "floor", "up"), [(6.0, 1, 1), (6.1, 1, 2), (4.0, 1, 1), (3.9, 0.5, 1), (0.0, 1, 1)]
)
def test_block_scales(largest, floor, up):
    largest = torch.tensor([float(largest)])
    assert nf.from_e8m0(nf.power_of_two_scale(largest)).item() == floor
    assert nf.from_e8m0(nf.power_of_two_scale(largest, round_up=True)).item() == up


def test_a_block_scale_of_nan_is_nan():
    assert nf.power_of_two_scale(torch.tensor([math.nan, math.inf])).tolist() == [255, 255]


@given(st.integers(2, 4), st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**31))
def test_packing_is_undone_by_unpacking(bits, rows, eighths, seed):
    codes = torch.randint(0, 2**bits, (rows, 8 * eighths), generator=torch.Generator().manual_seed(seed))
    codes = codes.to(torch.uint8)
    packed = nf.pack_codes(codes, bits)
    assert packed.shape == (rows, eighths * bits)
    assert torch.equal(nf.unpack_codes(packed, bits), codes)
    whole = sum(int(c) << (bits * i) for i, c in enumerate(codes[0]))  # lowest bits first
    assert packed[0].numpy().tobytes() == whole.to_bytes(eighths * bits, "little")
