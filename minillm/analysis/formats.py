"""How many bytes one number takes: plain dtypes, and quantized weights with their scales and zero points."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, short


@dataclass(frozen=True)
class Format:
    """A storage format. `group` numbers along a row share one scale (and one zero point); 0 means the whole row does.

    `bits` is the width of each number, `scale_bits` and `zero_bits` the metadata of one group.
    """

    name: str
    bits: float
    group: int = 0
    scale_bits: int = 0
    zero_bits: int = 0

    @property
    def bits_per_weight(self) -> float:
        """Average width with group metadata. A scale shared by a whole row is left out: the row's length is unknown
        here, and `tensor_bytes` counts it."""
        return self.bits + ((self.scale_bits + self.zero_bits) / self.group if self.group else 0.0)

    @property
    def bytes_per_element(self) -> float:
        """`bits_per_weight` / 8, a whole number as int so that byte counts of plain dtypes stay exact."""
        value = self.bits_per_weight / 8
        return int(value) if value == int(value) else value

    def tensor_bytes(self, rows: int, columns: int) -> int:
        """Exact bytes of a (rows, columns) matrix: packed numbers, then one scale and zero point a group of a row."""
        groups = -(-columns // self.group) if self.group else 1
        row_bits = self.bits * columns + (self.scale_bits + self.zero_bits) * groups
        return int(-(-rows * row_bits // 8))


_PLAIN = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8}
_ALIASES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "half": "float16",
            "float": "float32", "fp8": "float8_e4m3fn", "float8": "float8_e4m3fn"}  # fmt: skip
_PACKED = {
    "mxfp4": Format("mxfp4", 4, 32, scale_bits=8),
    "nvfp4": Format("nvfp4", 4, 16, scale_bits=8),
    "q4_0": Format("q4_0", 4, 32, scale_bits=16),
    "q4_1": Format("q4_1", 4, 32, scale_bits=16, zero_bits=16),
    "q5_0": Format("q5_0", 5, 32, scale_bits=16),
    "q5_1": Format("q5_1", 5, 32, scale_bits=16, zero_bits=16),
    "q8_0": Format("q8_0", 8, 32, scale_bits=16),
}
_LONGEST = 9  # digits of a group size
_WIDEST = 1 << 20  # bytes of one number
_INTEGER = re.compile(r"int([2-8])(?:-g([0-9]+))?(-sym)?")


def format_of(value: Any) -> Format:
    """The format named by a string, a torch dtype, a number of bytes, or a Format itself.

    "int8" is one bf16 scale a row. "int4" is groups of 128 with a bf16 scale and a bf16 zero point (4.25 bits);
    "int4-g32" says the group (5.0 bits), "int4-g128-sym" leaves the zero point out (4.125 bits).
    Raises ConfigError for anything else.
    """
    if isinstance(value, Format):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _WIDEST:
        return Format(f"{value:g} bytes", value * 8)
    name = "" if isinstance(value, int | float) else str(value).removeprefix("torch.").lower()
    name = _ALIASES.get(name, name)
    if name in _PLAIN:
        return Format(name, _PLAIN[name])
    if name in _PACKED:
        return _PACKED[name]
    if match := _INTEGER.fullmatch(name):
        return _integer(name, int(match[1]), match[2], match[3] is not None)
    shown = short(value if isinstance(value, int) else repr(value))
    raise ConfigError(
        f"unknown number format {shown}; use {', '.join([*_PLAIN, *_PACKED])}, "
        "int8, int4, int4-g32 (a group size) or int4-g128-sym (no zero point)"
    )


def _integer(name: str, bits: int, group: str | None, symmetric: bool) -> Format:
    if group is not None and (len(group) > _LONGEST or int(group) < 1):
        raise ConfigError(
            f"number format {short(name)!r} has groups of {short(group)}; a group holds at least 1 number, "
            f"and its size has {_LONGEST} digits at most"
        )
    if bits == 8 and group is None:
        return Format(name, 8, 0, scale_bits=16)
    return Format(name, bits, int(group or 128), scale_bits=16, zero_bits=0 if symmetric else 16)


def bytes_per_element(value: Any) -> float:
    """Average bytes of one number in the format `value` names. Raises ConfigError."""
    return format_of(value).bytes_per_element
