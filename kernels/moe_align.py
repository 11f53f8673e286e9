"""MoE, sorting: an order of the (token, expert) pairs in which every tile of rows belongs to one expert.

Shapes     experts (T, k) integers, the router's choice; source (P) int32; expert_of_block (P / B) int32
Formula    pair p = t · k + j. Pairs of expert 0 come first, in order of p, padded to a multiple of B rows, then those
           of expert 1, ... For a row i of that order source[i] is p, or T · k where it is padding. With B = 4:

               experts            2 0 | 0 2 | 0 -1                               (T = 3, k = 2)
               source             1 2 4 . | 0 3 . . | 5 . . .                    (. is padding, 6)
               expert_of_block       0         2         -1

Steps      histogram of every chunk of pairs → scan over chunks and experts → each chunk scatters its pairs
Bytes      3·T·k reads of an index and one write; a few microseconds, so what counts is the three launches
Trap       An expert without tokens has no tile. A pair without an expert (-1, or one beyond the last, as on another
           device) must not vanish: its output would stay unwritten (vllm#12583). It comes last, in tiles of expert -1,
           where moe_gemm writes zeros. Pairs keep their order inside an expert: with atomic counters they would
           not, and neither would the sums that follow. How many tiles there are is known on the device alone, so P
           is what may be needed at most, and the tiles too many are of expert -1 and all padding.

Source: Gale et al. 2022 (arXiv 2211.15841), section 5, for the padded order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.catalog import Bench, Case, Compilation, Trial, Work, spaced_rows
from kernels.launch import check_contiguous_rows, check_dtype, check_shape, on_device, require, tl, triton, use_triton

CHUNK = 128  # pairs of one program; they are compared with each other, so 128² comparisons
MAX_EXPERTS = 511


def blocks_needed(pairs: int, num_experts: int, block: int) -> int:
    """The most tiles that so many pairs can take: every group that is not empty may waste block - 1 rows."""
    return (pairs + min(num_experts + 1, pairs) * (block - 1)) // block


def moe_align_reference(experts: Tensor, num_experts: int, block: int) -> tuple[Tensor, Tensor]:
    flat = experts.flatten().long()
    pairs, blocks = flat.numel(), blocks_needed(flat.numel(), num_experts, block)
    group = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)  # (T · k)
    order = group.argsort(stable=True)
    counts = torch.bincount(group, minlength=num_experts + 1)
    padded = (counts + block - 1) // block * block
    shift = (padded - counts).cumsum(0) - (padded - counts)  # padding in front of each group
    source = torch.full((blocks * block,), pairs, dtype=torch.int32, device=experts.device)
    source[torch.arange(pairs, device=experts.device) + shift[group[order]]] = order.int()
    rows = torch.arange(blocks, device=experts.device) * block
    owner = torch.searchsorted(padded.cumsum(0), rows, right=True)
    return source, torch.where(owner < num_experts, owner, -1).int()


@triton.jit
def group_of(expert_ptr, i, pairs, k, expert_t, E):
    """The experts of pairs i; E for those without one."""
    expert = tl.load(expert_ptr + (i // k).to(tl.int64) * expert_t + i % k, mask=i < pairs, other=-1).to(tl.int32)
    return tl.where((expert >= 0) & (expert < E), expert, E)


@triton.jit
def histogram_kernel(expert_ptr, count_ptr, pairs, k, expert_t, E, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """count (chunks, BINS): how many pairs of chunk c each expert has."""
    c = tl.program_id(0)
    i = c * CHUNK + tl.arange(0, CHUNK)
    count = tl.histogram(group_of(expert_ptr, i, pairs, k, expert_t, E), BINS, mask=i < pairs)
    tl.store(count_ptr + c * BINS + tl.arange(0, BINS), count)


@triton.jit
def scan_kernel(
    count_ptr, start_ptr, owner_ptr, chunks, blocks, E,
    BLOCK: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program. count becomes how many pairs of an expert earlier chunks have; start, its first row."""
    bins, rows = tl.arange(0, BINS), tl.arange(0, ROWS)
    total = tl.zeros((BINS,), tl.int32)
    for first in range(0, chunks, ROWS):
        at = count_ptr + (first + rows)[:, None] * BINS + bins[None, :]
        count = tl.load(at, mask=(first + rows < chunks)[:, None], other=0)
        before = tl.cumsum(count, axis=0) - count + total[None, :]
        tl.store(at, before, mask=(first + rows < chunks)[:, None])
        total += tl.sum(count, axis=0)
    padded = (total + BLOCK - 1) // BLOCK * BLOCK
    end = tl.cumsum(padded, axis=0)
    tl.store(start_ptr + bins, end - padded)
    for first in range(0, blocks, ROWS):
        b = first + rows
        owner = tl.sum((end[None, :] <= (b * BLOCK)[:, None]).to(tl.int32), axis=1)  # groups that end before it
        tl.store(owner_ptr + b, tl.where(owner < E, owner, -1), mask=b < blocks)


