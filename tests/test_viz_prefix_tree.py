"""The tree that is drawn is the tree of the prompts, and the engine's own; the pictures show what they were given."""

from __future__ import annotations

import warnings

import matplotlib.pyplot as plt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.patches import Rectangle

from minillm.block_pool import BlockPool
from minillm.prefix_cache import Prefix, RadixCache, root_key
from minillm.viz.prefix_tree import Link, hash_chain, hit_bars, prefix_tree, prefix_trees, radix_edges, walk
from minillm.viz.widgets import png

AGENT = {f"step {k}": [("a", i) for i in range(3 * k)] for k in (1, 2, 3)}
CHATS = {f"user {u}": [("s", 0), ("s", 1), (u, 0), (u, 1)] for u in "abc"}
LINKS = {
    "first": [Link("You are", "3fa2"), Link("Hi", "", "unpublished")],
    "second": [Link("You are", "3fa2", "found")],
}

prompts = st.dictionaries(st.text("xyz", min_size=1, max_size=3), st.lists(st.integers(0, 2), max_size=8), max_size=8)


def texts(fig) -> list[str]:
    return [text.get_text() for text in fig.findobj(plt.Text) if text.get_text()]


@settings(max_examples=200, deadline=None)
@given(prompts)
def test_every_prefix_lies_on_one_edge_with_all_its_users(drawn):
    found = {}

    def collect(edges, before):
        for edge in edges:
            assert edge.start == len(before)
            for i in range(len(edge.blocks)):
                found[(*before, *edge.blocks[: i + 1])] = sorted(edge.users)
            collect(edge.children, (*before, *edge.blocks))

    collect(radix_edges(drawn), ())
    prefixes = {tuple(p[: i + 1]) for p in drawn.values() for i in range(len(p))}
    assert found == {x: sorted(n for n, p in drawn.items() if tuple(p[: len(x)]) == x) for x in prefixes}


@settings(max_examples=100, deadline=None)
@given(prompts)
def test_edges_are_split_only_where_prompts_part_or_end(drawn):
    ends = {len(p): p for p in drawn.values()}
    for edge in walk(radix_edges(drawn)):
        assert len(edge.children) != 1 or any(len(drawn[name]) == edge.end for name in edge.users), ends


@settings(max_examples=60, deadline=None)
@given(prompts)
def test_the_picture_is_the_engines_tree(drawn):
    """One block of one token for each entry; the engine's tree is not split where a prompt merely ends."""
    pool = BlockPool(128, 1)
    cache = RadixCache(pool)
    for tokens in drawn.values():
        hits = cache.match(Prefix(root_key()), tokens, len(tokens))
        pool.share(hits)
        table = hits + pool.allocate(len(tokens) - len(hits))
        cache.publish(Prefix(root_key()), tokens, table, len(hits), len(tokens))
    edges = cache.edges(root_key())
    assert sum(len(blocks) for _, blocks in edges) == sum(len(e.blocks) for e in walk(radix_edges(drawn)))
    assert sum(1 for depth, _ in edges if depth == 0) == len(radix_edges(drawn))


def test_blocks_asked_for_and_different_are_counted():
    heads = [t for t in texts(prefix_trees({"chats": CHATS, "agent": AGENT}, "t")) if "asked" in t]
    assert heads == [
        "chats: 12 blocks asked for, 8 different: 33% found",
        "agent: 18 blocks asked for, 9 different: 50% found",
    ]


def test_each_different_block_is_drawn_once_and_named_where_it_ends():
    fig = prefix_tree(AGENT | CHATS, "one title")
    assert len([p for p in fig.axes[0].patches if isinstance(p, Rectangle)]) == 9 + 8
    assert {*AGENT, *CHATS, "one title"} <= set(texts(fig))


def test_the_same_prompt_many_times_is_one_row_with_a_count():
    assert "a, b and 2 more" in texts(prefix_tree({key: [1, 2] for key in "abcd"}, "t"))


def test_a_chain_shows_texts_keys_and_only_the_states_there_are():
    shown = texts(hash_chain(LINKS, "t"))
    assert {"first", "second", "You are", "3fa2", "found in the cache", "not full: no key"} <= set(shown)
    only = texts(hash_chain({"a": [Link("x", "1", "found")]}, "t"))
    assert "not full: no key" not in only


@pytest.mark.parametrize("rows", [{}, {"a": []}, {"a": [Link("x", "1", "lost")]}])
def test_a_chain_of_nothing_or_an_unknown_state_is_refused(rows):
    with pytest.raises(ValueError, match="states found, computed, unpublished"):
        hash_chain(rows, "t")


def test_bars_add_up_to_what_was_asked():
    ax = hit_bars([0, 2, 3], [4, 4, 3], "t").axes[0]
    assert [round(b.get_height() + b.get_y(), 6) for b in ax.patches[3:]] == [4, 4, 3]
    assert ax.get_xlabel()
    assert ax.get_ylabel() == "blocks"


@pytest.mark.parametrize(
    "draw",
    [
        lambda: prefix_tree(AGENT, "t"),
        lambda: prefix_trees({"chats": CHATS, "agent": AGENT, "none": {}}, "t"),
        lambda: prefix_tree({}, "t"),
        lambda: hash_chain(LINKS, "t"),
        lambda: hit_bars([1, 2], [2, 2], "t"),
    ],
)
def test_a_picture_is_drawn_once_without_complaint_and_keeps_its_labels_inside(draw):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fig = draw()
        assert png(fig).startswith(b"\x89PNG")
    assert plt.get_fignums() == []
    fig.draw_without_rendering()
    box = fig.bbox
    drawn = [t for ax in fig.axes for t in (*ax.texts, ax.title, ax._left_title, ax.xaxis.label, ax.yaxis.label)]
    for text in [t for t in drawn if t.get_text()]:
        extent = text.get_window_extent()
        assert extent.x0 >= box.x0 - 1, text
        assert extent.x1 <= box.x1 + 1, text
