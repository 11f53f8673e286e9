"""python -m kernels aot: what the compiler makes of every kernel, for GPUs that need not be here.

Triton compiles for whatever the active driver says the device is. A driver of three methods that answers "sm_90" is
enough: `kernel.warmup` then specialises on the arguments exactly as a launch would (which integers are multiples of
16, which pointers are aligned; without that the registers double), and stops before it would need the device.

compiled.json holds what came out, each row under a key made of everything that went in: the text of the kernel and of
what it calls, arguments, configuration, target, Triton's version. A row whose key still stands is read, not compiled;
change a kernel, and its rows are compiled again. `--fresh` compiles all of them, `--record` writes what was found.

All of it happens in child processes: TRITON_INTERPRET=1, as the tests set it, turns every kernel into Python.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from itertools import groupby
from pathlib import Path

import torch

from kernels.catalog import Compilation, kernel_files
from kernels.launch import HAVE_TRITON, KernelError, tl, triton

# Shared memory one block may have, bytes (CUDA C++ Programming Guide, compute capabilities). The compiler takes more.
SHARED_LIMIT = {75: 65_536, 80: 166_912, 90: 232_448, 100: 232_448}
NATIVE = {75: "mma.sync", 80: "mma.sync", 90: "wgmma", 100: "tcgen05"}
COLUMNS = ("kernel", "target", "dtype", "config", "registers", "spills", "shared_bytes", "shared_limit", "instruction")
RECORD = Path(__file__).with_name("compiled.json")
PAGE = Path(__file__).with_name("COMPILED.md")


def compile_all(
    only: str = "", workers: int | None = None, file: str = "", fresh: bool = False, keys: Collection[str] = ()
) -> list[dict]:
    """One row for each kernel, configuration and target. `only` keeps the kernels whose name contains it.

    `file` names a module to take COMPILE from, instead of every kernel file. `fresh` compiles what is recorded too.
    `keys`, if there are any, picks rows by their key.

    Row: kernel, target, dtype, config, registers (a thread), spills (registers that went to memory), shared_bytes,
    shared_limit, instruction (mma.sync, wgmma, tcgen05, none), vector (widest global load), faults (list of str),
    file, key, recorded (bool: read, not compiled).
    """
    if not HAVE_TRITON:
        raise KernelError("triton is not installed, and it does the compiling; pip install triton (Linux only)")
    workers = workers or os.cpu_count() or 1
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    task = {"file": file, "only": only, "workers": workers, "fresh": fresh, "keys": sorted(keys)}
    command = [sys.executable, "-m", "kernels.aot"]
    children = [
        subprocess.Popen(
            [*command, json.dumps(task | {"index": i})],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(workers)
    ]
    rows = []
    try:
        for child in children:
            out, err = child.communicate()
            if child.returncode:
                raise KernelError(f"the compiling process ended with {child.returncode}: {err.strip()[-2000:]}")
            rows += [json.loads(line) for line in out.splitlines()]
    finally:  # interrupted, or one of them failed
        for child in children:
            child.kill()
    return sorted(rows, key=lambda row: (row["kernel"], int(row["target"][3:]), row["dtype"], row["config"]))


def table(rows: list[dict]) -> str:
    """The rows as text, widest load and faults last."""
    columns = (*COLUMNS, "vector", "faults")
    cells = [[", ".join(v) if isinstance(v, list) else str(v) for v in (row[c] for c in columns)] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    lines = ["  ".join(v.ljust(w) for v, w in zip(line, widths, strict=True)).rstrip() for line in (columns, *cells)]
    return "\n".join(lines)


def recorded() -> dict[str, dict]:
    """The rows of compiled.json by key."""
    if not RECORD.exists():
        return {}
    return {row["key"]: row for row in json.loads(RECORD.read_text())["rows"]}


def record(rows: list[dict]) -> None:
    """Writes compiled.json and the page made from it; `rows` must be all there are."""
    kept = [json.dumps({k: v for k, v in row.items() if k != "recorded"}, ensure_ascii=False) for row in rows]
    version = json.dumps(triton.__version__)
    RECORD.write_text(f'{{"triton": {version}, "rows": [\n' + ",\n".join(kept) + "\n]}\n")
    PAGE.write_text(markdown(rows))


def markdown(rows: list[dict]) -> str:
    """The rows as a page, a table for each kernel file."""
    version = json.loads(RECORD.read_text())["triton"]
    lines = [
        "# What the compiler makes of the kernels",
        f"Written by `python -m kernels aot --record` with Triton {version}; nothing here was measured on a GPU. "
        "Registers are those of one thread (255 at most); spills are registers that went to memory; shared memory is "
        "that of one program, against what the chip lets it have; the load is the widest from global memory.",
    ]
    for file, of_file in groupby(sorted(rows, key=lambda row: row["file"]), lambda row: row["file"]):
        lines += ["", f"## [{file}]({file}.py)"]
        lines += ["| kernel | configuration | target | type | registers | spills | shared memory | matrix | load |"]
        lines += ["|---|---|---|---|--:|--:|--:|---|---|"]
        lines += map(_line, of_file)
    return "\n".join(lines) + "\n"


def _line(row: dict) -> str:
    shared = f"{row['shared_bytes']:,} of {row['shared_limit']:,}" if row["shared_bytes"] else "0"
    names = [row[c] for c in ("kernel", "config", "target", "dtype")]
    return "| " + " | ".join([*names, *(f"{row[c]}" for c in ("registers", "spills")), shared, *_found(row)]) + " |"


def _found(row: dict) -> list[str]:
    return [row["instruction"], row["vector"]]


# In the child -------------------------------------------------------------------------------------------------------


class PretendDriver:
    """The GPU of which Triton asks three things. The device index is the architecture, so caches stay apart."""

    sm = 90

    def get_current_device(self) -> int:
        return self.sm

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.sm, 32)


def _child(file: str, only: str, workers: int, index: int, fresh: bool, keys: list[str]) -> None:
    """Prints rows: of those to be compiled its share, and if it is the first, those that need not be."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Triton and ptxas print what they reject to stdout, where the rows go
    driver = PretendDriver()
    triton.runtime.driver.set_active(driver)
    files = [importlib.import_module(file)] if file else kernel_files()
    jobs = [job for file in files for c in getattr(file, "COMPILE", []) if only in c.name for job in _jobs(c)]
    jobs = {key: job for job in jobs if (key := _key(*job)) in keys or not keys}
    known = {} if fresh else {key: row for key, row in recorded().items() if key in jobs}
    for row in known.values() if index == 0 else ():
        print(json.dumps(row | {"recorded": True}), file=out)
    for key in [key for key in jobs if key not in known][index::workers]:
        _, _, driver.sm, _ = jobs[key]
        print(json.dumps(_row(*jobs[key]) | {"key": key, "recorded": False}), file=out, flush=True)


