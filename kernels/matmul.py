"""C = epilogue(A Bᵀ + bias): a linear layer, its bias and its activation in one kernel.

Shapes     A (M, K) tokens by features, B (N, K) as linear layers store it, bias (N), C (M, N). Epilogues: none, silu,
           gelu (by erf, torch's default), and swiglu, for which B is (2N, K) and bias (2N), the gate's rows before
           the up projection's: C = silu(A Bgateᵀ + ...) · (A Bupᵀ + ...), and the (M, 2N) between is never written
Bytes      (M·K + N·K + M·N)·b at least (2N·K for swiglu); a separate activation would move 2·M·N·b more
FLOPs      2·M·N·K (4·M·N·K for swiglu): compute-bound from a few hundred rows on, memory-bound below
Trap       The sum over K stays in float32 and is rounded once, after the epilogue. A tile that hangs over the end of
           K must read zeros in both matrices: 0 · garbage may be NaN. A and B bring two strides each, whichever of
           them is 1. Programs run in groups of eight rows of tiles, so that those at work at one time share tiles of A
           and of B in the L2 cache; row by row they would share only A. Offsets pass 2³¹: 128,256 · 16,384 does.

Source: the grouped order is that of the Triton tutorial "Matrix Multiplication"; SwiGLU: Shazeer 2020 (2002.05202).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.catalog import Bench, Case, Compilation, Trial, Work, normal, spaced_rows, swapped
from kernels.launch import (
    KernelError,
    accumulator,
    check_dtype,
    check_multiple,
    check_shape,
    on_device,
    tl,
    triton,
    use_triton,
)

EPILOGUES = ("none", "silu", "gelu", "swiglu")
GROUP = tl.constexpr(8)


def matmul_reference(a: Tensor, b: Tensor, bias: Tensor | None = None, epilogue: str = "none") -> Tensor:
    wide = accumulator(a.dtype)
    c = a.to(wide) @ b.to(wide).t()
    c = c if bias is None else c + bias.to(wide)
    if epilogue == "swiglu":
        gate, up = c.chunk(2, dim=-1)
        c = F.silu(gate) * up
    else:
        c = {"none": lambda x: x, "silu": F.silu, "gelu": F.gelu}[epilogue](c)
    return c.to(a.dtype)


@triton.jit
def tile_of(m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """This program's row and column of tiles: down a group's rows first, then the next column."""
    rows, columns = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    program = tl.program_id(0)
    first = program // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    inside = program % (GROUP * columns)
    return first + inside % height, inside // height


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, bias_ptr, c_ptr, m, n, k, a_m, a_k, b_n, b_k, c_m,
    BIAS: tl.constexpr, EPILOGUE: tl.constexpr, WHOLE_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program makes one tile of C. WHOLE_K: K is a multiple of BLOCK_K."""
    row, column = tile_of(m, n, BLOCK_M, BLOCK_N)
    i = row * BLOCK_M + tl.arange(0, BLOCK_M)
    j = column * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    a_inside, b_inside = (i < m)[:, None], (j < n)[None, :]
    a_ptrs = a_ptr + i.to(tl.int64)[:, None] * a_m + at[None, :] * a_k
    b_ptrs = b_ptr + j.to(tl.int64)[None, :] * b_n + at[:, None] * b_k
    up_ptrs = b_ptrs + tl.full((), n, tl.int64) * b_n
    c = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        a_mask, b_mask = a_inside, b_inside
        if not WHOLE_K:
            a_mask = a_inside & (start + at < k)[None, :]
            b_mask = b_inside & (start + at < k)[:, None]
        a = tl.load(a_ptrs, mask=a_mask, other=0.0)
        b = tl.load(b_ptrs, mask=b_mask, other=0.0)
        c = tl.dot(a, b, c, input_precision=PRECISION)
        if EPILOGUE == "swiglu":
            up = tl.dot(a, tl.load(up_ptrs, mask=b_mask, other=0.0), up, input_precision=PRECISION)
        a_ptrs += BLOCK_K * a_k
        b_ptrs += BLOCK_K * b_k
        up_ptrs += BLOCK_K * b_k
    if BIAS:
        c += tl.load(bias_ptr + j, mask=j < n, other=0.0).to(tl.float32)[None, :]
    if EPILOGUE == "silu":
        c = c * tl.sigmoid(c)
    if EPILOGUE == "gelu":
        c = c * 0.5 * (1.0 + tl.erf(c * 0.7071067811865476))
    if EPILOGUE == "swiglu":
        if BIAS:
            up += tl.load(bias_ptr + n + j, mask=j < n, other=0.0).to(tl.float32)[None, :]
        c = c * tl.sigmoid(c) * up
    c_ptrs = c_ptr + i.to(tl.int64)[:, None] * c_m + j[None, :]
    tl.store(c_ptrs, c.to(c_ptr.dtype.element_ty), mask=(i < m)[:, None] & (j < n)[None, :])


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None, epilogue: str = "none", backend: str = "auto") -> Tensor:
    """a (M, K), b (N, K) or for swiglu (2N, K), bias (N) or (2N) -> (M, N). Any strides. Raises KernelError."""
    tensors = {"a": a, "b": b} | ({} if bias is None else {"bias": bias})
    launch = use_triton(backend, *tensors.values())
    check_dtype(**tensors)
    check_shape("a", a, None, None)
    check_shape("b", b, None, a.shape[1])
    if bias is not None:
        check_shape("bias", bias, b.shape[0])
    if epilogue not in EPILOGUES:
        raise KernelError(f"epilogue is {epilogue!r}; use one of {', '.join(EPILOGUES)}")
    if epilogue == "swiglu":
        check_multiple("the number of rows of b", b.shape[0], of=2)
    if not launch:
        return matmul_reference(a, b, bias, epilogue)
    return _launch(a, b, bias, epilogue)


