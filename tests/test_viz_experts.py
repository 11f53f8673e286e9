"""Promise: the pictures of experts draw what they were given, inside their frame, and refuse what they cannot draw."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest
from matplotlib.patches import Rectangle

from minillm.viz.experts import Read, experts_read, routing_map, sorted_tiles, waiting_devices
from minillm.viz.widgets import png

EXPERTS, SOURCE, OWNERS = [2, 0, 0, 2, 0, -1], [1, 2, 4, 6, 0, 3, 6, 6, 5, 6, 6, 6], [0, 2, -1]


def texts(fig):
    return [text.get_text() for text in fig.findobj(plt.Text)]


def routing():
    return routing_map([[0, 3], [3, -1]], [[0.5, 0.5], [0.9, 0.1]], 5, "t", ["the", "cat"])


def read(**more):
    return experts_read(
        [1, 2, 4], [Read("a", 8, [2, 3, 5], [2, 3, 4]), Read("b", 4, [1, 2, 3], [1, 2, 2])], "t", **more
    )


def test_pictures_are_drawn_once_and_inside_their_frame():
    loads = {"even": [3, 3, 3], "skewed": [9, 0, 3]}
    tiles = sorted_tiles(EXPERTS, SOURCE, OWNERS, 2, "t")
    for fig in (routing(), read(), read(share=False, marks={"here": 2}), tiles, waiting_devices(loads, "t")):
        assert png(fig).startswith(b"\x89PNG")
        drawn, (width, height) = fig.get_tightbbox(), fig.get_size_inches()
        assert min(drawn.x0, drawn.y0) >= -0.01
        assert drawn.x1 <= width + 0.01
        assert drawn.y1 <= height + 0.01
    assert plt.get_fignums() == []


def test_a_line_for_each_choice_that_was_not_dropped_and_a_count_for_each_expert():
    fig = routing()
    assert len(fig.axes[0].lines) == 3
    widths = [line.get_linewidth() for line in fig.axes[0].lines]
    assert widths[2] > widths[0] == widths[1]
    assert texts(fig).count("2") >= 1
    assert {"the", "cat", "4"} <= set(texts(fig))


def test_read_is_in_percent_of_each_models_experts_or_in_experts():
    percent, plain = read().axes[0], read(share=False).axes[0]
    assert list(percent.lines[0].get_ydata()) == [25, 37.5, 62.5]
    assert list(percent.lines[3].get_ydata()) == [25, 50, 50]
    assert list(plain.lines[1].get_ydata()) == [2, 3, 4]
    assert "%" in percent.get_ylabel()


def test_sorted_rows_keep_their_tokens_and_padding_is_empty():
    fig = sorted_tiles(EXPERTS, SOURCE, OWNERS, 2, "t")
    boxes = [patch for patch in fig.axes[0].patches if isinstance(patch, Rectangle)]
    assert len(boxes) == len(EXPERTS) + len(SOURCE)
    assert [text for text in texts(fig) if text.startswith("t") and text[1:].isdigit()] == [
        f"t{i}" for i in [0, 0, 1, 1, 2, 2, 0, 1, 2, 0, 1, 2]
    ]
    assert {"expert 0", "expert 2", "nobody"} <= set(texts(fig))


def test_every_device_waits_until_the_fullest_is_done():
    ax = waiting_devices({"skewed": [9, 0, 3]}, "t").axes[0]
    assert [bar.get_y() + bar.get_height() for bar in ax.patches[:3]] == [9, 9, 9]
    assert [bar.get_height() for bar in ax.patches[3:]] == [9, 0, 3]
    assert "skewed: × 2.25" in texts(ax.figure)


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="beyond the 2"):
        routing_map([[2]], [[1.0]], 2, "t")
    with pytest.raises(ValueError, match="each of the 3"):
        experts_read([1, 2, 4], [Read("a", 8, [1, 2], [1, 2, 3])], "t")