def _key(c: Compilation, dtype: torch.dtype, sm: int, config: dict) -> str:
    """A hash of all that a row depends on, this file's own way of reading the compiler's output included."""
    version = triton.__version__, os.environ["TRITON_DEFAULT_FP_FUSION"]
    reading = "".join(map(inspect.getsource, (_row, faults, resource_usage, matrix_instruction, widest_load)))
    limits = sm, SHARED_LIMIT[sm], NATIVE[sm], c.matrix
    call = c.name, dtype, c.make_args(dtype), c.constexprs, config, c.options
    return hashlib.sha256(repr((version, _texts(_plain(c.kernel)), call, limits, reading)).encode()).hexdigest()[:16]


def _texts(kernel) -> list[str]:
    """The text of a kernel, and of every function and constant of these files that it uses, or those use."""
    functions, constants = [kernel], []
    for function in functions:  # grows
        for name in sorted(function.fn.__code__.co_names):
            used = function.fn.__globals__.get(name)
            if isinstance(used, tl.constexpr):
                constants.append(f"{name} = {used.value!r}")
            elif hasattr(used, "src") and used not in functions:
                functions.append(used)
    return [function.src for function in functions] + constants


def _plain(kernel):
    return kernel.fn if hasattr(kernel, "configs") else kernel  # under autotune


