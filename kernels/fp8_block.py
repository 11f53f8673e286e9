"""FP8 block-scaled matmul: y = x · wᵀ in e4m3, with scales for 1 × 128 pieces of x and 128 × 128 pieces of w.

Shapes     a (M, K) e4m3, a_scale (M, ⌈K/128⌉) float32; weight (N, K) e4m3, w_scale (⌈N/128⌉, ⌈K/128⌉) float32; y (M, N)
Formula    y[m, n] = Σ_g a_scale[m, g] · w_scale[n // 128, g] · Σ_{k in g} a[m, k] · weight[n, k],  g = k // 128
Quantizer  per 128 numbers of a row: scale = max(amax, FLOOR) / 448, q = round(clamp(x / scale, ±448))
Bytes      M·K + N·K and the scales (of a, 4/128 byte a byte); y in 16 bits. The quantizer reads 2 bytes and writes 1
FLOPs      2·M·N·K, at twice the pace of 16-bit operands
Trap       e4m3 ends at 448 and has no infinity: clamp first, or torch makes 465 NaN. An all-zero block needs the
           floor (kernels-community#681 divided 0 by 0). The last, shorter block of K has a scale too (FBGEMM#6159
           dropped it). A tile of w must lie inside one 128 × 128 piece, or half of it meets the wrong scale
           (sglang#39626): refused. Hopper's FP8 matrix units keep about 14 bits of a sum, so every 128 products leave
           them for a float32 accumulator, which is also where the two scales come in.

e4m3 ("fp8e4nv") exists in hardware from sm_89 on; Triton refuses it for sm_80. The interpreter multiplies e4m3 exactly,
but its own cast from float32 drops carries (1.95 · 2ⁿ becomes 2ⁿ) and cuts subnormals off, so without a GPU the
quantizer is tested on numbers that round without either.

Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 3.3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.catalog import Bench, Case, Compilation, Trial, Work, normal, spaced_rows
from kernels.launch import (
    FLOATS,
    accumulator,
    check_capability,
    check_contiguous_rows,
    check_dtype,
    check_shape,
    on_device,
    require,
    tl,
    triton,
    use_triton,
)

E4M3 = torch.float8_e4m3fn
SCALE_BLOCK = 128
LARGEST = 448.0
FLOOR = 1e-10  # of amax: far below what 16 bits hold, far above where its reciprocal overflows


def quantize_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """(M, K) -> e4m3 (M, K), scale (M, ⌈K/128⌉) float32. From float64 the first is scaled and clamped, not rounded."""
    K, wide = x.shape[1], accumulator(x.dtype)
    padded = torch.nn.functional.pad(x.to(wide), (0, -K % SCALE_BLOCK)).unflatten(1, (-1, SCALE_BLOCK))
    scale = padded.abs().amax(2).clamp(min=FLOOR) / LARGEST
    q = (padded / scale[:, :, None]).clamp(-LARGEST, LARGEST).flatten(1)[:, :K]
    return q if x.dtype == torch.float64 else q.to(E4M3), scale


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(N, K) -> e4m3 (N, K), scale (⌈N/128⌉, ⌈K/128⌉) float32. Done once, so plain torch."""
    B, (N, K) = SCALE_BLOCK, weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -K % B, 0, -N % B)).unflatten(0, (-1, B)).unflatten(2, (-1, B))
    scale = padded.abs().amax((1, 3)).clamp(min=FLOOR) / LARGEST  # padded (N/B, B, K/B, B)
    q = (padded / scale[:, None, :, None]).clamp(-LARGEST, LARGEST)
    return q.flatten(2).flatten(0, 1)[:N, :K].to(E4M3).contiguous(), scale


def fp8_block_reference(a: Tensor, a_scale: Tensor, weight: Tensor, w_scale: Tensor, out_dtype=torch.bfloat16):
    wide, B, (N, K) = accumulator(a_scale.dtype), SCALE_BLOCK, weight.shape
    x = a.to(wide) * a_scale.to(wide).repeat_interleave(B, 1)[:, :K]
    w = weight.to(wide) * w_scale.to(wide).repeat_interleave(B, 0)[:N].repeat_interleave(B, 1)[:, :K]
    return (x @ w.t()).to(out_dtype if wide == torch.float32 else wide)


