"""Promise: the bits drawn are the bits that torch and the package store, for every format and value."""

from __future__ import annotations

import math
import struct

import matplotlib.pyplot as plt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.patches import Rectangle

from minillm.quantization import number_formats as nf
from minillm.viz import number_formats as drawn
from minillm.viz.number_formats import IntegerFormat, bit_fields, encode, value_lines, values
from minillm.viz.widgets import png

TORCH = [
    (drawn.FLOAT32, torch.float32, torch.int32),
    (drawn.BFLOAT16, torch.bfloat16, torch.int16),
    (drawn.FLOAT16, torch.float16, torch.int16),
    (drawn.E5M2, torch.float8_e5m2, torch.int8),
    (drawn.E4M3, torch.float8_e4m3fn, torch.int8),
]
SINGLE = st.floats(width=32, allow_nan=False, allow_infinity=False)
ROWS = [form for form, *_ in TORCH] + [drawn.E2M1, IntegerFormat("int8", 8, 0.01), IntegerFormat("int4", 4, 0.1)]


def bits(got) -> int:
    return int("".join(text for _, text in got.fields), 2)


@pytest.mark.parametrize(("form", "dtype", "integer"), TORCH, ids=lambda v: getattr(v, "name", str(v)))
@given(x=SINGLE)
def test_bits_are_those_of_torch(form, dtype, integer, x):
    got = encode(x, form)
    clipped = min(max(x, -form.largest), form.largest)
    cast = torch.tensor([clipped], dtype=torch.float32).to(dtype)
    width = 1 + form.exponent + form.mantissa
    assert bits(got) == cast.view(integer).item() % 2**width
    assert got.value == cast.to(torch.float64).item()


@given(x=st.floats(-8, 8))
def test_e2m1_is_the_package_s(x):
    got = encode(x, drawn.E2M1)
    code = nf.to_e2m1(torch.tensor([x], dtype=torch.float64))
    assert got.value == nf.from_e2m1(code, torch.float64).item()


@pytest.mark.parametrize(
    ("x", "text", "value"), [(0.3, "0011", 0.3), (-0.7, "1001", -0.7), (9, "0111", 0.7), (-9, "1001", -0.7)]
)
def test_integers_are_two_s_complement_and_saturate(x, text, value):
    got = encode(x, IntegerFormat("int4", 4, 0.1))
    assert got.fields == (("integer", text),)
    assert got.value == pytest.approx(value)


def test_values_are_every_finite_code():
    for form, dtype in ((drawn.E4M3, torch.float8_e4m3fn), (drawn.E5M2, torch.float8_e5m2)):
        every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
        assert values(form) == sorted(set(every[every.isfinite()].tolist()))
    assert values(drawn.E2M1) == sorted({s * v for v in nf.E2M1 for s in (-1, 1)})
    assert values(IntegerFormat("int4", 4, 2.0)) == [2.0 * c for c in range(-7, 8)]


def test_what_cannot_be_done_is_refused():
    with pytest.raises(ValueError, match="finite"):
        encode(math.inf, drawn.E4M3)
    with pytest.raises(ValueError, match="float16 has too many values"):
        values(drawn.FLOAT16)
    with pytest.raises(ValueError, match="far has no value"):
        value_lines({"far": [3.0]}, "t")


def test_a_cell_for_each_bit_and_the_value_beside_it():
    fig = bit_fields(0.3, ROWS, "t")
    assert sum(isinstance(p, Rectangle) for p in fig.axes[0].patches) == 32 + 16 + 16 + 8 + 8 + 4 + 8 + 4
    texts = [text.get_text() for text in fig.findobj(plt.Text)]
    assert {"t", "float32", "0.3125", "= 1.25 · 2^-2"} <= set(texts)
    row = "".join(t for t in texts if t in ("0", "1"))[:32]
    assert int(row, 2) == struct.unpack("I", struct.pack("f", 0.3))[0]


def test_a_stroke_for_each_value_in_reach():
    fig = value_lines({"a": [-1, 0, 0.5, 2.0], "b": [0.0]}, "t", spread=0.3)
    strokes = [c.get_segments() for c in fig.axes[0].collections if hasattr(c, "get_segments")]
    assert [len(s) for s in strokes] == [1, 3, 1, 1]
    assert fig.axes[0].get_xlabel() == "value, in units of the largest"


@pytest.mark.parametrize("x", [0.3, -1e9, 0.0, 1e-12])
def test_pictures_are_inside_their_frame(x):
    for fig in (bit_fields(x, ROWS, "t"), value_lines({"int4": [0, 1], "fp4 E2M1": [0]}, "t")):
        assert png(fig).startswith(b"\x89PNG")
        box, (width, height) = fig.get_tightbbox(), fig.get_size_inches()
        assert min(box.x0, box.y0) >= -0.01
        assert box.x1 <= width + 0.01
        assert box.y1 <= height + 0.01
    assert plt.get_fignums() == []