def _jobs(c: Compilation) -> Iterator[tuple[Compilation, torch.dtype, int, dict]]:
    """bf16 needs sm_80; above it fp16 gives the same code and is left out where there is bf16."""
    configs = [config.all_kwargs() for config in getattr(c.kernel, "configs", [])]
    configs = configs or [{"num_warps": c.num_warps, "num_stages": c.num_stages}]
    for sm in (sm for sm in SHARED_LIMIT if sm >= c.min_sm):
        unwanted = torch.bfloat16 if sm < 80 else torch.float16 if torch.bfloat16 in c.dtypes else None
        for dtype in (d for d in c.dtypes if d != unwanted):
            yield from ((c, dtype, sm, config) for config in configs)


def _row(c: Compilation, dtype: torch.dtype, sm: int, config: dict) -> dict:
    kernel = _plain(c.kernel)
    row = {
        "file": kernel.fn.__module__.removeprefix("kernels."),
        "kernel": c.name,
        "target": f"sm_{sm}",
        "dtype": str(dtype).removeprefix("torch."),
        "config": " ".join(f"{k}={v}" for k, v in (c.constexprs | config).items() if v is not None),
        "shared_limit": SHARED_LIMIT[sm],
    }
    try:
        binary = kernel.warmup(*c.make_args(dtype), grid=(1,), **c.constexprs, **config, **c.options)
        binary = binary.result() if hasattr(binary, "result") else binary  # some versions hand out a future
    except Exception as error:  # the compiler raises many kinds; each belongs in the table, beside the others
        blank = dict.fromkeys(("registers", "spills", "shared_bytes"), 0)
        message = " ".join(f"{type(error).__name__}: {error}".split())[-600:]
        return row | blank | {"instruction": "none", "vector": "none", "faults": [message]}
    registers, spills = resource_usage(binary.asm["cubin"])
    row |= {"registers": registers, "spills": spills, "shared_bytes": binary.metadata.shared}
    ptx = binary.asm["ptx"]
    row |= {"instruction": matrix_instruction(ptx), "vector": widest_load(ptx)}
    return row | {"faults": faults(row, ptx, c.matrix)}


def faults(row: dict, ptx: str, matrix: str = "") -> list[str]:
    """What makes a row unacceptable, in words."""
    found, native = row["instruction"], NATIVE[int(row["target"][3:])]
    wrong = {
        f"spills {row['spills']} registers": row["spills"] > 0,
        f"shared memory {row['shared_bytes']} > {row['shared_limit']}": row["shared_bytes"] > row["shared_limit"],
        "works in float64 somewhere": bool(re.search(r"\.f64\b", ptx)),
        "no matrix instruction": bool(matrix) and found == "none",
        f"{found} instead of {native}": matrix == "native" and found not in ("none", native),
    }
    return [text for text, holds in wrong.items() if holds]


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and how many 32-bit registers ptxas keeps on the stack instead."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return used["REG"], max(used["STACK"], used["LOCAL"]) // 4


def matrix_instruction(ptx: str) -> str:
    for name, pattern in (
        ("tcgen05", r"\btcgen05\.mma"),
        ("wgmma", r"\bwgmma\.mma_async"),
        ("mma.sync", r"\bmma\.sync"),
    ):
        if re.search(pattern, ptx):
            return name
    return "none"


def widest_load(ptx: str) -> str:
    """The widest way in which the kernel reads global memory; 128 bits a thread is what fills the bus."""
    if re.search(r"\bcp\.async\.bulk", ptx):
        return "cp.async.bulk"
    loads = re.findall(r"\bld\.global[.\w:]*?(?:\.v(\d))?\.[bfsu](\d+)", ptx)
    widths = {int(v or 1) * int(bits): f"ld.global{f'.v{v}' if v else ''}.b{bits}" for v, bits in loads}
    widths |= {
        8 * int(size, 0): "cp.async" for size in re.findall(r"\bcp\.async\.c[ag]\S* \[.*?\], \[.*?\], (\w+)", ptx)
    }
    return f"{widths[max(widths)]} ({max(widths)} bits)" if widths else "none"


if __name__ == "__main__":
    _child(**json.loads(sys.argv[1]))
