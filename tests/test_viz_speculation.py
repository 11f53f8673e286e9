"""Promise: the pictures of speculation draw every verdict that they were given, and refuse what cannot have been."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image

from minillm.viz.speculation import Verified, chips_of, draft_animation, draft_explorer, draft_map, residual_bars

STEPS = [Verified([" the", " cat", " sat", "\n"], 2, " on"), Verified([" a"], 1, "."), Verified([], 0, " So")]


def test_a_chip_for_each_verdict():
    assert [chip.state for chip in chips_of(STEPS[0])] == ["kept", "kept", "refused", "unread", "new"]
    assert [chip.state for chip in chips_of(STEPS[1])] == ["kept", "new"]
    assert [chip.state for chip in chips_of(STEPS[2])] == ["new"]
    assert [chip.state for chip in chips_of(STEPS[0], judged=False)] == ["guess"] * 4


def test_more_kept_than_drafted_is_refused():
    with pytest.raises(ValueError, match="2 kept of 1"):
        chips_of(Verified([" a"], 2, "."))


def test_the_map_counts_tokens_and_the_slider_shows_all_at_first():
    assert "3 steps of the target, 6 tokens" in draft_map(STEPS, "t").axes[0].get_title(loc="left")
    assert draft_explorer(STEPS).values == {"shown": 3}


def test_the_animation_is_two_frames_a_step_and_small():
    markup = draft_animation(STEPS).markup
    picture = Image.open(io.BytesIO(base64.b64decode(markup.split("base64,")[1].split('"')[0])))
    assert picture.n_frames <= 6
    assert len(markup) < 50_000


def test_kept_and_replaced_stack_up_to_the_target():
    p, q = [0.4, 0.3, 0.3], [0.1, 0.2, 0.7]
    right = residual_bars(list("abc"), p, q, "t").axes[1]
    kept, replaced = (bars.datavalues for bars in right.containers[:2])
    assert list(kept + replaced) == pytest.approx(p)
