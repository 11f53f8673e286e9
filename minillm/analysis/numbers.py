"""What a number must be before anything is computed from it."""

from __future__ import annotations

import numbers
from typing import Any

from ..errors import RequestError, short

MOST = 1 << 40  # tokens, sequences and the like: beyond any machine, and products of a few still print


def is_number(value: Any) -> bool:
    """A real number, numpy's included; True and False are none. NaN and infinity are."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def whole_number(name: str, value: Any, least: int, most: int = MOST) -> None:
    """Raises RequestError unless `value` is an integer, numpy's included, from `least` to `most`."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise RequestError(f"{name} is {short(repr(value))}; it must be a whole number")
    if not least <= value <= most:
        raise RequestError(f"{name} is {short(value)}; it must be from {least} to {most}")
