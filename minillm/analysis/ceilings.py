"""The two ceilings of the machine at hand, measured with torch alone: memory bandwidth and matrix-product rate.

Traps avoided: buffers larger than any cache; random numbers, since zeros draw less power and run faster than a real
matrix (894 against 769–798 TFLOP/s on an H200); a warm-up before every timing; a device synchronise around it. A
ceiling is the fastest of several runs: other work on the machine can only make a run slower. The result is cached as
JSON and measured again when the processor, the torch version or the number of threads is another one.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import RequestError, short
from ..storage import remembered
from .hardware import GIGA, Hardware

METHOD = 4  # raise it when the way of measuring changes, so that old caches are measured again
_BUFFER = 512 << 20
_SECONDS_A_CEILING = 0.4
_SECONDS_A_SHARE = 0.25
_RUNS = (5, 15)  # at least, at most
_STEADY = 2.0  # a median this many times the fastest run says that something else was running now and then
_OWN = 0.8  # a smaller share of the cores' time says that something else was running all along
_MATMUL_SIZES = {"cpu": (1024, 2048), "cuda": (4096, 8192)}
_TRIAL_SIZE = 256
_MATMUL_DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "float16", "bfloat16")}


def this_machine(device: str = "cpu", refresh: bool = False) -> Hardware:
    """Ceilings of this machine's `device` ("cpu" or "cuda"), from the cache if they still hold, else measured.

    Measuring takes a few seconds. A cache folder that cannot be written costs a warning, not the result. Ceilings
    taken while the machine was busy are too low: they come with a warning and hold for an hour.
    """
    key, now = _identity(device), datetime.datetime.now(datetime.UTC)
    for fresh in (refresh, True):  # a cache that cannot be believed is measured again
        name = f"ceilings-{device}-{key['threads']}-threads.json"
        value = remembered(name, key, lambda: asdict(measure(device)), fresh)
        if (known := _believed(value, now)) is not None:
            _warn_if_busy(known)
            return known
    raise RequestError(
        f"the ceilings measured on {key['device']} make no sense: {short(value, 300)}; measure on an idle machine"
    )


def measure(device: str = "cpu", buffer_bytes: int | None = None) -> Hardware:
    """Measures the ceilings of `device` now. `buffer_bytes` overrides the size of the bandwidth buffer."""
    buffer_bytes = buffer_bytes or _buffer_bytes(device)
    timer = _Timer(device)
    read, copy = _bandwidths(timer, buffer_bytes)
    rates = {dtype: rate for dtype in _MATMUL_DTYPES[device] if (rate := _matmul_rate(timer, dtype))}
    record = _identity(device) | {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "buffer_bytes": buffer_bytes,
        "copy_bandwidth": copy,
        "spread": timer.spread,
        "cpu_share": timer.cpu_share,
    }
    return Hardware(record["device"], _memory_bytes(device) / GIGA, read, rates, measured=record)


def _identity(device: str) -> dict[str, Any]:
    """What a cached measurement depends on."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
    return {"method": METHOD, "device": name, "torch": torch.__version__, "threads": torch.get_num_threads()}


