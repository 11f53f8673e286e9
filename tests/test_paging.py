"""Promise: no block is lost or owned twice, and a cache in blocks attends as one in a single piece."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.allocators import ContiguousAllocator, PagedAllocator
from minillm.attention import naive_attention
from minillm.block_pool import NULL, BlockError, BlockPool
from minillm.config import ModelConfig
from minillm.errors import EngineError
from minillm.events import EventLog
from minillm.paging import PagedCache, SequenceStep, StepMetadata, move_blocks

# --- the pool ---


def test_the_null_block_is_never_given_out():
    pool = BlockPool(5, 4)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    with pytest.raises(BlockError, match="1 blocks wanted, 0 available"):
        pool.allocate(1)


def test_a_shared_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(4, 4)
    table = pool.allocate(2)
    pool.share(table)
    pool.release(table)
    assert pool.available == 1
    pool.release(table)
    assert pool.available == 3
    with pytest.raises(BlockError, match="more often than it was taken"):
        pool.release(table)


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_tails_are_given_up_before_heads(eviction):
    pool, gone = BlockPool(4, 4, eviction), []
    pool.on_evict = gone.append
    table = pool.allocate(3)
    for block in table:
        pool.publish(block)
    pool.release(table)
    pool.allocate(3)
    assert gone == table[::-1]


def test_free_blocks_are_used_before_cached_ones():
    pool, gone = BlockPool(4, 4), []
    pool.on_evict = gone.append
    first = pool.allocate(1)
    pool.publish(first[0])
    pool.release(first)
    pool.allocate(2)
    assert gone == []


def evicted_after(eviction: str, uses: list[int]) -> list[int]:
    """Publishes a block for each entry, uses it so often, releases all in order, and evicts all."""
    pool, gone = BlockPool(1 + len(uses), 4, eviction), []
    pool.on_evict = gone.append
    blocks = pool.allocate(len(uses))
    for block in blocks:
        pool.publish(block)
        pool.release([block])
    for block, count in zip(blocks, uses, strict=True):
        for _ in range(count):
            pool.share([block])
            pool.release([block])
    pool.allocate(len(uses))
    return [blocks.index(block) for block in gone]


def test_lru_gives_up_the_oldest_and_lfu_the_rarest():
    assert evicted_after("lru", [3, 1, 2]) == [0, 1, 2]
    assert evicted_after("lfu", [3, 1, 2]) == [1, 2, 0]


def test_lfu_forgets_old_fame():
    """Without ageing a block used 5 times long ago would outlive every block used once, for ever."""
    pool, gone = BlockPool(3, 4, "lfu"), []
    pool.on_evict = gone.append
    famous, other = pool.allocate(2)
    for block in (famous, other):
        pool.publish(block)
        pool.release([block])
    for _ in range(4):
        pool.share([famous])
        pool.release([famous])
    for _ in range(8):  # a stream of blocks used once
        (block,) = pool.allocate(1)
        pool.publish(block)
        pool.release([block])
    assert famous in gone


def test_a_hit_on_a_cached_block_keeps_its_key_and_lowers_the_capacity_by_one():
    """ATOM#902."""
    pool = BlockPool(4, 4)
    (block,) = pool.allocate(1)
    pool.publish(block)
    pool.release([block])
    assert pool.available == 3
    pool.share([block])
    assert pool.available == 2
    assert pool.published[block]
    pool.release([block])
    assert pool.occupancy().cached == 1


@settings(max_examples=60, deadline=None)
@given(
    moves=st.lists(st.tuples(st.sampled_from("asrpcw"), st.integers(0, 5), st.integers(1, 3)), max_size=60),
    eviction=st.sampled_from(["lru", "lfu"]),
)
def test_any_sequence_of_moves_keeps_every_block_in_one_state(moves, eviction):
    pool, tables = BlockPool(9, 4, eviction), []
    for kind, which, count in moves:
        table = tables[which % len(tables)] if tables else None
        if kind == "a" and count <= pool.available:
            tables.append(pool.allocate(count))
        elif table is None:
            continue
        elif kind == "s":
            pool.share(table)
            tables.append(list(table))
        elif kind == "r":
            pool.release(tables.pop(which % len(tables)))
        elif kind == "p":
            pool.publish(table[0])
        elif kind == "w":
            pool.withdraw(table[0])
        elif kind == "c" and pool.is_shared(table[-1]) and pool.available:
            table[-1] = pool.copy_on_write(table[-1])
        pool.check(tables)
        o = pool.occupancy((t, 4 * len(t) - 1) for t in tables)
        assert o.free + o.cached + o.held == o.total == 8


