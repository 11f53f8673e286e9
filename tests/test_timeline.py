"""The pictures of a schedule show what the log says, with labels that stay inside."""

from __future__ import annotations

import warnings

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from minillm.analysis.history import SLO, Part, histories
from minillm.viz.timeline import COLOURS, gantt, merged, seating, slot_timeline, step_view
from minillm.viz.widgets import png
from tests.schedules import Job, play

CROWD = [Job(12, 14), Job(10, 12, 1), Job(9, 12, 2), Job(8, 14, 6)]
TIGHT = {"num_blocks": 14, "watermark": 0, "max_num_batched_tokens": 12, "prefix_cache": "off"}


def texts(fig: Figure) -> list[str]:
    return [text.get_text() for text in fig.findobj(Text)]


def bars(ax) -> list[tuple[float, float, float]]:
    """(lane, from, to) of every bar."""
    return [
        (round(p.get_y() + p.get_height() / 2), p.get_x(), p.get_x() + p.get_width())
        for p in ax.patches
        if p.get_width()
    ]


def drawn(**options):
    return play(CROWD, **TIGHT, **options).events


FIGURES = {
    "gantt": lambda: gantt(drawn(), "t"),
    "gantt with verdicts": lambda: gantt(drawn(), "t", SLO(0.1, 0.02)),
    "gantt in steps": lambda: gantt(drawn(preemption="swap", num_host_blocks=30), "t", SLO(5, 1.5), by="step"),
    "slots": lambda: slot_timeline({"static": drawn(continuous_batching=False), "continuous": drawn()}, 8, "t"),
    "a step": lambda: step_view(drawn(), 8),
    "a step that was not": lambda: step_view(drawn(), 999),
    "nobody": lambda: gantt([], "t"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_picture_is_drawn_without_complaint_and_no_label_leaves_it(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fig = FIGURES[name]()
        assert png(fig).startswith(b"\x89PNG")
    assert plt.get_fignums() == []
    fig.draw_without_rendering()
    drawn_box, (width, height) = fig.get_tightbbox(), fig.get_size_inches()
    assert min(drawn_box.x0, drawn_box.y0) >= -0.01
    assert drawn_box.x1 <= width + 0.01
    assert drawn_box.y1 <= height + 0.01


def test_lanes_are_requests_and_bars_are_their_parts():
    events = drawn()
    fig = gantt(events, "Who waits for whom")
    ax = fig.axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0", "1", "2", "3"]
    assert (ax.get_title(loc="left"), ax.get_ylabel(), ax.get_xlabel()) == (
        "Who waits for whom",
        "request",
        "time (ms)",
    )
    wanted = [
        (lane, 1e3 * part.start, 1e3 * part.end) for lane, life in enumerate(histories(events)) for part in life.parts
    ]
    for got, want in zip(sorted(bars(ax)), sorted(wanted), strict=True):
        assert got == pytest.approx(want)


def test_every_kind_has_a_colour_and_only_those_seen_are_explained():
    labels = texts(gantt(drawn(), "t"))
    assert {"queued", "prefill", "decode", "preempted, cache lost", "computed again"} <= set(labels)
    assert "swapped out" not in labels
    assert len(set(map(str, COLOURS.values()))) == len(COLOURS)


def test_verdicts_name_what_was_missed():
    events = play([Job(4, 3), Job(4, 3)], max_num_seqs=1).events
    labels = texts(gantt(events, "t", SLO(0.03, 0.02)))
    assert {"TTFT ≤ 30 ms", "TPOT ≤ 20 ms", "14 ms met", "50 ms missed"} <= set(labels)
    assert labels.count("11 ms met") == 2


def test_requests_can_be_chosen_and_ordered():
    ax = gantt(drawn(), "t", select=["3", "0"]).axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["3", "0"]


def test_long_answers_are_drawn_in_one_piece():
    many = bars(gantt(play([Job(4, 100)], num_blocks=60).events, "t").axes[0])
    assert len(many) == 2
    assert len(bars(gantt(play([Job(4, 20)]).events, "t").axes[0])) == 20


def test_a_wait_too_short_to_see_is_not_explained():
    events = play([Job(4, 3)]).events
    late = [event._replace(time=event.time - 1e-6 if event.kind == "added" else event.time) for event in events]
    assert histories(late)[0].parts[0].kind == "queued"
    assert "queued" not in texts(gantt(late, "t"))


def test_a_step_without_a_turn_stays_a_gap():
    one, two, far = Part("decode", 0, 1, 1, 1), Part("decode", 1, 2, 1, 2), Part("decode", 3, 4, 1, 4)
    assert merged([one, two, far]) == [Part("decode", 0, 2, 2, 2), far]
    chunks = [Part("prefill", 0, 1, 8, 1), Part("prefill", 1, 2, 8, 2)]
    assert merged(chunks) == chunks


def test_a_freed_slot_is_taken_by_the_next_and_nobody_moves():
    """Two slots; answers of 1, 4 and 3 tokens."""
    events = play([Job(2, 1), Job(2, 4), Job(2, 3)], max_num_seqs=2).events
    rows = [[seat and seat[0] for seat in row] for row in seating(events, 2)]
    assert rows == [["0", "1"], ["2", "1"], ["2", "1"], ["2", "1"]]
    assert [seat[1] for seat in seating(events, 2)[1]] == ["prefill", "decode"]


def test_static_batching_shows_its_idle_slots():
    jobs = [Job(2, 1), Job(2, 4), Job(2, 3)]
    logs = {
        name: play(jobs, max_num_seqs=2, continuous_batching=name == "continuous").events
        for name in ("static", "continuous")
    }
    fig = slot_timeline(logs, 2, "t")
    assert [ax.get_title(loc="left") for ax in fig.axes] == [
        "static: 7 steps, 6 of 14 slots idle (43%)",
        "continuous: 4 steps, 0 of 8 slots idle (0%)",
    ]
    widths = sum(end - start for _, start, end in bars(fig.axes[0]))
    assert widths == 14
    assert fig.axes[0].get_xlim() == fig.axes[1].get_xlim() == (0, 7)


def test_a_step_shows_what_is_cached_what_is_computed_and_what_is_to_come():
    """Prompts of 4 and 20, budget 8: in step 2 the first decodes, the second computes seven more after its four."""
    events = play([Job(4, 3), Job(20, 2)], max_num_batched_tokens=8).events
    ax = step_view(events, 2).axes[0]
    assert bars(ax) == [(0, 0, 5), (0, 0, 4), (0, 4, 5), (1, 0, 20), (1, 0, 4), (1, 4, 11)]
    assert ax.get_title(loc="left") == "Step 2: 8 tokens computed"
    assert {"+1", "+7"} <= set(texts(ax.figure))


@pytest.mark.parametrize(("options", "cached"), [({}, 0), ({"preemption": "swap", "num_host_blocks": 30}, 14)])
def test_who_is_preempted_has_lost_the_cache_and_who_is_swapped_has_not(options, cached):
    events = drawn(**options)
    victim = next(life for life in histories(events, "step") if life.num_preemptions)
    gone = next(part for part in victim.parts if part.kind in ("preempted", "swapped"))
    lane = int(victim.request)
    widths = [end for bar, _, end in bars(step_view(events, int(gone.start) + 1).axes[0]) if bar == lane]
    assert widths == [15, cached][: 2 if cached else 1]