def cpu_name() -> str:
    """The processor's name and its number of usable cores."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()} ({os.cpu_count()} cores)"
    return f"{platform.processor() or platform.machine() or 'unknown processor'} ({os.cpu_count()} cores)"


def _believed(value: dict[str, Any], now: datetime.datetime) -> Hardware | None:
    """The ceilings that a cache holds, or None if it is damaged, or was taken on a busy machine and is old."""
    try:
        known = Hardware(**{**value, "unchecked": tuple(value["unchecked"])})
        record = known.measured
        numbers = [known.memory_gb, known.bandwidth, record["copy_bandwidth"], record["cpu_share"]]
        numbers += known.peak_flops.values()
        sound = bool(known.peak_flops) and all(math.isfinite(number) and number > 0 for number in numbers)
        age = now - datetime.datetime.fromisoformat(record["date"])
        holds = not _busy(record) or age < datetime.timedelta(hours=1)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    return known if sound and holds else None


def _busy(record: dict[str, Any]) -> str:
    """What shows that other work was going on; empty for nothing."""
    if record["spread"] > _STEADY:
        return f"median run {record['spread']:.1f} times the fastest"
    if record["cpu_share"] < _OWN:
        return f"its {record['threads']} threads had {record['cpu_share']:.0%} of their cores' time"
    return ""


def _warn_if_busy(known: Hardware) -> None:
    if why := _busy(known.measured):
        warnings.warn(
            f"{known.name} was busy while its ceilings were measured ({why}), so they may be too low; measure again "
            "when it is idle: this_machine(refresh=True), or python -m minillm demo --refresh",
            stacklevel=3,
        )


def _memory_bytes(device: str) -> int:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_properties(0).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return 8 * GIGA


def _available_bytes(device: str) -> int:
    """Memory that can be had without pushing anything out."""
    if device == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0]
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    return _memory_bytes(device) // 4


def _buffer_bytes(device: str) -> int:
    """512 MiB (2 GiB on a GPU), or an eighth of the free memory where there is less."""
    wanted = _BUFFER * (4 if device == "cuda" else 1)
    smallest = 16 << 20
    return max(smallest, min(wanted, _available_bytes(device) // 8) // smallest * smallest)


class _Timer:
    """Times calls on a device, and finds out whether it was busy with something else.

    spread: the worst median / fastest seen, well above 1 where others ran now and then. cpu_share: of the time of so
    many cores as torch has threads, the most that this process had in a large product: threads wait for each other, so
    that one core shared all along makes every run slow, and all alike.
    """

    def __init__(self, device: str) -> None:
        self.device, self.spread, self._shares = device, 1.0, []

    @property
    def cpu_share(self) -> float:
        return max(self._shares, default=1.0)

    def note_share(self, work: Callable[[], object]) -> None:
        """Runs work that keeps every thread busy, on a CPU, for so long that a few ms of the clock do not count."""
        import torch

        start, cpu, wall = time.perf_counter(), time.process_time(), 0.0
        while wall < _SECONDS_A_SHARE:
            work()
            wall = time.perf_counter() - start
        cores = (time.process_time() - cpu) / wall
        self._shares.append(cores / torch.get_num_threads())

    def fastest_seconds(self, work: Callable[[], object]) -> float:
        """Fastest time of one call: after a warm-up, until the time is used up, but never fewer than five runs."""
        self._run(work)
        seconds: list[float] = []
        least, most = _RUNS
        while len(seconds) < least or (len(seconds) < most and sum(seconds) < _SECONDS_A_CEILING):
            start = time.perf_counter()
            self._run(work)
            seconds.append(time.perf_counter() - start)
        self.spread = max(self.spread, statistics.median(seconds) / min(seconds))
        return min(seconds)

    def _run(self, work: Callable[[], object]) -> None:
        work()
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()


def _bandwidths(timer: _Timer, buffer_bytes: int) -> tuple[float, float]:
    """(read, copy) bytes/s. A copy counts the bytes it reads and those it writes.

    Reading is a matrix–vector product or a dot product, whichever is faster: the first is what decode does.
    """
    import torch

    row = 4096
    columns = torch.randn(row, device=timer.device)
    # random rows, repeated: drawing every number anew would take longer than the measurement
    matrix = torch.randn(1024, row, device=timer.device).repeat(max(1, buffer_bytes // (1024 * row * 4)), 1)
    flat = matrix.view(-1)
    size = flat.numel() * 4
    products = (lambda: torch.mv(matrix, columns), lambda: torch.dot(flat, flat))
    read = max(size / timer.fastest_seconds(product) for product in products)
    half = flat.numel() // 2
    return read, size / timer.fastest_seconds(lambda: flat[:half].copy_(flat[half : 2 * half]))


def _matmul_rate(timer: _Timer, dtype: str) -> float | None:
    """FLOP/s of a square matrix product, the best of two sizes; None if torch cannot do it in `dtype` here.

    A processor without bfloat16 units may take a minute for one large product. A small trial tells: what is far
    behind float32 there is not worth waiting for, and its rate in the trial is the answer.
    """
    try:
        trial = _product_rate(timer, dtype, _TRIAL_SIZE)
        if dtype != "float32" and trial < 0.1 * _product_rate(timer, "float32", _TRIAL_SIZE):
            return trial
        return max(_product_rate(timer, dtype, size) for size in _MATMUL_SIZES[timer.device])
    except RuntimeError:
        return None


def _product_rate(timer: _Timer, dtype: str, size: int) -> float:
    import torch

    left, right = (torch.randn(size, size, device=timer.device).to(getattr(torch, dtype)) for _ in range(2))
    rate = 2 * size**3 / timer.fastest_seconds(lambda: left @ right)
    if timer.device == "cpu" and size == _MATMUL_SIZES["cpu"][-1]:
        timer.note_share(lambda: left @ right)
    return rate
