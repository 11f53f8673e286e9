"""python3 -m kernels gpu: every kernel on the GPU of this machine, tested and timed, in one JSON file.

Needs torch and triton and nothing else. First the roofline is measured (copy bandwidth, matmul peak), then each
kernel's cases run in bf16 and fp16 against float64, then its benches run against their rivals, each time as a
fraction of what was measured, and last the model end to end. When the budget is spent, what is left is listed.

An address gone wrong ends the process's use of the GPU, and an endless loop ends nothing: so the rows are made in a
child process (watch.py) that notes each in a journal, and where it ends early the next one goes on behind that row.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
import traceback
from pathlib import Path

import torch

from kernels.catalog import Bench, Case, compare, kernel_files
from kernels.launch import HAVE_TRITON, KernelError, UnsupportedError, triton

DEVICE = "cuda"
BROKEN = 3  # exit code: the GPU answers this process no more, another one has to go on
RATIO = 2.0  # a kernel's error may be this many times torch's own
MEASUREMENTS = Path(__file__).parents[1] / "figures/measurements"
MODEL_SECONDS = 110.0  # of the budget, kept for the model end to end


class Budget:
    """Seconds that may be spent, and the names of what no longer fitted."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.left_out: list[str] = []

    def allows(self, name: str, seconds: float = 3.0) -> bool:
        if name in JOURNAL.done or time.monotonic() + seconds < self.end:
            return True
        self.left_out.append(name)
        return False


