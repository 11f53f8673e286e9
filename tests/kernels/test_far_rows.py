"""Rows whose offsets pass 2³¹: Liger#1296, vllm#47671, sglang#20389 counted them in 32 bits and read elsewhere.

Three rows lie 2³⁰ elements apart, so that each stride fits into 32 bits and the last row's offset does not. Cut to 32
bits it is -2³¹, and there are zeros in front for those who read them. Only the touched pages exist.
"""

from __future__ import annotations

import mmap

import pytest
import torch

from kernels import fp8_block, moe_gemm, mxfp4, w4a16, w8a16
from kernels.matmul import matmul
from kernels.merge_states import merge_states
from kernels.moe_align import moe_align
from kernels.rms_norm import rms_norm
from kernels.rotary import angles, rotary
from kernels.sampling import parameters, sampling
from kernels.softmax import softmax
from kernels.swiglu import swiglu
from tests.kernels import harness

APART = 2**30
NORESERVE = 0x4000  # of Linux; Python has the name from 3.13 on


def far(x: torch.Tensor) -> torch.Tensor:
    """Equal to x, its first dimension 2³⁰ elements apart."""
    front, size = 2 * APART, 4 * APART + x[0].numel()
    if x.is_cuda:
        area = torch.zeros(size, dtype=x.dtype)
    else:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
        area = torch.frombuffer(mmap.mmap(-1, size * x.element_size(), flags=flags), dtype=torch.uint8).view(x.dtype)
    return area.as_strided(x.shape, (APART, *x[0].contiguous().stride()), front).copy_(x)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), device="cpu").half().to(harness.DEVICE)


def _router(experts: int):
    choice = torch.arange(experts)[:, None]
    return moe_align(choice, experts, 16, backend="torch")


W8 = w8a16.quantize(normal(3, 64))
W4 = w4a16.quantize(normal(3, 64), 32)
W_MX = mxfp4.quantize(normal(3, 64))
W_FP8 = fp8_block.quantize_weight(normal(3, 64))
A_FP8 = fp8_block.quantize_reference(normal(3, 64))
CALLS = {
    "rms_norm": (lambda x: rms_norm(x, normal(64), 1e-6, x, backend="triton"), normal(3, 64)),
    "swiglu": (lambda x: swiglu(x, x, backend="triton"), normal(3, 64)),
    "rotary": (lambda x: rotary(x, *angles(3, 16, harness.DEVICE), backend="triton"), normal(3, 2, 32)),
    "softmax": (lambda x: softmax(x, backend="triton"), normal(3, 64)),
    "sampling": (
        lambda x: sampling(x, **parameters([{"temperature": 0.0}] * 3, harness.DEVICE), backend="triton"),
        normal(3, 64),
    ),
    "matmul, a": (lambda a: matmul(a, normal(5, 64), backend="triton"), normal(3, 64)),
    "matmul, b": (lambda b: matmul(normal(5, 64), b, backend="triton"), normal(3, 64)),
    "merge_states": (lambda x: merge_states(x, torch.zeros(3, 1, 2), backend="triton"), normal(3, 1, 2, 32)),
    "w8a16, one row": (lambda w: w8a16.w8a16(normal(1, 64), w, W8[1], backend="triton"), W8[0]),
    "w8a16": (lambda w: w8a16.w8a16(normal(2, 64), w, W8[1], backend="triton"), W8[0]),
    "w4a16, one row": (lambda w: w4a16.w4a16(normal(1, 64), w, W4[1], None, 32, backend="triton"), W4[0]),
    "w4a16": (lambda w: w4a16.w4a16(normal(2, 64), w, W4[1], None, 32, backend="triton"), W4[0]),
    "mxfp4": (lambda w: mxfp4.mxfp4(normal(2, 64), w, W_MX[1], backend="triton"), W_MX[0]),
    "fp8_quantize": (lambda x: fp8_block.fp8_quantize(x, backend="triton")[1], normal(3, 64)),
    "fp8, a": (lambda a: fp8_block.fp8_block_matmul(a, A_FP8[1], *W_FP8, torch.float16, backend="triton"), A_FP8[0]),
    "fp8, weight": (
        lambda w: fp8_block.fp8_block_matmul(*A_FP8, w, W_FP8[1], torch.float16, backend="triton"),
        W_FP8[0],
    ),
    "moe_gemm, x": (lambda x: moe_gemm.moe_gemm(x, normal(3, 5, 64), *_router(3), backend="triton"), normal(3, 64)),
    "moe_gemm, experts": (
        lambda w: moe_gemm.moe_gemm(normal(3, 64), w, *_router(3), backend="triton"),
        normal(3, 5, 64),
    ),
    "moe_combine": (lambda y: moe_gemm.moe_combine(y, normal(3, 1), backend="triton"), normal(3, 64)),
}


@pytest.mark.parametrize("name", CALLS)
def test_far_rows_are_near_rows(name):
    call, x = CALLS[name]
    near, apart = call(x), call(far(x))
    for mine, want in zip(*((t if isinstance(t, tuple) else (t,)) for t in (apart, near)), strict=True):
        assert torch.equal(mine, want)