def leak(pool, tables):
    pool._free.pop()


def double_free(pool, tables):
    pool._free.append(tables[0][0])


def miscount(pool, tables):
    pool.ref_counts[tables[0][0]] += 1


def stale_table(pool, tables):
    tables[1] = list(tables[0])


def null_given_away(pool, tables):
    pool._free.append(NULL)


def kept_without_contents(pool, tables):
    pool._cached.add(pool._free.pop())


@pytest.mark.parametrize(
    "harm", [leak, double_free, miscount, stale_table, null_given_away, kept_without_contents], ids=lambda f: f.__name__
)
def test_the_check_walks_every_block(harm):
    """mini-sglang#149: a check that checks nothing. Each kind of damage must be seen."""
    pool = BlockPool(9, 4)
    tables = [pool.allocate(2), pool.allocate(2)]
    pool.check(tables)
    harm(pool, tables)
    with pytest.raises(BlockError):
        pool.check(tables)


def test_waste_is_counted_to_the_slot_and_shared_blocks_once():
    pool = BlockPool(9, 4)
    table = pool.allocate(3)
    pool.share(table[:2])
    o = pool.occupancy([(table, 9), (table[:2], 7)])
    assert (o.held, o.held_slots, o.used_slots) == (3, 12, 9)
    assert o.waste == 0.25


def test_the_pool_tells_what_it_does():
    log = EventLog(clock=lambda: 0.0)
    pool = BlockPool(3, 4, events=log)
    table = pool.allocate(2, "a")
    pool.publish(table[0])
    pool.release(table, "a")
    pool.allocate(2, "b")
    kinds = [(e.kind, e.request) for e in log]
    assert kinds == [
        ("allocated", "a"), ("published", None), ("released", "a"), ("evicted", None), ("allocated", "b")
    ]  # fmt: skip


@pytest.mark.parametrize("arguments", [(1, 4), (4, 0), (4, 4, "newest")])
def test_a_pool_that_cannot_work_is_refused(arguments):
    with pytest.raises(EngineError):
        BlockPool(*arguments)


# --- three allocators under one trace ---

ALLOCATORS = {
    "maximum": lambda: ContiguousAllocator(512, 128, "maximum"),
    "power-of-two": lambda: ContiguousAllocator(512, 128, "power-of-two"),
    "exact": lambda: ContiguousAllocator(512, 128, "exact"),
    "paged": lambda: PagedAllocator(512, 4),
}


@pytest.mark.parametrize("kind", ALLOCATORS)
@settings(max_examples=25, deadline=None)
@given(moves=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 60), st.integers(1, 60)), max_size=60))
def test_every_slot_is_accounted_for(kind, moves):
    allocator, lengths = ALLOCATORS[kind](), {}
    for i, (which, prompt, more) in enumerate(moves):
        if which < 4 and allocator.start(str(i), prompt, prompt + more):
            lengths[str(i)] = [prompt, prompt + more]
        elif lengths and which < 9:
            name = list(lengths)[which % len(lengths)]
            if lengths[name][0] < lengths[name][1] and allocator.append(name):
                lengths[name][0] += 1
        elif lengths:
            name = next(iter(lengths))
            allocator.free(name)
            del lengths[name]
        w = allocator.waste()
        assert w.used + w.reserved + w.internal + w.free == w.capacity == 512
        assert w.used == sum(length for length, _ in lengths.values())
        assert min(w.used, w.reserved, w.internal, w.free) >= 0
        assert w.largest <= w.free


def test_paging_fits_more_sequences_into_the_same_memory():
    started = {}
    for kind, make in ALLOCATORS.items():
        allocator = make()
        started[kind] = sum(allocator.start(str(i), 10, 40) for i in range(100))
    assert started == {"maximum": 4, "power-of-two": 8, "exact": 12, "paged": 42}


def test_holes_too_small_for_anybody():
    allocator = ContiguousAllocator(100, 100, "exact")
    for i in range(10):
        assert allocator.start(str(i), 5, 10)
    for i in range(0, 10, 2):
        allocator.free(str(i))
    assert allocator.waste().free == 50
    assert allocator.waste().largest == 10
    assert not allocator.start("wide", 5, 11)


# --- the cache ---

H, HKV, D, SIZE = 6, 2, 8, 4


def config(window: int | None = None, sinks: int = 0) -> ModelConfig:
    return ModelConfig(
        "llama", 64, 32, 32, 2, H, HKV, D, 512,
        sliding_window=window, attention_sinks=sinks,
        layer_types=("full_attention", "sliding_attention" if window else "full_attention"),
    )  # fmt: skip