@triton.jit
def scatter_kernel(
    expert_ptr, count_ptr, start_ptr, source_ptr, pairs, k, expert_t, E, BINS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    c = tl.program_id(0)
    j = tl.arange(0, CHUNK)
    i = c * CHUNK + j
    group = group_of(expert_ptr, i, pairs, k, expert_t, E)
    earlier = (group[:, None] == group[None, :]) & (j[:, None] > j[None, :])
    rank = tl.sum(earlier.to(tl.int32), axis=1)  # among the pairs of this chunk and expert
    row = tl.load(start_ptr + group) + tl.load(count_ptr + c * BINS + group) + rank
    tl.store(source_ptr + row, i, mask=i < pairs)


def moe_align(experts: Tensor, num_experts: int, block: int, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """experts (T, k) int32 or int64 -> source (P) int32, expert_of_block (P / block) int32. Raises KernelError."""
    launch = use_triton(backend, experts)
    check_dtype((torch.int32, torch.int64), experts=experts)
    check_shape("experts", experts, None, None)
    require(1 <= num_experts <= MAX_EXPERTS, f"num_experts is {num_experts}; the kernel takes 1 to {MAX_EXPERTS}")
    require(block in (16, 32, 64, 128), f"block is {block}; use 16, 32, 64 or 128")
    require(experts.numel() < 2**31 - 2**20, f"experts has {experts.numel()} pairs; an index has 31 bits")
    if not launch:
        return moe_align_reference(experts, num_experts, block)
    check_contiguous_rows(experts=experts)
    pairs, blocks = experts.numel(), blocks_needed(experts.numel(), num_experts, block)
    source = torch.full((blocks * block,), pairs, dtype=torch.int32, device=experts.device)
    owner = torch.empty((blocks,), dtype=torch.int32, device=experts.device)
    if pairs:
        with on_device(experts):
            _launch(experts, num_experts, block, source, owner)
    return source, owner


def _launch(experts: Tensor, E: int, block: int, source: Tensor, owner: Tensor) -> None:
    pairs, k, bins = experts.numel(), experts.shape[1], bins_for(E)
    chunks = triton.cdiv(pairs, CHUNK)
    count = torch.empty((chunks, bins), dtype=torch.int32, device=experts.device)
    start = torch.empty((bins,), dtype=torch.int32, device=experts.device)
    where = (pairs, k, experts.stride(0), E)
    histogram_kernel[(chunks,)](experts, count, *where, BINS=bins, CHUNK=CHUNK, num_warps=4)
    scan_kernel[(1,)](
        count, start, owner, chunks, len(owner), E, BLOCK=block, BINS=bins, ROWS=scan_rows(bins), num_warps=8
    )
    scatter_kernel[(chunks,)](experts, count, start, source, *where, BINS=bins, CHUNK=CHUNK, num_warps=4)


def bins_for(num_experts: int) -> int:
    """One bin an expert and one for pairs without; at least a warp of them."""
    return max(triton.next_power_of_2(num_experts + 1), 32)


def scan_rows(bins: int) -> int:
    """Rows of the scanning program's tile: 8192 numbers in all, 32 a thread."""
    return max(8192 // bins, 8)


# What the tools take from here -------------------------------------------------------------------------------------


def choices(generator: torch.Generator, tokens: int, k: int, num_experts: int, dropped: float = 0.0) -> Tensor:
    """Random distinct experts for every token, some of them replaced by -1; int64 (T, k)."""
    scores = torch.rand(tokens, num_experts, generator=generator, device="cpu")
    experts = scores.topk(k, dim=1).indices
    return torch.where(torch.rand(tokens, k, generator=generator, device="cpu") < dropped, -1, experts)


def _case(name, tokens, k, num_experts, block=16, dropped=0.0, layout=lambda t: t, dtype=torch.int64) -> Case:
    def make(device, _, generator):
        experts = choices(generator, tokens, k, num_experts, dropped).to(device, dtype)
        return Trial(moe_align, moe_align_reference, (layout(experts), num_experts, block))

    return Case(name, make, (torch.float16,))


CASES = [
    _case("several chunks", 145, 2, 8),
    _case("one token", 1, 2, 8, dtype=torch.int32),
    _case("most experts have no token", 5, 3, 300),
    _case("some dropped, spaced", 49, 4, 17, block=64, dropped=0.3, layout=spaced_rows),
    _case("all dropped", 17, 2, 4, dropped=1.1),
    _case("more chunks than the scan takes at once", 300, 8, 300),
    _case("one expert", 33, 1, 1),
    _case("no tokens", 0, 2, 8),
]

_WHERE = (65536, 8, 8, 128)
COMPILE = [
    Compilation(
        "moe_histogram",
        histogram_kernel,
        lambda d: (torch.int64, torch.int32, *_WHERE),
        {"BINS": bins_for(128), "CHUNK": CHUNK},
    ),
    *(
        Compilation(
            f"moe_scan_{e}",
            scan_kernel,
            lambda d: (torch.int32, torch.int32, torch.int32, 512, 640, 128),
            {"BLOCK": 64, "BINS": bins_for(e), "ROWS": scan_rows(bins_for(e))},
            num_warps=8,
        )
        for e in (8, 128, MAX_EXPERTS)
    ),
    Compilation(
        "moe_scatter",
        scatter_kernel,
        lambda d: (torch.int64, torch.int32, torch.int32, torch.int32, *_WHERE),
        {"BINS": bins_for(128), "CHUNK": CHUNK},
    ),
]


def _bench(device, dtype, tokens, k, num_experts) -> Work:
    experts = choices(torch.Generator().manual_seed(0), tokens, k, num_experts).to(device)
    block = 64
    return Work(
        kernel=lambda: moe_align(experts, num_experts, block, backend="triton"),
        rivals={"torch sort": lambda: moe_align_reference(experts, num_experts, block)},
        bytes=experts.nbytes + 4 * (experts.numel() + num_experts * block),
    )


BENCHES = [
    Bench(
        "MoE align",
        _bench,
        {
            "Qwen3-30B-A3B, 16 tokens": {"tokens": 16, "k": 8, "num_experts": 128},
            "Qwen3-30B-A3B, 8192 tokens": {"tokens": 8192, "k": 8, "num_experts": 128},
        },
    )
]
