"""Paged decode: one query token a sequence attends to its keys and values in the paged cache, in splits.

Shapes     q, out (B, H, D); k_cache, v_cache (blocks, block_size, Hkv, D); block_tables (B, widest) int32, padded with
           anything; context_lengths (B,) int32, the query's own token included; 0 gives a row of zeros
           int8 caches: k_scales, v_scales (blocks, block_size, Hkv) float32; fp8 caches: e4m3 and no scales
Formula    out = softmax(scale · q Kᵀ) V over the last `window` tokens; soft-cap: s -> cap · tanh(s / cap)
           int8: a token's key scale multiplies its score, its value scale its probability
Bytes      2·Hkv·D·b for every token attended to, for all H / Hkv query heads of a group at once
FLOPs      4·H·D a token: 2·(H / Hkv) / b FLOPs a byte, so memory-bound; parallelism is what is scarce
Trap       One program a (sequence, KV head) leaves most of the GPU idle, so each sequence is cut in `splits`, which
           merge_states joins; a split without tokens is (0, -inf). A group's query heads stand where a prefill has
           its queries: M of the matrix instruction, which else runs on one row of sixteen. block · stride in int64.
           Beyond the context the table and the block hold what an earlier request left: masked, never read.
           tanh through exp(2x) is inf / inf from x = 44 on. e4m3 is no type of GPUs before sm_89: there, its bytes
           become numbers through the integers.

Source: Kwon et al. 2023 (arXiv 2309.06180), section 4.3; Dao et al. 2023, "Flash-Decoding".
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
    check_multiple,
    check_shape,
    on_device,
    require,
    tl,
    triton,
    use_triton,
)
from kernels.merge_states import merge_states

MAX_HEAD = 256
MAX_GROUP = 64  # query heads that share a KV head
NO_WINDOW = 2**30  # more than any context, and differences of it with one stay within 32 bits
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


def paged_decode_reference(
    q, k_cache, v_cache, block_tables, context_lengths, scale=None, window=None, soft_cap=None, k_scales=None,
    v_scales=None, splits=None,
):  # fmt: skip
    out, wide = torch.zeros_like(q), accumulator(q.dtype)
    group, scale = q.shape[1] // k_cache.shape[2], q.shape[2] ** -0.5 if scale is None else scale
    for row, length in enumerate(context_lengths.tolist()):
        tokens = torch.arange(0 if window is None else max(0, length - window), length, device=q.device)
        at = block_tables[row].long()[tokens // k_cache.shape[1]], tokens % k_cache.shape[1]
        k, v = k_cache[at].to(wide), v_cache[at].to(wide)  # (S, Hkv, D)
        if k_scales is not None:
            k, v = k * k_scales[at][..., None], v * v_scales[at][..., None]
        k, v = (side.repeat_interleave(group, dim=1) for side in (k, v))
        scores = torch.einsum("hd,shd->hs", q[row].to(wide), k) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        out[row] = torch.einsum("hs,shd->hd", scores.softmax(-1), v).to(q.dtype)
    return out


@triton.jit
def _tanh(x):
    """exp(-2|x|) lies in (0, 1]: nothing overflows."""
    t = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - t) / (1.0 + t)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def paged_decode_kernel(
    q_ptr, k_ptr, v_ptr, ks_ptr, vs_ptr, tables_ptr, lengths_ptr, out_ptr, lse_ptr,
    q_b, q_h, k_b, k_s, k_h, v_b, v_s, v_h, ks_b, ks_s, vs_b, vs_s, tables_b,  # strides: row or block, slot, head
    out_p, out_b, out_h, lse_p, lse_b,  # of the split, row, head
    group, d, scale, window, soft_cap, splits,
    PAGE: tl.constexpr, INT8: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (row, KV head, split): the group's heads over one stretch of the sequence."""
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + row)
    begin = tl.maximum(length - window, 0)
    stretch = tl.cdiv(tl.cdiv(length - begin, splits), BLOCK_N) * BLOCK_N
    lo = begin + split * stretch
    hi = tl.minimum(lo + stretch, length)

    m, i, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    heads = kv_head * group + m
    inside = (m < group)[:, None] & (i < d)[None, :]
    q = tl.load(q_ptr + row * q_b + heads[:, None] * q_h + i[None, :], mask=inside, other=0.0)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for first in range(lo, hi, BLOCK_N):
        token = first + n
        seen = token < hi
        block = tl.load(tables_ptr + row * tables_b + token // PAGE, mask=seen, other=0).to(tl.int64)
        place = token % PAGE
        both = seen[:, None] & (i < d)[None, :]
        k = tl.load(k_ptr + (block * k_b + place * k_s + kv_head * k_h)[:, None] + i[None, :], mask=both, other=0.0)
        scores = tl.dot(q, tl.trans(widen(k, q.dtype)), input_precision="ieee") * scale
        if INT8:
            scores *= tl.load(ks_ptr + block * ks_b + place * ks_s + kv_head, mask=seen, other=0.0)[None, :]
        if CAPPED:
            scores = soft_cap * _tanh(scores / soft_cap)
        scores = tl.where(seen[None, :], scores * LOG2E, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))  # finite: the first token of a tile is always seen
        fade = tl.exp2(top - higher)
        p = tl.exp2(scores - higher[:, None])
        total = total * fade + tl.sum(p, axis=1)
        if INT8:
            p *= tl.load(vs_ptr + block * vs_b + place * vs_s + kv_head, mask=seen, other=0.0)[None, :]
        v = tl.load(v_ptr + (block * v_b + place * v_s + kv_head * v_h)[:, None] + i[None, :], mask=both, other=0.0)
        acc = tl.dot(p.to(q.dtype), widen(v, q.dtype), acc * fade[:, None], input_precision="ieee")
        top = higher

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    out_at = split * out_p + row * out_b + heads[:, None] * out_h + i[None, :]
    tl.store(out_ptr + out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    lse = tl.where(empty, float("-inf"), (top + tl.log2(total)) * LN2)
    tl.store(lse_ptr + split * lse_p + row * lse_b + heads, lse, mask=m < group)


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lengths: Tensor,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    splits: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """q (B, H, D) -> (B, H, D). `scale` is D^-0.5 unless given. Raises KernelError.

    `splits` follows from the shapes of the whole batch; with a number of the caller's a sequence's bits depend on its
    own length alone, whoever it is batched with.
    """
    given = {"k_scales": k_scales, "v_scales": v_scales}
    scales = {name: t for name, t in given.items() if t is not None}
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, **scales}
    launch = use_triton(backend, *tensors.values(), block_tables, context_lengths)
    check_paged(q, k_cache, v_cache, block_tables, context_lengths, window, soft_cap, scales)
    check_shape("block_tables", block_tables, q.shape[0], None)
    require(splits is None or splits >= 1, f"splits is {splits}; give at least 1, or None")
    scale = q.shape[2] ** -0.5 if scale is None else scale
    options = (scale, window, soft_cap, k_scales, v_scales, splits)
    if not launch:
        return paged_decode_reference(q, k_cache, v_cache, block_tables, context_lengths, *options)
    check_contiguous_rows(**tensors, block_tables=block_tables, context_lengths=context_lengths)
    group = q.shape[1] // k_cache.shape[2]
    require(group <= MAX_GROUP, f"{group} query heads share a KV head; the kernel takes up to {MAX_GROUP}")
    return _launch(q, k_cache, v_cache, block_tables, context_lengths, *options)


