"""Promise: what is found was written, depends on nothing but its key, and is the longest there is."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.block_pool import BlockError, BlockPool
from minillm.errors import EngineError, RequestError
from minillm.prefix_cache import Prefix, block_key, make_prefix_cache, root_key

SIZE = 4


@pytest.fixture(params=["hash", "radix"])
def kind(request):
    return request.param


def cache_of(kind: str, blocks: int = 64, eviction: str = "lru"):
    pool = BlockPool(blocks, SIZE, eviction)
    return pool, make_prefix_cache(kind, pool)


def store(pool, cache, tokens, prefix=None, release=True) -> list[int]:
    """Computes a prompt, as an engine would: takes what is there, allocates the rest, publishes full blocks."""
    prefix = prefix or Prefix(root_key())
    full = len(tokens) // SIZE
    found = cache.match(prefix, tokens, full)
    pool.share(found)
    table = found + pool.allocate(full - len(found))
    cache.publish(prefix, tokens, table, len(found), full)
    if release:
        pool.release(table)
    return table


def found(cache, tokens, prefix=None) -> list[int]:
    return cache.match(prefix or Prefix(root_key()), tokens, len(tokens) // SIZE)


def test_the_longest_common_run_of_blocks_is_found(kind):
    pool, cache = cache_of(kind)
    table = store(pool, cache, list(range(16)))
    assert found(cache, list(range(16))) == table
    assert found(cache, [*range(8), 99, 9, 10, 11, 12, 13, 14, 15]) == table[:2]
    assert found(cache, [*range(4), *range(4)]) == table[:1]
    assert found(cache, [1, 2, 3, 4]) == []
    assert cache.match(Prefix(root_key()), list(range(16)), 3) == table[:3]


def test_equal_tokens_after_different_ones_are_not_the_same(kind):
    pool, cache = cache_of(kind)
    store(pool, cache, [1, 1, 1, 1, 5, 6, 7, 8])
    assert found(cache, [2, 2, 2, 2, 5, 6, 7, 8]) == []
    assert found(cache, [5, 6, 7, 8]) == []


KEYS = [
    (),
    (("adapter", "S", 1),),
    (("adapter", "S", 2),),
    (("salt", "S"),),
    (("media", "S"),),
    (("adapter", "S", "1"),),
    (("salt", "S"), ("media", "S")),
]


def test_a_key_holds_everything_the_contents_depend_on(kind):
    """vllm#30931, #42125, #44701: an adapter named S is not a salt S, nor its own next version."""
    pool, cache = cache_of(kind)
    tokens = list(range(8))
    tables = [store(pool, cache, tokens, Prefix(root_key(keys))) for keys in KEYS]
    assert len({block for table in tables for block in table}) == 2 * len(KEYS)
    for keys, table in zip(KEYS, tables, strict=True):
        assert found(cache, tokens, Prefix(root_key(keys))) == table


def test_media_enter_with_the_block_that_holds_them(kind):
    """Blocks of 4, an image at token 5: the first block is shared by all, the second and later ones by equal images."""
    pool = BlockPool(40, SIZE)
    cache = make_prefix_cache(kind, pool)
    tokens = list(range(12))
    cat, dog = (Prefix.of([("media", digest, 5)]) for digest in (b"cat", b"dog"))
    table = store(pool, cache, tokens, cat)
    assert found(cache, tokens, Prefix.of([("media", b"cat", 5)])) == table
    assert found(cache, tokens, dog) == table[:1]
    assert found(cache, tokens, Prefix.of()) == table[:1]
    assert found(cache, tokens, Prefix.of([("media", b"cat", 9)])) == table[:1]  # the same image, elsewhere
    assert found(cache, tokens, Prefix.of([("media", b"cat", 5), ("salt", "x")])) == []
    theirs = store(pool, cache, tokens, dog)
    assert found(cache, tokens, dog) == [table[0], *theirs[1:]]
    cache.check()


def test_the_order_of_extra_keys_does_not_matter():
    assert root_key([("salt", "a"), ("media", "b")]) == root_key([("media", "b"), ("salt", "a")])


@pytest.mark.parametrize("bad", ["salt", ("salt",), ("salt", 1.5), (1, "a"), ("salt", None), ["salt", "a"]])
def test_an_extra_key_that_cannot_be_told_apart_is_refused(bad):
    with pytest.raises(RequestError, match="extra key"):
        root_key([bad])


def test_keys_are_the_same_in_every_process():
    """Never Python's hash(): with another seed of it, the same key."""
    code = (
        "from minillm.prefix_cache import *;"
        "print(block_key(root_key([('salt', 'x'), ('adapter', 'lora', 3)]), [1, 2, 3, 70000]).hex())"
    )
    seen = set()
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(p for p in sys.path if p)}
        result = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        seen.add(result.stdout.strip())
    here = block_key(root_key([("salt", "x"), ("adapter", "lora", 3)]), [1, 2, 3, 70000]).hex()
    assert seen == {here}