@triton.jit
def quantize_kernel(
    x_ptr, q_ptr, scale_ptr, x_m, q_m, scale_m, M, K, FLOOR: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """Program (m, g): block g of BLOCK_M rows."""
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    g = tl.program_id(1)
    k = g * 128 + tl.arange(0, 128)
    inside = (m < M)[:, None] & (k < K)[None, :]
    x = tl.load(x_ptr + m[:, None] * x_m + k[None, :], mask=inside, other=0.0).to(tl.float32)
    # max passes NaN over; the sum, which is 0 for numbers, makes the scale of a block with NaN or infinity NaN.
    amax = tl.maximum(tl.max(tl.abs(x), axis=1), FLOOR) + tl.sum(x * 0.0, axis=1)
    q = tl.clamp(x * tl.div_rn(448.0, amax)[:, None], -448.0, 448.0)
    tl.store(q_ptr + m[:, None] * q_m + k[None, :], q.to(q_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + m * scale_m + g, tl.div_rn(amax, 448.0), mask=m < M)


@triton.jit
def fp8_block_kernel(
    a_ptr, a_scale_ptr, w_ptr, w_scale_ptr, y_ptr,
    a_m, a_scale_m, w_n, w_scale_n, y_m,  # strides
    M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (m, n): one tile of y. Neighbours share weights, which are the larger operand."""
    tl.static_assert(128 % BLOCK_N == 0 and 128 % BLOCK_K == 0, "a tile must lie inside one scale block")
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    w_scale_row = w_scale_ptr + tl.program_id(1) * BLOCK_N // 128 * w_scale_n
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + m[:, None] * a_m + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        w = tl.load(w_ptr + n[None, :] * w_n + k[:, None], mask=(n < N)[None, :] & (k < K)[:, None], other=0.0)
        a_scale = tl.load(a_scale_ptr + m * a_scale_m + first // 128, mask=m < M, other=0.0)
        w_scale = tl.load(w_scale_row + first // 128)
        total += tl.dot(a, w) * (a_scale * w_scale)[:, None]
    y = y_ptr + m[:, None] * y_m + n[None, :]
    tl.store(y, total.to(y_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def fp8_quantize(x: Tensor, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """x (M, K) -> e4m3 (M, K), scale (M, ⌈K/128⌉) float32. Raises KernelError."""
    launch = use_triton(backend, x)
    check_dtype(x=x)
    check_shape("x", x, None, None)
    if not launch:
        return quantize_reference(x)
    check_capability(x, (8, 9), "e4m3", 'use backend="torch"')
    check_contiguous_rows(x=x)
    M, K = x.shape
    q = torch.empty((M, K), dtype=E4M3, device=x.device)
    scale = torch.empty((M, triton.cdiv(K, SCALE_BLOCK)), dtype=torch.float32, device=x.device)
    if q.numel():
        grid = (triton.cdiv(M, 16), scale.shape[1])
        with on_device(x):
            quantize_kernel[grid](
                x, q, scale, x.stride(0), q.stride(0), scale.stride(0), M, K, FLOOR=FLOOR, BLOCK_M=16, num_warps=4
            )
    return q, scale


def fp8_block_matmul(
    a: Tensor,
    a_scale: Tensor,
    weight: Tensor,
    w_scale: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    tile: tuple[int, int, int] | None = None,
    backend: str = "auto",
) -> Tensor:
    """a (M, K), weight (N, K), both e4m3, with float32 scales shaped as above -> (M, N). Raises KernelError.

    tile: BLOCK_M, BLOCK_N, BLOCK_K instead of those of `configuration`; the last two must divide 128.
    """
    launch = use_triton(backend, a, a_scale, weight, w_scale)
    check_dtype((E4M3,), a=a, weight=weight)
    check_dtype((torch.float32,), a_scale=a_scale, w_scale=w_scale)
    require(out_dtype in FLOATS, f"out_dtype is {out_dtype}; use float32, float16 or bfloat16")
    check_shape("a", a, None, None)
    check_shape("weight", weight, None, a.shape[1])
    (M, K), N = a.shape, weight.shape[0]
    check_shape("a_scale", a_scale, M, triton.cdiv(K, SCALE_BLOCK))
    check_shape("w_scale", w_scale, triton.cdiv(N, SCALE_BLOCK), triton.cdiv(K, SCALE_BLOCK))
    wide = all(size % 16 == 0 for size in (K, a.stride(0), weight.stride(0)))
    *blocks, warps, stages = configuration(M, wide)
    blocks = blocks if tile is None else tile
    for name, size in zip(("BLOCK_N", "BLOCK_K"), blocks[1:], strict=True):
        require(
            SCALE_BLOCK % size == 0, f"{name} is {size}: such a tile straddles two scale blocks; use a divisor of 128"
        )
    if not launch:
        return fp8_block_reference(a, a_scale, weight, w_scale, out_dtype)
    check_capability(a, (8, 9), "e4m3", 'use backend="torch"')
    check_contiguous_rows(a=a, a_scale=a_scale, weight=weight, w_scale=w_scale)
    y = torch.empty((M, N), dtype=out_dtype, device=a.device)
    if y.numel():
        _launch(a, a_scale, weight, w_scale, y, blocks, warps, stages)
    return y


def _launch(a: Tensor, a_scale: Tensor, weight: Tensor, w_scale: Tensor, y: Tensor, blocks, warps, stages) -> None:
    (M, K), N = a.shape, weight.shape[0]
    strides = [t.stride(0) for t in (a, a_scale, weight, w_scale, y)]
    with on_device(a):
        fp8_block_kernel[(triton.cdiv(M, blocks[0]), triton.cdiv(N, blocks[1]))](
            a, a_scale, weight, w_scale, y, *strides, M, N, K,
            BLOCK_M=blocks[0], BLOCK_N=blocks[1], BLOCK_K=blocks[2], num_warps=warps, num_stages=stages,
        )  # fmt: skip


def configuration(M: int, wide: bool = True) -> tuple[int, int, int, int, int]:
    """Rows of a -> BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages.

    Not `wide`, where rows do not begin at multiples of 16 bytes, numbers come one by one and through registers.
    """
    if not wide:
        return min(max(triton.next_power_of_2(M), 16), 128), 64, 32, 4 if M <= 32 else 8, 2
    if M <= 64:
        return max(triton.next_power_of_2(M), 16), 64, 128, 4, 4
    return 128, 128, 128, 8, 3


# What the tools take from here -------------------------------------------------------------------------------------


def roundable(generator: torch.Generator, m: int, k: int) -> Tensor:
    """Numbers that the interpreter's cast gets right: block maxima 448 · 2ᵖ, no carry, no subnormal; float32 (M, K)."""
    draw = lambda low, high, *shape: torch.randint(low, high, shape, generator=generator, device="cpu")  # noqa: E731
    blocks = -(-k // SCALE_BLOCK)
    fraction = torch.rand(m, blocks, SCALE_BLOCK, generator=generator, device="cpu") * 0.9
    x = (1 + fraction) * 2.0 ** draw(-6, 8, m, blocks, SCALE_BLOCK) * (1 - 2 * draw(0, 2, m, blocks, SCALE_BLOCK))
    x[:, :, 0] = LARGEST
    return (x * 2.0 ** draw(-8, 7, m, blocks, 1)).flatten(1)[:, :k]


def _quantize_case(name, m, k, dtypes=FLOATS, layout=lambda t: t) -> Case:
    def make(device, dtype, generator):
        exact = dtypes == FLOATS
        x = roundable(generator, m, k) if exact else normal(generator, m, k, device="cpu", dtype=dtype)
        return Trial(fp8_quantize, quantize_reference, (layout(x.to(device, dtype)),))

    return Case(name, make, dtypes)


def _case(name, m, n, k, layout=lambda t: t, tile=None) -> Case:
    def make(device, dtype, generator):
        a, a_scale = quantize_reference(normal(generator, m, k, device=device, dtype=torch.float32))
        w, w_scale = quantize_weight(normal(generator, n, k, device=device, dtype=torch.float32))
        args = (layout(a), layout(a_scale), layout(w), layout(w_scale), dtype)
        return Trial(fp8_block_matmul, _reference, args, {"tile": tile})

    return Case(name, make, (torch.float16, torch.bfloat16))


def _reference(a, a_scale, weight, w_scale, out_dtype, tile) -> Tensor:
    return fp8_block_reference(a, a_scale, weight, w_scale, out_dtype)


CASES = [
    _quantize_case("quantize, odd sizes", 5, 273),
    _quantize_case("quantize, one row apart", 1, 145, layout=spaced_rows),
    _quantize_case("quantize, no rows", 0, 128),
    _quantize_case("quantize, any numbers", 33, 273, dtypes=(torch.bfloat16,)),
    _case("few rows, odd sizes", 3, 145, 273),
    _case("one row", 1, 33, 128),
    _case("spaced", 17, 49, 145, layout=lambda t: spaced_rows(t) if t.dtype == torch.float32 else t),
    _case("tiles of half a scale block", 5, 145, 273, tile=(16, 64, 64)),
    _case("many rows", 145, 273, 145),
    _case("no rows", 0, 16, 64),
]


def _compilation(m: int, k: int = 4096) -> Compilation:
    block_m, block_n, block_k, warps, stages = configuration(m, k % 16 == 0)

    def args(d):
        return (E4M3, torch.float32, E4M3, torch.float32, d, k, 32, k, 32, 4096, m, 4096, k)

    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
    matrix, name = "native" if m > 64 and k % 16 == 0 else "any", f"fp8_block_{m}{'_odd' if k % 16 else ''}"
    return Compilation(name, fp8_block_kernel, args, blocks, warps, stages, min_sm=90, matrix=matrix)


COMPILE = [
    Compilation(
        "fp8_quantize",
        quantize_kernel,
        lambda d: (d, E4M3, torch.float32, 4096, 4096, 32, 8192, 4096),
        {"FLOOR": FLOOR, "BLOCK_M": 16},
        min_sm=90,
    ),
    *map(_compilation, (16, 64, 4096)),
    *(_compilation(m, 4095) for m in (16, 64, 4096)),
]


def _bench(device, dtype, n, k, m) -> Work:
    x, full = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
    (a, a_scale), (w, w_scale) = fp8_quantize(x, backend="triton"), quantize_weight(full)
    return Work(
        kernel=lambda: fp8_block_matmul(a, a_scale, w, w_scale, dtype, backend="triton"),
        rivals={"16-bit matmul": lambda: torch.nn.functional.linear(x, full)},
        bytes=sum(t.nbytes for t in (a, a_scale, w, w_scale)) + m * n * x.element_size(),
        flops=2 * m * n * k,
    )


def _bench_quantize(device, dtype, k, m=8192) -> Work:
    x = torch.randn(m, k, device=device, dtype=dtype)
    return Work(
        kernel=lambda: fp8_quantize(x, backend="triton"),
        rivals={"torch": lambda: quantize_reference(x)},
        bytes=3 * m * k + m * k // 32,
    )


BENCHES = [
    Bench("FP8 quantize", _bench_quantize, {"Llama-3-8B": {"k": 4096}}, goal=0.85),
    Bench("FP8 block matmul, decode", _bench, {"Llama-3-8B gate and up": {"n": 28672, "k": 4096, "m": 16}}),
    Bench(
        "FP8 block matmul, prefill",
        _bench,
        {"Llama-3-8B gate and up": {"n": 28672, "k": 4096, "m": 4096}},
        bound="compute",
    ),
]
