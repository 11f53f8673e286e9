"""How `bench` measures: sizes, rounds taken in turns, peak memory."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from ..errors import RequestError
from ..fetch import locate
from ..generate import generate
from ..packing import choose_layouts
from ..sampling_params import SamplingParams
from ..tokenizer import Tokenizer
from ..transformer import Transformer


@dataclass(frozen=True)
class Sizes:
    """Tokens of the prompt before decoding, decode steps, tokens of the prefill, and rounds."""

    prompt: int
    output: int
    prefill: int
    rounds: int

    def check(self, context: int) -> None:
        """Raises RequestError for what cannot be measured in a context of that many tokens."""
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise RequestError(f"{field.name} is {getattr(self, field.name)}; a benchmark needs at least 1")
        if (longest := max(self.prompt + self.output, self.prefill) + 1) > context:
            raise RequestError(
                f"the benchmark needs {longest} tokens and the model's context is {context}; "
                "lower --prompt-tokens, --output-tokens or --prefill-tokens"
            )


@dataclass(frozen=True)
class Run:
    """One round: seconds from the request to its first token, and of each decode step after it; the tokens drawn."""

    prefill_s: float
    decode_steps: list[float]
    token_ids: list[int]


class Engine(Protocol):
    """Anything that can be timed: greedy, never ending early."""

    version: str

    def token_times(self, ids: Sequence[int], count: int) -> tuple[list[float], list[int]]:
        """`count` tokens after `ids`: seconds from the start of the request to each, and the tokens."""


class Minillm:
    """This package."""

    version = ""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, make_cache=None) -> None:
        self.model, self.tokenizer, self.make_cache = model, tokenizer, make_cache

    def token_times(self, ids: Sequence[int], count: int) -> tuple[list[float], list[int]]:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        cache = None if self.make_cache is None else self.make_cache(len(ids) + count)
        done = generate(self.model, self.tokenizer, ids, params, cache)
        return done.token_times, done.token_ids


def measure_once(engine: Engine, ids: Sequence[int], sizes: Sizes) -> Run:
    """The two requests of a round: a short prompt and many tokens, then a long prompt and one."""
    times, tokens = engine.token_times(ids[: sizes.prompt], sizes.output + 1)
    steps = [after - before for before, after in pairwise(times)]
    prefill, _ = engine.token_times(ids[: sizes.prefill], 1)
    return Run(prefill[0], steps, tokens)


def warm_up(engine: Engine, ids: Sequence[int], sizes: Sizes) -> None:
    """The first pass of each shape builds kernels and touches memory; nobody should time it."""
    measure_once(engine, ids, Sizes(sizes.prompt, min(sizes.output, 4), sizes.prefill, 1))


def take_turns(engines: dict[str, Engine], ids: Sequence[int], sizes: Sizes) -> dict[str, list[Run]]:
    """All rounds, the engines one after another in each: what slows the machine for a while slows them alike."""
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    for _ in range(sizes.rounds):
        for name, engine in engines.items():
            runs[name].append(measure_once(engine, ids, sizes))
    return runs


def text_ids(tokenizer: Tokenizer, count: int) -> list[int]:
    """The first `count` tokens of pydoc's topics, which every CPython carries: real English, no download."""
    from ..analysis.quality import TEXT

    ids = tokenizer.encode(TEXT[: 40 * count])
    if len(ids) < count:
        raise RequestError(f"the benchmark's text gives {len(ids)} tokens; ask for at most that many, not {count}")
    return ids[:count]


def settle_layout(source: str | None, dtype: str, device: str) -> tuple[Path, float]:
    """(where the model is, seconds spent): fetches what is not there and measures layouts not measured yet, so that
    loading can be timed without either."""
    path = locate(source)
    started = time.perf_counter()
    if dtype == "auto" and device == "cpu":
        choose_layouts(int4_codes=path.is_file())
    return path, time.perf_counter() - started


def peak_rss_bytes() -> int:
    """The most memory this process ever had resident."""
    if sys.platform == "win32":
        return _peak_working_set()
    if sys.platform == "linux":  # there getrusage also counts the parent, whose memory a child begins with
        with contextlib.suppress(OSError, StopIteration):
            status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
            return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS says bytes, Linux kibibytes


def _peak_working_set() -> int:
    import ctypes
    from ctypes import wintypes

    class Counters(ctypes.Structure):  # PROCESS_MEMORY_COUNTERS of psapi.h
        _fields_ = (
            ("cb", wintypes.DWORD),
            ("PageFaultCount", wintypes.DWORD),
            *((name, ctypes.c_size_t) for name in (
                "PeakWorkingSetSize", "WorkingSetSize", "QuotaPeakPagedPoolUsage", "QuotaPagedPoolUsage",
                "QuotaPeakNonPagedPoolUsage", "QuotaNonPagedPoolUsage", "PagefileUsage", "PeakPagefileUsage",
            )),
        )  # fmt: skip

    counters = Counters(cb=ctypes.sizeof(Counters))
    kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    kernel.GetCurrentProcess.restype = wintypes.HANDLE
    query = kernel.K32GetProcessMemoryInfo
    query.argtypes = (wintypes.HANDLE, ctypes.POINTER(Counters), wintypes.DWORD)
    if not query(kernel.GetCurrentProcess(), ctypes.byref(counters), counters.cb):
        raise ctypes.WinError(ctypes.get_last_error())
    return counters.PeakWorkingSetSize
