"""MLA decode: every query head attends to one shared, paged latent; key and value are the same bytes.

Shapes     q (B, H, R + P) absorbed: its first R = kv_lora_rank numbers are W_UK^T q_nope, its last P the rotary part;
           latents (blocks, block_size, R + P), 512 + 64 for DeepSeek-V3; block_tables (B, widest) int32;
           context_lengths (B,) int32, the query's own token included; out (B, H, R), which W_UV turns into values
Formula    out = softmax(scale · q · latentᵀ) · latent[:, :R]
Bytes      (R + P)·b for every cached token, whatever H: 1152 in bf16 against 2·128·128·2 = 65536 of plain attention
FLOPs      2·H·((R + P) + R) a token: at 128 heads 242 FLOPs a byte, near the ridge of an H100, so both matter
Trap       The scale is an argument because the width of the key does not tell it. Absorption moves a matrix from the
           key to the query and leaves q · k the number it was, a dot product of 128 + 64 numbers: the scale stays
           192^-0.5 (times mscale² under YaRN), and 576^-0.5 would be another model. The latent is read once, as key
           and, its first R, as value: reading it twice doubles the time. R must be a power of two, since the two parts
           are two tiles; one tile of 576 would be padded to 1024. block · stride in int64; empty splits; see also
           paged_decode.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.catalog import Bench, Case, Compilation, Trial, Work, normal, swapped
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
from kernels.merge_states import merge_states
from kernels.paged_decode import LN2, LOG2E, choose_splits, multiprocessors, paged


def mla_decode_reference(q, latents, block_tables, context_lengths, rank, scale, splits=None):
    out, wide, page = q.new_zeros(*q.shape[:2], rank), accumulator(q.dtype), latents.shape[1]
    for row, length in enumerate(context_lengths.tolist()):
        tokens = torch.arange(length, device=q.device)
        latent = latents[block_tables[row].long()[tokens // page], tokens % page].to(wide)
        weights = (q[row].to(wide) @ latent.T * scale).softmax(-1)
        out[row] = (weights @ latent[:, :rank]).to(q.dtype)
    return out


@triton.jit
def mla_decode_kernel(
    q_ptr, c_ptr, tables_ptr, lengths_ptr, out_ptr, lse_ptr,
    q_b, q_h, c_b, c_s, tables_b, out_p, out_b, out_h, lse_p, lse_b,  # strides: row or block, slot, head, split
    heads, scale, splits,
    PAGE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (heads, row, split): BLOCK_H heads over one stretch of the sequence."""
    row, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths_ptr + row)
    stretch = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    lo = split * stretch
    hi = tl.minimum(lo + stretch, length)

    h, n = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_N)
    i, j = tl.arange(0, RANK), RANK + tl.arange(0, ROPE)
    inside = (h < heads)[:, None]
    q_at = row * q_b + h[:, None] * q_h
    q_latent = tl.load(q_ptr + q_at + i[None, :], mask=inside, other=0.0)
    q_rope = tl.load(q_ptr + q_at + j[None, :], mask=inside, other=0.0)
    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, RANK), tl.float32)
    for first in range(lo, hi, BLOCK_N):
        seen = first + n < hi
        token = tl.minimum(first + n, hi - 1)  # the last again, at weight 0: a mask would cost registers
        block = tl.load(tables_ptr + row * tables_b + token // PAGE).to(tl.int64)
        at = c_ptr + (block * c_b + token % PAGE * c_s)[:, None]
        latent = tl.load(at + i[None, :])
        rope = tl.load(at + j[None, :])
        scores = tl.dot(q_rope, tl.trans(rope), input_precision="ieee")
        scores = tl.dot(q_latent, tl.trans(latent), scores, input_precision="ieee")
        scores = tl.where(seen[None, :], scores * (scale * LOG2E), float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))  # finite: the first token of a tile is always seen
        fade = tl.exp2(top - higher)
        p = tl.exp2(scores - higher[:, None])
        total = total * fade + tl.sum(p, axis=1)
        acc = tl.dot(p.to(latent.dtype), latent, acc * fade[:, None], input_precision="ieee")
        top = higher

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    out_at = (split * out_p + row * out_b + h * out_h)[:, None] + tl.arange(0, RANK)[None, :]
    tl.store(out_ptr + out_at, (acc * (1.0 / total)[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    lse = tl.where(empty, float("-inf"), (top + tl.log2(total)) * LN2)
    tl.store(lse_ptr + split * lse_p + row * lse_b + h, lse, mask=h < heads)


def mla_decode(
    q: Tensor,
    latents: Tensor,
    block_tables: Tensor,
    context_lengths: Tensor,
    rank: int,
    scale: float,
    splits: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """q (B, H, R + P), latents (blocks, block_size, R + P) -> (B, H, R). `rank` is R. Raises KernelError.

    `splits` as in paged_decode: given, a sequence's bits do not depend on the batch.
    """
    launch = use_triton(backend, q, latents, block_tables, context_lengths)
    check_dtype(q=q, latents=latents)
    check_dtype((torch.int32,), block_tables=block_tables, context_lengths=context_lengths)
    check_shape("q", q, None, None, None)
    check_shape("latents", latents, None, None, q.shape[2])
    check_shape("block_tables", block_tables, q.shape[0], None)
    check_shape("context_lengths", context_lengths, q.shape[0])
    require(splits is None or splits >= 1, f"splits is {splits}; give at least 1, or None")
    require(0 < rank < q.shape[2], f"rank is {rank}; it must leave a rotary part of q's {q.shape[2]}")
    if not launch:
        return mla_decode_reference(q, latents, block_tables, context_lengths, rank, scale)
    for name, size in (("rank", rank), ("rotary part", q.shape[2] - rank)):
        power = size >= 16 and triton.next_power_of_2(size) == size
        require(power, f"{name} is {size}; the kernel takes powers of two from 16, such as 512 and 64")
    check_contiguous_rows(q=q, latents=latents, block_tables=block_tables, context_lengths=context_lengths)
    return _launch(q, latents, block_tables, context_lengths, rank, scale, splits)


def _launch(q, latents, block_tables, lengths, rank, scale, splits) -> Tensor:
    (batch, heads, width), page = q.shape, latents.shape[1]
    if not batch * heads:
        return torch.empty(batch, heads, rank, dtype=q.dtype, device=q.device)
    major = torch.cuda.get_device_capability(q.device)[0] if q.is_cuda else 9
    block_h, block_n, warps, stages = configuration(heads, q.element_size(), major)
    groups = triton.cdiv(heads, block_h)
    # One program fills a multiprocessor here, so a quarter of the programs of paged_decode are wanted.
    splits = splits or choose_splits(4 * batch * groups, block_tables.shape[1] * page, multiprocessors(q.device))
    # In float32 even where there is one: an output in 16 bits takes the loop 30 registers that it does not have.
    parts = torch.empty(splits, batch, heads, rank, device=q.device)
    lses = torch.empty(splits, batch, heads, device=q.device)
    strides = [*q.stride()[:2], *latents.stride()[:2], block_tables.stride(0), *parts.stride()[:3], *lses.stride()[:2]]
    with on_device(q):
        mla_decode_kernel[(groups, batch, splits)](
            q, latents, block_tables, lengths, parts, lses, *strides, heads, scale, splits,
            PAGE=page, RANK=rank, ROPE=width - rank, BLOCK_H=block_h, BLOCK_N=block_n, num_warps=warps,
            num_stages=stages,
        )  # fmt: skip
    return merge_states(parts, lses, q.dtype, backend="triton")[0]


def configuration(heads: int, size: int, major: int) -> tuple[int, int, int, int]:
    """Heads, bytes a number, compute capability -> BLOCK_H, BLOCK_N, num_warps, num_stages.

    The accumulator alone is BLOCK_H · 512 numbers of float32: 64 heads fill half the register file of a Hopper
    multiprocessor and give wgmma its 64 rows. The query, the tiles and what the pipeline holds of them must fit in
    shared memory, at 1152 bytes a row.
    """
    if size == 4:
        return 16, 16, 4, 1
    if major in (9, 10) and heads > 16:  # consumer chips of later generations have less shared memory
        return 64, 32, 8, 3  # more stages spill
    return 16, 32, 4, 5


# What the tools take from here -------------------------------------------------------------------------------------


def _case(name, contexts, heads, rank, rope, page=16, layout=lambda x: x, **options) -> Case:
    def make(device, dtype, generator):
        width = rank + rope
        latents, _, tables, lengths = paged(generator, contexts, page, 1, width, device, dtype)
        q = normal(generator, len(contexts), heads, width, device=device, dtype=dtype)
        args = (layout(q), layout(latents[:, :, 0]), tables, lengths, rank, 1.7 * width**-0.5)
        return Trial(mla_decode, mla_decode_reference, args, options)

    return Case(name, make)


CASES = [
    _case("DeepSeek-V3's widths", [49, 18], 17, 512, 64, splits=2),
    _case("odd sizes, three splits", [145, 1, 0, 81], 5, 64, 16, splits=3),
    _case("many heads, swapped", [33, 81], 81, 32, 16, page=8, layout=swapped),
    _case("no sequences", [], 16, 64, 16),
]


def _compile_args(splits):
    def make(dtype):
        row = 128 * 512
        strides = (128 * 576, 576, 16 * 576, 576, 512, 32 * row, row, 512, 128 * 32, 128)
        pointers = (dtype, dtype, torch.int32, torch.int32, torch.float32, torch.float32)
        return (*pointers, *strides, 128, 0.1, splits)

    return make


def _compilation(heads, major, splits=6, dtype=None) -> Compilation:
    block_h, block_n, warps, stages = configuration(heads, 4 if dtype else 2, major)
    settings = {"dtypes": (dtype,)} if dtype else {"matrix": "native" if block_h >= 64 else "any"}
    return Compilation(
        f"mla_decode_h{block_h}{'_whole' if splits == 1 else ''}{'_fp32' if dtype else ''}",
        mla_decode_kernel,
        _compile_args(splits),
        {"PAGE": 16, "RANK": 512, "ROPE": 64, "BLOCK_H": block_h, "BLOCK_N": block_n},
        num_warps=warps,
        num_stages=stages,
        min_sm=10 * major,
        **settings,
    )


COMPILE = [
    _compilation(16, 8),
    _compilation(128, 9),
    _compilation(128, 9, splits=1),
    _compilation(16, 8, dtype=torch.float32),
]


def _bench(device, dtype, heads=128, batch=64, context=4096) -> Work:
    blocks, generator = batch * context // 16, torch.Generator().manual_seed(0)
    q = torch.randn(batch, heads, 576, device=device, dtype=dtype)
    latents = torch.randn(blocks + 1, 16, 576, device=device, dtype=dtype)
    tables = (torch.randperm(blocks, generator=generator, device="cpu") + 1).view(batch, -1).int().to(device)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    dense = latents[1:].view(batch, 1, context, 576)
    sdpa, scale = torch.nn.functional.scaled_dot_product_attention, 192**-0.5
    tokens = batch * context
    return Work(
        kernel=lambda: mla_decode(q, latents, tables, lengths, 512, scale, backend="triton"),
        rivals={"SDPA on a contiguous latent": lambda: sdpa(q[:, None], dense, dense[..., :512], scale=scale)},
        bytes=tokens * 576 * q.element_size() + q.nbytes * 17 // 9 + tables.nbytes,
        flops=2 * heads * (576 + 512) * tokens,
    )


BENCHES = [Bench("MLA decode", _bench, {"DeepSeek-V3": {}, "DeepSeek-V3, 16 heads a rank": {"heads": 16}})]