def _launch(a: Tensor, b: Tensor, bias: Tensor | None, epilogue: str) -> Tensor:
    (m, k), n = a.shape, b.shape[0] // (2 if epilogue == "swiglu" else 1)
    c = torch.empty(m, n, dtype=a.dtype, device=a.device)
    if c.numel():
        wide = aligned(m, n, k, *a.stride(), *b.stride())
        blocks, options = configuration(m, k, a.element_size(), epilogue, wide)
        grid = (triton.cdiv(m, blocks["BLOCK_M"]) * triton.cdiv(n, blocks["BLOCK_N"]),)
        bias = None if bias is None else bias.contiguous()
        with on_device(a):
            matmul_kernel[grid](
                a, b, a if bias is None else bias, c, m, n, k, *a.stride(), *b.stride(), c.stride(0),
                BIAS=bias is not None, EPILOGUE=epilogue, **blocks, **options,
            )  # fmt: skip
    return c


def aligned(m: int, n: int, k: int, a_m: int, a_k: int, b_n: int, b_k: int) -> bool:
    """Whether the compiler can prove that 16 bytes at a time may be read, masks included."""
    sizes = [k] + [m] * (a_m == 1) + [n] * (b_n == 1)
    return all(x % 16 == 0 for x in sizes) and all(s == 1 or s % 16 == 0 for s in (a_m, a_k, b_n, b_k))


def configuration(m: int, k: int, itemsize: int, epilogue: str, wide: bool) -> tuple[dict, dict]:
    """Shapes -> constexprs, compiler options. Few rows: small tiles, and more of them, so that all processors load.

    What is read in single elements goes through registers, hence the small tile where reads are not `wide`.
    """
    if itemsize == 4 or not wide:
        tile, warps, stages = (64, 32, 16) if epilogue == "swiglu" else (64, 64, 32), 8, 2
    elif m <= 16:
        tile, warps, stages = (16, 64, 128), 4, 3 if epilogue == "swiglu" else 4
    elif m <= 64:
        tile, warps, stages = (64, 64, 64), 4, 4
    else:  # 256 columns make 128 sums a thread, which leaves no registers for erf or for a second matrix
        columns = {"swiglu": 64, "gelu": 128}.get(epilogue, 256)
        tile, warps, stages = (128, columns, 64), 8, 3
    blocks = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile, strict=True))
    precision = "ieee" if itemsize == 4 else "tf32"
    return blocks | {"WHOLE_K": k % tile[2] == 0, "PRECISION": precision}, {"num_warps": warps, "num_stages": stages}


# What the tools take from here -------------------------------------------------------------------------------------


def _case(name, m, n, k, epilogue="none", bias=False, layout=lambda x: x, b_layout=None) -> Case:
    b_layout = b_layout or layout
    rows = 2 * n if epilogue == "swiglu" else n

    def make(device, dtype, generator):
        a = normal(generator, m, k, device=device, dtype=dtype)
        b = normal(generator, rows, k, device=device, dtype=dtype, scale=max(k, 1) ** -0.5)
        added = normal(generator, rows, device=device, dtype=dtype) if bias else None
        return Trial(matmul, matmul_reference, (layout(a), b_layout(b), added, epilogue))

    return Case(name, make)


