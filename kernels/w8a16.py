"""W8A16: y = (x · wᵀ) · scale with weights in int8, one scale an output channel, and activations in 16 bits.

Shapes     x (M, K); weight (N, K) int8; scale (N) float32; y (M, N) in the type of x
Formula    y[m, n] = scale[n] · Σ_k x[m, k] · weight[n, k]: the scale does not depend on k, so it waits for the sum
Bytes      N·K + 4·N + (M·K + M·N)·b: half of what 16-bit weights take, and at M = 1 that is all there is to gain
FLOPs      2·M·N·K. 2·M FLOPs a byte: below some 150 rows bytes decide, above them the matmul, which gains nothing
Trap       Scaling the weights before the dot rounds each of them to 16 bits; -128 ... 127 themselves are exact there.
           K / splits need not be a multiple of BLOCK_K: the last tile of a split must not read into the next one's
           part nor beyond K, and a split that has nothing left writes zeros (aiter#5286 wrote NaN).

M = 1 is a matrix-vector product on ordinary cores. From 2 rows on, tensor cores take tiles, and K is split over several
programs while the tiles alone would leave most of the GPU idle. The partial sums are added in a fixed order.

The weight tile stands on the left of the dot, because Hopper's wgmma takes only its left operand from registers, where
the int8 has just become 16 bits; on the right it would make a detour through shared memory.

Source: Dettmers et al. 2022 (arXiv 2208.07339), section 2, for the row-wise scales.
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
    check_shape,
    on_device,
    require,
    tl,
    triton,
    use_triton,
)

FLOATS16 = (torch.float16, torch.bfloat16)
PROGRAMS = 512  # enough to keep 132 processors reading; a constant, so that results do not depend on the GPU


def w8a16_reference(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    wide = accumulator(x.dtype)
    return ((x.to(wide) @ weight.to(wide).t()) * scale.to(wide)).to(x.dtype)


@triton.jit
def int8_to_float32(w):
    """Bits 0x4B000000 + u are the float 2²³ + u. An integer conversion instruction runs at a quarter of that pace."""
    u = (w.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint32)  # w + 128, which is not negative
    return (u | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0  # 2²³ + 128


@triton.jit
def w8a16_vector_kernel(
    x_ptr, w_ptr, scale_ptr, y_ptr, w_n, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """One row of x. Program n makes BLOCK_N outputs; a thread reads 16 bytes of each of their weight rows at a time."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = w_ptr + n.to(tl.int64)[:, None] * w_n
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        w = tl.load(rows + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0)
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        total += int8_to_float32(w) * x[None, :]
    scale = tl.load(scale_ptr + n, mask=n < N, other=0.0)
    y = tl.sum(total, axis=1) * scale
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def w8a16_tile_kernel(
    x_ptr, w_ptr, scale_ptr, y_ptr,
    x_m, w_n, y_m, y_split,  # strides
    M, N, K, k_split,  # k_split: how much of K is one program's, a multiple of BLOCK_K
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (m, n, s): tile (m, n) of y from part s of K. With SPLIT, y is float32 and not yet scaled."""
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    split = tl.program_id(2)
    start = split * k_split
    end = tl.minimum(start + k_split, K)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in range(start, end, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        w = tl.load(w_ptr + n[:, None] * w_n + k[None, :], mask=(n < N)[:, None] & (k < end)[None, :], other=0)
        x = tl.load(x_ptr + m[None, :] * x_m + k[:, None], mask=(m < M)[None, :] & (k < end)[:, None], other=0.0)
        total = tl.dot(w.to(x.dtype), x, total)
    if not SPLIT:
        total *= tl.load(scale_ptr + n, mask=n < N, other=0.0)[:, None]
    y = y_ptr + split.to(tl.int64) * y_split + m[:, None] * y_m + n[None, :]
    tl.store(y, tl.trans(total).to(y_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def w8a16_sum_kernel(part_ptr, scale_ptr, y_ptr, N, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """y = scale · Σ_s part[s], in the order of s; part (SPLITS, M · N) float32."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for s in range(SPLITS):
        total += tl.load(part_ptr + s * size + i, mask=i < size, other=0.0)
    scale = tl.load(scale_ptr + i % N, mask=i < size, other=0.0)
    tl.store(y_ptr + i, (total * scale).to(y_ptr.dtype.element_ty), mask=i < size)


def w8a16(x: Tensor, weight: Tensor, scale: Tensor, splits: int | None = None, backend: str = "auto") -> Tensor:
    """x (M, K) in 16 bits, weight (N, K) int8, scale (N) float32 -> (M, N). Raises KernelError.

    splits: over how many programs K goes; None leaves it to `configuration`.
    """
    launch = use_triton(backend, x, weight, scale)
    check_dtype(FLOATS16 if launch else FLOATS, x=x)
    check_dtype((torch.int8,), weight=weight)
    check_dtype((torch.float32,), scale=scale)
    check_shape("x", x, None, None)
    check_shape("weight", weight, None, x.shape[1])
    check_shape("scale", scale, weight.shape[0])
    require(splits is None or splits >= 1, f"splits is {splits}; use 1 or more, or None")
    if not launch:
        return w8a16_reference(x, weight, scale)
    check_contiguous_rows(x=x, weight=weight, scale=scale)
    y = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    if y.numel():
        with on_device(x):
            (_vector if len(x) == 1 and splits is None else _tiles)(x, weight, scale, y, splits)
    return y


def _vector(x: Tensor, weight: Tensor, scale: Tensor, y: Tensor, splits: None) -> None:
    N, K = weight.shape
    block_n, block_k = vector_configuration(K)
    grid = (triton.cdiv(N, block_n),)
    w8a16_vector_kernel[grid](
        x, weight, scale, y, weight.stride(0), N, K, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4
    )


def _tiles(x: Tensor, weight: Tensor, scale: Tensor, y: Tensor, splits: int | None) -> None:
    (M, K), N = x.shape, weight.shape[0]
    wide = all(size % 16 == 0 for size in (K, x.stride(0), weight.stride(0)))
    block_m, block_n, block_k, warps, stages = configuration(M, wide)
    tiles = (triton.cdiv(M, block_m), triton.cdiv(N, block_n))
    steps = triton.cdiv(K, block_k)
    splits = splits or min(max(PROGRAMS // (tiles[0] * tiles[1]), 1), max(steps // 4, 1))
    k_split = max(triton.cdiv(steps, splits), 1) * block_k
    out = y if splits == 1 else torch.empty((splits, M, N), dtype=torch.float32, device=y.device)
    w8a16_tile_kernel[(*tiles, splits)](
        x, weight, scale, out, x.stride(0), weight.stride(0), N, M * N, M, N, K, k_split,
        SPLIT=splits > 1, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        w8a16_sum_kernel[(triton.cdiv(M * N, 1024),)](out, scale, y, N, M * N, SPLITS=splits, BLOCK=1024)


def vector_configuration(K: int) -> tuple[int, int]:
    """K -> BLOCK_N, BLOCK_K. 128 threads times 16 bytes are 2048 weights of one row."""
    return 4, min(max(triton.next_power_of_2(K), 64), 2048)


def configuration(M: int, wide: bool = True) -> tuple[int, int, int, int, int]:
    """Rows of x -> BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages. wgmma needs 64 weight rows a warp group.

    Not `wide`, where rows do not begin at multiples of 16, numbers come one by one and through registers.
    """
    if not wide:
        return min(max(triton.next_power_of_2(M), 16), 128), 64, 32, 4 if M <= 64 else 8, 2
    if M <= 64:
        return max(triton.next_power_of_2(M), 16), 64, 128, 4, 4
    return 128, 128, 64, 8, 3


# What the tools take from here -------------------------------------------------------------------------------------


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(N, K) -> int8 (N, K), scale (N) float32: the largest magnitude of a row becomes 127."""
    scale = weight.float().abs().amax(1).clamp(min=1e-10) / 127
    return (weight.float() / scale[:, None]).round().to(torch.int8), scale


def _case(name, m, n, k, layout=lambda t: t, splits=None) -> Case:
    def make(device, dtype, generator):
        x = normal(generator, m, k, device=device, dtype=dtype)
        weight = torch.randint(-128, 128, (n, k), generator=generator, device="cpu", dtype=torch.int8).to(device)
        scale = torch.rand(n, generator=generator, device="cpu").to(device) * 0.01
        return Trial(w8a16, _reference, (layout(x), layout(weight), scale), {"splits": splits})

    return Case(name, make, FLOATS16)


def _reference(x: Tensor, weight: Tensor, scale: Tensor, splits: int | None = None) -> Tensor:
    return w8a16_reference(x, weight, scale)


CASES = [
    _case("one row", 1, 33, 273),
    _case("one row, several tiles", 1, 9, 2 * 2048 + 17),
    _case("few rows, odd sizes", 5, 81, 145),
    _case("few rows, spaced", 3, 70, 130, layout=spaced_rows),
    _case("three splits of 273", 2, 49, 273, splits=3),
    _case("more splits than there is of K", 2, 17, 145, splits=4),
    _case("many rows", 145, 145, 81),
    _case("no rows", 0, 16, 64),
    _case("nothing to sum", 2, 16, 0),
]


def _vector_args(dtype):
    return (dtype, torch.int8, torch.float32, dtype, 4096, 4096, 4096)


def _tile_args(m, split, k):
    def make(dtype):
        out = torch.float32 if split else dtype
        return (dtype, torch.int8, torch.float32, out, k, k, 4096, m * 4096, m, 4096, k, 1024 if split else k)

    return make


def _tile_compilation(m: int, split: bool, k: int = 4096) -> Compilation:
    block_m, block_n, block_k, warps, stages = configuration(m, k % 16 == 0)
    blocks = {"SPLIT": split, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
    name = f"w8a16_tile_{m}{'_split' if split else ''}{'_odd' if k % 16 else ''}"
    return Compilation(name, w8a16_tile_kernel, _tile_args(m, split, k), blocks, warps, stages, min_sm=80, matrix="any")


COMPILE = [
    Compilation(
        "w8a16_vector",
        w8a16_vector_kernel,
        _vector_args,
        dict(zip(("BLOCK_N", "BLOCK_K"), vector_configuration(4096), strict=True)),
    ),
    *(_tile_compilation(m, split) for m, split in ((16, True), (64, True), (64, False), (4096, False))),
    *(_tile_compilation(m, split, 4095) for m, split in ((16, True), (64, True), (4096, False))),
    Compilation(
        "w8a16_sum",
        w8a16_sum_kernel,
        lambda d: (torch.float32, torch.float32, d, 4096, 65536),
        {"SPLITS": 4, "BLOCK": 1024},
    ),
]


def _bench(device, dtype, n, k, m=1) -> Work:
    x, full = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
    weight, scale = quantize(full)
    return Work(
        kernel=lambda: w8a16(x, weight, scale, backend="triton"),
        rivals={"16-bit matmul": lambda: torch.nn.functional.linear(x, full)},
        bytes=weight.nbytes + scale.nbytes + x.nbytes + m * n * x.element_size(),
        flops=2 * m * n * k,
    )


BENCHES = [
    Bench(
        "W8A16",
        _bench,
        {
            "SmolLM2-135M gate and up, batch 1": {"n": 3072, "k": 576},
            "Llama-3-8B gate and up, batch 1": {"n": 28672, "k": 4096},
            "Llama-3-8B gate and up, batch 16": {"n": 28672, "k": 4096, "m": 16},
        },
    ),
    Bench("W8A16, prefill", _bench, {"Llama-3-8B o, 4096": {"n": 4096, "k": 4096, "m": 4096}}, bound="compute"),
]
