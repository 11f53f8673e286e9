"""MXFP4: y = x · wᵀ with weights in E2M1, two a byte, and one E8M0 scale for every 32 of them along K.

Shapes     x (M, K) in 16 bits; weight (N, K / 2) uint8; scale (N, K / 32) uint8; y (M, N)
Formula    w[n, k] = E2M1[code[n, k]] · 2^(scale[n, k // 32] - 127);  y[m, n] = Σ_k x[m, k] · w[n, k]
Layout     byte j holds code[2j] in its low four bits and code[2j + 1] in its high ones; a code is a sign bit and one of

               code      0     1     2     3     4     5     6     7
               value     0    0.5    1    1.5    2     3     4     6

Bytes      N·K·(1/2 + 1/32) + (M·K + M·N)·2: 4.25 bits a weight
FLOPs      2·M·N·K. tl.dot_scaled turns the codes into 16 bits and uses the ordinary matrix instruction below sm_100,
           and there too while x stays in 16 bits: bytes are saved, FLOPs are not
Trap       E8M0 is an exponent without a sign or a mantissa: byte 0 is 2⁻¹²⁷ and not zero, byte 255 is NaN and not
           infinity (triton#11624; compilers before the fix take byte 0 for zero). The scale of the right operand is
           (N, K / 32), not transposed with the codes. With x in float16 so are the scaled weights, which end at 65504
           and 2⁻²⁴: scales beyond 2⁻¹⁴ ... 2¹³ need bfloat16. Triton makes that float16 with an instruction of sm_89.

Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5 and 6.
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
    check_multiple,
    check_shape,
    on_device,
    tl,
    triton,
    use_triton,
)

FLOATS16 = (torch.float16, torch.bfloat16)
SCALE_BLOCK = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def pack(codes: Tensor) -> Tensor:
    """(N, K) codes 0 ... 15 -> (N, K / 2) uint8."""
    low, high = codes.to(torch.uint8).unflatten(1, (-1, 2)).unbind(2)
    return low | high << 4


def unpack(weight: Tensor) -> Tensor:
    """(N, K / 2) uint8 -> (N, K) codes 0 ... 15."""
    return torch.stack([weight & 15, weight >> 4], 2).flatten(1)


def scale_values(scale: Tensor) -> Tensor:
    """E8M0 bytes -> float32. Byte 0 is the subnormal 2⁻¹²⁷, byte 255 is NaN."""
    bits = (scale.to(torch.int32) << 23).clamp(min=1 << 22)
    return torch.where(scale == 255, float("nan"), bits.view(torch.float32))


def dequantize(weight: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """weight (N, K / 2), scale (N, K / 32) -> (N, K)."""
    codes = unpack(weight).long()
    values = torch.tensor([*VALUES, *(-v for v in VALUES)], device=weight.device, dtype=dtype)[codes]
    return (values.unflatten(1, (-1, SCALE_BLOCK)) * scale_values(scale)[:, :, None].to(dtype)).flatten(1)


def quantize(w: Tensor) -> tuple[Tensor, Tensor]:
    """(N, K) -> packed (N, K / 2), scale (N, K / 32). Scale 2^(⌊log₂ amax⌋ - 2), ties to the even code, at most 6."""
    blocks = w.float().unflatten(1, (-1, SCALE_BLOCK))
    exponent = torch.frexp(blocks.abs().amax(2)).exponent - 1 - 2  # frexp's mantissa lies in [0.5, 1)
    scale = (exponent + 127).clamp(0, 254).to(torch.uint8)
    magnitude = (blocks / scale_values(scale)[:, :, None]).abs()
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=w.device)
    code = torch.bucketize(magnitude, middles)  # a tie goes down, which is wrong for every other one
    code += ((magnitude == middles[code.clamp(max=6)]) & (code % 2 == 1)).long()
    return pack((code + 8 * torch.signbit(blocks)).flatten(1)), scale


def mxfp4_reference(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    wide = accumulator(x.dtype)
    return (x.to(wide) @ dequantize(weight, scale, wide).t()).to(x.dtype)


@triton.jit
def mxfp4_kernel(
    x_ptr, w_ptr, scale_ptr, y_ptr,
    x_m, w_n, scale_n, y_m, y_split,  # strides
    M, N, K, k_split,  # k_split: how much of K is one program's, a multiple of BLOCK_K
    FORMAT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (m, n, s): tile (m, n) of y from part s of K."""
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    split = tl.program_id(2)
    start = split * k_split
    end = tl.minimum(start + k_split, K)
    k, byte, block = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 2), tl.arange(0, BLOCK_K // 32)
    x_rows, w_rows, scale_rows = x_ptr + m[:, None] * x_m, w_ptr + n[None, :] * w_n, scale_ptr + n[:, None] * scale_n
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(start, end, BLOCK_K):
        left = end - at
        x = tl.load(x_rows + (at + k)[None, :], mask=(m < M)[:, None] & (k < left)[None, :], other=0.0)
        w = tl.load(w_rows + (at // 2 + byte)[:, None], mask=(2 * byte < left)[:, None] & (n < N)[None, :], other=0)
        inside = (n < N)[:, None] & (32 * block < left)[None, :]
        scale = tl.load(scale_rows + (at // 32 + block)[None, :], mask=inside, other=127)  # 255 would make 0 NaN
        total = tl.dot_scaled(x, None, FORMAT, w, scale, "e2m1", total)
    y = y_ptr + split.to(tl.int64) * y_split + m[:, None] * y_m + n[None, :]
    tl.store(y, total.to(y_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def mxfp4(x: Tensor, weight: Tensor, scale: Tensor, backend: str = "auto") -> Tensor:
    """x (M, K) in 16 bits, weight (N, K / 2) uint8, scale (N, K / 32) uint8 -> (M, N). Raises KernelError."""
    launch = use_triton(backend, x, weight, scale)
    check_dtype(FLOATS16 if launch else FLOATS, x=x)
    check_dtype((torch.uint8,), weight=weight, scale=scale)
    check_shape("x", x, None, None)
    check_multiple("K", x.shape[1], of=SCALE_BLOCK)
    check_shape("weight", weight, None, x.shape[1] // 2)
    check_shape("scale", scale, weight.shape[0], x.shape[1] // SCALE_BLOCK)
    if not launch:
        return mxfp4_reference(x, weight, scale)
    check_contiguous_rows(x=x, weight=weight, scale=scale)
    if x.dtype == torch.float16:
        check_capability(x, (8, 9), "x in float16", "convert it to bfloat16")
    y = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    if y.numel():
        with on_device(x):
            _launch(x, weight, scale, y)
    return y


def _launch(x: Tensor, weight: Tensor, scale: Tensor, y: Tensor) -> None:
    (M, K), N = x.shape, weight.shape[0]
    block_m, block_n, block_k, warps, stages = configuration(M)
    tiles, steps = (triton.cdiv(M, block_m), triton.cdiv(N, block_n)), max(triton.cdiv(K, block_k), 1)
    # Few rows: about 512 programs keep 132 processors reading. Their partial sums, float32, are added in one order.
    splits = min(max(512 // (tiles[0] * tiles[1]), 1), max(steps // 4, 1))
    out = y if splits == 1 else torch.empty((splits, M, N), dtype=torch.float32, device=y.device)
    mxfp4_kernel[(*tiles, splits)](
        x, weight, scale, out, x.stride(0), weight.stride(0), scale.stride(0), N, M * N,
        M, N, K, triton.cdiv(steps, splits) * block_k,
        FORMAT="fp16" if x.dtype == torch.float16 else "bf16",
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        y.copy_(out.sum(0))


def configuration(M: int) -> tuple[int, int, int, int, int]:
    """Rows of x -> BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages."""
    if M <= 64:
        return max(triton.next_power_of_2(M), 16), 64, 128, 4, 4
    return 128, 128, 64, 8, 3


# What the tools take from here -------------------------------------------------------------------------------------


def _case(name, m, n, k, layout=lambda t: t) -> Case:
    def make(device, dtype, generator):
        draw = lambda low, high, *shape: torch.randint(low, high, shape, generator=generator, device="cpu")  # noqa: E731
        x = normal(generator, m, k, device=device, dtype=dtype)
        weight = draw(0, 256, n, k // 2).to(device, torch.uint8)
        scale = draw(117, 125, n, k // SCALE_BLOCK).to(device, torch.uint8)
        return Trial(mxfp4, mxfp4_reference, (layout(x), layout(weight), layout(scale)))

    return Case(name, make, FLOATS16)


CASES = [
    _case("one row", 1, 33, 288),
    _case("few rows, odd sizes", 5, 81, 160),
    _case("few rows, spaced", 3, 70, 96, layout=spaced_rows),
    _case("two splits", 2, 17, 1056),
    _case("many rows", 145, 145, 96),
    _case("no rows", 0, 16, 64),
]


def _compilation(m: int, dtype: torch.dtype) -> Compilation:
    block_m, block_n, block_k, warps, stages = configuration(m)
    split = m <= 64

    def args(d):
        out = torch.float32 if split else d
        strides = (4096, 2048, 128, 4096, m * 4096)
        return (d, torch.uint8, torch.uint8, out, *strides, m, 4096, 4096, 1024 if split else 4096)

    form = "fp16" if dtype == torch.float16 else "bf16"
    blocks = {"FORMAT": form, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
    min_sm = 90 if form == "fp16" else 80
    return Compilation(
        f"mxfp4_{m}_{form}", mxfp4_kernel, args, blocks, warps, stages, dtypes=(dtype,), min_sm=min_sm, matrix="any"
    )


COMPILE = [_compilation(m, dtype) for m in (16, 64, 4096) for dtype in FLOATS16]


def _bench(device, dtype, n, k, m=1) -> Work:
    x, full = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
    weight, scale = quantize(full)
    return Work(
        kernel=lambda: mxfp4(x, weight, scale, backend="triton"),
        rivals={"16-bit matmul": lambda: torch.nn.functional.linear(x, full)},
        bytes=weight.nbytes + scale.nbytes + x.nbytes + m * n * x.element_size(),
        flops=2 * m * n * k,
    )


BENCHES = [
    Bench(
        "MXFP4",
        _bench,
        {
            "Llama-3-8B gate and up, batch 1": {"n": 28672, "k": 4096},
            "Llama-3-8B gate and up, batch 16": {"n": 28672, "k": 4096, "m": 16},
        },
    ),
    Bench("MXFP4, prefill", _bench, {"Llama-3-8B o, 4096": {"n": 4096, "k": 4096, "m": 4096}}, bound="compute"),
]
