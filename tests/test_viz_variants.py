"""Promise: the pictures of attention variants draw what they were given, and refuse what they cannot draw."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest
from matplotlib.patches import Rectangle

from minillm.viz.variants import KINDS, Kept, cache_growth, remembered
from minillm.viz.widgets import png

TOKENS = [100, 1000, 10000]
CURVES = {"grows": [1e6, 1e7, 1e8], "flat": [5e6, 5e6, 5e6]}


def texts(fig):
    return [text.get_text() for text in fig.findobj(plt.Text)]


def pictures():
    every = [Kept(kind, kind, 4, f"{kind} kept") for kind in KINDS]
    return [
        remembered(every, "t"),
        cache_growth(TOKENS, CURVES, 1000, "t"),
        cache_growth(TOKENS, CURVES, 1000, "t", 1e9),
    ]


def test_pictures_are_drawn_once_and_inside_their_frame():
    for fig in pictures():
        assert png(fig).startswith(b"\x89PNG")
        drawn, (width, height) = fig.get_tightbbox(), fig.get_size_inches()
        assert min(drawn.x0, drawn.y0) >= -0.01
        assert drawn.x1 <= width + 0.01
        assert drawn.y1 <= height + 0.01
    assert plt.get_fignums() == []


@pytest.mark.parametrize(
    ("kind", "stores", "boxes"), [("pairs", 8, 80), ("pairs", 2, 20), ("row", 1, 10), ("state", 8, 72)]
)
def test_a_box_for_each_thing_kept_of_five_tokens(kind, stores, boxes):
    fig = remembered([Kept("a", kind, stores, "b")], "t")
    assert sum(isinstance(patch, Rectangle) for patch in fig.axes[0].patches) == boxes
    assert {"a", "b", "t"} <= set(texts(fig))


def test_every_query_head_is_joined_to_a_store():
    fig = remembered([Kept("a", "pairs", 2, "")], "t", heads=8)
    lines = [line for line in fig.axes[0].lines if len(line.get_xdata()) == 2]
    assert len(lines) == 8
    assert len({line.get_xdata()[1] for line in lines}) == 2


@pytest.mark.parametrize("one", [Kept("a", "cube", 1, ""), Kept("a", "pairs", 3, "")])
def test_what_cannot_be_drawn_is_refused_by_name(one):
    with pytest.raises(ValueError, match="a: "):
        remembered([one], "t")


def test_growth_has_units_the_bytes_at_the_length_and_how_many_fit():
    fig = cache_growth(TOKENS, CURVES, 1000, "t", 1e9)
    left, right = fig.axes
    assert left.get_xlabel() == "sequence (tokens)"
    assert "GB" in left.get_ylabel()
    assert right.get_xlabel() == "GB at 1,000 tokens"
    assert {"10 MB, 100 fit", "5 MB, 200 fit"} <= set(texts(fig))
    assert [list(line.get_ydata()) for line in left.lines if len(line.get_xdata()) == 3] == [
        [value / 1e9 for value in curve] for curve in CURVES.values()
    ]


@pytest.mark.parametrize(("curves", "at"), [(CURVES, 999), ({"short": [1.0]}, 1000)])
def test_growth_needs_a_value_for_each_length(curves, at):
    with pytest.raises(ValueError, match="each curve"):
        cache_growth(TOKENS, curves, at, "t")
