"""python -m tests.kernels.guard FILE [TEXT]: the cases of a kernel file between unreadable pages; see harness.

A kernel that reads or writes beside a tensor ends this process with a segmentation fault.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import mmap
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


def main(file: str, only: str = "") -> None:
    faulthandler.enable()
    module = importlib.import_module(f"kernels.{file}")
    for case in (case for case in module.CASES if only in case.name):
        dtype = torch.float32 if torch.float32 in case.dtypes else torch.float16
        for at_end in (True, False):
            print(f"{case.name}, fenced at its {'end' if at_end else 'start'}", flush=True)
            trial = case.make("cpu", dtype, torch.Generator().manual_seed(0))
            trial = trial.moved(lambda t, at_end=at_end: fenced(t, at_end))
            with FencedOutputs(at_end):
                trial.kernel()


if __name__ == "__main__":
    main(*sys.argv[1:])
