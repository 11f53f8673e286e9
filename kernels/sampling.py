"""Sampling: a row of logits to a token through temperature, min-p, top-k and top-p, without sorting the row.

Shapes     logits (B, V); temperature, top_p, min_p (B) float32; top_k (B) int32; seeds, positions, sequences (B) int64;
           ids (B) int64; survivors (B, V) bool, only if asked for
Method     In the order "higher logit first, then lower id" each of the three cuts keeps a prefix, and together they
           keep the shortest. A prefix is a threshold, and how many of the logits equal to it belong. The threshold is
           the largest value whose tail has k tokens, or mass p; it is searched by its bits, seen as an integer of the
           same order. Eight pivots at a time, so that a pass over the row leaves a ninth of the bracket: at most
           eleven passes where a sort makes many more, and usually fewer, because one token in the bracket is enough
Bytes      V·b a row must come from memory; the later passes find it in the L2 cache
Rules      Those of minillm/sampling.py. Ties go to the lower id, at both edges; top-k keeps exactly k; k ≤ 0, p ≥ 1
           and min-p 0 are off; temperature below GREEDY_BELOW is argmax; one token always survives; columns from
           vocab_size on do not exist. Masses are float32 here, so a mass within rounding of p may fall on either side
Draw       The cumulative distribution, in order of ids, is inverted at the 24 leading bits of Philox(seed; position,
           sequence): no state, and up to rounding the very token that minillm.sampling draws
Trap       A row with NaN, +inf or nothing but -inf has no token: id -1, because a kernel cannot raise. tl.max drops
           NaN, so NaN is counted. -0.0 and 0.0 differ in their bits and tie.

Source: the generator is Philox4x32-10 (Salmon et al. 2011, SC11, section 3.3); the search is bisection.
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
from minillm.sampling import GREEDY_BELOW, uniform

NEVER = float("-inf")
PIVOTS = 8
LOG2E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32


def sampling_reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    seeds: Tensor, positions: Tensor, sequences: Tensor | None = None, vocab_size: int | None = None,
    survivors: bool = False,
):  # fmt: skip
    """By a full sort."""
    wide = logits[:, :vocab_size].to(accumulator(logits.dtype))
    peak, greedy = wide.amax(dim=-1), temperature < GREEDY_BELOW
    order = wide.argsort(dim=-1, descending=True, stable=True)
    scores = (wide - peak[:, None]) / torch.where(greedy, 1.0, temperature)[:, None]
    ranked, rank = scores.gather(1, order), torch.arange(wide.shape[1], device=wide.device)
    keep = (ranked > NEVER) & (ranked >= min_p.log()[:, None])
    keep &= rank < torch.where(greedy, 1, torch.where(top_k > 0, top_k, wide.shape[1]))[:, None]
    mass = torch.where(keep, ranked.exp(), 0.0).cumsum(dim=-1)
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    keep &= (before < top_p[:, None] * mass[:, -1:]) | (top_p >= 1)[:, None]
    kept = torch.zeros_like(keep).scatter(1, order, keep)

    cumulative = torch.where(kept, scores.exp(), 0.0).cumsum(dim=-1)
    sequences = torch.zeros_like(seeds) if sequences is None else sequences
    u = [uniform(*row) for row in zip(seeds.tolist(), positions.tolist(), sequences.tolist(), strict=True)]
    total = cumulative[:, -1:].contiguous()
    found = torch.searchsorted(cumulative, total * total.new_tensor(u)[:, None], right=True)
    ids = torch.minimum(found, torch.searchsorted(cumulative, total)).squeeze(-1)
    ids = torch.where(peak.isfinite(), ids, -1)
    if not survivors:
        return ids
    columns = logits.shape[1] - wide.shape[1]
    return ids, torch.nn.functional.pad(kept & peak.isfinite()[:, None], (0, columns))


@triton.jit
def order_key(x):
    """float32 -> int32 that compares as the numbers do."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def tails(row_ptr, v, pivots, peak, factor, PIVOTS: tl.constexpr, BLOCK: tl.constexpr):
    """How many keys of the row reach each of the pivots, and what their tokens weigh."""
    i = tl.arange(0, BLOCK)
    count = tl.zeros((BLOCK // 4, PIVOTS), tl.int32)  # a thread's four neighbouring columns share a counter
    mass = tl.zeros((BLOCK // 4, PIVOTS), tl.float32)
    for start in range(0, v, BLOCK):
        x = tl.load(row_ptr + start + i, mask=start + i < v, other=float("-inf")).to(tl.float32)
        weight = tl.exp2((x - peak) * factor)
        reached = order_key(x)[:, None] >= pivots[None, :]
        count += tl.sum(tl.reshape(reached.to(tl.int32), (BLOCK // 4, 4, PIVOTS)), axis=1)
        mass += tl.sum(tl.reshape(tl.where(reached, weight[:, None], 0.0), (BLOCK // 4, 4, PIVOTS)), axis=1)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def search(row_ptr, v, peak, factor, low, high, n, mass, k, goal, PIVOTS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key in low ... high whose tail has k tokens and mass `goal`; that of low has, n tokens of `mass`.

    Returns key, tokens and mass of its tail, tokens and mass above it. With one token left in the bracket, the key
    may lie below that token's own: the tail is the same.
    """
    j = tl.arange(0, PIVOTS)
    above = 0
    mass_above = 0.0
    while (low < high) & (n - above > 1):
        width = (high.to(tl.int64) - low) * (j + 1)
        pivots = (low + (width + PIVOTS) // (PIVOTS + 1)).to(tl.int32)  # all in low + 1 ... high
        counts, masses = tails(row_ptr, v, pivots, peak, factor, PIVOTS, BLOCK)
        enough = (counts >= k) & (masses >= goal)
        low = tl.max(tl.where(enough, pivots, low), axis=0)
        high = tl.min(tl.where(enough, high, pivots - 1), axis=0)
        n = tl.min(tl.where(enough, counts, n), axis=0)
        mass = tl.min(tl.where(enough, masses, mass), axis=0)
        above = tl.max(tl.where(enough, above, counts), axis=0)
        mass_above = tl.max(tl.where(enough, mass_above, masses), axis=0)
    return low, n, mass, above, mass_above


@triton.jit
def peak_of(row_ptr, v, BLOCK: tl.constexpr):
    """The largest logit; NaN if there is a NaN."""
    i = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, v, BLOCK):
        x = tl.load(row_ptr + start + i, mask=start + i < v, other=float("-inf")).to(tl.float32)
        broken += (x != x).to(tl.int32)
        top = tl.maximum(top, x)
    return tl.where(tl.sum(broken, axis=0) > 0, float("nan"), tl.max(top, axis=0))


@triton.jit
def id_of_tie(row_ptr, v, key, wanted, BLOCK: tl.constexpr):
    """The id of the wanted-th (from 1) logit that equals the key's."""
    i = tl.arange(0, BLOCK)
    seen = 0
    found = v
    for start in range(0, v, BLOCK):
        x = tl.load(row_ptr + start + i, mask=start + i < v, other=float("-inf")).to(tl.float32)
        tie = (order_key(x) == key).to(tl.int32)
        here = tl.sum(tie, axis=0)
        if (seen < wanted) & (seen + here >= wanted):
            place = seen + tl.cumsum(tie, axis=0)
            found = tl.min(tl.where((place == wanted) & (tie == 1), start + i, v), axis=0)
        seen += here
    return found


@triton.jit
def cuts(row_ptr, v, peak, factor, lowest, k, p, PIVOTS: tl.constexpr, BLOCK: tl.constexpr):
    """What top-k and top-p leave of the logits from `lowest` up: key, last id among its ties, mass of the survivors."""
    counts, masses = tails(row_ptr, v, lowest + tl.arange(0, 1), peak, factor, 1, BLOCK)
    low = lowest
    high = order_key(peak)
    n = tl.sum(counts, axis=0)  # tokens from `low` up
    mass = tl.sum(masses, axis=0)  # of those that are kept
    ties = n  # tokens at `low`, the last ones in the order ...
    kept_ties = n  # ... and how many of them are kept
    if k < n:
        low, n, mass, above, mass_above = search(
            row_ptr, v, peak, factor, low, high, n, mass, k, 0.0, PIVOTS, BLOCK
        )  # fmt: skip
        ties = n - above
        kept_ties = k - above
        if kept_ties < ties:
            mass = mass_above + kept_ties * tl.exp2((value_of(low) - peak) * factor)
    if p < 1.0:
        goal = p * mass
        edge, n, tail, above, mass_above = search(
            row_ptr, v, peak, factor, low, high, n, mass, 0, goal, PIVOTS, BLOCK
        )  # fmt: skip
        weight = tl.exp2((value_of(edge) - peak) * factor)
        needed = tl.ceil((goal - mass_above) / tl.maximum(weight, 2e-38))
        ties = n - above
        most = tl.where(edge == low, tl.minimum(ties, kept_ties), ties).to(tl.float32)
        kept_ties = tl.minimum(tl.maximum(needed, 1.0), most).to(tl.int32)
        mass = tl.where(kept_ties < ties, mass_above + kept_ties * weight, tail)
        low = edge
    last = v
    if kept_ties < ties:
        last = id_of_tie(row_ptr, v, low, kept_ties, BLOCK)
    return low, last, mass


@triton.jit
def draw(row_ptr, kept_ptr, v, peak, factor, low, last, target, SURVIVORS: tl.constexpr, BLOCK: tl.constexpr):
    """The first survivor at which the running mass passes the target."""
    i = tl.arange(0, BLOCK)
    reached = 0.0
    token = -1
    final = -1  # the last token with weight, if rounding left the target beyond the end
    for start in range(0, v, BLOCK):
        x = tl.load(row_ptr + start + i, mask=start + i < v, other=float("-inf")).to(tl.float32)
        key = order_key(x)
        kept = (key > low) | ((key == low) & (start + i <= last))
        if SURVIVORS:
            tl.store(kept_ptr + start + i, kept.to(tl.int8), mask=start + i < v)
        weight = tl.where(kept, tl.exp2((x - peak) * factor), 0.0)
        here = tl.sum(weight, axis=0)
        latest = tl.max(tl.where(weight > 0.0, start + i, -1), axis=0)
        final = tl.maximum(final, latest)
        if (token < 0) & (reached + here > target):
            beyond = (reached + tl.cumsum(weight, axis=0) > target) & (weight > 0.0)
            first = tl.min(tl.where(beyond, start + i, v), axis=0)
            token = tl.where(first < v, first, latest)
        reached += here
    return tl.where(token < 0, final, token)


@triton.jit
def sampling_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr, sequences_ptr,
    ids_ptr, kept_ptr, logits_b, kept_b, v, greedy_below,
    SURVIVORS: tl.constexpr, PIVOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program b draws from row b. Greedy is top-k with k = 1."""
    b = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + b * logits_b
    peak = peak_of(row_ptr, v, BLOCK)
    if (peak != peak) | (tl.abs(peak) == float("inf")):
        tl.store(ids_ptr + b, -1)
        return
    temperature = tl.load(temperature_ptr + b)
    greedy = temperature < greedy_below
    temperature = tl.where(greedy, 1.0, temperature)
    factor = LOG2E / temperature
    k = tl.where(greedy, 1, tl.load(top_k_ptr + b))
    k = tl.where(k <= 0, v, k)
    p = tl.where(greedy, 1.0, tl.load(top_p_ptr + b))
    min_p = tl.load(min_p_ptr + b)
    cut = tl.where(min_p > 0.0, peak + temperature * tl.log(tl.where(min_p > 0.0, min_p, 1.0)), -LARGEST)
    lowest = order_key(tl.maximum(cut, -LARGEST))
    low, last, mass = cuts(row_ptr, v, peak, factor, lowest, k, p, PIVOTS, BLOCK)

    position = tl.load(positions_ptr + b)
    word, _, _, _ = tl.philox(
        tl.load(seeds_ptr + b),
        position.to(tl.uint32), (position >> 32).to(tl.uint32), tl.load(sequences_ptr + b).to(tl.uint32), 0,
    )  # fmt: skip
    target = (word >> 8).to(tl.float32) * 5.9604644775390625e-08 * mass  # 2^-24
    kept_ptr += b * kept_b
    token = draw(row_ptr, kept_ptr, v, peak, factor, low, last, target, SURVIVORS, BLOCK)
    tl.store(ids_ptr + b, token.to(tl.int64))


def sampling(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    seeds: Tensor, positions: Tensor, sequences: Tensor | None = None, vocab_size: int | None = None,
    survivors: bool = False, backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """logits (B, V), one number a row for each parameter -> ids (B) int64, or (ids, survivors (B, V) bool).

    A row that has no token to draw (NaN, +inf, nothing but -inf) has id -1. `positions` is the index that the token
    will have in its sequence, `sequences` tells the n sequences of a request apart. Raises KernelError.
    """
    sequences = torch.zeros_like(seeds) if sequences is None else sequences
    integers = {"seeds": seeds, "positions": positions, "sequences": sequences}
    numbers = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    launch = use_triton(backend, logits, top_k, *numbers.values(), *integers.values())
    check_dtype(FLOATS, logits=logits)
    check_dtype((torch.float32,), **numbers)
    check_dtype((torch.int64,), **integers)
    check_dtype((torch.int32,), top_k=top_k)
    check_shape("logits", logits, None, None)
    for name, t in {**numbers, **integers, "top_k": top_k}.items():
        check_shape(name, t, len(logits))
    columns = logits.shape[1]
    vocab_size = columns if vocab_size is None else vocab_size
    require(0 < vocab_size <= columns, f"vocab_size is {vocab_size}; 1 to the {columns} columns of logits is needed")
    if not launch:
        return sampling_reference(
            logits, temperature, top_k, top_p, min_p, seeds, positions, sequences, vocab_size, survivors
        )  # fmt: skip
    check_contiguous_rows(logits=logits, top_k=top_k, **numbers, **integers)
    ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    kept = torch.zeros(logits.shape if survivors else (0, 0), dtype=torch.int8, device=logits.device)
    if len(logits):
        block, warps = configuration(vocab_size)
        with on_device(logits):
            sampling_kernel[(len(logits),)](
                logits, temperature, top_k, top_p, min_p, seeds, positions, sequences, ids, kept,
                logits.stride(0), kept.stride(0), vocab_size, GREEDY_BELOW,
                SURVIVORS=survivors, PIVOTS=PIVOTS, BLOCK=block, num_warps=warps,
            )  # fmt: skip
    return (ids, kept.bool()) if survivors else ids


def configuration(v: int) -> tuple[int, int]:
    """Columns -> BLOCK, num_warps: four columns a thread at a time, for each of eight pivots."""
    block = min(max(triton.next_power_of_2(v), 16), 2048)
    return block, max(block // 128, 1)


# What the tools take from here -------------------------------------------------------------------------------------


def parameters(rows: list[dict], device) -> dict[str, Tensor]:
    """[{"temperature": 0.7, "top_k": 40}, ...] -> the launcher's tensors; what a row leaves out is off."""
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 0, "positions": 0, "sequences": 0}
    types = {"top_k": torch.int32, "seeds": torch.int64, "positions": torch.int64, "sequences": torch.int64}
    return {
        name: torch.tensor(
            [row.get(name, default) for row in rows], dtype=types.get(name, torch.float32), device=device
        )
        for name, default in defaults.items()
    }


EVERY_KIND = [
    {},
    {"temperature": 0.0, "top_k": 5},
    {"temperature": 0.7, "top_k": 40},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"temperature": 1.5, "top_k": 30, "top_p": 0.8, "min_p": 0.01},
    {"top_k": 1},
    {"top_p": 0.001},
]


def _case(name, v, rows=EVERY_KIND, vocab_size=None, grid=None, layout=lambda x: x) -> Case:
    """grid: logits are multiples of it, so that there are ties."""

    def make(device, dtype, generator):
        logits = normal(generator, len(rows), v, device=device, dtype=dtype, scale=2.0)
        logits = logits if grid is None else (logits / grid).round() * grid
        each = [row | {"seeds": 7 * i - 9, "positions": i} for i, row in enumerate(rows)]
        settings = parameters(each, device) | {"vocab_size": vocab_size, "survivors": True}
        return Trial(sampling, sampling_reference, (layout(logits),), settings)

    return Case(name, make)


CASES = [
    _case("odd width", 273),
    _case("ties", 273, grid=0.5),
    _case("longer than a block", 4096 + 17, rows=EVERY_KIND[5:6]),
    _case("padded vocabulary, rows apart", 161, vocab_size=145, layout=spaced_rows),
    _case("one column", 1),
    _case("no rows", 64, rows=[]),
]

COMPILE = [
    Compilation(
        "sampling",
        sampling_kernel,
        lambda dtype: (
            *(dtype, torch.float32, torch.int32, torch.float32, torch.float32, *[torch.int64] * 4, torch.int8),
            *(128256, 128256, 128256, GREEDY_BELOW),
        ),
        {"SURVIVORS": False, "PIVOTS": PIVOTS, "BLOCK": configuration(128256)[0]},
        num_warps=configuration(128256)[1],
        dtypes=(torch.float32, torch.float16, torch.bfloat16),
    )
]


def _bench(device, dtype, v, rows=128, **row) -> Work:
    logits = torch.randn(rows, v, device=device, dtype=dtype) * 2
    settings = parameters([row | {"seeds": i} for i in range(rows)], device)
    k, p = settings["top_k"], settings["top_p"]

    def by_torch():
        ranked, order = (logits.float() / settings["temperature"][:, None]).sort(dim=-1, descending=True)
        ranked = ranked.masked_fill(torch.arange(v, device=device) >= k[:, None], NEVER) if row["top_k"] else ranked
        probs = ranked.softmax(dim=-1)
        probs = probs.masked_fill(probs.cumsum(dim=-1) - probs >= p[:, None], 0.0)
        return order.gather(1, probs.multinomial(1))

    return Work(
        kernel=lambda: sampling(logits, **settings, backend="triton"),
        rivals={"torch sort, cumsum, multinomial": by_torch},
        bytes=logits.nbytes,
    )


BENCHES = [
    Bench(
        f"sampling, {name}",
        _bench,
        {"SmolLM2-135M": {"v": 49152, **row}, "Llama-3-8B": {"v": 128256, **row}},
        dtypes=(torch.float32,),
    )
    for name, row in {
        "top-k 50": {"temperature": 0.7, "top_k": 50},
        "top-p 0.9": {"temperature": 0.7, "top_k": 0, "top_p": 0.9},
    }.items()
]
