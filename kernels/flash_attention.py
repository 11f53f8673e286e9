"""FlashAttention-2 prefill on packed sequences: out = softmax(scale · q kᵀ + mask) v, the scores never in memory.

Shapes     q, out (Tq, H, D); k, v (Tk, Hkv, D); query_starts, key_starts (B + 1) int32; lse (H, Tq) float32, base e.
           Sequence b has queries query_starts[b] ... query_starts[b + 1] - 1, and keys likewise
Mask       A sequence's queries are its last tokens ("causal, aligned bottom-right"): query i of n stands at position
           m - n + i of m keys and sees those up to its own; with a window of w only the last w of them
Bytes      2·Tq·H·D·b + 2·Tk·Hkv·D·b + 4·H·Tq
FLOPs      4·D·H for each visible pair of query and key: compute-bound beyond a few hundred tokens
Trap       Tiles that every query of the block sees whole need no mask and come first; then those on the diagonal and
           on the window's edge; the rest is never read. exp2 with log2(e) folded into the scale makes the running
           maximum base 2, so the log-sum-exp converts back. Soft-capping needs the natural score, hence the scale
           before it, and tanh by exp(2x) / (exp(2x) + 1) is inf / inf beyond 88. A row that sees no key has weights
           0 / 0: it gives out = 0 and lse = -inf. A head of 96 is padded to 128 with zeros.

Source: Dao 2023 (arXiv 2307.08691), algorithm 1; soft-cap: Gemma 2 (arXiv 2408.00118), section 2.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from kernels.catalog import Bench, Case, Compilation, Trial, Work, normal, swapped
from kernels.launch import (
    KernelError,
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

HEADS = (64, 96, 128, 256)
NEVER = float("-inf")
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


def flash_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, query_starts: Tensor, key_starts: Tensor,
    scale: float | None = None, window: int | None = None, soft_cap: float | None = None, longest: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    wide, group = accumulator(q.dtype), q.shape[1] // k.shape[1]
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q), dtype=wide, device=q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for (q0, q1), (k0, k1) in zip(*(pairwise(s.tolist()) for s in (query_starts, key_starts)), strict=True):
        keys, values = (t[k0:k1].to(wide).repeat_interleave(group, dim=1) for t in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[q0:q1].to(wide), keys) * scale
        if soft_cap is not None:
            scores = soft_cap * (scores / soft_cap).tanh()
        scores = scores.masked_fill(~visible(q1 - q0, k1 - k0, window, q.device), NEVER)
        lse[:, q0:q1] = scores.logsumexp(dim=-1)
        weights = (scores - lse[:, q0:q1].clamp(min=torch.finfo(wide).min)[..., None]).exp()
        out[q0:q1] = torch.einsum("hij,jhd->ihd", weights, values).to(q.dtype)
    return out, lse


def visible(queries: int, keys: int, window: int | None, device) -> Tensor:
    """(queries, keys) booleans: which key each query sees."""
    i = torch.arange(keys - queries, keys, device=device)[:, None]
    j = torch.arange(keys, device=device)[None, :]
    return (j <= i) if window is None else (j <= i) & (j > i - window)


@triton.jit
def soft_capped(score, cap):
    """cap · tanh(score / cap). 1 - 2 / (exp(2x) + 1) is ±1 at either end; near 0 it cancels, so the series serves."""
    x = score / cap
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    tanh = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    return cap * tl.where(tl.abs(x) < 0.25, series, tanh)


@triton.jit
def attend(
    total, peak, mass, q, position, k_ptr, v_ptr, k_t, v_t, start, stop, gap, skip, keys, window, scale, cap, d,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds keys start ... stop - 1 to a block of queries' running sum of values, maximum (base 2) and mass.

    MASKED: from key `gap` on, the next `skip` are left out.
    """
    factor = LOG2E if CAP else scale * LOG2E
    j = tl.arange(0, BLOCK_N)
    i = tl.arange(0, BLOCK_D)
    k_tile = j[None, :] * k_t + i[:, None]  # (D, N): transposed as it is read
    v_tile = j[:, None] * v_t + i[None, :]
    for n in tl.range(start, stop - skip, BLOCK_N, num_stages=STAGES):
        if MASKED:
            n = tl.where(n < gap, n, n + skip)
        first = tl.full((), n, tl.int64)
        k_ptrs = k_ptr + first * k_t + k_tile
        v_ptrs = v_ptr + first * v_t + v_tile
        if MASKED:
            inside = n + j < keys
            k = tl.load(k_ptrs, mask=inside[None, :] & (i < d)[:, None], other=0.0)
            v = tl.load(v_ptrs, mask=inside[:, None] & (i < d)[None, :], other=0.0)
        elif PADDED:
            k = tl.load(k_ptrs, mask=(i < d)[:, None], other=0.0)
            v = tl.load(v_ptrs, mask=(i < d)[None, :], other=0.0)
        else:
            k = tl.load(k_ptrs)
            v = tl.load(v_ptrs)
        score = tl.dot(q, k, input_precision=PRECISION)
        if CAP:
            score = soft_capped(score * scale, cap)
        if MASKED:
            key = (n + j)[None, :]
            seen = (key <= position[:, None]) & inside[None, :]
            if WINDOW:
                seen = seen & (key > position[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
        grown = tl.maximum(peak, tl.max(score, axis=1) * factor)
        shift = grown
        if MASKED:
            shift = tl.where(grown == float("-inf"), 0.0, grown)  # nothing seen yet: -inf - -inf would be NaN
        weight = tl.exp2(score * factor - shift[:, None])
        decay = tl.exp2(peak - shift)
        mass = mass * decay + tl.sum(weight, axis=1)
        total = tl.dot(weight.to(v.dtype), v, total * decay[:, None], input_precision=PRECISION)
        peak = grown
    return total, peak, mass


@triton.jit
def key_ranges(keys, lowest, window, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """For queries from position `lowest` on: some see keys begin ... stop - 1, and all see full ... diagonal - 1."""
    highest = tl.minimum(lowest + BLOCK_M, keys) - 1
    diagonal = tl.maximum((lowest + 1) // BLOCK_N * BLOCK_N, 0)
    begin = 0
    full = 0
    if WINDOW:
        begin = tl.maximum(lowest - window + 1, 0) // BLOCK_N * BLOCK_N
        full = tl.cdiv(tl.maximum(highest - window + 1, 0), BLOCK_N) * BLOCK_N
    return begin, tl.minimum(full, diagonal), diagonal, highest + 1


@triton.jit
def flash_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, query_starts, key_starts,
    q_t, q_h, k_t, k_h, v_t, v_h, out_t, out_h, lse_h,
    group, window, scale, cap, d,
    WINDOW: tl.constexpr, CAP: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr, MASKED_STAGES: tl.constexpr,
):  # fmt: skip
    """Program (head, block, sequence) makes BLOCK_M rows of one head of one sequence."""
    head = tl.program_id(0).to(tl.int64)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M  # longest rows first, so that short ones fill up
    sequence = tl.program_id(2)
    q0 = tl.load(query_starts + sequence).to(tl.int64)
    k0 = tl.load(key_starts + sequence).to(tl.int64)
    queries = (tl.load(query_starts + sequence + 1) - q0).to(tl.int32)
    keys = (tl.load(key_starts + sequence + 1) - k0).to(tl.int32)
    if first >= queries:
        return
    q_ptr += (q0 + first) * q_t + head * q_h  # 64 bits to the first row, 32 from there on: half the registers
    k_ptr += k0 * k_t + head // group * k_h
    v_ptr += k0 * v_t + head // group * v_h
    out_ptr += (q0 + first) * out_t + head * out_h
    r = tl.arange(0, BLOCK_M)
    i = tl.arange(0, BLOCK_D)
    inside = (first + r < queries)[:, None] & (i < d)[None, :]
    q = tl.load(q_ptr + r[:, None] * q_t + i[None, :], mask=inside, other=0.0)

    position = keys - queries + first + r
    begin, full, diagonal, stop = key_ranges(keys, keys - queries + first, window, WINDOW, BLOCK_M, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    total, peak, mass = attend(
        total, peak, mass, q, position, k_ptr, v_ptr, k_t, v_t, full, diagonal, 0, 0, keys, window, scale, cap, d,
        False, WINDOW, CAP, PADDED, PRECISION, BLOCK_N, BLOCK_D, STAGES,
    )  # fmt: skip
    total, peak, mass = attend(
        total, peak, mass, q, position, k_ptr, v_ptr, k_t, v_t, begin, stop, full, diagonal - full,
        keys, window, scale, cap, d,
        True, WINDOW, CAP, PADDED, PRECISION, BLOCK_N, BLOCK_D, MASKED_STAGES,
    )  # fmt: skip
    some = tl.where(mass == 0.0, 1.0, mass)
    out = (total / some[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + r[:, None] * out_t + i[None, :], out, mask=inside)
    lse = tl.where(mass == 0.0, float("-inf"), peak * LN2 + tl.log(some))
    tl.store(lse_ptr + head * lse_h + q0 + first + r, lse, mask=first + r < queries)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, query_starts: Tensor, key_starts: Tensor,
    scale: float | None = None, window: int | None = None, soft_cap: float | None = None, longest: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q (Tq, H, D), k and v (Tk, Hkv, D), starts (B + 1) int32 -> out (Tq, H, D), lse (H, Tq) float32, base e.

    `longest` is the largest number of queries of a sequence; without it a GPU has to be waited for to learn it.
    `window` counts the query's own token. Raises KernelError.
    """
    launch = use_triton(backend, q, k, v, query_starts, key_starts)
    check_dtype(q=q, k=k, v=v)
    check_dtype((torch.int32,), query_starts=query_starts, key_starts=key_starts)
    check_shape("q", q, None, None, None)
    check_shape("k", k, None, None, q.shape[2])
    check_shape("v", v, *k.shape)
    check_shape("query_starts", query_starts, None)
    check_shape("key_starts", key_starts, *query_starts.shape)
    require(len(query_starts) > 0, "query_starts is empty; B + 1 numbers are needed, the first of them 0")
    require(k.shape[1] > 0, "k has no heads; at least one is needed")
    check_multiple("the number of query heads", q.shape[1], of=k.shape[1])
    require(window is None or window > 0, f"window is {window}; at least 1 is needed, or None for all")
    require(soft_cap is None or soft_cap > 0, f"soft_cap is {soft_cap}; a number above 0 is needed, or None")
    require(scale is None or scale > 0, f"scale is {scale}; a number above 0 is needed, or None for D^-0.5")
    if not launch:
        return flash_attention_reference(q, k, v, query_starts, key_starts, scale, window, soft_cap)
    if q.shape[2] not in HEADS:
        raise KernelError(f"q has heads of {q.shape[2]}; the kernel takes {', '.join(map(str, HEADS))}")
    check_contiguous_rows(q=q, k=k, v=v, query_starts=query_starts, key_starts=key_starts)
    for name, t in {"q": q, "k": k, "v": v}.items():
        require(t.stride(0) < 2**24, f"{name} has tokens {t.stride(0)} elements apart; call {name}.contiguous()")
    if longest is None:
        longest = int(query_starts.diff().max()) if len(query_starts) > 1 else 0
    return _launch(q, k, v, query_starts, key_starts, scale, window, soft_cap, longest)


def _launch(q, k, v, query_starts, key_starts, scale, window, soft_cap, longest) -> tuple[Tensor, Tensor]:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    (tokens, heads, d), sequences = q.shape, len(query_starts) - 1
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    blocks, launch = configuration(d, q.element_size())
    grid = (heads, triton.cdiv(longest, blocks["BLOCK_M"]), sequences)
    if q.numel() and longest and sequences:
        strides = [s for t in (q, k, v, out) for s in t.stride()[:2]]
        with on_device(q):
            flash_attention_kernel[grid](
                q, k, v, out, lse, query_starts, key_starts, *strides, lse.stride(0),
                heads // k.shape[1], window or 0, d**-0.5 if scale is None else scale, soft_cap or 1.0, d,
                WINDOW=window is not None, CAP=soft_cap is not None, **blocks, **launch,
            )  # fmt: skip
    return out, lse


def configuration(d: int, itemsize: int) -> tuple[dict, dict]:
    """Head size and bytes an element -> constexprs, compiler options. Larger tiles than these spill registers."""
    padded = triton.next_power_of_2(d)
    tiles = {64: (128, 64, 4, 3, 1), 128: (128, 64, 8, 3, 2), 256: (64, 32, 8, 2, 2)}
    m, n, warps, stages, masked_stages = tiles[padded] if itemsize == 2 else (32, 32, 16, 1, 1)
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_D": padded, "PADDED": padded != d, "STAGES": stages}
    blocks |= {"MASKED_STAGES": masked_stages, "PRECISION": "tf32" if itemsize == 2 else "ieee"}
    return blocks, {"num_warps": warps, "num_stages": stages}


# What the tools take from here -------------------------------------------------------------------------------------


def starts(lengths, device) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def _case(name, queries, keys=None, heads=(2, 1), d=64, layout=lambda x: x, spread=1.0, **kwargs) -> Case:
    keys = keys or queries

    def make(device, dtype, generator):
        draw = lambda t, h: layout(normal(generator, t, h, d, device=device, dtype=dtype, scale=spread))  # noqa: E731
        q, k, v = draw(sum(queries), heads[0]), draw(sum(keys), heads[1]), draw(sum(keys), heads[1])
        args = (q, k, v, starts(queries, device), starts(keys, device))
        return Trial(flash_attention, flash_attention_reference, args, kwargs)

    return Case(name, make)


CASES = [
    _case("two sequences, odd lengths", (145, 33)),
    _case("one token", (1,)),
    _case("an empty sequence between", (17, 0, 3), (17, 0, 20)),
    _case("no tokens", (0,)),
    _case("more keys than queries, grouped", (33,), (161,), heads=(6, 2)),
    _case("more queries than keys", (49,), (17,)),
    _case("window", (273,), window=100),
    _case("window shorter than a tile", (145,), (162,), window=5),
    _case("window and chunk", (40, 9), (200, 300), window=90),
    _case("soft-cap", (81,), (145,), soft_cap=2.0, spread=2.0),
    _case("soft-cap of Gemma 2", (81,), soft_cap=50.0, d=256, heads=(1, 1)),
    _case("head 96", (81,), d=96),
    _case("head 128, swapped", (145,), d=128, heads=(2, 2), layout=swapped),
    _case("a scale of one's own", (33,), scale=0.3),
]


def _compilation(d, heads, kv_heads, window=False, cap=False, dtype=None) -> Compilation:
    blocks, launch = configuration(d, 4 if dtype else 2)

    def make_args(dtype):
        strides = (heads * d, d, kv_heads * d, d, kv_heads * d, d, heads * d, d)
        starts = (torch.int32, torch.int32)
        return (dtype,) * 4 + (torch.float32, *starts, *strides, 8192, heads // kv_heads, 4096, d**-0.5, 50.0, d)

    suffix = "_window" * window + "_cap" * cap + "_fp32" * bool(dtype)
    settings = {"dtypes": (dtype,)} if dtype else {"matrix": "any"}
    constexprs = {"WINDOW": window, "CAP": cap, **blocks}
    return Compilation(
        f"flash_attention_{d}{suffix}", flash_attention_kernel, make_args, constexprs, **launch, **settings, min_sm=80
    )  # on sm_75 Triton has no matrix instruction


COMPILE = [
    _compilation(64, 9, 3),
    _compilation(96, 32, 32),
    _compilation(128, 32, 8),
    _compilation(128, 32, 8, window=True),
    _compilation(256, 16, 8),
    _compilation(256, 16, 8, window=True, cap=True),  # Gemma 2
    _compilation(128, 32, 8, dtype=torch.float32),
    _compilation(256, 16, 8, dtype=torch.float32, window=True, cap=True),
    _compilation(96, 32, 32, dtype=torch.float32),
    _compilation(64, 9, 3, window=True, cap=True),
    _compilation(96, 32, 32, window=True, cap=True),
]


def _bench(device, dtype, heads, kv_heads, d, tokens=4096, sequences=2, window=None) -> Work:
    total = tokens * sequences
    q, k, v = (torch.randn(total, h, d, device=device, dtype=dtype) for h in (heads, kv_heads, kv_heads))
    ends = starts([tokens] * sequences, device)
    apart = [t.view(sequences, tokens, -1, d).transpose(1, 2) for t in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    pairs = int(visible(tokens, tokens, window, device).sum()) * sequences
    return Work(
        kernel=lambda: flash_attention(q, k, v, ends, ends, window=window, longest=tokens, backend="triton"),
        rivals={} if window else {"torch SDPA": lambda: sdpa(*apart, is_causal=True, enable_gqa=heads != kv_heads)},
        bytes=2 * q.nbytes + k.nbytes + v.nbytes + 4 * heads * total,
        flops=4 * d * heads * pairs,
    )


BENCHES = [
    Bench(
        "FlashAttention prefill",
        _bench,
        {
            "SmolLM2-135M": {"heads": 9, "kv_heads": 3, "d": 64},
            "Qwen3-0.6B": {"heads": 16, "kv_heads": 8, "d": 128},
            "Llama-3-8B": {"heads": 32, "kv_heads": 8, "d": 128},
        },
        bound="compute",
        goal=0.5,
    ),
    Bench(
        "FlashAttention prefill, head 256 and window",
        _bench,
        {
            "head 256": {"heads": 16, "kv_heads": 8, "d": 256},
            "Mistral-7B, window 1024": {"heads": 32, "kv_heads": 8, "d": 128, "window": 1024},
        },
        bound="compute",
    ),
]