def scattered_tables(lengths: list[int], seed: int) -> list[list[int]]:
    """Block tables in no order, as a pool hands them out after a while."""
    order = (torch.randperm(sum(lengths), generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    return [[order.pop() for _ in range(-(-n // SIZE))] for n in lengths]


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(0, 20), st.sampled_from([1, 1, 1, 2, 5, 9])), min_size=1, max_size=7),
    window=st.sampled_from([None, 1, 3, 6]),
    sinks=st.sampled_from([0, 0, 1, 5]),
    exact=st.booleans(),
    seed=st.integers(0, 99),
)
def test_attending_in_blocks_equals_attending_in_one_piece(parts, window, sinks, exact, seed):
    """Decodes and chunks of any length in one step, against the formula over each sequence's own keys."""
    generator = torch.Generator().manual_seed(seed)
    tables = scattered_tables([start + count for start, count in parts], seed)
    cache = PagedCache(config(window, sinks), 1 + sum(start + count for start, count in parts), SIZE)
    cache.storage[:, :, 1:] = float("nan")  # what an earlier request may have left
    k, v = (torch.randn(sum(a + b for a, b in parts), HKV, D, generator=generator) for _ in range(2))
    q = torch.randn(len(k), H, D, generator=generator)
    for layer in (0, 1):
        expected, steps = [], []
        for history in (True, False):  # what is there already, then the step under test
            first, row, sequences, rows = 0, 0, [], []
            for (start, count), table in zip(parts, tables, strict=True):
                own = slice(first, first + start) if history else slice(first + start, first + start + count)
                size = own.stop - own.start
                if size:
                    sequences.append(SequenceStep(row, size, 0 if history else start, table))
                rows += range(own.start, own.stop)
                row += size
                if not history:
                    whole = slice(first, first + start + count)
                    expected.append(
                        naive_attention(q[own], k[whole], v[whole], cache.config.window(layer), sinks=sinks)
                    )
                first += start + count
            steps.append((sequences, rows))
        for sequences, rows in steps:
            if sequences:
                step = cache.step(StepMetadata(sequences, SIZE), exact)
                out = step.attend(layer, q[rows], k[rows], v[rows])
        torch.testing.assert_close(out, torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_a_step_says_where_everything_is():
    """What a kernel reads, by hand: 3 tokens into an empty table, 1 token after 5."""
    m = StepMetadata([SequenceStep(0, 3, 0, [7]), SequenceStep(3, 1, 5, [2, 9])], SIZE, rows=5)
    assert m.query_starts.tolist() == [0, 3, 4]
    assert m.context_lengths.tolist() == [3, 6]
    assert m.block_tables.tolist() == [[7, 0], [2, 9]]
    assert m.slot_mapping.tolist() == [28, 29, 30, 37, -1]
    assert (m.query_starts.dtype, m.block_tables.dtype, m.slot_mapping.dtype) == (
        torch.int32, torch.int32, torch.int64,
    )  # fmt: skip


def test_padding_rows_write_nothing():
    cache = PagedCache(config(), 4, SIZE)
    before = cache.storage.zero_().clone()
    step = cache.step(StepMetadata([SequenceStep(1, 1, 0, [2])], SIZE, rows=3))
    ones = torch.ones(3, HKV, D)
    out = step.attend(0, torch.ones(3, H, D), ones, ones)
    before[0, :, 2, 0] = 1
    assert torch.equal(cache.storage, before)
    assert out[0].abs().sum() == out[2].abs().sum() == 0


def test_copies_read_all_sources_before_they_write():
    cache = PagedCache(config(), 4, SIZE)
    cache.storage[:] = torch.arange(4.0)[:, None, None, None]
    cache.copy_blocks([(1, 2), (2, 3)])
    assert cache.storage[1, 1, :, 0, 0, 0].tolist() == [0, 1, 1, 2]


def test_blocks_go_to_the_host_and_come_back():
    device, host = PagedCache(config(), 4, SIZE), PagedCache(config(), 3, SIZE)
    device.storage[:] = torch.arange(4.0)[:, None, None, None]
    move_blocks(device, host, [(3, 1), (1, 2)])
    move_blocks(host, device, [(1, 2)])
    assert device.storage[0, 0, :, 0, 0, 0].tolist() == [0, 1, 3, 3]


def test_bytes_are_those_of_the_formula():
    cache = PagedCache(config(), 10, SIZE, torch.bfloat16)
    assert cache.allocated_bytes == 2 * 2 * 10 * SIZE * HKV * D * 2
    assert cache.block_bytes * 10 == cache.allocated_bytes
