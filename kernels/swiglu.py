"""SwiGLU: y = silu(gate) · up, silu(g) = g / (1 + exp(-g)), without writing silu(gate) to memory.

Shapes     gate, up, y (T, f); gate and up may be the two halves of one matmul's output (T, 2f)
Bytes      3·T·f·b (read gate and up, write y); torch's two operators move 5·T·f·b
FLOPs      about 5·T·f: memory-bound
Trap       silu in float32 and rounded once, at the end. A Python scalar that Triton takes for float64 (an argument
           such as alpha=1.702) drags the whole expression into double precision, thirty-two times slower on most GPUs;
           the compiled PTX must hold no .f64. Halves of one tensor have rows 2f apart.

Source: Shazeer 2020 (arXiv 2002.05202), equation 6.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.catalog import Bench, Case, Compilation, Trial, Work, normal, spaced_rows, swapped
from kernels.launch import (
    accumulator,
    check_contiguous_rows,
    check_dtype,
    check_shape,
    on_device,
    tl,
    triton,
    use_triton,
)

BLOCK, WARPS = 1024, 4  # eight elements a thread: one 16-byte load from each input in 16 bits


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    wide = accumulator(gate.dtype)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)


@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, y_ptr, gate_t, up_t, y_t, f, BLOCK: tl.constexpr):
    """Program (t, j) makes elements j · BLOCK ... of row t."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < f
    gate = tl.load(gate_ptr + t * gate_t + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + t * up_t + i, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + t * y_t + i, y.to(y_ptr.dtype.element_ty), mask=inside)


def swiglu(gate: Tensor, up: Tensor, backend: str = "auto") -> Tensor:
    """gate (T, f), up (T, f) -> (T, f) contiguous. Raises KernelError."""
    launch = use_triton(backend, gate, up)
    check_dtype(gate=gate, up=up)
    check_shape("gate", gate, None, None)
    check_shape("up", up, *gate.shape)
    if not launch:
        return swiglu_reference(gate, up)
    check_contiguous_rows(gate=gate, up=up)
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    tokens, f = gate.shape
    if y.numel():
        grid = (tokens, triton.cdiv(f, BLOCK))
        with on_device(y):
            swiglu_kernel[grid](gate, up, y, gate.stride(0), up.stride(0), y.stride(0), f, BLOCK=BLOCK, num_warps=WARPS)
    return y


# What the tools take from here -------------------------------------------------------------------------------------


def _case(name, t, f, layout=lambda x: x, scale=1.0) -> Case:
    def make(device, dtype, generator):
        gate, up = (normal(generator, t, f, device=device, dtype=dtype, scale=scale) for _ in range(2))
        return Trial(swiglu, swiglu_reference, (layout(gate), up))

    return Case(name, make)


def _halves(device, dtype, generator) -> Trial:
    gate, up = normal(generator, 4, 2 * 145, device=device, dtype=dtype).chunk(2, dim=-1)
    return Trial(swiglu, swiglu_reference, (gate, up))


CASES = [
    _case("several tiles", 3, 2 * BLOCK + 17),
    _case("one token", 1, 273),
    _case("no tokens", 0, 64),
    _case("no width", 4, 0),
    _case("rows apart", 5, 81, layout=spaced_rows),
    _case("one row, swapped", 1, 33, layout=swapped),
    _case("far from zero", 2, 49, scale=40.0),  # exp(-g) overflows float32 beyond 88, and sigmoid is then exactly 0
    Case("halves of one tensor", _halves),
]

COMPILE = [Compilation("swiglu", swiglu_kernel, lambda d: (d, d, d, 29696, 29696, 14336, 14336), {"BLOCK": BLOCK})]


def _bench(device, dtype, f) -> Work:
    t = 2**26 // f  # 128 MiB a tensor, far more than any L2 cache
    gate, up = torch.randn(t, 2 * f, device=device, dtype=dtype).chunk(2, dim=-1)
    return Work(
        kernel=lambda: swiglu(gate, up, backend="triton"),
        rivals={"torch silu, then mul": lambda: F.silu(gate) * up},
        bytes=3 * t * f * gate.element_size(),
        flops=5 * t * f,
    )


BENCHES = [
    Bench(
        "SwiGLU",
        _bench,
        {"SmolLM2-135M": {"f": 1536}, "Qwen3-0.6B": {"f": 3072}, "Llama-3-8B": {"f": 14336}},
        goal=0.85,
    )
]