class Journal:
    """A file of JSON lines, {"begin": name} and {"done": name, ...}: what a process knows of those before it."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path and path.exists() else []
        entries = [json.loads(line) for line in lines if line.endswith("}")]
        self.done = {entry["done"]: entry["row"] for entry in entries if "done" in entry}
        self.begun = next((entry["begin"] for entry in reversed(entries) if "begin" in entry), None)

    def note(self, **entry) -> None:
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def made(self, name: str, call) -> dict:
        """The row of that name: as noted, or else made and noted now."""
        if name not in self.done:
            self.note(begin=name)
            self.done[name] = call()
            self.note(done=name, row=self.done[name])
        return self.done[name]


JOURNAL = Journal(None)


def main(args: argparse.Namespace) -> int:
    """0: all right. 1: a case failed. 2: nothing to run it on. Makes the rows that the journal has not."""
    global JOURNAL
    check_machine()
    JOURNAL = Journal(args.journal and Path(args.journal))
    budget, start = Budget(args.budget - MODEL_SECONDS), time.monotonic()
    report = {"machine": JOURNAL.made("machine", machine), "roofline": JOURNAL.made("roofline", roofline)}
    _say(f"{report['machine']['gpu']}: " + ", ".join(f"{k} {v:.3g}" for k, v in report["roofline"].items()))
    files = [file for file in kernel_files() if args.only in file.__name__]
    report["cases"] = [row for file in files for row in _cases(file, budget)]
    report["benches"] = [row for file in files for row in _benches(file, budget, report["roofline"])]
    budget.end += MODEL_SECONDS
    report["model"] = end_to_end(budget, report["roofline"]) if args.only in "gpu_model" else []
    report |= {"left_out": budget.left_out, "seconds": round(time.monotonic() - start, 1)}
    path = _write(report, args.out)
    failed = [row for row in (*report["cases"], *report["benches"], *report["model"]) if row.get("error")]
    missed = [
        row for row in report["benches"] if row.get("goal") and "fraction" in row and row["fraction"] < row["goal"]
    ]
    cases, benches = len(report["cases"]), len(report["benches"])
    _say(f"{cases} cases, {benches} benches: {len(failed)} failed, {len(missed)} below goal")
    _say(f"{len(budget.left_out)} left out. {report['seconds']} s. Written to {path}")
    return 1 if failed else 0


def check_machine() -> None:
    """Raises KernelError where there is no GPU, or nothing to use it with."""
    if not HAVE_TRITON or not torch.cuda.is_available():
        missing = "torch finds no CUDA GPU" if HAVE_TRITON else "triton is not installed"
        raise KernelError(f"{missing}; python -m kernels aot checks what can be checked without a GPU")


def machine() -> dict:
    p = torch.cuda.get_device_properties(0)
    return {
        "gpu": p.name,
        "sm": 10 * p.major + p.minor,
        "processors": p.multi_processor_count,
        "memory_bytes": p.total_memory,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def milliseconds(call, spend_ms: float = 80.0) -> float:
    """Median time of a call on the GPU alone, the L2 cache emptied before each, as triton.testing.do_bench does it.

    One difference: the GPU sleeps before the clock starts, so that Python has handed over the whole call by then.
    Otherwise a kernel of ten microseconds is timed as the fifty that its launch takes; CUDA graphs hide those too.
    """
    call()
    torch.cuda.synchronize()
    cache = torch.empty(2**28, dtype=torch.int8, device=DEVICE)
    times: list[float] = []
    while len(times) < 10 or (sum(times) < spend_ms and len(times) < 100):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(10)]
        for start, end in events:
            cache.zero_()
            torch.cuda._sleep(1_000_000)  # cycles: about half a millisecond
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        times += [start.elapsed_time(end) for start, end in events]
    return statistics.median(times)


def roofline() -> dict[str, float]:
    """What this GPU does, not what its sheet says: a copy of 1 GiB, and the best of three square matmuls."""
    source = torch.empty(2**28, dtype=torch.float32, device=DEVICE).normal_()
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / (milliseconds(lambda: target.copy_(source)) * 1e-3)
    peak = 0.0
    for n in (4096, 8192, 12288):
        a, b = (torch.randn(n, n, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        peak = max(peak, 2 * n**3 / (milliseconds(lambda a=a, b=b: a @ b) * 1e-3))
    return {"copy_bytes_per_s": bandwidth, "matmul_flops_per_s": peak}


def _cases(file, budget: Budget) -> list[dict]:
    rows = []
    for case in getattr(file, "CASES", []):
        for dtype in (d for d in case.dtypes if d != torch.float32):
            name = f"{file.__name__}: {case.name}, {_name(dtype)}"
            if budget.allows(name):
                rows.append(_attempt(name, lambda case=case, dtype=dtype: run_case(case, dtype)))
    return rows


def run_case(case: Case, dtype: torch.dtype) -> dict:
    errors = compare(case.make(DEVICE, dtype, torch.Generator().manual_seed(0)))
    worst = max((e.ratio for e in errors), default=0.0)
    row = {"ratio": worst, "outputs": [{"kernel": e.kernel, "torch": e.torch} for e in errors]}
    return row if worst <= RATIO else row | {"error": f"{worst:.3g} times torch's error"}


def _benches(file, budget: Budget, roof: dict[str, float]) -> list[dict]:
    rows = []
    for bench in getattr(file, "BENCHES", []):
        for size in bench.sizes:
            for dtype in bench.dtypes:
                name = f"{bench.name}, {size}, {_name(dtype)}"
                if budget.allows(name, 5.0):
                    rows.append(_attempt(name, lambda b=bench, s=size, d=dtype: time_bench(b, s, d, roof)))
    return rows


def time_bench(bench: Bench, size: str, dtype: torch.dtype, roof: dict[str, float]) -> dict:
    work = bench.make(DEVICE, dtype, **bench.sizes[size])
    ms = milliseconds(work.kernel)
    memory = work.bytes / (ms * 1e-3) / roof["copy_bytes_per_s"]
    compute = work.flops / (ms * 1e-3) / roof["matmul_flops_per_s"]
    return {
        "ms": ms,
        "do_bench_ms": triton.testing.do_bench(work.kernel, warmup=10, rep=40, return_mode="median"),
        "rivals_ms": {rival: milliseconds(call) for rival, call in work.rivals.items()},
        "bytes": work.bytes,
        "flops": work.flops,
        "of_copy_bandwidth": memory,
        "of_matmul_peak": compute,
        "fraction": memory if bench.bound == "memory" else compute,
        "goal": bench.goal,
        "shape": {k: v if isinstance(v, int | float | str) else str(v) for k, v in bench.sizes[size].items()},
    }


def end_to_end(budget: Budget, roof: dict[str, float]) -> list[dict]:
    """Rows of gpu_model; each has name, backend, ms, tokens_per_s and the fraction of the roofline."""
    from kernels import gpu_model  # which asks this file for the device

    return [_attempt(name, call) for name, call in gpu_model.rows(roof) if budget.allows(name, 10.0)]


def _attempt(name: str, call) -> dict:
    """A failure is a row like any other, so that one kernel does not hide the rest."""
    row = JOURNAL.made(name, lambda: _row(name, call))
    shown = ("ratio", "ms", "tokens_per_s", "fraction", "graph_fraction", "goal", "rivals_ms", "skipped", "error")
    numbers = {k: v for k, v in row.items() if k in shown}
    _say(f"{name:64} " + "  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in numbers.items()))
    if row.get("error") and not _answers():
        sys.exit(BROKEN)
    return row


def _row(name: str, call) -> dict:
    try:
        return {"name": name} | call()
    except UnsupportedError as error:
        return {"name": name, "skipped": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {"name": name, "error": f"{type(error).__name__}: {error}"[:500]}


def _answers() -> bool:
    """False once a kernel has touched memory that is not its own: from then on every call fails."""
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def _write(report: dict, out: str | None) -> Path:
    gpu = "-".join(report["machine"]["gpu"].lower().split())
    path = Path(out) if out else MEASUREMENTS / f"kernels-{gpu}-{report['machine']['date'][:10]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _say(text: str) -> None:
    print(text, flush=True)
