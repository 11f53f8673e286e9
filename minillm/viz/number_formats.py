"""Number formats bit by bit: which bits a value becomes, what they say, and which values a format has at all.

Encoding is here in plain Python, from the definition of a floating-point number, so that a picture needs no tensor.
Sources: IEEE 754-2019, section 3.4; Micikevicius et al. 2022 (arXiv 2209.05433) for E4M3 and E5M2; OCP Microscaling
Formats v1.0, section 5.3 for E2M1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from .style import BLUE, GREEN, GREY, INK, ORANGE, PAPER, RED, blank, colour_of, figure, tint

_COLOURS = {"sign": RED, "exponent": GREEN, "mantissa": BLUE, "integer": ORANGE}


class FloatFormat(NamedTuple):
    """sign, `exponent` bits, `mantissa` bits; `largest` is its largest finite value. Saturates beyond it."""

    name: str
    exponent: int
    mantissa: int
    largest: float

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1


class IntegerFormat(NamedTuple):
    """`bits` of two's complement, from -(2^(bits-1) - 1) to 2^(bits-1) - 1; the value is code · scale."""

    name: str
    bits: int
    scale: float


Format = FloatFormat | IntegerFormat

FLOAT32 = FloatFormat("float32", 8, 23, (2 - 2.0**-23) * 2.0**127)
BFLOAT16 = FloatFormat("bfloat16", 8, 7, (2 - 2.0**-7) * 2.0**127)
FLOAT16 = FloatFormat("float16", 5, 10, 65504.0)
E5M2 = FloatFormat("fp8 E5M2", 5, 2, 57344.0)
E4M3 = FloatFormat("fp8 E4M3", 4, 3, 448.0)
E2M1 = FloatFormat("fp4 E2M1", 2, 1, 6.0)


class Encoded(NamedTuple):
    """A value in a format: (kind, bits as text) of each field from the left, what they say, and the sum in words."""

    fields: tuple[tuple[str, str], ...]
    value: float
    words: str


def encode(x: float, form: Format) -> Encoded:
    """The nearest value of the format, ties to the even code. Raises ValueError for what is not finite."""
    if not math.isfinite(x):
        raise ValueError(f"{x} has no nearest value; give a finite number")
    return _encode_integer(x, form) if isinstance(form, IntegerFormat) else _encode_float(x, form)


def _encode_integer(x: float, form: IntegerFormat) -> Encoded:
    top = 2 ** (form.bits - 1) - 1
    code = min(max(round(x / form.scale), -top), top)
    bits = format(code % 2**form.bits, f"0{form.bits}b")
    return Encoded((("integer", bits),), code * form.scale, f"{code} · {form.scale:.4g}")


def _encode_float(x: float, form: FloatFormat) -> Encoded:
    lowest = 1 - form.bias  # exponent of the smallest normal numbers, and of those below
    power = max(math.frexp(abs(x))[1] - 1, lowest) if x else lowest
    steps = round(math.ldexp(abs(x), form.mantissa - power))  # how many units in the last place
    if steps == 2 ** (form.mantissa + 1):  # rounded up to the next power of two
        steps, power = steps // 2, power + 1
    if math.ldexp(steps, power - form.mantissa) > form.largest:
        power = math.frexp(form.largest)[1] - 1
        steps = int(math.ldexp(form.largest, form.mantissa - power))
    normal = steps >= 2**form.mantissa
    field = power + form.bias if normal else 0
    rest = steps - 2**form.mantissa if normal else steps
    fields = (
        ("sign", str(int(math.copysign(1, x) < 0))),
        ("exponent", format(field, f"0{form.exponent}b")),
        ("mantissa", format(rest, f"0{form.mantissa}b")),
    )
    value = math.copysign(math.ldexp(steps, power - form.mantissa), x)
    minus = "−" if value < 0 else ""
    return Encoded(fields, value, f"{minus}{steps / 2**form.mantissa:.6g} · 2^{power}")