CASES = [
    _case("odd everywhere", 145, 273, 81),
    _case("one row", 1, 81, 145, bias=True),
    _case("silu", 33, 49, 64, "silu", bias=True),
    _case("gelu", 17, 33, 49, "gelu"),
    _case("swiglu", 81, 49, 273, "swiglu"),
    _case("swiglu with bias", 9, 33, 128, "swiglu", bias=True),
    _case("both transposed", 81, 145, 33, layout=swapped),
    _case("a of spaced rows, b transposed", 145, 33, 64, layout=spaced_rows, b_layout=swapped),
    _case("more groups than rows of tiles", 17, 529, 17),
    _case("no rows", 0, 33, 64),
    _case("no features", 5, 33, 0, bias=True),
]


def _compilation(name, m, n, k, epilogue="none", bias=False, transposed=False, itemsize=2, **settings) -> Compilation:
    strides = (1, m, 1, n) if transposed else (k, 1, k, 1)
    blocks, options = configuration(m, k, itemsize, epilogue, aligned(m, n, k, *strides))
    constexprs = {"BIAS": bias, "EPILOGUE": epilogue, **blocks}
    settings = {"min_sm": 80, "matrix": "any"} | settings  # on sm_75 Triton has no matrix instruction
    return Compilation(
        f"matmul_{name}",
        matmul_kernel,
        lambda dtype: (dtype,) * 4 + (m, n, k, *strides, n),
        constexprs,
        **options,
        **settings,
    )


COMPILE = [
    _compilation("large", 8192, 4096, 4096),
    _compilation("large_bias_silu", 8192, 4096, 4096, "silu", bias=True),
    _compilation("large_gelu", 8192, 4096, 4096, "gelu"),
    _compilation("large_swiglu", 8192, 14336, 4096, "swiglu"),
    _compilation("large_bias_swiglu", 8192, 14336, 4096, "swiglu", bias=True),
    _compilation("large_transposed", 8192, 4096, 4096, transposed=True),
    _compilation("odd", 8191, 4097, 4095),
    _compilation("odd_rows", 8191, 4096, 4096, bias=True),
    _compilation("odd_swiglu", 8191, 4097, 4095, "swiglu", bias=True),
    _compilation("64_rows", 64, 4096, 4096),
    _compilation("64_rows_swiglu", 64, 14336, 4096, "swiglu"),
    _compilation("1_row", 1, 4096, 4096),
    _compilation("1_row_swiglu", 1, 14336, 4096, "swiglu"),
    _compilation("fp32", 8192, 4096, 4096, itemsize=4, dtypes=(torch.float32,), matrix=""),
    _compilation("fp32_swiglu", 8191, 4097, 4095, "swiglu", itemsize=4, dtypes=(torch.float32,), matrix=""),
]


def _bench(device, dtype, m, n, k, epilogue="none") -> Work:
    a = torch.randn(m, k, device=device, dtype=dtype)
    b = torch.randn(2 * n if epilogue == "swiglu" else n, k, device=device, dtype=dtype) * k**-0.5

    def by_torch():
        c = F.linear(a, b)
        if epilogue == "none":
            return c
        gate, up = c.chunk(2, dim=-1)
        return F.silu(gate) * up

    return Work(
        kernel=lambda: matmul(a, b, None, epilogue, backend="triton"),
        rivals={"cuBLAS" if epilogue == "none" else "cuBLAS, silu, mul": by_torch},
        bytes=a.nbytes + b.nbytes + m * n * a.element_size(),
        flops=2 * m * len(b) * k,
    )


BENCHES = [
    Bench(
        "matmul",
        _bench,
        {"4096³": {"m": 4096, "n": 4096, "k": 4096}, "8192³": {"m": 8192, "n": 8192, "k": 8192}},
        bound="compute",
        goal=0.75,
    ),
    Bench(
        "matmul with SwiGLU",
        _bench,
        {
            "SmolLM2-135M": {"m": 8192, "n": 1536, "k": 576, "epilogue": "swiglu"},
            "Qwen3-0.6B": {"m": 8192, "n": 3072, "k": 1024, "epilogue": "swiglu"},
            "Llama-3-8B": {"m": 8192, "n": 14336, "k": 4096, "epilogue": "swiglu"},
        },
        bound="compute",
    ),
    Bench("matmul of one row", _bench, {"Llama-3-8B": {"m": 1, "n": 14336, "k": 4096, "epilogue": "swiglu"}}),
]
