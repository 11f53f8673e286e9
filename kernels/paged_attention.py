"""Paged attention: one kernel for a step that mixes prefill chunks and decodes, over block tables.

Shapes     q, out (T, H, D) packed; query_starts (B + 1,) int32, the first packed row of each sequence; k_cache, v_cache
           (blocks, block_size, Hkv, D), the step's own tokens written; block_tables (B, widest) int32;
           context_lengths (B,) int32, cached and new tokens; rows beyond query_starts[B] become zeros
           int8 caches: k_scales, v_scales (blocks, block_size, Hkv) float32; fp8 caches: e4m3 and no scales
Formula    token t of a sequence's `count` new ones stands at position p = context - count + t (bottom-right), and
           out = softmax over positions max(0, p - window + 1) to p of (scale · q Kᵀ), times V
Bytes      q, out 2·T·H·D·b, and 2·Hkv·D·b for each cached token, once for every BLOCK_M / group queries of a sequence
FLOPs      4·H·D for each (query, key) pair: compute-bound in a long chunk, memory-bound in a decode
Trap       Rows of the tile are (token, head of the group) pairs, so a decode fills `group` of them and a chunk all.
           Nobody counts tiles on the host: sequence s starts at tile query_starts[s] // Q + s, which leaves each at
           least as many as it needs, and a program finds its sequence by bisection. Tiles that every query sees come
           first and need no mask. Inside a window a row may see nothing of its first tile: -inf - (-inf).

Source: Kwon et al. 2023 (arXiv 2309.06180), section 4.3; Dao 2023 (arXiv 2307.08691), section 3.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.catalog import Bench, Case, Compilation, Trial, Work, normal, swapped
from kernels.kv_write import as_loaded, widen
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
from kernels.paged_decode import (
    FP8,
    INT8,
    LOG2E,
    MAX_GROUP,
    NO_WINDOW,
    STORED,
    check_paged,
    oldest,
    paged,
    quantized,
)


def paged_attention_reference(
    q, k_cache, v_cache, query_starts, block_tables, context_lengths, scale=None, window=None, soft_cap=None,
    k_scales=None, v_scales=None,
):  # fmt: skip
    out, wide, page = torch.zeros_like(q), accumulator(q.dtype), k_cache.shape[1]
    group, scale = q.shape[1] // k_cache.shape[2], q.shape[2] ** -0.5 if scale is None else scale
    starts = query_starts.tolist()
    for s, length in enumerate(context_lengths.tolist()):
        rows = slice(starts[s], starts[s + 1])
        keys = torch.arange(length, device=q.device)
        at = block_tables[s].long()[keys // page], keys % page
        k, v = k_cache[at].to(wide), v_cache[at].to(wide)
        if k_scales is not None:
            k, v = k * k_scales[at][..., None], v * v_scales[at][..., None]
        k, v = (side.repeat_interleave(group, dim=1) for side in (k, v))
        scores = torch.einsum("thd,shd->hts", q[rows].to(wide), k) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        positions = torch.arange(length - starts[s + 1] + starts[s], length, device=q.device)[:, None]
        seen = (keys <= positions) & (keys > positions - (NO_WINDOW if window is None else window))
        out[rows] = torch.einsum("hts,shd->thd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v).to(q.dtype)
    return out


@triton.jit
def _sequence(starts_ptr, sequences, tile, TOKENS: tl.constexpr):
    """The last sequence that begins at this tile or before; `sequences` itself stands for the rows behind the last."""
    lo, hi = 0, sequences
    while lo < hi:
        middle = (lo + hi + 1) // 2
        begins = tl.load(starts_ptr + middle) // TOKENS + middle <= tile
        lo = tl.where(begins, middle, lo)
        hi = tl.where(begins, hi, middle - 1)
    return lo


@triton.jit
def _tanh(x):
    """exp(-2|x|) lies in (0, 1]: nothing overflows."""
    t = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - t) / (1.0 + t)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def _tile(
    q, top, total, acc, key, position, length, table_ptr, k_ptr, v_ptr, ks_ptr, vs_ptr,
    k_b, k_s, v_b, v_s, ks_b, ks_s, vs_b, vs_s, i, d, scale, window, soft_cap,
    PAGE: tl.constexpr, INT8: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over keys `key` (N,). DIAGONAL: some queries do not see all of them."""
    there = key < length
    block = tl.load(table_ptr + key // PAGE, mask=there, other=0).to(tl.int64)
    place = key % PAGE
    both = there[:, None] & (i < d)[None, :]
    k = tl.load(k_ptr + (block * k_b + place * k_s)[:, None] + i[None, :], mask=both, other=0.0)
    scores = tl.dot(q, tl.trans(widen(k, q.dtype)), input_precision="ieee") * scale
    if INT8:
        scores *= tl.load(ks_ptr + block * ks_b + place * ks_s, mask=there, other=0.0)[None, :]
    if CAPPED:
        scores = soft_cap * _tanh(scores / soft_cap)
    scores *= LOG2E
    if DIAGONAL:
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    if WINDOWED:
        scores = tl.where(key[None, :] > position[:, None] - window, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=1))
    base = higher
    if WINDOWED:  # without a window every query sees the first key
        base = tl.where(higher > float("-inf"), higher, 0.0)
    fade = tl.exp2(top - base)
    p = tl.exp2(scores - base[:, None])
    total = total * fade + tl.sum(p, axis=1)
    if INT8:
        p *= tl.load(vs_ptr + block * vs_b + place * vs_s, mask=there, other=0.0)[None, :]
    v = tl.load(v_ptr + (block * v_b + place * v_s)[:, None] + i[None, :], mask=both, other=0.0)
    acc = tl.dot(p.to(q.dtype), widen(v, q.dtype), acc * fade[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def paged_attention_kernel(
    q_ptr, k_ptr, v_ptr, ks_ptr, vs_ptr, starts_ptr, tables_ptr, lengths_ptr, out_ptr,
    q_t, q_h, k_b, k_s, k_h, v_b, v_s, v_h, ks_b, ks_s, vs_b, vs_s, tables_b, out_t, out_h,  # strides
    tokens, sequences, d, scale, window, soft_cap,
    GROUP: tl.constexpr, PAGE: tl.constexpr, INT8: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head): Q = BLOCK_M // GROUP tokens of one sequence, the group's heads of each."""
    Q: tl.constexpr = BLOCK_M // GROUP
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    s = _sequence(starts_ptr, sequences, tile, Q)
    begin = tl.load(starts_ptr + s)
    count = tl.load(starts_ptr + s + 1, mask=s < sequences, other=tokens) - begin
    first = (tile - begin // Q - s) * Q
    if first >= count:
        return
    length = tl.load(lengths_ptr + s, mask=s < sequences, other=0)
    earlier = tl.where(s < sequences, length - count, -count)  # behind the last: positions below 0 see nothing

    r, i, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    token, head = first + r // GROUP, kv_head * GROUP + r % GROUP
    used = (r // GROUP < Q) & (token < count)
    inside = used[:, None] & (i < d)[None, :]
    row = (begin + token).to(tl.int64)
    q = tl.load(q_ptr + (row * q_t + head * q_h)[:, None] + i[None, :], mask=inside, other=0.0)
    position = earlier + token
    lo = tl.maximum(earlier + first - window + 1, 0)
    hi = earlier + tl.minimum(first + Q, count)  # no query of this tile sees more
    middle = lo + tl.maximum(earlier + first + 1 - lo, 0) // BLOCK_N * BLOCK_N  # below it each sees all, but windows

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    table_ptr = tables_ptr + s.to(tl.int64) * tables_b
    k_ptr += kv_head * k_h
    v_ptr += kv_head * v_h
    ks_ptr += kv_head
    vs_ptr += kv_head
    for key in range(lo, middle, BLOCK_N):
        top, total, acc = _tile(
            q, top, total, acc, key + n, position, hi, table_ptr, k_ptr, v_ptr, ks_ptr, vs_ptr,
            k_b, k_s, v_b, v_s, ks_b, ks_s, vs_b, vs_s, i, d, scale, window, soft_cap,
            PAGE, INT8, CAPPED, WINDOWED, False,
        )  # fmt: skip
    for key in range(middle, hi, BLOCK_N):
        top, total, acc = _tile(
            q, top, total, acc, key + n, position, hi, table_ptr, k_ptr, v_ptr, ks_ptr, vs_ptr,
            k_b, k_s, v_b, v_s, ks_b, ks_s, vs_b, vs_s, i, d, scale, window, soft_cap,
            PAGE, INT8, CAPPED, WINDOWED, True,
        )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = (row * out_t + head * out_h)[:, None] + i[None, :]
    tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=inside)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_starts: Tensor,
    block_tables: Tensor,
    context_lengths: Tensor,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """q (T, H, D) -> (T, H, D). `scale` is D^-0.5 unless given. Sequences lie end to end. Raises KernelError."""
    given = {"k_scales": k_scales, "v_scales": v_scales}
    scales = {name: t for name, t in given.items() if t is not None}
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **scales}
    integers = {"query_starts": query_starts, "block_tables": block_tables, "context_lengths": context_lengths}
    launch = use_triton(backend, *tensors.values(), *integers.values())
    check_paged(q, k_cache, v_cache, block_tables, context_lengths, window, soft_cap, scales)
    check_dtype((torch.int32,), query_starts=query_starts)
    check_shape("query_starts", query_starts, block_tables.shape[0] + 1)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    options = (scale, window, soft_cap, k_scales, v_scales)
    if not launch:
        return paged_attention_reference(q, k_cache, v_cache, *integers.values(), *options)
    check_contiguous_rows(**tensors, **integers)
    group = q.shape[1] // k_cache.shape[2]
    require(group <= MAX_GROUP, f"{group} query heads share a KV head; the kernel takes up to {MAX_GROUP}")
    return _launch(q, k_cache, v_cache, *integers.values(), *options)


def _launch(q, k_cache, v_cache, starts, tables, lengths, scale, window, soft_cap, k_scales, v_scales) -> Tensor:
    (tokens, heads, d), (page, kv_heads), sequences = q.shape, k_cache.shape[1:3], tables.shape[0]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    group, int8, (k_cache, v_cache) = heads // kv_heads, k_scales is not None, as_loaded(k_cache, v_cache)
    as_bytes = k_cache.dtype == torch.uint8
    block_m, block_n, block_d, warps, stages = configuration(tokens, sequences, group, d, q.element_size(), as_bytes)
    k_scales, v_scales = (k_scales, v_scales) if int8 else (k_cache, v_cache)  # unused: any pointer will do
    strides = [*q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3]]
    strides += [*k_scales.stride()[:2], *v_scales.stride()[:2], tables.stride(0), *out.stride()[:2]]
    with on_device(q):
        paged_attention_kernel[(tokens // (block_m // group) + sequences + 1, kv_heads)](
            q, k_cache, v_cache, k_scales, v_scales, starts, tables, lengths, out, *strides,
            tokens, sequences, d, scale, NO_WINDOW if window is None else window, soft_cap or 1.0,
            GROUP=group, PAGE=page, INT8=int8, CAPPED=soft_cap is not None, WINDOWED=window is not None,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out


def configuration(
    tokens: int, sequences: int, group: int, d: int, itemsize: int = 2, as_bytes: bool = False
) -> tuple[int, int, int, int, int]:
    """The step's shape -> BLOCK_M, BLOCK_N, BLOCK_D, num_warps, num_stages. `as_bytes`: e4m3 through the integers.

    Rows enough for a sequence of average length. Five stages hold two tiles of keys; see paged_decode, also for
    float32.
    """
    rows, block_d = group * tokens // max(sequences, 1), max(triton.next_power_of_2(d), 16)
    if itemsize == 4:
        block_m = max(16, triton.next_power_of_2(group))
        return block_m, 16, block_d, 8 if block_m <= 32 else 16, 1
    large = 128 if d == block_d <= 128 and not as_bytes else 64  # a padded head's mask and integers cost registers
    block_m = max(16 if rows <= 16 else 64 if rows <= 512 else large, triton.next_power_of_2(group))
    return block_m, min(8192 // block_d, 64), block_d, 4 if block_m == 16 else 8, 5 if block_d <= 128 else 3


# What the tools take from here -------------------------------------------------------------------------------------


def _case(name, parts, heads, kv_heads, d, page=16, stored=None, padding=0, layout=lambda x: x, **options) -> Case:
    """parts: (new tokens, context with them) of each sequence."""

    def make(device, dtype, generator):
        k, v, tables, lengths = paged(generator, [c for _, c in parts], page, kv_heads, d, device, dtype)
        starts = torch.tensor([0] + [n for n, _ in parts]).cumsum(0).int()
        q = normal(generator, int(starts[-1]) + padding, heads, d, device=device, dtype=dtype)
        extra = {}
        if stored:
            (k, extra["k_scales"]), (v, extra["v_scales"]) = quantized(k, stored), quantized(v, stored)
        args = (layout(q), layout(k), v, starts.to(device), tables, lengths)
        return Trial(paged_attention, paged_attention_reference, args, extra | options)

    return Case(name, make)


CASES = [
    _case("chunk, decodes, whole prompt", [(33, 81), (1, 145), (1, 1), (49, 49)], 3, 1, 64),
    _case("decodes alone, padding rows", [(1, 17), (1, 0), (1, 49)], 4, 2, 96, padding=3),
    _case("window shorter than a tile", [(49, 81), (1, 70)], 6, 2, 32, page=8, window=7),
    _case("rows that see nothing of the first tile", [(49, 81)], 1, 1, 256, window=7),
    _case("window", [(33, 145)], 2, 1, 128, window=81, layout=swapped),
    _case("soft-cap", [(17, 49), (1, 33)], 2, 2, 64, soft_cap=2.0),
    _case("int8", [(17, 81), (1, 33)], 4, 2, 64, stored=INT8, padding=1),
    _case("fp8", [(17, 81), (1, 33)], 4, 2, 64, stored=FP8, padding=1),
    _case("fp8, window, head 96", [(17, 49)], 3, 1, 96, stored=FP8, window=20, layout=swapped),
    _case("a sequence without new tokens", [(2, 20), (0, 9), (17, 17)], 2, 1, 256),
    _case("no sequences", [], 2, 1, 64, padding=2),
]


def _compile_args(group, d, stored=None):
    def make(dtype):
        cache, scales = stored or dtype, torch.float32 if stored == INT8 else stored or dtype
        row = 8 * d
        strides = (row * group, d, 16 * row, row, d, 16 * row, row, d, 128, 8, 128, 8, 512, row * group, d)
        ints = (torch.int32,) * 3
        return (dtype, cache, cache, scales, scales, *ints, dtype, *strides, 4096, 3, d, 0.1, NO_WINDOW, 1.0)

    return make


def _compilation(d, group, tokens, sequences, stored=None, windowed=False, capped=False, dtype=None) -> Compilation:
    m, n, block_d, warps, stages = configuration(tokens, sequences, group, d, 4 if dtype else 2, stored == torch.uint8)
    flags = {"INT8": stored == INT8, "CAPPED": capped, "WINDOWED": windowed}
    suffix = STORED[stored] + "_window" * windowed + "_capped" * capped + "_fp32" * bool(dtype)
    settings = {"dtypes": (dtype,)} if dtype else {"matrix": "native" if m >= 64 else "any"}
    return Compilation(
        f"paged_attention_{d}_m{m}{suffix}",
        paged_attention_kernel,
        _compile_args(group, d, stored),
        {"GROUP": group, "PAGE": 16} | flags | {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_D": block_d},
        num_warps=warps,
        num_stages=stages,
        min_sm=oldest(stored),
        **settings,
    )


COMPILE = [
    _compilation(64, 3, 4096, 4),
    _compilation(96, 3, 4096, 4),
    _compilation(128, 4, 4096, 4),
    _compilation(128, 4, 4096, 4, windowed=True),
    _compilation(128, 4, 4096, 4, INT8),
    _compilation(128, 4, 4096, 4, FP8),
    _compilation(128, 4, 4096, 4, torch.uint8),
    _compilation(128, 4, 32, 32, FP8),
    _compilation(128, 4, 2048, 32),
    _compilation(128, 4, 32, 32),
    _compilation(256, 2, 4096, 4),
    _compilation(256, 2, 4096, 4, windowed=True, capped=True),  # Gemma 2
    _compilation(256, 2, 32, 32, windowed=True, capped=True),
    _compilation(64, 3, 4096, 4, dtype=torch.float32),
    _compilation(128, 4, 4096, 4, stored=INT8, windowed=True, dtype=torch.float32),
    _compilation(256, MAX_GROUP, 4096, 4, windowed=True, capped=True, dtype=torch.float32),
]


def _bench(device, dtype, heads, kv_heads, d, parts) -> Work:
    generator = torch.Generator().manual_seed(0)
    k, v, tables, lengths = paged(generator, [c for _, c in parts], 16, kv_heads, d, device, dtype)
    starts = torch.tensor([0] + [n for n, _ in parts]).cumsum(0).int().to(device)
    q = torch.randn(int(starts[-1]), heads, d, device=device, dtype=dtype)
    pairs = sum(n * (c - n) + n * (n + 1) // 2 for n, c in parts)
    return Work(
        kernel=lambda: paged_attention(q, k, v, starts, tables, lengths, backend="triton"),
        rivals={},
        bytes=2 * q.nbytes + 2 * sum(c for _, c in parts) * kv_heads * d * q.element_size(),
        flops=4 * heads * d * pairs,
    )


_MIXED = {"parts": [(1, 2048)] * 31 + [(2017, 2017)]}
BENCHES = [
    Bench("paged attention, mixed step", _bench, {
        "SmolLM2-135M": {"heads": 9, "kv_heads": 3, "d": 64, **_MIXED},
        "Llama-3-8B": {"heads": 32, "kv_heads": 8, "d": 128, **_MIXED},
    }),
    Bench("paged attention, chunk of 4k", _bench, {
        "Llama-3-8B": {"heads": 32, "kv_heads": 8, "d": 128, "parts": [(4096, 4096)]},
    }, bound="compute"),
]  # fmt: skip
