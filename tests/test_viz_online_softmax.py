"""Promise: the steps of an online softmax end at the softmax of the whole row, and their pictures show those steps."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot as plt

from minillm.viz.online_softmax import online_explorer, online_softmax, online_steps, online_walk

ROW = [0.4, -0.8, 1.1, 0.2, 1.9, 0.3, -0.5, 2.4, 1.0]
NOTHING = float("-inf")


@given(st.lists(st.floats(-300, 300), min_size=1, max_size=40), st.integers(1, 50))
def test_last_step_is_the_whole_row(scores, tile):
    last = online_steps(scores, tile)[-1]
    assert last.peak == max(scores)
    assert last.stop == len(scores)
    assert math.isclose(last.mass, math.fsum(math.exp(s - max(scores)) for s in scores), rel_tol=1e-9)


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=40), st.integers(1, 9))
def test_steps_hang_together(scores, tile):
    steps = online_steps(scores, tile)
    assert [s.start for s in steps] == list(range(0, len(scores), tile))
    assert steps[0].before == NOTHING
    assert steps[0].correction == 0
    for old, new in itertools.pairwise(steps):
        assert new.before == old.peak <= new.peak
        assert new.correction == math.exp(old.peak - new.peak) <= 1


def test_masked_scores_weigh_nothing():
    first, second = online_steps([NOTHING, NOTHING, 1.0, NOTHING], 2)
    assert (first.peak, first.mass, first.correction) == (NOTHING, 0, 0)
    assert (second.peak, second.mass, second.correction) == (1.0, 1.0, 0)


def test_tile_below_one_is_refused():
    with pytest.raises(ValueError, match="tile is 0"):
        online_steps(ROW, 0)


def test_walk_has_a_panel_for_each_tile():
    for tile, panels in ((2, 5), (4, 3), (9, 1)):
        shown = [ax for ax in online_walk(ROW, tile, "walk").axes if ax.get_visible()]
        assert len(shown) == panels


def test_a_step_says_what_changed():
    assert "× 0.27" in online_softmax(ROW, 4, 2).axes[0].get_title(loc="left")
    assert "m stays 2.4, × 1" in online_softmax(ROW, 4, 3).axes[0].get_title(loc="left")
    assert "Step 3 of 3" in online_softmax(ROW, 4, 99).axes[0].get_title(loc="left")


def test_a_row_with_nothing_yet_can_be_drawn():
    online_softmax([NOTHING] * 4 + ROW, 4, 1).canvas.draw()
    online_walk([NOTHING] * 4 + ROW, 4, "walk").canvas.draw()


def test_explorer_moves_step_and_tile():
    explorer = online_explorer(ROW, [1, 3, 9], tile=3, step=2)
    before = explorer.widget and explorer.image.value
    explorer.set("step", 3)
    explorer.set("tile", 9)
    assert explorer.image.value != before
    assert explorer.message.value == ""
    assert list(explorer.sliders) == ["step", "tile"]
    assert plt.get_fignums() == []
