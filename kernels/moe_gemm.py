"""MoE, computing: one matmul for all experts over the order of moe_align, and the weighted sum back to tokens.

Shapes     x (R, K); weight (E, N, K), with SwiGLU (E, 2·N, K) of which the first N rows are the gate; source (P) and
           expert_of_block (P / B) from moe_align; y (T · k, N). In the first matmul R = T and pair p reads row p // k,
           in the second R = T · k and pair p reads row p
Formula    y[p] = x[p // share] · weight[e(p)]ᵀ, or silu(x · gateᵀ) · (x · upᵀ), one row for each (token, expert) pair;
           out[t] = Σ_j router_weight[t, j] · y[t · k + j]
Bytes      the weights of the experts that have tokens, E · (1 - (1 - k/E)^T) of them on average, and the rows once
           each: no copy of x in expert order is ever written, the tiles gather their rows themselves
FLOPs      2·T·k·N·K, with SwiGLU 4·T·k·N·K. Bound by bytes until an expert has some hundred tokens
Trap       The pairs of expert -1 must be written, as zeros (vllm#12583), and padding must not be. The router weight
           comes in once, in float32, in the last sum; that sum runs over j in order and without atomics, so a token's
           bits do not depend on its neighbours. expert · stride passes 2³¹ in any large model.

Source: Gale et al. 2022 (arXiv 2211.15841); Shazeer et al. 2017 (arXiv 1701.06538), equation 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.catalog import Bench, Case, Compilation, Trial, Work, normal, spaced_rows
from kernels.launch import (
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
from kernels.moe_align import choices, moe_align


def moe_gemm_reference(x, weight, source, expert_of_block, share: int = 1, swiglu: bool = False) -> Tensor:
    """As moe_gemm: one expert after the other, zeros where there is none."""
    wide, pairs = accumulator(x.dtype), x.shape[0] * share
    owner = torch.full((pairs + 1,), -1, device=x.device)
    owner[source.long()] = expert_of_block.long().repeat_interleave(len(source) // max(len(expert_of_block), 1))
    y = torch.zeros((pairs, weight.shape[1] // (2 if swiglu else 1)), dtype=x.dtype, device=x.device)
    for e in range(len(weight)):
        mine = (owner[:pairs] == e).nonzero().squeeze(1)
        rows = x[mine // share].to(wide) @ weight[e].to(wide).t()
        if swiglu:
            gate, up = rows.chunk(2, dim=-1)
            rows = F.silu(gate) * up
        y[mine] = rows.to(x.dtype)
    return y


def moe_combine_reference(y: Tensor, router_weight: Tensor) -> Tensor:
    wide, (tokens, k) = accumulator(y.dtype), router_weight.shape
    return (y.to(wide).reshape(tokens, k, -1) * router_weight.to(wide)[:, :, None]).sum(1).to(y.dtype)


@triton.jit
def moe_gemm_kernel(
    x_ptr, w_ptr, source_ptr, owner_ptr, y_ptr,
    x_m, w_e, w_n, y_m,  # strides
    pairs, N, K, SHARE: tl.constexpr, SWIGLU: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (b, n): columns n of tile b. Neighbours are tiles of one expert and share its weights in the cache."""
    block = tl.program_id(0)
    pair = tl.load(source_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    expert = tl.load(owner_ptr + block).to(tl.int64)
    real = (pair < pairs)[:, None]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    y_at = y_ptr + pair.to(tl.int64)[:, None] * y_m + n[None, :]
    if expert < 0:
        tl.store(y_at, tl.zeros((BLOCK_M, BLOCK_N), y_ptr.dtype.element_ty), mask=real & (n < N)[None, :])
        return
    x_rows = x_ptr + (pair // SHARE).to(tl.int64)[:, None] * x_m
    w_rows = w_ptr + expert * w_e + n.to(tl.int64)[None, :] * w_n
    up_rows = w_ptr + expert * w_e + (n + N).to(tl.int64)[None, :] * w_n
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        x = tl.load(x_rows + k[None, :], mask=real & (k < K)[None, :], other=0.0)
        inside = (k < K)[:, None] & (n < N)[None, :]
        total = tl.dot(x, tl.load(w_rows + k[:, None], mask=inside, other=0.0), total, input_precision="ieee")
        if SWIGLU:
            w_up = tl.load(up_rows + k[:, None], mask=inside, other=0.0)
            up = tl.dot(x, w_up, up, input_precision="ieee")
    if SWIGLU:
        total = total * tl.sigmoid(total) * up
    tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=real & (n < N)[None, :])


@triton.jit
def moe_combine_kernel(
    y_ptr, weight_ptr, out_ptr, y_m, weight_t, out_t, k, d, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (t, i): BLOCK columns of token t."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(k):
        y = tl.load(y_ptr + (t * k + j) * y_m + i, mask=i < d, other=0.0).to(tl.float32)
        total += tl.load(weight_ptr + t * weight_t + j).to(tl.float32) * y
    tl.store(out_ptr + t * out_t + i, total.to(out_ptr.dtype.element_ty), mask=i < d)


def moe_gemm(
    x: Tensor,
    weight: Tensor,
    source: Tensor,
    expert_of_block: Tensor,
    share: int = 1,
    swiglu: bool = False,
    backend: str = "auto",
) -> Tensor:
    """x (R, K), weight (E, N, K) or with swiglu (E, 2·N, K) -> (R · share, N). Raises KernelError.

    source, expert_of_block: from moe_align, for R · share pairs; pair p reads row p // share of x.
    """
    launch = use_triton(backend, x, weight, source, expert_of_block)
    check_dtype(x=x, weight=weight)
    check_dtype((torch.int32,), source=source, expert_of_block=expert_of_block)
    check_shape("x", x, None, None)
    check_shape("weight", weight, None, None, x.shape[1])
    check_multiple("weight.shape[1]", weight.shape[1], of=2 if swiglu else 1)
    require(share >= 1, f"share is {share}; it is how many pairs read one row of x, 1 or more")
    block = len(source) // max(len(expert_of_block), 1)
    fits = block * len(expert_of_block) == len(source) and (block in (16, 32, 64, 128) or not x.shape[0])
    require(
        fits, f"source has {len(source)} rows and expert_of_block {len(expert_of_block)}; take both from one moe_align"
    )
    if not launch:
        return moe_gemm_reference(x, weight, source, expert_of_block, share, swiglu)
    check_contiguous_rows(x=x, weight=weight, source=source, expert_of_block=expert_of_block)
    N = weight.shape[1] // (2 if swiglu else 1)
    y = torch.empty((x.shape[0] * share, N), dtype=x.dtype, device=x.device)
    if y.numel():
        strides = x.stride(0), *weight.stride()[:2]
        wide = x.element_size() == 2 and all(size % 16 == 0 for size in (x.shape[1], *strides))
        block_n, block_k, warps, stages = configuration(block, swiglu, wide)
        with on_device(x):
            moe_gemm_kernel[(len(expert_of_block), triton.cdiv(N, block_n))](
                x, weight, source, expert_of_block, y, *strides, y.stride(0),
                y.shape[0], N, x.shape[1], SHARE=share, SWIGLU=swiglu,
                BLOCK_M=block, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
            )  # fmt: skip
    return y


def moe_combine(y: Tensor, router_weight: Tensor, backend: str = "auto") -> Tensor:
    """y (T · k, d), router_weight (T, k) -> (T, d). Raises KernelError."""
    launch = use_triton(backend, y, router_weight)
    check_dtype(y=y)
    check_dtype(router_weight=router_weight)
    check_shape("router_weight", router_weight, None, None)
    tokens, k = router_weight.shape
    check_shape("y", y, tokens * k, None)
    if not launch:
        return moe_combine_reference(y, router_weight)
    check_contiguous_rows(y=y, router_weight=router_weight)
    out = torch.empty((tokens, y.shape[1]), dtype=y.dtype, device=y.device)
    if out.numel():
        strides = y.stride(0), router_weight.stride(0), out.stride(0)
        with on_device(y):
            moe_combine_kernel[(tokens, triton.cdiv(y.shape[1], 1024))](
                y, router_weight, out, *strides, k, y.shape[1], BLOCK=1024, num_warps=4
            )
    return out


def moe_layer(
    x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, router_weight: Tensor, backend: str = "auto"
) -> Tensor:
    """The expert layer. x (T, d), gate_up (E, 2f, d), down (E, d, f), experts and router_weight (T, k) -> (T, d)."""
    check_shape("x", x, None, None)
    check_shape("experts", experts, x.shape[0], None)
    check_shape("gate_up", gate_up, None, None, x.shape[1])
    k = experts.shape[1]
    check_shape("down", down, len(gate_up), x.shape[1], gate_up.shape[1] // 2)
    check_shape("router_weight", router_weight, x.shape[0], k)
    order = moe_align(experts, len(gate_up), tile_rows(experts.numel(), len(gate_up)), backend)
    h = moe_gemm(x, gate_up, *order, share=k, swiglu=True, backend=backend)
    return moe_combine(moe_gemm(h, down, *order, backend=backend), router_weight, backend)


def tile_rows(pairs: int, num_experts: int) -> int:
    """B: about as many rows as an expert gets, since padding costs FLOPs and small tiles read the weights again."""
    return min(max(triton.next_power_of_2(pairs // num_experts), 16), 128)


def configuration(block: int, swiglu: bool, wide: bool = True) -> tuple[int, int, int, int]:
    """B -> BLOCK_N, BLOCK_K, num_warps, num_stages. SwiGLU has two weight tiles and two accumulators.

    Not `wide`, in float32 or where rows do not begin at multiples of 32 bytes, everything goes through registers.
    """
    if not wide:
        return 32, 16 if block == 128 else 32, 8, 2
    if block <= 32:
        return 64, 64 if swiglu else 128, 4, 4
    return (64 if swiglu else 128), 64, 8 if block == 128 else 4, 3


# What the tools take from here -------------------------------------------------------------------------------------


def layer_reference(x, gate_up, down, experts, router_weight) -> Tensor:
    """A loop over experts, rounded where the kernels round: after SwiGLU, after down, after the sum."""
    wide, out = accumulator(x.dtype), torch.zeros(x.shape, dtype=accumulator(x.dtype), device=x.device)
    for e in range(len(gate_up)):
        token, j = (experts == e).nonzero(as_tuple=True)
        gate, up = (x[token].to(wide) @ gate_up[e].to(wide).t()).chunk(2, dim=-1)
        h = (F.silu(gate) * up).to(x.dtype).to(wide)
        y = (h @ down[e].to(wide).t()).to(x.dtype).to(wide)
        out.index_add_(0, token, y * router_weight[token, j, None].to(wide))
    return out.to(x.dtype)


def _layer(x, gate_up, down, experts, router_weight, backend) -> Tensor:
    return moe_layer(x, gate_up, down, experts, router_weight, backend)


def _layer_case(name, tokens, d, f, num_experts, k, dropped=0.0, layout=lambda t: t) -> Case:
    def make(device, dtype, generator):
        draw = lambda *shape, scale=1.0: normal(generator, *shape, device=device, dtype=dtype, scale=scale)  # noqa: E731
        gate_up, down = draw(num_experts, 2 * f, d, scale=d**-0.5), draw(num_experts, d, f, scale=f**-0.5)
        experts = choices(generator, tokens, k, num_experts, dropped).to(device)
        weight = draw(tokens, k).float().softmax(1)
        return Trial(_layer, layer_reference, (layout(draw(tokens, d)), gate_up, down, layout(experts), weight))

    return Case(name, make)


def _gemm_case(name, tokens, n, k, num_experts, top_k, swiglu, block, dropped=0.0) -> Case:
    def make(device, dtype, generator):
        draw = lambda *shape, scale=1.0: normal(generator, *shape, device=device, dtype=dtype, scale=scale)  # noqa: E731
        experts = choices(generator, tokens, top_k, num_experts, dropped).to(device)
        order = moe_align(experts, num_experts, block, backend="torch")
        weight = spaced_rows(draw(num_experts, n * (2 if swiglu else 1), k, scale=k**-0.5))
        return Trial(moe_gemm, moe_gemm_reference, (spaced_rows(draw(tokens, k)), weight, *order, top_k, swiglu))

    return Case(name, make)


CASES = [
    _layer_case("layer, odd sizes", 49, 81, 49, 5, 2),
    _layer_case("layer, one token", 1, 145, 33, 8, 3),
    _layer_case("layer, some dropped, experts without tokens", 7, 33, 17, 9, 2, dropped=0.4, layout=spaced_rows),
    _layer_case("layer, all dropped", 5, 33, 17, 3, 2, dropped=1.1),
    _layer_case("layer, no tokens", 0, 33, 17, 3, 2),
    _gemm_case("matmul, spaced", 20, 81, 145, 3, 2, False, 32, dropped=0.2),
    _gemm_case("matmul with SwiGLU, spaced, large tiles", 145, 33, 81, 2, 1, True, 128),
]


def _compilation(block: int, swiglu: bool, odd: int = 0, dtype=None) -> Compilation:
    """Qwen3-30B-A3B: d = 2048, f = 768, 128 experts, 8 a token. odd: how far K is from that."""
    (n, k), share = ((768, 2048 + odd), 8) if swiglu else ((2048, 768 + odd), 1)
    wide = not odd and dtype is None
    block_n, block_k, warps, stages = configuration(block, swiglu, wide)

    def args(d):
        i = torch.int32
        return (d, d, i, i, d, k, n * k * (2 if swiglu else 1), k, n, 4096, n, k)

    blocks = {"SHARE": share, "SWIGLU": swiglu, "BLOCK_M": block, "BLOCK_N": block_n, "BLOCK_K": block_k}
    name = f"moe_{'gate_up' if swiglu else 'down'}_{block}{'_odd' if odd else ''}{'_fp32' if dtype else ''}"
    settings = {"dtypes": (dtype,)} if dtype else {"matrix": "native" if wide and block >= 64 else "any"}
    return Compilation(name, moe_gemm_kernel, args, blocks, warps, stages, min_sm=80, **settings)


COMPILE = [
    *(_compilation(block, swiglu) for block in (16, 32, 64, 128) for swiglu in (True, False)),
    *(_compilation(block, True, odd=1) for block in (16, 32, 64, 128)),
    *(_compilation(block, True, odd=1, dtype=torch.float32) for block in (16, 32, 64, 128)),
    Compilation(
        "moe_combine", moe_combine_kernel, lambda d: (d, torch.float32, d, 2048, 8, 2048, 8, 2048), {"BLOCK": 1024}
    ),
]


def _bench(device, dtype, tokens, d=2048, f=768, num_experts=128, k=8) -> Work:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, d, device=device, dtype=dtype)
    gate_up = torch.randn(num_experts, 2 * f, d, device=device, dtype=dtype) * d**-0.5
    down = torch.randn(num_experts, d, f, device=device, dtype=dtype) * f**-0.5
    experts = choices(generator, tokens, k, num_experts).to(device)
    weight = torch.full((tokens, k), 1 / k, device=device)
    used = len(experts.unique())
    return Work(
        kernel=lambda: moe_layer(x, gate_up, down, experts, weight, backend="triton"),
        rivals={"loop over experts": lambda: layer_reference(x, gate_up, down, experts, weight)},
        bytes=used * (gate_up[0].nbytes + down[0].nbytes) + (2 + k) * x.nbytes,
        flops=6 * tokens * k * d * f,
    )


BENCHES = [
    Bench("MoE layer, decode", _bench, {"Qwen3-30B-A3B, 64 tokens": {"tokens": 64}}),
    Bench("MoE layer, prefill", _bench, {"Qwen3-30B-A3B, 8192 tokens": {"tokens": 8192}}, bound="compute"),
]
