"""What the test of every kernel needs: its cases against float64, poisoned outputs, guard pages.

    @pytest.mark.parametrize(("case", "dtype"), harness.trials(rms_norm))
    def test_against_float64(case, dtype):
        harness.check(case, dtype)

    def test_stays_in_bounds():
        harness.check_bounds("kernels.rms_norm")

The interpreter adds and multiplies bf16 wrongly and turns float32 into bf16 by cutting digits off, so there float32 and
float16 are tested; on a CUDA machine bf16 is too.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from kernels import launch
from kernels.catalog import Case, Error, Trial, compare

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16) + ((torch.bfloat16,) if DEVICE == "cuda" else ())


def trials(module: ModuleType) -> list:
    """Parameters ("case", "dtype") for every case of a kernel file in every type that this machine gets right."""
    return [
        pytest.param(case, dtype, id=f"{case.name}-{str(dtype).removeprefix('torch.')}")
        for case in module.CASES
        for dtype in DTYPES
        if dtype in case.dtypes
    ]


def make(case: Case, dtype: torch.dtype, seed: int = 0) -> Trial:
    return case.make(DEVICE, dtype, torch.Generator().manual_seed(seed))


def check(case: Case, dtype: torch.dtype, ratio: float = 2.0) -> list[Error]:
    """The kernel's error is at most `ratio` times torch's own, with every output poisoned beforehand."""
    with poisoned():
        errors = compare(make(case, dtype))
    for i, error in enumerate(errors):
        assert error.ratio <= ratio, f"output {i}: rms error {error.kernel:.3g}, torch's own {error.torch:.3g}"
    return errors


@contextlib.contextmanager
def poisoned():
    """torch.empty and its kin come filled with NaN (integers: their largest), so what nobody writes shows."""
    mode = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.set_deterministic_debug_mode(mode)


class _Guard:
    """A process of tests.kernels.guard, started at the first request and again if it is lost."""

    def __init__(self) -> None:
        self.process = None

    def run(self, **request) -> str:
        """The exit code, as text; "" when the guard itself is lost."""
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.kernels.guard"],
                cwd=Path(__file__).parents[2],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            atexit.register(self.process.kill)
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


_GUARD = _Guard()


def check_bounds(module: str, only: str = "", seconds: int = 120) -> None:
    """Runs the cases of a kernel file in a child process in which nothing may be touched beside the tensors.

    Each tensor, outputs included, ends where an unreadable page begins, and in a second run begins where one ends.
    The interpreter's accesses are real, so a wrong one kills the child. Children are forked from one process that has
    imported torch and triton: an import takes longer than most of the runs.
    """
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        code = _GUARD.run(module=module, only=only, output=output.name, seconds=seconds)
        said = output.read()
    last = [line for line in said.splitlines() if ", fenced at its " in line][-1:] or ["before the first case"]
    assert code == "0", f"{module}, {last[0]}: exit {code or 'of the guard itself'}\n{said[-3000:]}"


@contextlib.contextmanager
def quick_interpreter():
    """The same results in half the time, for kernels that call functions of their own.

    The interpreter replaces triton.language's operators at each such call, tl.sum and tl.max included, though one
    replacement lasts for the whole launch. Here it happens once a launch.
    """
    if not launch.INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    patch, done = interpreter._patch_lang, set()

    def once(fn):
        langs = frozenset(id(v) for v in fn.__globals__.values() if v is launch.tl or v is launch.tl.core)
        if langs in done:
            return None  # only a launch restores, and its own patch is always the first
        scope = patch(fn)
        done.add(langs)
        restore = scope.restore
        scope.restore = lambda: (done.clear(), restore())
        return scope

    interpreter._patch_lang = once
    try:
        yield
    finally:
        interpreter._patch_lang = patch


@contextlib.contextmanager
def plain_matmul():
    """In the interpreter tl.dot is numpy's matmul, and the BLAS behind it picks its code, and with it the order of a
    sum, by where a row lies in the tile. Here every number is summed alike, as a GPU's matrix instructions do it."""
    if not launch.INTERPRETED:
        yield
        return

    def matmul(a, b, dtype=None):
        return np.einsum("...ij,...jk->...ik", a.astype(dtype), b.astype(dtype))

    whole, np.matmul = np.matmul, matmul
    try:
        yield
    finally:
        np.matmul = whole
