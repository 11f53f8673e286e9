"""Row softmax with its log-sum-exp: y = exp(x - lse), lse = log(sum(exp(x))), base e.

Shapes     x, y (T, V); lse (T) float32
Bytes      2·T·V·b + 4·T. A row of up to 16,384 stays in registers; a longer one is read twice, and the second time
           from the L2 cache where the rows at work fit into it
FLOPs      about 5·T·V: memory-bound
Trap       exp(x) alone overflows float32 beyond 88, so the maximum is taken off first, and it is not known before the
           row has been read: "online", each new maximum rescales the sum so far. A row of nothing but -inf has no
           maximum to take off (-inf - -inf is NaN): it gives y = 0 and lse = -inf. A row with NaN or +inf in it gives
           NaN throughout: tl.max drops a NaN, so it is the sum that has to carry it.

Source: Milakov and Gimelshein 2018 (arXiv 1805.02867), algorithm 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.catalog import Bench, Case, Compilation, Trial, Work, normal, spaced_rows
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

MAX_BLOCK = 16384  # columns that one program holds in registers
NEVER = float("-inf")


def softmax_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.to(accumulator(x.dtype))
    peak = wide.amax(dim=-1, keepdim=True)
    shift = torch.where(peak == NEVER, 0.0, peak)
    e = (wide - shift).exp()
    total = e.sum(dim=-1, keepdim=True)
    y = e / torch.where(total == 0, 1.0, total)
    return y.to(x.dtype), (shift + total.log()).squeeze(-1)


@triton.jit
def softmax_kernel(x_ptr, y_ptr, lse_ptr, x_t, y_t, v, BLOCK: tl.constexpr, LOOP: tl.constexpr):
    """Program t makes row t. LOOP: the row is longer than BLOCK."""
    t = tl.program_id(0).to(tl.int64)
    x_ptr += t * x_t
    y_ptr += t * y_t
    i = tl.arange(0, BLOCK)
    peak = float("-inf")
    total = 0.0
    for start in range(0, v, BLOCK):
        x = tl.load(x_ptr + start + i, mask=start + i < v, other=float("-inf")).to(tl.float32)
        grown = tl.maximum(peak, tl.max(x, axis=0))
        shift = tl.where(grown == float("-inf"), 0.0, grown)
        e = tl.exp(x - shift)
        total = total * tl.exp(peak - shift) + tl.sum(e, axis=0)
        peak = grown
        if not LOOP:
            tl.store(y_ptr + i, (e / tl.where(total == 0.0, 1.0, total)).to(y_ptr.dtype.element_ty), mask=i < v)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    lse = shift + tl.log(tl.where(total == 0.0, 1.0, total))
    tl.store(lse_ptr + t, tl.where(total == 0.0, float("-inf"), lse))
    if LOOP:
        scale = 1.0 / tl.where(total == 0.0, 1.0, total)
        for start in range(0, v, BLOCK):
            inside = start + i < v
            x = tl.load(x_ptr + start + i, mask=inside, other=0.0).to(tl.float32)
            tl.store(y_ptr + start + i, (tl.exp(x - shift) * scale).to(y_ptr.dtype.element_ty), mask=inside)


def softmax(x: Tensor, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """x (T, V) -> y (T, V) of its type, lse (T) float32, base e. Raises KernelError."""
    launch = use_triton(backend, x)
    check_dtype(x=x)
    check_shape("x", x, None, None)
    require(x.shape[1] > 0, f"x has shape {tuple(x.shape)}; a row needs at least one column")
    if not launch:
        return softmax_reference(x)
    check_contiguous_rows(x=x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    lse = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    if len(x):
        block, warps = configuration(x.shape[1])
        loop = x.shape[1] > block
        with on_device(x):
            softmax_kernel[(len(x),)](
                x, y, lse, x.stride(0), y.stride(0), x.shape[1], BLOCK=block, LOOP=loop, num_warps=warps
            )
    return y, lse


def configuration(v: int) -> tuple[int, int]:
    """Columns -> BLOCK, num_warps: from 8 to 32 elements a thread."""
    block = min(triton.next_power_of_2(v), MAX_BLOCK)
    return block, min(max(block // 256, 1), 16)


# What the tools take from here -------------------------------------------------------------------------------------


def _case(name, t, v, layout=lambda x: x, shift=0.0) -> Case:
    def make(device, dtype, generator):
        x = normal(generator, t, v, device=device, dtype=dtype, scale=3.0) + shift
        return Trial(softmax, softmax_reference, (layout(x),))

    return Case(name, make)


def _special(device, dtype, generator) -> Trial:
    """A row of -inf, rows with one -inf, one NaN, one +inf, a row of NaN, and one of equal numbers."""
    x = normal(generator, 6, 81, device=device, dtype=dtype)
    x[0], x[1, 5], x[2, 80], x[3, 7], x[4], x[5] = NEVER, NEVER, float("nan"), float("inf"), float("nan"), 3.0
    return Trial(softmax, softmax_reference, (x,))


def _special_long(device, dtype, generator) -> Trial:
    """Longer than one block: -inf fills the first block, then a whole row; a NaN before and one after the maximum."""
    x = normal(generator, 4, MAX_BLOCK + 17, device=device, dtype=dtype)
    x[0, :MAX_BLOCK], x[1], x[2, 3], x[3, -1] = NEVER, NEVER, float("nan"), float("nan")
    return Trial(softmax, softmax_reference, (x,))


CASES = [
    _case("odd width", 33, 273),
    _case("one row, longer than a block", 1, 2 * MAX_BLOCK + 17),
    _case("far from zero", 3, 145, shift=1000.0),
    _case("one column", 4, 1),
    _case("no rows", 0, 64),
    _case("slice of a wider row", 7, 81, layout=spaced_rows),
    Case("-inf and NaN", _special),
    Case("-inf and NaN, longer than a block", _special_long),
]

COMPILE = [
    Compilation(
        f"softmax_{v}",
        softmax_kernel,
        lambda dtype, v=v: (dtype, dtype, torch.float32, v, v, v),
        {"BLOCK": configuration(v)[0], "LOOP": v > MAX_BLOCK},
        num_warps=configuration(v)[1],
    )
    for v in (128, 4096, 16384, 128256)
]


def _bench(device, dtype, v, t=4096) -> Work:
    x = torch.randn(t, v, device=device, dtype=dtype)
    return Work(
        kernel=lambda: softmax(x, backend="triton"),
        rivals={"torch softmax, without log-sum-exp": lambda: x.softmax(dim=-1)},
        bytes=2 * x.nbytes + 4 * t,
        flops=5 * x.numel(),
    )


BENCHES = [
    Bench("softmax", _bench, {"4k columns": {"v": 4096}, "16k columns": {"v": 16384}}, goal=0.85),
    Bench("softmax of logits", _bench, {"SmolLM2-135M": {"v": 49152}, "Llama-3-8B": {"v": 128256, "t": 1024}}),
]