def test_the_first_of_two_copies_is_kept(kind):
    """mini-sglang#142: twins computed side by side; the second copy goes with its owner, the first stays."""
    pool, cache = cache_of(kind)
    tokens, tables = list(range(8)), []
    for _ in range(2):
        table = pool.allocate(2)
        tables.append(table)
    for table in tables:
        cache.publish(Prefix(root_key()), tokens, table, 0, 2)
    assert found(cache, tokens) == tables[0]
    pool.release(tables[0])
    pool.check([tables[1]])
    pool.release(tables[1])
    assert found(cache, tokens) == tables[0]
    assert pool.occupancy().cached == 2
    cache.check()


def test_an_evicted_block_is_found_no_more(kind):
    pool, cache = cache_of(kind, blocks=5)
    table = store(pool, cache, list(range(16)))
    pool.allocate(1)
    assert found(cache, list(range(16))) == table[:3]
    pool.allocate(3)
    assert found(cache, list(range(16))) == []
    cache.check()


def test_a_tail_whose_head_was_given_up_is_reached_only_through_the_same_head(kind):
    """Head and tail let go apart, so the head went first. The chain keeps the tail for later, the tree drops it."""
    pool, cache = cache_of(kind, blocks=4)
    tokens = list(range(8))
    head, tail = store(pool, cache, tokens, release=False)
    pool.release([head])
    others = pool.allocate(2)  # the block never used, then the head
    assert found(cache, tokens) == []
    cache.check()
    pool.check([[tail], others])
    pool.release(others[:1])
    new_head = store(pool, cache, tokens[:4], release=False)
    assert found(cache, tokens) == new_head + ([tail] if kind == "hash" else [])
    cache.check()


def test_what_was_given_up_leaves_nothing_behind(kind):
    """A thousand tenants, each with a salt, through a pool of four blocks: memory follows the pool, not the tenants."""
    pool, cache = cache_of(kind, blocks=5)
    roots = [root_key([("salt", str(i))]) for i in range(1000)]
    for root in roots:
        store(pool, cache, list(range(8)), Prefix(root))
    sizes = [len(value) for value in vars(cache).values() if isinstance(value, dict)]
    assert max(sizes) <= 4
    assert [found(cache, list(range(8)), Prefix(root)) != [] for root in roots[-3:]] == [False, True, True]


def test_clearing_forgets_everything(kind):
    pool, cache = cache_of(kind)
    table = store(pool, cache, list(range(8)), release=False)
    store(pool, cache, list(range(50, 58)))
    cache.clear()
    assert found(cache, list(range(8))) == found(cache, list(range(50, 58))) == []
    pool.check([table])
    cache.check()
    assert pool.occupancy().cached == 0


def test_a_disagreement_with_the_pool_is_seen(kind):
    pool, cache = cache_of(kind)
    table = store(pool, cache, list(range(8)), release=False)
    pool.withdraw(table[1])
    with pytest.raises(BlockError, match="disagree"):
        cache.check()


def test_off_finds_nothing():
    pool, cache = cache_of("off")
    store(pool, cache, list(range(8)))
    assert found(cache, list(range(8))) == []
    assert pool.occupancy().free == pool.total


def test_hits_are_counted_once_a_request():
    _, cache = cache_of("hash")
    cache.stats.record(100, 64)
    cache.stats.record(50, 0)
    cache.stats.record(70, 64, resumed=True)
    assert (cache.stats.queries, cache.stats.hit_tokens, cache.stats.resumed_hit_tokens) == (2, 64, 64)
    assert cache.stats.hit_rate == 64 / 150


def test_an_unknown_kind_is_refused():
    with pytest.raises(EngineError, match="choose one of off, hash, radix"):
        make_prefix_cache("tree", BlockPool(4, 4))


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=25),
    blocks=st.integers(8, 24),
    eviction=st.sampled_from(["lru", "lfu"]),
    held=st.integers(0, 2),
)
def test_hash_chain_and_radix_tree_agree(prompts, blocks, eviction, held):
    """The same prompts through both, and a naive list of what was written. Two letters make many splits.

    The pool is too small, so blocks are given up; some sequences stay while others come and go.
    """
    sides = [cache_of(kind, blocks, eviction) for kind in ("hash", "radix")]
    tables: list[list[list[int]]] = [[], []]
    written: list[dict[int, tuple]] = [{}, {}]  # block -> everything up to its end
    for tokens in prompts:
        hits = []
        for (pool, cache), open_tables, contents in zip(sides, tables, written, strict=True):
            prefix, full = Prefix(root_key()), len(tokens) // SIZE
            hit = cache.match(prefix, tokens, full)
            hits.append(len(hit))
            for i, block in enumerate(hit):
                assert contents[block] == tuple(tokens[: (i + 1) * SIZE])
            pool.share(hit)
            while pool.available < full - len(hit) or len(open_tables) > held:
                pool.release(open_tables.pop(0))
            table = hit + pool.allocate(full - len(hit))
            contents.update({b: tuple(tokens[: (i + 1) * SIZE]) for i, b in enumerate(table)})
            cache.publish(prefix, tokens, table, len(hit), full)
            open_tables.append(table)
            pool.check(open_tables)
            cache.check()
        if not sides[0][0].evictions:  # afterwards the tree drops what lost its head, and the chain may find it again
            assert hits[0] == hits[1]