def check_paged(q, k_cache, v_cache, block_tables, context_lengths, window, soft_cap, scales) -> None:
    """What every kernel asks that walks block tables for grouped heads."""
    check_dtype(q=q)
    check_dtype((q.dtype, torch.int8, torch.float8_e4m3fn), k_cache=k_cache, v_cache=v_cache)
    check_dtype((torch.int32,), block_tables=block_tables, context_lengths=context_lengths)
    check_shape("q", q, None, None, None)
    heads, d = q.shape[1:]
    require(1 <= d <= MAX_HEAD, f"q has heads of {d}; the kernel takes 1 to {MAX_HEAD}")
    check_shape("k_cache", k_cache, None, None, None, d)
    check_shape("v_cache", v_cache, *k_cache.shape)
    check_multiple("number of query heads", heads, k_cache.shape[2])
    check_shape("context_lengths", context_lengths, block_tables.shape[0])
    require(window is None or window >= 1, f"window is {window}; give at least 1, or None for all tokens")
    require(soft_cap is None or soft_cap > 0, f"soft_cap is {soft_cap}; give a positive number, or None")
    wanted = 2 if k_cache.dtype == torch.int8 else 0
    require(
        len(scales) == wanted,
        f"{len(scales)} scale tensors with a cache of {k_cache.dtype}; int8 takes both, other types none",
    )
    for name, t in scales.items():
        check_dtype((torch.float32,), **{name: t})
        check_shape(name, t, *k_cache.shape[:3])


