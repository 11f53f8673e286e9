"""Merging attention states: partial results over disjoint keys become the result over all of them.

Shapes     outs (S, N, H, D) partial outputs, each already divided by its own sum; lses (S, N, H) float32, their natural
           log-sum-exps; out (N, H, D), lse (N, H) float32
Formula    lse = log Σ exp(lse_s),   out = Σ exp(lse_s - lse) · out_s
Bytes      S·N·H·(D·b + 4) read, N·H·(D·b_out + 4) written
FLOPs      2·S·N·H·D: memory-bound, and small beside the keys and values that made the parts
Trap       A part without keys is (anything, -inf), and where all are, -inf - (-inf) is NaN: the result must be
           (0, -inf). What a part without keys holds is never read, since 0 · NaN is NaN too.

Source: Dao et al. 2023, "Flash-Decoding for long-context inference"; the formula is Milakov and Gimelshein 2018
(arXiv 1805.02867), section 3.1, with a vector beside the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.catalog import Bench, Case, Compilation, Trial, Work, normal, spaced_rows, swapped
from kernels.launch import (
    FLOATS,
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

MAX_PARTS = 1024


def merge_states_reference(outs: Tensor, lses: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    wide = accumulator(outs.dtype)
    lse = torch.logsumexp(lses.to(wide), dim=0)
    weights = torch.where(lses == float("-inf"), 0.0, (lses - lse).exp().to(wide))[..., None]
    out = torch.where(weights > 0, weights * outs.to(wide), 0.0).sum(0)
    return out.to(dtype or outs.dtype), lse.to(lses.dtype)


@triton.jit
def merge_states_kernel(
    outs_ptr, lses_ptr, out_ptr, lse_ptr,
    outs_s, outs_n, outs_h, lses_s, lses_n, lses_h, out_n, out_h, lse_n,  # strides: part, row, head
    parts, heads, d,
    BLOCK_S: tl.constexpr, TILE_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (r, j) merges elements j · BLOCK_D ... of head r % heads of row r // heads."""
    row = tl.program_id(0).to(tl.int64)
    n, h = row // heads, row % heads
    lses_ptr += n * lses_n + h * lses_h
    p = tl.arange(0, BLOCK_S)
    every = tl.load(lses_ptr + p.to(tl.int64) * lses_s, mask=p < parts, other=float("-inf"))
    most = tl.max(every, axis=0)
    base = tl.where(most > float("-inf"), most, 0.0)  # no keys anywhere: exp(-inf - 0) is 0, exp(-inf + inf) is NaN
    total = tl.sum(tl.exp(every - base), axis=0)

    i = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    out = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(0, parts, TILE_S):
        s = first + tl.arange(0, TILE_S)
        lse = tl.load(lses_ptr + s.to(tl.int64) * lses_s, mask=s < parts, other=float("-inf"))
        read = (lse > float("-inf"))[:, None] & (i < d)[None, :]
        at = s.to(tl.int64)[:, None] * outs_s + n * outs_n + h * outs_h + i[None, :]
        part = tl.load(outs_ptr + at, mask=read, other=0.0).to(tl.float32)
        out += tl.sum(tl.exp(lse - base)[:, None] * part, axis=0)
    total = tl.where(most > float("-inf"), total, 1.0)
    out = out / total
    tl.store(out_ptr + n * out_n + h * out_h + i, out.to(out_ptr.dtype.element_ty), mask=i < d)
    tl.store(lse_ptr + n * lse_n + h, most + tl.log(total), mask=tl.program_id(1) == 0)


def merge_states(
    outs: Tensor, lses: Tensor, dtype: torch.dtype | None = None, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """outs (S, N, H, D), lses (S, N, H) -> out (N, H, D) of `dtype` (that of outs), lse (N, H). Raises KernelError."""
    launch = use_triton(backend, outs, lses)
    check_dtype(outs=outs)
    check_dtype((torch.float32,), lses=lses)
    check_shape("outs", outs, None, None, None, None)
    check_shape("lses", lses, *outs.shape[:3])
    require(dtype is None or dtype in FLOATS, f"dtype is {dtype}; use float32, float16 or bfloat16")
    require(1 <= outs.shape[0] <= MAX_PARTS, f"outs has {outs.shape[0]} parts; the kernel takes 1 to {MAX_PARTS}")
    if not launch:
        return merge_states_reference(outs, lses, dtype)
    check_contiguous_rows(outs=outs)
    parts, rows, heads, d = outs.shape
    out = torch.empty(rows, heads, d, dtype=dtype or outs.dtype, device=outs.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=outs.device)
    if out.numel():
        block_d = configuration(d)
        with on_device(outs):
            merge_states_kernel[(rows * heads, triton.cdiv(d, block_d))](
                outs, lses, out, lse, *outs.stride()[:3], *lses.stride(), *out.stride()[:2], lse.stride(0),
                parts, heads, d, BLOCK_S=triton.next_power_of_2(parts), TILE_S=8, BLOCK_D=block_d, num_warps=2,
            )  # fmt: skip
    return out, lse


def configuration(d: int) -> int:
    """Head size -> BLOCK_D: 512 bytes of float32 from each of 8 parts in flight; wider heads take more programs."""
    return min(triton.next_power_of_2(d), 128)


# What the tools take from here -------------------------------------------------------------------------------------


def _case(name, parts, rows, heads, d, layout=lambda x: x, empty=0.0) -> Case:
    """empty: the share of the parts without keys, which hold NaN."""

    def make(device, dtype, generator):
        outs = normal(generator, parts, rows, heads, d, device=device, dtype=dtype)
        lses = normal(generator, parts, rows, heads, device=device, dtype=torch.float32, scale=5.0)
        without = torch.rand(parts, rows, heads, generator=generator, device="cpu").to(device) < empty
        lses[without], outs[without] = float("-inf"), float("nan")
        return Trial(merge_states, merge_states_reference, (layout(outs), layout(lses)))

    return Case(name, make)


CASES = [
    _case("odd sizes", 19, 3, 5, 81),
    _case("two parts, wide heads", 2, 3, 2, 145, layout=swapped),
    _case("one part", 1, 2, 3, 33, layout=spaced_rows),
    _case("most without keys", 9, 4, 3, 64, empty=0.7),
    _case("none has keys", 5, 2, 2, 17, empty=1.0),
    _case("no rows", 3, 0, 2, 64),
]

_STRIDES = (32 * 32 * 128, 32 * 128, 128, 32 * 32, 32, 1, 32 * 128, 128, 32)
COMPILE = [
    Compilation(
        f"merge_states_{d}",
        merge_states_kernel,
        lambda dtype, d=d: (torch.float32, torch.float32, dtype, torch.float32, *_STRIDES, 16, 32, d),
        {"BLOCK_S": 16, "TILE_S": 8, "BLOCK_D": configuration(d)},
        num_warps=2,
    )
    for d in (64, 512)
]


def _bench(device, dtype, heads, d, rows=32, parts=16) -> Work:
    outs = torch.randn(parts, rows, heads, d, device=device)
    lses = torch.randn(parts, rows, heads, device=device)
    weighted = lambda: torch.einsum("snh,snhd->nhd", lses.softmax(0), outs).to(dtype)  # noqa: E731
    return Work(
        kernel=lambda: merge_states(outs, lses, dtype, backend="triton"),
        rivals={"torch softmax, then einsum": weighted},
        bytes=outs.nbytes + lses.nbytes + rows * heads * (d * 2 + 4),
        flops=2 * outs.numel(),
    )


BENCHES = [Bench("merge states", _bench, {"Llama-3-8B": {"heads": 32, "d": 128, "rows": 64}})]
