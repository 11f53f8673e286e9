"""W4A16: y = x · wᵀ with weights in 4 bits, scaled (and shifted) by groups along K, and activations in 16 bits.

Shapes     x (M, K); weight (N, K / 2) uint8; scale (N, K / G) in the type of x; zero (N, K / G) uint8 or none; y (M, N)
Formula    w[n, k] = scale[n, g] · (q[n, k] - zero[n, g]) with g = k // G and q in 0 ... 15; without zero points it is 8
           y[m, n] = Σ_g scale[n, g] · Σ_{k in g} x[m, k] · (q[n, k] - zero[n, g])
Layout     Of a group of G, byte j holds q[j] in its low four bits and q[j + G/2] in its high ones. For G = 8:

               byte       0        1        2        3
               low      q[0]     q[1]     q[2]     q[3]        x[0 ... 3] meet all low halves,
               high     q[4]     q[5]     q[6]     q[7]        x[4 ... 7] all high ones

           so neither weights nor activations have to be interleaved: a group is two dots over contiguous halves.
Bytes      N·K/2 + N·K/G·(2, with zero points 3) + (M·K + M·N)·2. Group 128 makes 4.125 bits a weight, group 32 4.5
FLOPs      2·M·N·K: at M = 1 four FLOPs a byte, so bytes decide
Trap       The scale changes with k and so cannot wait for the end of the sum, only for the end of its group: a tile of
           K lies inside one group. A group above the tile (llm-awq#21: 256 came out wrong) takes several. q - zero is
           a small integer, exact in 16 bits; scale · (q - zero) would not be. K / splits is rounded up to whole tiles
           (aiter#5286).

Source: Frantar et al. 2022 (arXiv 2210.17323) and Lin et al. 2023 (arXiv 2306.00978) for grouped 4-bit weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.catalog import Bench, Case, Compilation, Trial, Work, normal, spaced_rows
from kernels.launch import (
    FLOATS,
    accumulator,
    check_contiguous_rows,
    check_dtype,
    check_multiple,
    check_shape,
    on_device,
    require,
    tl,
    triton,
    use_triton,
)

FLOATS16 = (torch.float16, torch.bfloat16)
GROUPS = (32, 64, 128, 256)
PROGRAMS = 512  # enough to keep 132 processors reading; a constant, so that results do not depend on the GPU


def pack(q: Tensor, group: int) -> Tensor:
    """(N, K) integers 0 ... 15 -> (N, K / 2) uint8, laid out as above."""
    low, high = q.to(torch.uint8).unflatten(1, (-1, 2, group // 2)).unbind(2)  # each (N, K / G, G / 2)
    return (low | high << 4).flatten(1)


def unpack(weight: Tensor, group: int) -> Tensor:
    """(N, K / 2) uint8 -> (N, K) uint8, 0 ... 15."""
    halves = weight.unflatten(1, (-1, group // 2))
    return torch.stack([halves & 15, halves >> 4], 2).flatten(1)


def w4a16_reference(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None = None, group: int = 128) -> Tensor:
    wide = accumulator(x.dtype)
    q = unpack(weight, group).unflatten(1, (-1, group)).to(wide)  # (N, K / G, G)
    w = (q - (8 if zero is None else zero[:, :, None].to(wide))) * scale[:, :, None].to(wide)
    return (x.to(wide) @ w.flatten(1).t()).to(x.dtype)


@triton.jit
def w4a16_vector_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, y_ptr, w_n, scale_n, zero_n, N, groups,
    ZERO: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """One row of x. Program n makes BLOCK_N outputs, taking BLOCK_G groups of their weight rows at a time."""
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    j = tl.arange(0, GROUP // 2)
    total = tl.zeros((BLOCK_N, BLOCK_G), tl.float32)
    for first in range(0, groups, BLOCK_G):
        g = first + tl.arange(0, BLOCK_G)
        here = (n < N)[:, None] & (g < groups)[None, :]
        # Weights first: x has to change threads through shared memory, and no load passes the barriers of that.
        w_at = n[:, None, None] * w_n + g[None, :, None] * (GROUP // 2) + j[None, None, :]
        w = tl.load(w_ptr + w_at, mask=here[:, :, None], other=0).to(tl.uint32)
        scale = tl.load(scale_ptr + n[:, None] * scale_n + g[None, :], mask=here, other=0.0).to(tl.float32)
        at, inside = g[:, None] * GROUP + j[None, :], (g < groups)[:, None]
        low = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(x_ptr + at + GROUP // 2, mask=inside, other=0.0).to(tl.float32)
        # Bits 0x4B000000 + q are the float 2²³ + q; an integer conversion instruction runs at a quarter of that pace.
        if ZERO:
            zero = tl.load(zero_ptr + n[:, None] * zero_n + g[None, :], mask=here, other=0).to(tl.float32)
            shift = (zero + 8388608.0)[:, :, None]
        else:
            shift = 8388616.0
        w_low = ((w & 15) | 0x4B000000).to(tl.float32, bitcast=True) - shift
        w_high = ((w >> 4) | 0x4B000000).to(tl.float32, bitcast=True) - shift
        total += tl.sum(w_low * low[None, :, :] + w_high * high[None, :, :], axis=2) * scale
    y = tl.sum(total, axis=1)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def w4a16_tile_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, y_ptr,
    x_m, w_n, scale_n, zero_n, y_m, y_split,  # strides
    M, N, steps, steps_split,  # tiles along K, in all and of one program
    ZERO: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (m, n, s): tile (m, n) of y from part s of K.

    The weights stand on the left: Hopper's wgmma takes its left operand from registers, where they become 16 bits.
    """
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    split = tl.program_id(2)
    HALF: tl.constexpr = BLOCK_K // 2
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(split * steps_split, tl.minimum((split + 1) * steps_split, steps)):
        g = step // (GROUP // BLOCK_K)
        j = step % (GROUP // BLOCK_K) * HALF + tl.arange(0, HALF)
        w = tl.load(w_ptr + n[:, None] * w_n + (g * (GROUP // 2) + j)[None, :], mask=(n < N)[:, None], other=0)
        x_at = x_ptr + m[None, :] * x_m + (g * GROUP + j)[:, None]
        low = tl.load(x_at, mask=(m < M)[None, :], other=0.0)
        high = tl.load(x_at + GROUP // 2, mask=(m < M)[None, :], other=0.0)
        scale = tl.load(scale_ptr + n * scale_n + g, mask=n < N, other=0.0).to(tl.float32)
        zero = 8
        if ZERO:
            zero = tl.load(zero_ptr + n * zero_n + g, mask=n < N, other=0).to(tl.int8)[:, None]
        part = tl.dot(((w & 15).to(tl.int8) - zero).to(low.dtype), low)
        part = tl.dot(((w >> 4).to(tl.int8) - zero).to(low.dtype), high, part)
        total += part * scale[:, None]
    y = y_ptr + split.to(tl.int64) * y_split + m[:, None] * y_m + n[None, :]
    tl.store(y, tl.trans(total).to(y_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def w4a16_sum_kernel(part_ptr, y_ptr, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """y = Σ_s part[s], in the order of s; part (SPLITS, M · N) float32."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for s in range(SPLITS):
        total += tl.load(part_ptr + s * size + i, mask=i < size, other=0.0)
    tl.store(y_ptr + i, total.to(y_ptr.dtype.element_ty), mask=i < size)


def w4a16(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    group: int = 128,
    splits: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """x (M, K), weight (N, K/2) packed, scale (N, K/G), zero (N, K/G) uint8 -> (M, N). Raises KernelError.

    splits: over how many programs K goes; None leaves it to `configuration`.
    """
    quants = {"weight": weight} | ({} if zero is None else {"zero": zero})
    launch = use_triton(backend, x, scale, *quants.values())
    check_dtype(FLOATS16 if launch else FLOATS, x=x, scale=scale)
    check_dtype((torch.uint8,), **quants)
    check_shape("x", x, None, None)
    (_, K), N = x.shape, weight.shape[0]
    require(group in GROUPS, f"group is {group}; use one of {', '.join(map(str, GROUPS))}")
    check_multiple("K", K, of=group)
    check_shape("weight", weight, None, K // 2)
    check_shape("scale", scale, N, K // group)
    if zero is not None:
        check_shape("zero", zero, N, K // group)
    require(splits is None or splits >= 1, f"splits is {splits}; use 1 or more, or None")
    if not launch:
        return w4a16_reference(x, weight, scale, zero, group)
    check_contiguous_rows(x=x, scale=scale, **quants)
    y = torch.empty((x.shape[0], N), dtype=x.dtype, device=x.device)
    if y.numel():
        with on_device(x):
            (_vector if len(x) == 1 and splits is None else _tiles)(x, weight, scale, zero, group, y, splits)
    return y


def _vector(x, weight, scale, zero, group, y, splits) -> None:
    N, groups = scale.shape
    block_n, block_g = vector_configuration(groups, group)
    z = weight if zero is None else zero
    w4a16_vector_kernel[(triton.cdiv(N, block_n),)](
        x, weight, scale, z, y, weight.stride(0), scale.stride(0), z.stride(0), N, groups,
        ZERO=zero is not None, GROUP=group, BLOCK_N=block_n, BLOCK_G=block_g, num_warps=4,
    )  # fmt: skip


def _tiles(x, weight, scale, zero, group, y, splits) -> None:
    (M, K), N = x.shape, weight.shape[0]
    block_m, block_n, block_k, warps, stages = configuration(M, group)
    tiles, steps = (triton.cdiv(M, block_m), triton.cdiv(N, block_n)), K // block_k
    splits = splits or min(max(PROGRAMS // (tiles[0] * tiles[1]), 1), max(steps // 4, 1))
    out = y if splits == 1 else torch.empty((splits, M, N), dtype=torch.float32, device=y.device)
    z = weight if zero is None else zero
    w4a16_tile_kernel[(*tiles, splits)](
        x, weight, scale, z, out, x.stride(0), weight.stride(0), scale.stride(0), z.stride(0), N, M * N,
        M, N, steps, triton.cdiv(steps, splits),
        ZERO=zero is not None, GROUP=group, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        w4a16_sum_kernel[(triton.cdiv(M * N, 1024),)](out, y, M * N, SPLITS=splits, BLOCK=1024)


def vector_configuration(groups: int, group: int) -> tuple[int, int]:
    """-> BLOCK_N, BLOCK_G. 128 threads times 16 bytes are 4096 weights of one row."""
    return 4, min(triton.next_power_of_2(max(groups, 1)), 4096 // group)


def configuration(M: int, group: int) -> tuple[int, int, int, int, int]:
    """Rows of x -> BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages. BLOCK_K divides the group."""
    if M <= 64:
        return max(triton.next_power_of_2(M), 16), 64, min(group, 128), 4, 4
    return 128, 128, min(group, 64), 8, 3


# What the tools take from here -------------------------------------------------------------------------------------


def quantize(weight: Tensor, group: int = 128, symmetric: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    """(N, K) -> packed (N, K/2), scale (N, K/G) in the type of weight, zero (N, K/G) uint8 or None."""
    w = weight.float().unflatten(1, (-1, group))
    low, high = w.amin(2).clamp(max=0), w.amax(2).clamp(min=0)
    scale = torch.maximum(-low / 8, high / 7) if symmetric else (high - low) / 15
    scale = scale.clamp(min=1e-5).to(weight.dtype)
    zero = torch.full_like(low, 8) if symmetric else (-low / scale.float()).round().clamp(0, 15)
    q = (w / scale.float()[:, :, None] + zero[:, :, None]).round().clamp(0, 15)
    return pack(q.flatten(1), group), scale, None if symmetric else zero.to(torch.uint8)


def _case(name, m, n, k, group, symmetric=True, layout=lambda t: t, splits=None) -> Case:
    def make(device, dtype, generator):
        draw = lambda high, *shape: torch.randint(0, high, shape, generator=generator, device="cpu").to(device)  # noqa: E731
        x = normal(generator, m, k, device=device, dtype=dtype)
        scale = normal(generator, n, k // group, device=device, dtype=dtype, scale=0.02)
        zero = None if symmetric else spaced_rows(draw(16, n, k // group).to(torch.uint8), 5)
        weight = draw(256, n, k // 2).to(torch.uint8)
        return Trial(w4a16, _reference, (layout(x), layout(weight), layout(scale), zero, group, splits))

    return Case(name, make, FLOATS16)


def _reference(x, weight, scale, zero, group, splits) -> Tensor:
    return w4a16_reference(x, weight, scale, zero, group)


CASES = [
    _case("one row, group 32", 1, 33, 288, 32),
    _case("one row, group 64, zero points", 1, 17, 192, 64, symmetric=False, layout=spaced_rows),
    _case("one row, several tiles, group 128", 1, 5, 4096 + 128, 128, symmetric=False),
    _case("one row, group 256", 1, 9, 768, 256),
    _case("few rows, group 32", 5, 81, 160, 32),
    _case("few rows, group 64, zero points", 3, 70, 192, 64, symmetric=False, layout=spaced_rows),
    _case("few rows, group 256: two tiles a group", 3, 33, 512, 256, symmetric=False),
    _case("three splits of five tiles", 2, 49, 640, 128, splits=3),
    _case("more splits than tiles", 2, 17, 256, 128, splits=4),
    _case("many rows", 145, 145, 256, 128),
    _case("no rows", 0, 16, 64, 32),
]


def _vector_compilation(group: int, zero: bool) -> Compilation:
    block_n, block_g = vector_configuration(4096 // group, group)
    args = lambda d: (d, torch.uint8, d, torch.uint8, d, 2048, 4096 // group, 4096 // group, 4096, 4096 // group)  # noqa: E731
    blocks = {"ZERO": zero, "GROUP": group, "BLOCK_N": block_n, "BLOCK_G": block_g}
    return Compilation(f"w4a16_vector_g{group}{'_zero' if zero else ''}", w4a16_vector_kernel, args, blocks)


def _tile_compilation(m: int, group: int, zero: bool) -> Compilation:
    block_m, block_n, block_k, warps, stages = configuration(m, group)
    groups, steps, out = 4096 // group, 4096 // block_k, torch.float32 if m <= 64 else None

    def args(d):
        strides = (4096, 2048, groups, groups, 4096, m * 4096)
        return (d, torch.uint8, d, torch.uint8, out or d, *strides, m, 4096, steps, steps if out is None else 8)

    blocks = {"ZERO": zero, "GROUP": group, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
    name = f"w4a16_tile_{m}_g{group}{'_zero' if zero else ''}"
    return Compilation(name, w4a16_tile_kernel, args, blocks, warps, stages, min_sm=80, matrix="any")


COMPILE = [
    *(_vector_compilation(group, zero) for group, zero in ((32, False), (128, False), (128, True), (256, True))),
    *(_tile_compilation(m, g, z) for m, g, z in ((16, 32, False), (16, 128, True), (64, 128, True), (4096, 128, True))),
    Compilation("w4a16_sum", w4a16_sum_kernel, lambda d: (torch.float32, d, 65536), {"SPLITS": 4, "BLOCK": 1024}),
]


def _bench(device, dtype, n, k, m=1, group=128) -> Work:
    x, full = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
    weight, scale, zero = quantize(full, group, symmetric=False)
    return Work(
        kernel=lambda: w4a16(x, weight, scale, zero, group, backend="triton"),
        rivals={"16-bit matmul": lambda: torch.nn.functional.linear(x, full)},
        bytes=weight.nbytes + scale.nbytes + zero.nbytes + x.nbytes + m * n * x.element_size(),
        flops=2 * m * n * k,
    )


BENCHES = [
    Bench(
        "W4A16",
        _bench,
        {
            "SmolLM2-135M gate and up, group 64, batch 1": {"n": 3072, "k": 576, "group": 64},
            "Llama-3-8B gate and up, batch 1": {"n": 28672, "k": 4096},
            "Llama-3-8B down, batch 1": {"n": 4096, "k": 14336},
            "Llama-3-8B gate and up, batch 16": {"n": 28672, "k": 4096, "m": 16},
        },
    ),
    Bench("W4A16, prefill", _bench, {"Llama-3-8B o, 4096": {"n": 4096, "k": 4096, "m": 4096}}, bound="compute"),
]