def _launch(q, k_cache, v_cache, block_tables, lengths, scale, window, soft_cap, k_scales, v_scales, splits) -> Tensor:
    (batch, heads, d), (page, kv_heads) = q.shape, k_cache.shape[1:3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    window = NO_WINDOW if window is None else window
    longest = min(block_tables.shape[1] * page, window)
    splits = splits or choose_splits(batch * kv_heads, longest, multiprocessors(q.device))
    block_m, block_n, block_d, warps, stages = configuration(heads // kv_heads, d, q.element_size())
    parts = torch.empty(splits, *q.shape, device=q.device) if splits > 1 else out[None]
    lses = torch.empty(splits, batch, heads, device=q.device)
    int8, (k_cache, v_cache) = k_scales is not None, as_loaded(k_cache, v_cache)
    k_scales, v_scales = (k_scales, v_scales) if int8 else (k_cache, v_cache)  # unused: any pointer will do
    strides = [*q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3]]
    strides += [*k_scales.stride()[:2], *v_scales.stride()[:2], block_tables.stride(0)]
    strides += [*parts.stride()[:3], *lses.stride()[:2]]
    with on_device(q):
        paged_decode_kernel[(batch, kv_heads, splits)](
            q, k_cache, v_cache, k_scales, v_scales, block_tables, lengths, parts, lses, *strides,
            heads // kv_heads, d, scale, window, soft_cap or 1.0, splits,
            PAGE=page, INT8=int8, CAPPED=soft_cap is not None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out if splits == 1 else merge_states(parts, lses, q.dtype, backend="triton")[0]


def configuration(group: int, d: int, itemsize: int = 2) -> tuple[int, int, int, int, int]:
    """Query heads a KV head, head size, bytes a number -> BLOCK_M, BLOCK_N, BLOCK_D, num_warps, num_stages.

    16 KB of keys a tile in 16 bits. Keys are found through the table, which the pipeline has to fetch first: five
    stages hold two tiles of keys, and three hold one. In float32 no matrix instruction holds the operands, registers
    do: small tiles on many threads.
    """
    block_m, block_d = max(triton.next_power_of_2(group), 16), max(triton.next_power_of_2(d), 16)
    if itemsize == 4:
        return block_m, 16, block_d, 8 if block_m <= 32 else 16, 1
    if block_m > 32 and block_d > 128:
        return block_m, 16, block_d, 8, 3
    return block_m, min(8192 // block_d, 128), block_d, 4 if block_m <= 32 else 8, 5


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def choose_splits(rows: int, longest: int, processors: int) -> int:
    """Four programs a multiprocessor, as long as each has 256 tokens to read: a part costs 8·D bytes a head."""
    return max(min(4 * processors // max(rows, 1), triton.cdiv(longest, 256)), 1)


# What the tools take from here -------------------------------------------------------------------------------------


def paged(generator, contexts, page, kv_heads, d, device, dtype, blocks=None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k_cache, v_cache, block_tables, context_lengths: tables in no order, and NaN wherever no token is."""
    counts = [-(-context // page) for context in contexts]
    blocks = blocks or sum(counts) + 2
    order = torch.randperm(blocks - 1, generator=generator, device="cpu")[: sum(counts)] + 1
    tables = torch.zeros(len(contexts), max([*counts, 1]), dtype=torch.int32)
    k, v = (torch.full((blocks, page, kv_heads, d), float("nan")) for _ in range(2))
    for row, (context, mine) in enumerate(zip(contexts, order.split(counts), strict=True)):
        tables[row, : len(mine)] = mine
        at = mine.repeat_interleave(page)[:context], torch.arange(context) % page
        k[at], v[at] = (torch.randn(context, kv_heads, d, generator=generator, device="cpu") for _ in range(2))
    return k.to(device, dtype), v.to(device, dtype), tables.to(device), torch.tensor(contexts).int().to(device)


def quantized(cache: Tensor, stored: torch.dtype = torch.int8) -> tuple[Tensor, Tensor | None]:
    """A cache with NaN where no token is -> int8 and scales, with the largest number and NaN there; or e4m3, None."""
    if stored != torch.int8:
        return cache.float().clamp(-448, 448).to(stored), None
    scales = (cache.float().abs().amax(-1) / 127).clamp(min=1e-10)
    return (cache.float() / scales[..., None]).round().nan_to_num(nan=127).to(torch.int8), scales


def _case(name, contexts, heads, kv_heads, d, page=16, stored=None, layout=lambda x: x, peak=1.0, **options) -> Case:
    def make(device, dtype, generator):
        k, v, tables, lengths = paged(generator, contexts, page, kv_heads, d, device, dtype)
        q = layout(normal(generator, len(contexts), heads, d, device=device, dtype=dtype, scale=peak))
        extra = {}
        if stored:
            (k, extra["k_scales"]), (v, extra["v_scales"]) = quantized(k, stored), quantized(v, stored)
        return Trial(paged_decode, paged_decode_reference, (q, layout(k), v, tables, lengths), extra | options)

    return Case(name, make)


INT8, FP8 = torch.int8, torch.float8_e4m3fn
CASES = [
    _case("odd sizes, three splits", [145, 1, 0, 81], 3, 1, 64, splits=3),
    _case("head 96, group of 3", [49, 17], 6, 2, 96, splits=2),
    _case("head 128, swapped", [145, 33], 4, 2, 128, layout=swapped),
    _case("head 256, window", [81, 20], 2, 1, 256, page=8, window=33, splits=2),
    _case("soft-cap", [81], 2, 1, 64, peak=30.0, soft_cap=20.0),
    _case("int8", [145, 33], 4, 2, 64, stored=INT8, splits=2),
    _case("int8, window", [81], 3, 1, 96, stored=INT8, window=17),
    _case("fp8", [145, 33], 4, 2, 64, stored=FP8, splits=2),
    _case("fp8, window, swapped", [81], 3, 1, 96, stored=FP8, window=17, layout=swapped),
    _case("no sequences", [], 2, 1, 64),
]


def _compile_args(group, d, stored=None, splits=6):
    def make(dtype):
        cache, scales = stored or dtype, torch.float32 if stored == INT8 else stored or dtype
        row, out = 8 * d, dtype if splits == 1 else torch.float32
        strides = (row * group, d, 16 * row, row, d, 16 * row, row, d, 128, 8, 128, 8, 512)
        strides += (32 * row * group, row * group, d, 256 * group, 8 * group)
        pointers = (dtype, cache, cache, scales, scales, torch.int32, torch.int32, out, torch.float32)
        return (*pointers, *strides, group, d, 0.1, NO_WINDOW, 1.0, splits)

    return make


STORED = {None: "", INT8: "_int8", FP8: "_fp8", torch.uint8: "_fp8_bytes"}


def oldest(stored: torch.dtype | None) -> int:
    """Triton has no matrix instruction for sm_75, and e4m3 as a type from sm_89 on."""
    return 90 if stored == FP8 else 80


def _compilation(d, group, stored=None, capped=False, splits=6, dtype=None) -> Compilation:
    *blocks, warps, stages = configuration(group, d, 4 if dtype else 2)
    suffix = STORED[stored] + "_capped" * capped + "_whole" * (splits == 1) + "_fp32" * bool(dtype)
    settings = {"dtypes": (dtype,)} if dtype else {"matrix": "any"}
    return Compilation(
        f"paged_decode_{d}_g{group}{suffix}",
        paged_decode_kernel,
        _compile_args(group, d, stored, splits),
        {"PAGE": 16, "INT8": stored == INT8, "CAPPED": capped}
        | dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_D"), blocks, strict=True)),
        num_warps=warps,
        num_stages=stages,
        min_sm=oldest(stored),
        **settings,
    )


COMPILE = [
    _compilation(64, 3),
    _compilation(96, 3),
    _compilation(128, 4),
    _compilation(128, 4, splits=1),
    _compilation(128, 4, INT8),
    _compilation(128, 4, FP8),
    _compilation(128, 4, torch.uint8),
    _compilation(64, 3, FP8),
    _compilation(256, 2, capped=True),
    _compilation(256, MAX_GROUP, capped=True),
    _compilation(64, 3, dtype=torch.float32),
    _compilation(128, 4, INT8, dtype=torch.float32),
    _compilation(128, 4, FP8, dtype=torch.float32),
    _compilation(256, MAX_GROUP, capped=True, splits=1, dtype=torch.float32),
]


def _bench(device, dtype, heads, kv_heads, d, batch=32, context=4096, stored=None) -> Work:
    generator, blocks = torch.Generator().manual_seed(0), batch * context // 16
    q = torch.randn(batch, heads, d, device=device, dtype=dtype)
    k, v = (torch.randn(blocks + 1, 16, kv_heads, d, device=device, dtype=dtype) for _ in range(2))
    tables = (torch.randperm(blocks, generator=generator, device="cpu") + 1).view(batch, -1).int().to(device)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    dense = [side[1:].view(batch, context, kv_heads, d).transpose(1, 2) for side in (k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    rivals = {"SDPA on contiguous keys": lambda: sdpa(q[:, :, None], *dense, enable_gqa=True)}
    (k, ks), (v, vs) = (quantized(side, stored) if stored else (side, None) for side in (k, v))
    moved = 2 * batch * context * kv_heads * (d * k.element_size() + (4 if stored == INT8 else 0))
    return Work(
        kernel=lambda: paged_decode(q, k, v, tables, lengths, k_scales=ks, v_scales=vs, backend="triton"),
        rivals=rivals,
        bytes=moved + 2 * q.nbytes + tables.nbytes,
        flops=4 * batch * heads * d * context,
    )


_LLAMA, _SMOL = {"heads": 32, "kv_heads": 8, "d": 128}, {"heads": 9, "kv_heads": 3, "d": 64}
BENCHES = [
    Bench("paged decode", _bench, {
        "SmolLM2-135M": _SMOL, "Qwen3-0.6B": {"heads": 16, "kv_heads": 8, "d": 128}, "Llama-3-8B": _LLAMA,
        "Llama-3-8B, one sequence of 16k": _LLAMA | {"batch": 1, "context": 16384},
    }, goal=0.75),
    Bench("paged decode, int8", _bench, {"Llama-3-8B": _LLAMA | {"stored": INT8}}, goal=0.75),
    Bench("paged decode, fp8", _bench, {"Llama-3-8B": _LLAMA | {"stored": FP8}}, goal=0.75),
]  # fmt: skip
