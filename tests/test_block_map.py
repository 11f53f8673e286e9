"""The block map says of every step what the pool itself would have said, from the event log alone."""

import base64
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from PIL import Image

from minillm.allocators import PagedAllocator
from minillm.batching import Scheduler, SchedulerConfig
from minillm.block_pool import BlockPool
from minillm.events import EventLog
from minillm.request import Request
from minillm.sampling_params import SamplingParams
from minillm.viz import block_map
from minillm.viz.block_map import CACHED, FREE, block_animation, block_explorer, block_history, block_strip
from minillm.viz.style import PAPER
from tests.shadow import ShadowRunner

BLOCKS = 24
LOADS = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(1, 3), st.booleans()), min_size=1, max_size=8
)
SETTINGS = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(20, BLOCKS),
        "max_num_batched_tokens": st.integers(4, 40),
        "prefix_cache": st.sampled_from(["off", "hash", "radix"]),
        "preemption": st.sampled_from(["recompute", "swap"]),
        "sliding_window": st.sampled_from([None, 6]),
    }
)


def played(load, options):
    """The log of a whole run, and (holders, cached blocks) of each step as the scheduler itself knew them."""
    scheduler = Scheduler(SchedulerConfig(block_size=4, max_num_seqs=6, num_host_blocks=20, **options))
    truth = {}

    def look(event):
        if event.kind == "scheduled":
            holders = {}
            for request in scheduler.running:
                for block in filter(None, request.block_ids):
                    holders.setdefault(block, set()).add(request.label)
            truth[event.step] = holders, set(scheduler.pool._cached)

    scheduler.events.listeners.append(look)
    for i, (prompt, output, n, common) in enumerate(load):
        ids = list(range(30)) if common else [100 * i + t for t in range(30)]
        scheduler.add(Request(str(i), ids[:prompt], SamplingParams(max_tokens=output, n=n)))
    ShadowRunner(scheduler).run()
    return scheduler.events, truth


@settings(max_examples=60, deadline=None)
@given(LOADS, SETTINGS)
def test_holders_are_those_of_the_scheduler_at_every_step(load, options):
    events, truth = played(load, options)
    history = block_history(events, options["num_blocks"])
    assert history.steps[:-1] == list(truth)
    for step, (holders, cached) in truth.items():
        frame = history.frame(step)
        assert {block: set(cell) for block, cell in enumerate(frame) if cell} == holders
        drawn = {block for block, cell in enumerate(frame) if cell is CACHED}
        assert drawn == cached
        counts = history.counts(step)
        assert counts["held"] + counts["cached"] + counts["free"] == options["num_blocks"] - 1
    assert not any(history.frames[-1])


def test_a_block_is_cached_from_its_release_until_it_is_taken_back_or_evicted():
    load = [(22, 3, 1, True), (14, 20, 1, False), (22, 9, 1, True), (30, 3, 1, False)]
    events, truth = played(load, {"num_blocks": 13, "max_num_batched_tokens": 40})
    history = block_history(events, 13)
    drawn = {step: {b for b, cell in enumerate(history.frame(step)) if cell is CACHED} for step in truth}
    assert sum(map(bool, drawn.values())) > 5
    assert events.of("evicted")
    for step, (_, cached) in truth.items():
        assert drawn[step] == cached


def test_a_shared_prompt_and_its_copy_on_write_are_seen():
    events, _ = played([(6, 4, 3, True)], {"num_blocks": 20})
    history = block_history(events, 20)
    assert history.owners == ["0", "0/1", "0/2"]
    first, second = history.frame(1), history.frame(2)
    assert [cell for cell in first if cell] == [("0",), ("0",)]
    assert [len(cell) for cell in second if cell] == [3, 1, 1, 1]
    assert history.counts(2) == {"held": 4, "shared": 1, "cached": 0, "free": 15}


def test_a_pool_played_by_hand_has_a_frame_for_each_event():
    log = EventLog()
    pool = BlockPool(6, 4, events=log)
    a = pool.allocate(2, "a")
    b = pool.allocate(1, "b")
    pool.release(a, "a")
    pool.release(b, "b")
    history = block_history(log, 6)
    assert [history.counts(step)["held"] for step in history.steps] == [2, 3, 1, 0]
    assert history.frame(1)[1:4] == [("a",), ("a",), ("b",)]
    assert history.frame(99) == [FREE] * 6


def test_a_log_without_a_pool_is_refused():
    with pytest.raises(ValueError, match="beginning"):
        block_history(EventLog(), 4)
    assert PagedAllocator(64).pool.events is None


def example():
    return block_history(played([(20, 12, 2, False), (9, 20, 1, True)], {"num_blocks": 24})[0], 24)


def test_the_map_draws_each_block_in_its_holders_colour():
    history = example()
    ax = block_map.block_map(history, 3, "title", columns=8).axes[0]
    squares, cells = ax.patches, history.frame(3)[1:]
    assert len(squares) == 23
    colours = [square.get_facecolor()[:3] for square in squares]
    assert all((colour == to_rgb(PAPER)) == (cell == FREE) for colour, cell in zip(colours, cells, strict=True))
    alone = {cell[0]: colour for cell, colour in zip(cells, colours, strict=True) if cell and len(cell) == 1}
    assert len(set(alone.values())) == len(alone) >= 2
    assert {text.get_text() for text in ax.texts} >= set(alone) | {"×2"}
    counts = history.counts(3)
    assert ax.get_title(loc="left") == f"title\nstep 3: {counts['held']} held, {counts['shared']} shared, " + (
        f"{counts['free']} free"
    )


def test_the_strip_has_a_row_for_each_block_and_a_column_for_each_step():
    history = example()
    ax = block_strip(history, "title").axes[0]
    assert ax.images[0].get_array().shape == (23, len(history.steps), 3)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "block id")


def test_the_slider_starts_at_the_fullest_step():
    history = example()
    explorer = block_explorer(history)
    assert explorer.choices == {"step": history.steps}
    held = [history.counts(step)["held"] for step in history.steps]
    assert history.counts(explorer.values["step"])["held"] == max(held)
    explorer.widget  # noqa: B018 -- built on demand
    explorer.set("step", history.steps[0])
    assert explorer.message.value == ""


def test_the_animation_has_a_frame_for_each_chosen_step_and_stays_small():
    history = example()
    for most in (200, 5):
        page = block_animation(history, columns=8, most=most)
        picture = Image.open(io.BytesIO(base64.b64decode(page.markup.split("base64,")[1].split('"')[0])))
        assert len(page.markup) < 100_000
        assert 2 <= picture.n_frames <= min(most + 1, len(history.steps))
    assert f"to step {history.steps[-1]}" in page.text
