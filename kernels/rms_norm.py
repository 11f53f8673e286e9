"""add + RMSNorm: h = x + residual, y = h / sqrt(mean(h²) + eps) · weight, in one pass over the row.

Shapes     x, residual, h, y (T, d) or (T, H, d); weight (d)
Bytes      with residual 4·T·d·b (read x and residual, write h and y), without 2·T·d·b; torch's own operators, run one
           by one, move three times as much
FLOPs      about 4·T·d: at 0.5 to 1 FLOP a byte only the bytes matter
Trap       h is rounded to the type of x before it is normalised, because the next block reads the rounded one.
           Llama rounds the normalised row, then multiplies by the weight (and rounds again); Gemma multiplies by
           (1 + weight) in float32 and rounds once. Each tensor has its own strides, and row · stride passes 2³¹
           at 2³¹ elements, so rows count in int64.

Source: Zhang and Sennrich 2019 (arXiv 1910.07467), equation 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.catalog import Bench, Case, Compilation, Trial, Work, normal, spaced_rows, swapped
from kernels.launch import (
    accumulator,
    check_contiguous_rows,
    check_dtype,
    check_shape,
    on_device,
    require,
    tl,
    triton,
    use_triton,
)

MAX_WIDTH = 32768  # one program holds one row in registers


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, gemma: bool = False):
    h = x if residual is None else x + residual
    wide = h.to(accumulator(x.dtype))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if gemma:
        y = (normed * (1 + weight.to(wide.dtype))).to(x.dtype)
    else:
        y = normed.to(x.dtype) * weight
    return y if residual is None else (y, h)


@triton.jit
def rms_norm_kernel(
    x_ptr, r_ptr, h_ptr, y_ptr, w_ptr,
    x_t, x_h, r_t, r_h, h_t, h_h, y_t, y_h,  # strides of token and head, one pair a tensor
    heads, d, eps,
    ADD: tl.constexpr, GEMMA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    t, head = row // heads, row % heads
    i = tl.arange(0, BLOCK)
    inside = i < d
    h = tl.load(x_ptr + t * x_t + head * x_h + i, mask=inside, other=0.0)
    if ADD:
        r = tl.load(r_ptr + t * r_t + head * r_h + i, mask=inside, other=0.0)
        h = (h.to(tl.float32) + r.to(tl.float32)).to(h.dtype)
        tl.store(h_ptr + t * h_t + head * h_h + i, h, mask=inside)
    wide = h.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / d + eps)
    w = tl.load(w_ptr + i, mask=inside, other=0.0)
    if GEMMA:
        y = wide * scale * (1.0 + w.to(tl.float32))
    else:
        y = (wide * scale).to(h.dtype).to(tl.float32) * w.to(tl.float32)
    tl.store(y_ptr + t * y_t + head * y_h + i, y.to(h.dtype), mask=inside)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    gemma: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """x (T, d) or (T, H, d), weight (d) -> y, or (y, x + residual) when a residual is given. Raises KernelError."""
    tensors = {"x": x, "weight": weight} | ({} if residual is None else {"residual": residual})
    launch = use_triton(backend, *tensors.values())
    check_dtype(**tensors)
    require(x.dim() in (2, 3), f"x has {x.dim()} dimensions; (T, d) or (T, H, d) is needed")
    check_shape("weight", weight, x.shape[-1])
    if residual is not None:
        check_shape("residual", residual, *x.shape)
    if not launch:
        return rms_norm_reference(x, weight, eps, residual, gemma)
    check_contiguous_rows(**tensors)
    require(1 <= x.shape[-1] <= MAX_WIDTH, f"x has rows of {x.shape[-1]}; the kernel takes 1 to {MAX_WIDTH}")
    return _launch(x, weight, eps, residual, gemma)


def _launch(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, gemma: bool):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    add = residual is not None
    h = torch.empty_like(y) if add else y
    r = residual if add else x
    heads, d = (x.shape[1] if x.dim() == 3 else 1), x.shape[-1]
    strides = [s for t in (x, r, h, y) for s in (t.stride(0), t.stride(1) if t.dim() == 3 else 0)]
    rows = x.shape[0] * heads
    if rows:
        block, warps = configuration(d)
        with on_device(x):
            rms_norm_kernel[(rows,)](
                x, r, h, y, weight, *strides, heads, d, eps, ADD=add, GEMMA=gemma, BLOCK=block, num_warps=warps
            )
    return (y, h) if add else y


def configuration(d: int) -> tuple[int, int]:
    """Row length -> BLOCK, num_warps: eight elements a thread, which is one 16-byte load in 16 bits."""
    block = triton.next_power_of_2(d)
    return block, min(max(block // 256, 1), 16)


# What the tools take from here -------------------------------------------------------------------------------------


def _case(name, t, d, heads=None, add=True, gemma=False, layout=lambda x: x) -> Case:
    def make(device, dtype, generator):
        shape = (t, d) if heads is None else (t, heads, d)
        draw = lambda *shape: normal(generator, *shape, device=device, dtype=dtype)  # noqa: E731
        residual = draw(*shape) if add else None
        args = (layout(draw(*shape)), draw(d), 1e-6, residual, gemma)
        return Trial(rms_norm, rms_norm_reference, args)

    return Case(name, make)


CASES = [
    _case("add, odd width", 5, 1041),
    _case("llama, one token", 1, 576, add=False),
    _case("gemma", 3, 273, gemma=True),
    _case("no tokens", 0, 64),
    _case("heads, swapped", 4, 145, heads=3, layout=swapped),
    _case("slice of a wider row", 7, 81, layout=spaced_rows),
]


def _compile_args(dtype):
    strides = (4096, 0) * 4
    return (dtype, dtype, dtype, dtype, dtype, *strides, 1, 4096, 1e-6)


COMPILE = [
    Compilation(
        f"rms_norm{'_gemma' if gemma else ''}_{d}",
        rms_norm_kernel,
        _compile_args,
        {"ADD": True, "GEMMA": gemma, "BLOCK": configuration(d)[0]},
        num_warps=configuration(d)[1],
    )
    for d, gemma in ((576, False), (4096, False), (4096, True), (MAX_WIDTH, False))
]


def _bench(device, dtype, d) -> Work:
    t = 2**26 // d  # 128 MiB a tensor, far more than any L2 cache
    x, residual, weight = (torch.randn(*s, device=device, dtype=dtype) for s in ((t, d), (t, d), (d,)))
    norm = torch.nn.functional.rms_norm
    return Work(
        kernel=lambda: rms_norm(x, weight, 1e-6, residual, backend="triton"),
        rivals={"torch add, then rms_norm": lambda: norm(x + residual, (d,), weight, 1e-6)},
        bytes=4 * x.nbytes,
        flops=4 * x.numel(),
    )


BENCHES = [
    Bench(
        "add + RMSNorm",
        _bench,
        {"SmolLM2-135M": {"d": 576}, "Qwen3-0.6B": {"d": 1024}, "Llama-3-8B": {"d": 4096}},
        goal=0.85,
    )
]
