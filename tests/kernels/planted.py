"""Kernels that aot must find fault with, and one autotuned kernel that it must compile in every configuration."""

from __future__ import annotations

import torch

from kernels.catalog import Compilation
from kernels.launch import tl, triton


@triton.jit
def crowded(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, x * tl.sum(x, axis=0))  # all of x stays in registers until the sum is known


@triton.jit
def wide(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(tl.float64) * 0.1)


@triton.jit
def matmul(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, tl.dot(x, x).to(x.dtype))


@triton.jit
def pipelined(x_ptr, y_ptr, steps, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for _ in range(steps):
        x = tl.load(x_ptr + i)
        total = tl.dot(x, x, total)
        x_ptr += BLOCK * BLOCK
    tl.store(y_ptr + i, total.to(y_ptr.dtype.element_ty))


@triton.jit
def undefined(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i) * scale)  # noqa: F821


@triton.autotune([triton.Config({"BLOCK": 256}), triton.Config({"BLOCK": 512}, num_warps=8)], key=[])
@triton.jit
def tuned(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i) * 2)


def _compilation(name, kernel, constexprs, extra=(), **settings) -> Compilation:
    settings = {"dtypes": (torch.bfloat16,), "min_sm": 90} | settings
    return Compilation(name, kernel, lambda dtype: (dtype, dtype, *extra), constexprs, **settings)


COMPILE = [
    _compilation("spilling", crowded, {"BLOCK": 4096}, num_warps=1, dtypes=(torch.float32,), options={"maxnreg": 32}),
    _compilation("wide", wide, {"BLOCK": 256}),
    _compilation("small matmul", matmul, {"BLOCK": 32}, matrix="native"),
    _compilation("no matmul", tuned.fn if hasattr(tuned, "configs") else tuned, {"BLOCK": 256}, matrix="any"),
    _compilation("large tiles", pipelined, {"BLOCK": 64}, extra=(64,), num_stages=40),
    _compilation("undefined", undefined, {"BLOCK": 256}),
    _compilation("tuned", tuned, {}, dtypes=(torch.float16, torch.bfloat16), min_sm=75),
]
