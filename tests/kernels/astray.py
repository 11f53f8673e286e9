"""What the guard must find: a kernel beside its tensors, one that never ends, one that fails."""

from __future__ import annotations

import torch

from kernels.catalog import Case, Trial, normal
from kernels.launch import tl, triton


@triton.jit
def copy(x_ptr, y_ptr, n, first_read, first_write, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + first_read + i, mask=i < n)
    tl.store(y_ptr + first_write + i, x, mask=i < n)


def _copied(read: int = 0, write: int = 0):
    def launcher(x, backend):
        y = torch.empty_like(x)
        copy[(1,)](x, y, x.numel(), read, write, BLOCK=64)
        return y

    return launcher


def _never_ends(x, backend):
    while True:
        pass


def _fails(x, backend):
    raise ValueError("on purpose")


def _case(name: str, launcher) -> Case:
    def make(device, dtype, generator) -> Trial:
        return Trial(launcher, torch.clone, (normal(generator, 50, device=device, dtype=dtype),))

    return Case(name, make)


CASES = [
    _case("in bounds", _copied()),
    _case("reads one too far", _copied(read=1)),
    _case("reads one too early", _copied(read=-1)),
    _case("writes one too far", _copied(write=1)),
    _case("writes one too early", _copied(write=-1)),
    _case("never ends", _never_ends),
    _case("fails", _fails),
]