def values(form: Format) -> list[float]:
    """Every finite value of a format of 8 bits or fewer, from the lowest up, zero once. Raises ValueError for wider."""
    if isinstance(form, IntegerFormat):
        top = 2 ** (form.bits - 1) - 1
        return [code * form.scale for code in range(-top, top + 1)]
    if form.exponent + form.mantissa > 7:
        raise ValueError(f"{form.name} has too many values to list; take a format of 8 bits or fewer")
    sizes, m = {0.0}, form.mantissa
    for field in range(2**form.exponent):
        for rest in range(2**m):
            steps, power = (rest, 1 - form.bias) if field == 0 else (rest + 2**m, field - form.bias)
            size = math.ldexp(steps, power - m)
            if size <= form.largest:
                sizes.add(size)
    return sorted({sign * size for size in sizes for sign in (-1, 1)})


def bit_fields(x: float, forms: Sequence[Format], title: str) -> Figure:
    """A row for each format: its bits for x, coloured by what they mean; the value they say, and the relative error."""
    with figure(height=0.95 + 0.52 * len(forms)) as (fig, ax):
        ax.set_title(title)
        for row, form in enumerate(forms):
            _bit_row(ax, -row, x, form)
        ax.set(xlim=(-7.0, 51), ylim=(0.45 - len(forms), 1.75))
        for left, words in ((33.5, "says"), (44.5, "error")):
            ax.text(left, 1.15, words, size=9, color=GREY, va="center")
        handles = [Patch(facecolor=tint(colour, 0.35), label=kind) for kind, colour in _COLOURS.items()]
        ax.legend(handles=handles, ncols=4, loc="upper left", bbox_to_anchor=(0.11, 1.04), handlelength=1.0)
        blank(ax)
    return fig


def _bit_row(ax: Axes, y: float, x: float, form: Format) -> None:
    got, left = encode(x, form), 0
    ax.text(-0.5, y + 0.35, form.name, ha="right", va="center", size=10, weight="bold", color=INK)
    for kind, bits in got.fields:
        for bit in bits:
            cell = Rectangle((left, y), 1, 0.7, facecolor=tint(_COLOURS[kind], 0.35 if bit == "1" else 0.8))
            cell.set(edgecolor=PAPER, linewidth=1)
            ax.add_patch(cell)
            ax.text(left + 0.5, y + 0.35, bit, ha="center", va="center", size=8.5, color=INK)
            left += 1
    ax.text(33.5, y + 0.35, f"{got.value:.7g}", va="center", size=10, color=INK)
    ax.text(left + 0.6, y + 0.35, f"= {got.words}" if left < 20 else "", va="center", size=9, color=GREY)
    error = abs(got.value - x) / abs(x) if x else 0.0
    ax.text(44.5, y + 0.35, f"{error:.2g}" if error else "none", va="center", size=10, color=INK)


def value_lines(rows: Mapping[str, Sequence[float]], title: str, reach: float = 1.0, spread: float = 0.0) -> Figure:
    """Where the values of each format lie between -reach and reach, a stroke each; above them, with `spread`, the
    density of normal numbers of that standard deviation.

    Raises ValueError for a row without values in reach.
    """
    with figure(height=1.6 + 0.55 * len(rows)) as (fig, ax):
        ax.set_title(title)
        for row, (name, given) in enumerate(rows.items()):
            seen = [v for v in given if -reach <= v <= reach]
            if not seen:
                raise ValueError(f"{name} has no value between {-reach} and {reach}")
            ax.hlines(-row, -reach, reach, color=tint(GREY, 0.6), linewidth=0.8, zorder=1)
            ax.vlines(seen, -row - 0.3, -row + 0.3, color=colour_of(row), linewidth=1.6 if len(seen) < 40 else 0.7)
        if spread:
            x = np.linspace(-reach, reach, 300)
            ax.fill_between(x, 0.6, 0.6 + 1.3 * np.exp(-0.5 * (x / spread) ** 2), color=tint(GREY, 0.7), linewidth=0)
        ax.set(
            yticks=[-row for row in range(len(rows))], yticklabels=list(rows), xlabel="value, in units of the largest"
        )
        ax.tick_params(axis="y", length=0)
        ax.grid(False)
        ax.spines["left"].set_visible(False)
    return fig
