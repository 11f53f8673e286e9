"""python -m tests.kernels.guard: runs the cases of kernel files between unreadable pages; see harness.

A request is a line of JSON: module, only (text that the names of its cases hold), output (a file for what it prints)
and seconds. The answer is a line with the exit code. Each request has a process of its own, forked from this one, which
has imported torch and triton and run nothing: a kernel that reads or writes beside a tensor ends that process with a
segmentation fault, and the next request finds everything as it was.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import mmap
import os
import signal
import sys
import traceback

os.environ["TRITON_INTERPRET"] = "1"
# A fork takes the calling thread alone along; what other threads of numpy's or torch's held would stay held for ever.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import torch
import torch._dynamo  # which the first torch.empty under a TorchDispatchMode would import, in each child anew
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels import harness  # and with it triton

PAGE = mmap.PAGESIZE
_KEPT = []  # maps must outlive the tensors in them


def fenced(x: torch.Tensor, at_end: bool) -> torch.Tensor:
    """A copy of x, strides and all, whose last (or first) element touches a page that may not be touched."""
    if x.numel() == 0:
        return x
    reach = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))  # elements from first to last
    size = reach * x.element_size()
    pages = -(-size // PAGE)
    area = mmap.mmap(-1, (pages + 2) * PAGE)
    _KEPT.append(area)
    base = ctypes.addressof(ctypes.c_char.from_buffer(area))
    for page in (0, pages + 1):
        _protect(base + page * PAGE)
    offset = PAGE * (pages + 1) - size if at_end else PAGE
    flat = torch.frombuffer(memoryview(area)[offset : offset + size], dtype=torch.uint8)
    copy = torch.as_strided(flat.view(x.dtype), x.shape, x.stride())
    return copy.copy_(x)


def _protect(address: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")


class FencedOutputs(TorchDispatchMode):
    """What torch.empty, zeros and full hand out is fenced too."""

    MAKERS = (
        "empty",
        "new_empty",
        "empty_like",
        "empty_strided",
        "zeros",
        "zeros_like",
        "new_zeros",
        "full",
        "full_like",
    )

    def __init__(self, at_end: bool) -> None:
        super().__init__()
        self.at_end = at_end

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return fenced(out, self.at_end) if func.overloadpacket.__name__ in self.MAKERS else out


def run(module: str, only: str) -> None:
    cases = [case for case in importlib.import_module(module).CASES if only in case.name]
    assert cases, f"no case of {module} is called {only!r}"
    for case in cases:
        dtype = torch.float32 if torch.float32 in case.dtypes else torch.float16
        for at_end in (True, False):
            print(f"{case.name}, fenced at its {'end' if at_end else 'start'}", flush=True)
            trial = case.make("cpu", dtype, torch.Generator().manual_seed(0))
            trial = trial.moved(lambda t, at_end=at_end: fenced(t, at_end))
            with FencedOutputs(at_end), harness.quick_interpreter():
                trial.kernel()


def forked(module: str, only: str, output: str, seconds: int) -> int:
    """The exit code of a child that ran the cases; minus the signal that ended it."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        file = os.open(output, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(file, stream)
        faulthandler.enable()
        signal.alarm(seconds)  # which ends this process
        run(module, only)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def main() -> None:
    threads = "/proc/self/task"  # of Linux; elsewhere nobody says
    assert not os.path.isdir(threads) or len(os.listdir(threads)) == 1, "a fork would leave threads behind"
    for line in sys.stdin:
        print(forked(**json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
