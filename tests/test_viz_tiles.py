"""The tile machine computes what the program says, writes every access down, and its pictures show what happened."""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from minillm.viz.style import RED
from minillm.viz.tiles import _READ, _WRITE, TileError, TileMachine, tile_explorer, tile_walk

RECORD = Path(__file__).parents[1] / "figures/measurements/chapter-06-compiled.json"


def add_program(m, x, y, out, n, BLOCK, masked):
    i = m.program_id(0) * BLOCK + m.arange(0, BLOCK)
    mask = i < n if masked else None
    m.store(out + i, m.load(x + i, mask=mask) + m.load(y + i, mask=mask), mask=mask)


def added(n=49, BLOCK=16, masked=True, gap=0):
    m = TileMachine(gap)
    pointers = [m.place(name, np.arange(n)) for name in ("x", "y", "out")]
    m.place("neighbour", np.full(64, 7))
    m.run(add_program, [-(-n // BLOCK)], *pointers, n, BLOCK, masked)
    return m


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.sampled_from([1, 2, 8, 64]), st.integers(0, 5))
def test_a_masked_program_touches_its_own_numbers_once(n, BLOCK, gap):
    m = added(n, BLOCK, gap=gap)
    assert m.read("out").tolist() == (2 * np.arange(n)).tolist()
    assert m.strays() == []
    assert [m.moved_bytes("load", name) for name in ("x", "y", "out")] == [4 * n, 4 * n, 0]
    assert m.moved_bytes("store", "out") == m.moved_bytes("store") == 4 * n


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.sampled_from([2, 8, 16]))
def test_without_the_mask_the_store_lands_in_the_next_buffer(n, BLOCK):
    m, over = added(n, BLOCK, masked=False), -n % BLOCK
    assert len(m.strays()) == 3 * over
    assert int((m.read("neighbour") != 7).sum()) <= over
    assert m.read("neighbour")[over:].tolist() == [7.0] * (64 - over)
    places = {place for _, kind, place in m.strays() if kind == "store"}
    start = m.buffers["neighbour"].start
    assert places == set(range(start, start + over))


def test_masked_lanes_give_other_and_nan_without_it():
    m = TileMachine()
    x, mask = m.place("x", [1, 2]), np.arange(4) < 2
    loaded = []
    m.run(lambda m: loaded.append((m.load(x + m.arange(0, 4), mask, other=5), m.load(x + m.arange(0, 4), mask))), [1])
    with_other, without = loaded[0]
    assert with_other.tolist() == [1, 2, 5, 5]
    assert np.isnan(without[2:]).all()


def test_a_grid_of_two_dimensions_runs_every_program_once():
    m, seen = TileMachine(), []
    m.run(lambda m: seen.append((m.program_id(0), m.program_id(1), m.num_programs(1))), (2, 3))
    assert seen == [(i, j, 3) for i in range(2) for j in range(3)]


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (lambda m: m.arange(0, 12), "power of two"),
        (lambda m: m.load(4), "illegal memory access"),
        (lambda m: m.store(-1, 0.0), "illegal memory access"),
    ],
)
def test_what_cannot_run_says_why(program, says):
    m = TileMachine()
    m.place("x", [0, 0, 0])
    with pytest.raises(TileError, match=says):
        m.run(program, [1])


def faces(fig):
    return [tuple(round(part, 4) for part in patch.get_facecolor()[:3]) for patch in fig.axes[0].patches]


@pytest.mark.parametrize(("program", "masked", "reads", "writes", "strays"), [(1, True, 32, 16, 0), (3, True, 2, 1, 0)])
def test_the_picture_colours_what_the_program_touched(program, masked, reads, writes, strays):
    fig = tile_walk(added(masked=masked), program)
    colours = faces(fig)
    for colour, count in ((_READ, reads), (_WRITE, writes), (to_rgb(RED), strays)):
        assert colours.count(tuple(round(part, 4) for part in colour)) == count
    assert sum(bool(p.get_hatch()) for p in fig.axes[0].patches if isinstance(p, Rectangle)) == (
        45 if program == 3 else 0
    )
    assert plt.get_fignums() == []


def test_strays_are_red_where_they_were_meant_and_where_they_landed():
    colours = faces(tile_walk(added(masked=False), 3))
    assert colours.count(tuple(round(part, 4) for part in to_rgb(RED))) == 2 * 45


@pytest.mark.parametrize(
    ("masked", "program", "seen"),
    [(True, 1, "all 16 lanes at work"), (True, 3, "15 of 16 lanes masked off"), (False, 3, "45 accesses to another")],
)
def test_the_title_says_what_there_is_to_see(masked, program, seen):
    assert seen in tile_walk(added(masked=masked), program).axes[0].get_title(loc="left")


@pytest.mark.parametrize("program", [0, 3])
def test_no_label_leaves_the_picture(program):
    fig = tile_walk(added(masked=False), program)
    fig.draw_without_rendering()
    drawn, (width, height) = fig.get_tightbbox(), fig.get_size_inches()
    assert min(drawn.x0, drawn.y0) >= -0.01
    assert drawn.x1 <= width + 0.01
    assert drawn.y1 <= height + 0.01


def test_the_controls_draw_anew_and_a_program_that_is_not_there_is_told():
    explorer = tile_explorer(lambda BLOCK: added(BLOCK=BLOCK), {"BLOCK": [16, 64], "program": [0, 3]})
    assert explorer.widget is not None
    before = explorer.image.value
    explorer.set("program", 3)
    after = explorer.image.value
    assert after != before
    explorer.set("BLOCK", 64)
    assert "no program" in explorer.message.value
    assert explorer.image.value == after


def test_the_recorded_compilation_holds_what_chapter_06_shows_without_triton():
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    life, long = record["life"], record["long"]
    assert list(life) == ["triton", "aligned", "odd length", "shifted"]
    assert [life[name]["ptx"].count(" ld.global") for name in list(life)[1:]] == [4, 16, 16]
    assert {"ttir", "ttgir", "llir", "sass"} <= life["aligned"].keys()
    assert [numbers for numbers, _, _ in long] == [32768, 65536]
    assert long[0][2] == 0 < long[1][2]
