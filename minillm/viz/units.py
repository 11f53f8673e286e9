"""Numbers with units, as a reader would write them."""

from __future__ import annotations

import math

# Units that take a decimal prefix. Everything else ("tokens", "%", "ratio") is printed as it is.
PREFIXED = {"B": "B", "byte": "B", "bytes": "B", "FLOP": "FLOP", "FLOPs": "FLOP", "s": "s", "B/s": "B/s"}
PREFIXED |= {"parameters": " parameters"}
PREFIXED |= {"bytes/s": "B/s", "FLOP/s": "FLOP/s", "FLOPs/s": "FLOP/s", "Hz": "Hz"}
_PREFIXES = {-3: "n", -2: "µ", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T", 5: "P", 6: "E"}


def scale(values: list[float], unit: str) -> tuple[float, str]:
    """(divisor, unit with its prefix) that suits the largest of the values. Times never take k, M, …."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if unit not in PREFIXED or largest == 0:
        return 1.0, PREFIXED.get(unit, unit).strip()
    power = math.floor(math.log10(largest) / 3 + 1e-9)
    low, high = (-3, 0) if unit == "s" else (0, 6)
    power = min(max(power, low), high)
    return 1000.0**power, (_PREFIXES[power] + PREFIXED[unit]).strip()


def number(value: float) -> str:
    """Whole numbers in full with thousands separated, others to four significant digits."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def human(value: float, unit: str) -> str:
    """`human(28_311_552, "bytes")` -> "28.31 MB"."""
    divisor, name = scale([value], unit)
    return f"{number(value / divisor)} {name}".strip()
