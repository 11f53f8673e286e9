"""What a device can do: datasheet figures of accelerators, and the ceilings of the machine at hand.

Datasheet figures are dense (no sparsity), SXM parts where there is a choice. Rows marked `checked=False` are from
memory: say so where they are printed. Measured ceilings come from `ceilings.py`, cached with the date.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError, short
from .formats import format_of

TERA, GIGA = 10**12, 10**9


@dataclass(frozen=True)
class Hardware:
    """One device. `peak_flops` maps a dtype to FLOP/s (operations a second for int8), `bandwidth` is bytes/s of its
    memory, read. `link_gb_s` sums both directions, as datasheets do; `link_bandwidth` is one of them.

    `unchecked` names single figures that are from memory in a row that was otherwise checked. `measured` is empty for
    a datasheet; for a measured machine it says when and how (date, torch, threads, device, copy_bandwidth).
    """

    name: str
    memory_gb: float
    bandwidth: float
    peak_flops: Mapping[str, float]
    link_gb_s: float | None = None
    checked: bool = True
    unchecked: tuple[str, ...] = ()
    measured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def memory_bytes(self) -> int:
        """Bytes of device memory, with a gigabyte of 10^9 as on a datasheet."""
        return round(self.memory_gb * GIGA)

    @property
    def link_bandwidth(self) -> float | None:
        """Bytes/s to the other devices in one direction; None if it has no link of its own (PCIe only)."""
        return None if self.link_gb_s is None else self.link_gb_s * GIGA / 2

    @property
    def copy_bandwidth(self) -> float | None:
        """Measured bytes/s of a copy, reads and writes together; None for a datasheet."""
        return self.measured.get("copy_bandwidth")

    def peak(self, dtype: Any = "bfloat16") -> float:
        """FLOP/s of matrix products in `dtype`. Raises ConfigError if the device does not do that dtype."""
        name = format_of(dtype).name
        if name not in self.peak_flops:
            raise ConfigError(
                f"{self.name} has no matrix rate for {name}; choose one of {', '.join(sorted(self.peak_flops))}"
            )
        return self.peak_flops[name]

    def ridge(self, dtype: Any = "bfloat16") -> float:
        """FLOPs a byte at which the two roofs meet: less is memory-bound, more is compute-bound."""
        return self.peak(dtype) / self.bandwidth

    def scaled(self, devices: int) -> Hardware:
        """`devices` of them as one, with nothing lost between them: the floor that a real group stays above."""
        return Hardware(
            f"{devices} x {self.name}",
            self.memory_gb * devices,
            self.bandwidth * devices,
            {dtype: rate * devices for dtype, rate in self.peak_flops.items()},
            self.link_gb_s,
            self.checked,
            self.unchecked,
        )


def _gpu(name: str, gb: float, tb_s: float, bf16: float, fp8: float | None, int8: float, link: float | None = None,
         checked: bool = True, unchecked: tuple[str, ...] = (), fp16_only: bool = False) -> Hardware:  # fmt: skip
    peak = {"float16": bf16, "int8": int8} | ({} if fp16_only else {"bfloat16": bf16})
    peak |= {} if fp8 is None else {"float8_e4m3fn": fp8, "float8_e5m2": fp8}
    rates = {dtype: rate * TERA for dtype, rate in peak.items()}
    return Hardware(name, gb, round(tb_s * TERA), rates, link, checked, unchecked)


_TABLE = (
    _gpu("A100-40", 40, 1.555, 312, None, 624, 600),
    _gpu("A100-80", 80, 2.039, 312, None, 624, 600),
    _gpu("H100", 80, 3.35, 989, 1979, 1979, 900),
    _gpu("H200", 141, 4.8, 989, 1979, 1979, 900),
    _gpu("B200", 180, 8.0, 2250, 4500, 4500, 1800, unchecked=("int8",)),
    _gpu("MI300X", 192, 5.3, 1307, 2615, 2615, 896, unchecked=("int8", "link")),
    _gpu("L40S", 48, 0.864, 362, 733, 733, checked=False),
    _gpu("L4", 24, 0.30, 121, 242, 242, checked=False),
    _gpu("T4", 16, 0.32, 65, None, 130, checked=False, fp16_only=True),
    _gpu("RTX-4090", 24, 1.008, 165, 330, 661, checked=False),
)
HARDWARE: Mapping[str, Hardware] = {device.name: device for device in _TABLE}
_ALIASES = {"a100": "A100-80", "a100-80gb": "A100-80", "a100-40gb": "A100-40", "h100-sxm": "H100", "4090": "RTX-4090",
            "rtx4090": "RTX-4090", "h200-sxm": "H200"}  # fmt: skip


def find_hardware(name: str | Hardware) -> Hardware:
    """The device called `name` in the datasheet table, whatever its capitals; a Hardware is returned as it is.
    Raises ConfigError with the names there are."""
    if isinstance(name, Hardware):
        return name
    if not isinstance(name, str):
        raise ConfigError(f"a device's name is {short(repr(name))}; give a text such as 'H100', or a Hardware")
    key = name.strip().lower().replace(" ", "-").replace("_", "-")
    by_lower = {known.lower(): device for known, device in HARDWARE.items()}
    by_lower |= {alias: HARDWARE[target] for alias, target in _ALIASES.items()}
    if device := by_lower.get(key):
        return device
    close = difflib.get_close_matches(short(key), by_lower, n=3, cutoff=0.5)
    hint = ", ".join(dict.fromkeys(by_lower[match].name for match in close)) or ", ".join(HARDWARE)
    raise ConfigError(f"no device called {short(name)!r} in the datasheet table; did you mean {hint}?")
