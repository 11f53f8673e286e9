"""Chapter 09, attention over blocks, against exact softmax in float64 over the tokens in order."""

from __future__ import annotations

import torch

from exercises import Exercise, Judge, Mistake

from .chapter_02_ready_made import WithoutReadyMade


def cache_of(length: int, size: int, kv_heads: int, dim: int, seed: int, stale: float = 9.0, scale: float = 1.0):
    """Keys and values in order (length, Hkv, D), and dealt out to blocks: keys, values, table with one block spare."""
    made = torch.Generator().manual_seed(seed)
    k, v = (scale * torch.randn(length, kv_heads, dim, generator=made) for _ in range(2))
    needed = -(-length // size)
    table = torch.randperm(3 * needed + 2, generator=made)[: needed + 1].tolist()
    blocks = torch.full((2, 3 * needed + 2, size, kv_heads, dim), stale)
    for t in range(length):
        blocks[0, table[t // size], t % size] = k[t]
        blocks[1, table[t // size], t % size] = v[t]
    return k, v, blocks[0], blocks[1], table


def in_order(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Head by head over the tokens in order, in float64."""
    group = q.shape[0] // k.shape[1]
    rows = []
    for h in range(q.shape[0]):
        weights = (k[:, h // group].double() @ q[h].double() / q.shape[1] ** 0.5).softmax(0)
        rows.append(weights @ v[:, h // group].double())
    return torch.stack(rows).float()


def attended(paged_attention, q, k, v, keys, values, table, judge: Judge, hint: str) -> None:
    with WithoutReadyMade("scaled_dot_product_attention"):
        got = paged_attention(q, keys, values, table, len(k))
    judge.close(got, in_order(q, k, v), f"Likely mistake: {hint}", rtol=1e-4, atol=1e-5)


def queries(heads: int, dim: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(heads, dim, generator=torch.Generator().manual_seed(seed))


def one_full_block(paged_attention, judge: Judge) -> None:
    k, v, keys, values, table = cache_of(4, 4, 1, 8, 1)
    attended(
        paged_attention, queries(1, 8, 1), k, v, keys, values, table[:1], judge, "the scale 1/sqrt(D), or the softmax."
    )


def blocks_in_the_order_of_the_table(paged_attention, judge: Judge) -> None:
    k, v, keys, values, table = cache_of(12, 4, 1, 8, 3)
    hint = (
        "blocks taken in another way than the table says, or what was summed before not scaled when the maximum grew."
    )
    for seed in range(4):
        attended(paged_attention, queries(2, 8, seed, 2.0), k, v, keys, values, table[:3], judge, hint)


def heads_in_groups(paged_attention, judge: Judge) -> None:
    k, v, keys, values, table = cache_of(8, 4, 3, 8, 5)
    hint = "query head h reads key-value head h // (H // Hkv); repeat would lay them out as h % Hkv."
    attended(paged_attention, queries(6, 8, 2), k, v, keys, values, table[:2], judge, hint)


def the_last_block_is_cut(paged_attention, judge: Judge) -> None:
    hint = (
        "the slots past the last token belong to somebody else; count how many of the last block are this sequence's."
    )
    for length in (1, 5, 7, 9):
        k, v, keys, values, table = cache_of(length, 4, 2, 8, length)
        attended(paged_attention, queries(4, 8, 3), k, v, keys, values, table[: -(-length // 4)], judge, hint)


def spare_blocks_are_not_read(paged_attention, judge: Judge) -> None:
    for length in (3, 4, 8, 10):
        k, v, keys, values, table = cache_of(length, 4, 2, 8, length)
        hint = "a table may be longer than needed; `length` says where the sequence ends."
        attended(paged_attention, queries(4, 8, 4), k, v, keys, values, table, judge, hint)


def stale_slots_are_not_touched(paged_attention, judge: Judge) -> None:
    for stale in (float("nan"), float("inf")):
        k, v, keys, values, table = cache_of(6, 4, 2, 8, 8, stale)
        hint = f"slots of others hold {stale} here, and a weight of zero times {stale} is NaN: cut off, do not mask."
        attended(paged_attention, queries(4, 8, 5), k, v, keys, values, table, judge, hint)


def large_scores(paged_attention, judge: Judge) -> None:
    k, v, keys, values, table = cache_of(11, 4, 2, 8, 9, scale=30.0)
    hint = "exp of a large score overflows: subtract the maximum first, in every block."
    attended(paged_attention, queries(4, 8, 6, 8.0), k, v, keys, values, table, judge, hint)


def other_sizes(paged_attention, judge: Judge) -> None:
    hint = "a block size, a head size or a number of heads written as a number; they are in the shapes."
    for size, dim, kv_heads, group in ((1, 4, 1, 2), (3, 16, 2, 3), (7, 6, 4, 1), (16, 32, 1, 5)):
        for length in (1, size, size + 1, 3 * size - 1):
            k, v, keys, values, table = cache_of(length, size, kv_heads, dim, length)
            q = queries(kv_heads * group, dim, size, 2.0)
            attended(paged_attention, q, k, v, keys, values, table, judge, hint)


_MASKED = """
def paged_attention(q, key_blocks, value_blocks, table, length):
    (H, D), Hkv = q.shape, key_blocks.shape[2]
    keys = key_blocks[table].flatten(0, 1).repeat_interleave(H // Hkv, dim=1)
    values = value_blocks[table].flatten(0, 1).repeat_interleave(H // Hkv, dim=1)
    scores = torch.einsum("hd,shd->hs", q, keys) / D**0.5
    scores[:, length:] = -torch.inf
    return torch.einsum("hs,shd->hd", scores.softmax(-1), values)
"""

_WHOLE_TABLE = """
def paged_attention(q, key_blocks, value_blocks, table, length):
    (H, D), (_, size, Hkv, _) = q.shape, key_blocks.shape
    end = (len(table) - 1) * size + (length - 1) % size + 1
    keys = key_blocks[table].flatten(0, 1)[:end].repeat_interleave(H // Hkv, dim=1)
    values = value_blocks[table].flatten(0, 1)[:end].repeat_interleave(H // Hkv, dim=1)
    weights = (torch.einsum("hd,shd->hs", q, keys) / D**0.5).softmax(-1)
    return torch.einsum("hs,shd->hd", weights, values)
"""

_NO_MAXIMUM = """
def paged_attention(q, key_blocks, value_blocks, table, length):
    (H, D), (_, size, Hkv, _) = q.shape, key_blocks.shape
    total, out = torch.zeros(H, 1), torch.zeros(H, D)
    for first in range(0, length, size):
        block, here = table[first // size], min(size, length - first)
        keys = key_blocks[block, :here].repeat_interleave(H // Hkv, dim=1)
        values = value_blocks[block, :here].repeat_interleave(H // Hkv, dim=1)
        weights = (torch.einsum("hd,shd->hs", q, keys) / D**0.5).exp()
        total = total + weights.sum(dim=1, keepdim=True)
        out = out + torch.einsum("hs,shd->hd", weights, values)
    return out / total
"""

_READY_MADE = """
def paged_attention(q, key_blocks, value_blocks, table, length):
    k, v = (side[table].flatten(0, 1)[:length].transpose(0, 1) for side in (key_blocks, value_blocks))
    return torch.nn.functional.scaled_dot_product_attention(q[:, None], k, v, enable_gqa=True)[:, 0]
"""

_FIXED_SIZES = """
def paged_attention(q, key_blocks, value_blocks, table, length):
    blocks = table[: -(-length // 4)]
    k, v = (torch.cat([side[b] for b in blocks])[:length] for side in (key_blocks, value_blocks))
    group = q.shape[0] // k.shape[1]
    heads = range(q.shape[0])
    return torch.stack([(k[:, h // group] @ q[h] / 8**0.5).softmax(0) @ v[:, h // group] for h in heads])
"""

ATTENTION = Exercise(
    name="paged_attention",
    title="Attention over blocks",
    chapter="09",
    difficulty=3,
    minutes=25,
    checks=[
        one_full_block,
        blocks_in_the_order_of_the_table,
        heads_in_groups,
        the_last_block_is_cut,
        spare_blocks_are_not_read,
        stale_slots_are_not_touched,
        large_scores,
        other_sizes,
    ],
    mistakes=[
        Mistake("no scale", "one_full_block", edit=(" / D**0.5", "")),
        Mistake("never divides by the sum", "one_full_block", edit=("return out / total", "return out")),
        Mistake("torch's own", "one_full_block", source=_READY_MADE),
        Mistake(
            "block ids from the counter", "one_full_block", edit=("table[first // size], min", "first // size, min")
        ),
        Mistake(
            "blocks by id",
            "blocks_in_the_order_of_the_table",
            edit=("table[first // size], min", "min(table) + first // size, min"),
        ),
        Mistake("old values not scaled", "blocks_in_the_order_of_the_table", edit=("out = out * old +", "out = out +")),
        Mistake(
            "old sum not scaled", "blocks_in_the_order_of_the_table", edit=("total = total * old +", "total = total +")
        ),
        Mistake(
            "heads dealt in turn",
            "heads_in_groups",
            edit=(
                "value_blocks[block, :here].repeat_interleave(H // Hkv, dim=1)",
                "value_blocks[block, :here].repeat(1, H // Hkv, 1)",
            ),
        ),
        Mistake("the last block whole", "the_last_block_is_cut", edit=("min(size, length - first)", "size")),
        Mistake(
            "the last block left out",
            "the_last_block_is_cut",
            edit=("range(0, length, size)", "range(0, length - size + 1, size)"),
        ),
        Mistake(
            "every last block has one token too many",
            "the_last_block_is_cut",
            edit=("min(size, length - first)", "min(size, length - first + 1)"),
        ),
        Mistake("the table says where it ends", "spare_blocks_are_not_read", source=_WHOLE_TABLE),
        Mistake("masks what it should cut", "stale_slots_are_not_touched", source=_MASKED),
        Mistake("no maximum", "large_scores", source=_NO_MAXIMUM),
        Mistake(
            "blocks of 4",
            "other_sizes",
            edit=("= q.shape, key_blocks.shape", "= q.shape, (0, 4, *key_blocks.shape[2:])"),
        ),
        Mistake("heads of 8", "other_sizes", edit=("/ D**0.5", "/ 8**0.5")),
        Mistake("blocks of 4, heads of 8, in one go", "other_sizes", source=_FIXED_SIZES),
    ],
    forbids=("minillm.paging", "minillm.attention"),
)
