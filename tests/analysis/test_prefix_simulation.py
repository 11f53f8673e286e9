"""A replayed trace finds what a dictionary would: exact rates by hand, bounds, and files that are refused by line."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.analysis.prefix_simulation import (
    TraceRequest,
    distinct_blocks,
    hit_rate_curve,
    load_trace,
    replay,
    to_jsonl,
)
from minillm.errors import EngineError, MinillmError, RequestError

SIZE = 4


def request(*ids: int, missing: int = 0, at: float = 0) -> TraceRequest:
    return TraceRequest(at, len(ids) * SIZE - missing, 1, ids)


def rates(requests, capacity=None, eviction="lru"):
    return replay(requests, capacity, eviction, SIZE)


# Each path through a tree of two branches a level is a prompt; an id names everything up to it, as a hash does.
paths = st.lists(st.integers(0, 1), min_size=1, max_size=6)
traces = st.lists(paths, min_size=1, max_size=30).map(
    lambda drawn: [request(*(int("1" + "".join(map(str, p[: i + 1])), 2) for i in range(len(p)))) for p in drawn]
)


def by_sets(requests) -> list[int]:
    """Hits of an endless cache, from the set of everything seen."""
    seen, hits = set(), []
    for r in requests:
        hits.append(next((i for i, h in enumerate(r.hash_ids) if h not in seen), len(r.hash_ids)))
        seen |= set(r.hash_ids)
    return hits


def by_lists(requests, capacity: int) -> list[int]:
    """Hits of an LRU cache, from a list ordered by last use, the head of a prompt used after its tail."""
    order, hits = [], []
    for r in requests:
        ids = r.hash_ids[:capacity]
        hits.append(next((i for i, h in enumerate(ids) if h not in order), len(ids)))
        order = [h for h in order if h not in ids] + list(reversed(ids))
        order = order[max(0, len(order) - capacity) :]
    return hits


def test_rates_by_hand():
    found = rates([request(1, 2, 3), request(1, 2, 4, 5), request(6), request(1, 2, 3)])
    assert (found.blocks, found.hit_blocks) == ([3, 4, 1, 3], [0, 2, 0, 3])
    assert found.block_hit_rate == 5 / 11
    assert found.hit_tokens == [0, 8, 0, 11]  # the last token of a prompt is always computed
    assert found.token_hit_rate == 19 / 44
    assert found.request_rates == [0, 0.5, 0, 11 / 12]


def test_a_hole_ends_the_match():
    assert rates([request(1, 2, 3), request(1, 9, 3)]).hit_blocks == [0, 1]


def test_the_last_block_may_be_partly_filled():
    found = rates([request(1, 2, missing=3), request(1, 2, missing=3), request(1, missing=2)])
    assert found.hit_tokens == [0, 4, 1]
    assert found.tokens == [5, 5, 2]


@settings(max_examples=80, deadline=None)
@given(traces)
def test_without_a_limit_everything_seen_is_found(requests):
    assert rates(requests).hit_blocks == by_sets(requests)
    full = distinct_blocks(requests)
    for eviction in ("lru", "lfu"):
        assert rates(requests, full, eviction).hit_blocks == by_sets(requests)
        assert rates(requests, full, eviction).evictions == 0


@settings(max_examples=150, deadline=None)
@given(traces, st.integers(1, 20))
def test_least_recently_used_is_what_it_says(requests, capacity):
    assert rates(requests, capacity).hit_blocks == by_lists(requests, capacity)


@settings(max_examples=80, deadline=None)
@given(traces, st.integers(6, 20), st.sampled_from(["lru", "lfu"]))
def test_no_cache_finds_more_than_an_endless_one(requests, capacity, eviction):
    limited, endless = rates(requests, capacity, eviction), rates(requests)
    assert all(a <= b for a, b in zip(limited.hit_blocks, endless.hit_blocks, strict=True))


def test_a_small_cache_gives_up_the_oldest():
    a, b, c = request(1, 2), request(3, 4), request(5, 6)
    assert rates([a, b, c, a], 4).hit_blocks == [0, 0, 0, 0]
    assert rates([a, b, a, c, a], 4).hit_blocks == [0, 0, 2, 0, 2]
    assert rates([a, b, c, b], 5).hit_blocks == [0, 0, 0, 2]


def test_tails_go_before_heads():
    """Five blocks, two of them taken: what is left of the older prompt is its head, and that can be found."""
    assert rates([request(1, 2, 3, 4), request(7, 8, 9), request(1, 2, 3, 4)], 5).hit_blocks == [0, 0, 2]


def test_frequency_keeps_a_hot_set_through_a_scan():
    hot, trace = request(1, 2, 3), []
    for i in range(30):
        scan = (request(*range(start, start + 10)) for start in (100 + 20 * i, 110 + 20 * i))
        trace += [hot, hot, *scan]
    lru, lfu = rates(trace, 16), rates(trace, 16, "lfu")
    assert lru.hit_blocks[-4:] == [0, 3, 0, 0]
    assert lfu.hit_blocks[-4:] == [3, 3, 0, 0]


def test_a_prompt_longer_than_the_cache_leaves_its_head():
    assert rates([request(1, 2, 3, 4), request(1, 2, 3, 4)], 2).hit_blocks == [0, 2]


def test_a_curve_ends_at_the_endless_cache():
    trace = [request(i % 7, 10 + i % 7, 20 + i % 7) for i in range(40)]
    curve = hit_rate_curve(trace, [3, 9, 21, 1000], block_size=SIZE)
    assert curve[0] == 0
    assert curve[-2:] == [rates(trace).block_hit_rate] * 2


def test_a_file_comes_back_as_it_was_written(tmp_path):
    trace = [request(1, 2, at=5), request(1, 3, missing=1, at=9.5)]
    path = to_jsonl(trace, tmp_path / "trace.jsonl")
    assert load_trace(path, SIZE) == trace
    assert load_trace(path, SIZE, limit=1) == trace[:1]


GOOD = {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": list(range(46, 60))}


def test_the_published_schema_is_read(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + json.dumps(GOOD) + "\n")
    assert replay(load_trace(path)).token_hit_rate == 6954 / (2 * 6955)


@pytest.mark.parametrize(
    "change",
    [
        {"hash_ids": [1, 2]},
        {"hash_ids": [5] * 14},
        {"hash_ids": [-1, *range(13)]},
        {"hash_ids": ["a"] * 14},
        {"hash_ids": None},
        {"hash_ids": [True, *range(2, 15)]},
        {"input_length": 0, "hash_ids": []},
        {"input_length": 69.5},
        {"output_length": -1},
        {"timestamp": "now"},
        {"timestamp": float("nan")},
    ],
)
def test_a_line_that_contradicts_itself_is_named(tmp_path, change):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD | change) + "\n")
    with pytest.raises(RequestError, match=r"t\.jsonl, line 2: ") as error:
        load_trace(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("line", ["{", "[1, 2]", "3", '{"timestamp": 1}', "[" * 100_000])
def test_a_line_of_another_form_is_named(tmp_path, line):
    path = tmp_path / "t.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(RequestError, match="line 1"):
        load_trace(path)


def test_missing_empty_and_binary_files_are_refused(tmp_path):
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("\n")
    binary.write_bytes(b"\xff\xfe\x00")
    for path, text in ((tmp_path / "none", "cannot be read"), (empty, "holds no requests"), (binary, "cannot be read")):
        with pytest.raises(RequestError, match=text):
            load_trace(path)


def test_impossible_settings_are_refused():
    trace = [request(1, 2)]
    for capacity in (0, -3, 2.5, True):
        with pytest.raises(MinillmError, match="capacity"):
            replay(trace, capacity, block_size=SIZE)
    with pytest.raises(EngineError, match="eviction"):
        replay(trace, 4, "random", SIZE)
    with pytest.raises(RequestError, match="block_size"):
        replay(trace, 4, block_size=0)
    with pytest.raises(RequestError, match="block size of the trace"):
        replay(trace, 4)


def test_no_requests_have_no_rate():
    assert (rates([]).block_hit_rate, rates([]).token_hit_rate) == (0.0, 0.0)
