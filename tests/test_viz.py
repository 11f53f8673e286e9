"""What the notebooks show is what they were given: data, labels and units in the pictures, arithmetic in the ledger."""

import functools
import math
import subprocess
import sys
import types
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from minillm import config, errors, viz
from minillm.viz import LedgerError, ShowError, figures, show, table
from minillm.viz import ledger as ledger_function
from minillm.viz.chips import drawable, visible
from minillm.viz.ledger import Ledger
from minillm.viz.style import PALETTE
from minillm.viz.units import human, number, scale
from minillm.viz.widgets import WITHOUT_KERNEL, Explorer, RooflineData, RooflineExplorer, explore, png

MACHINE = figures.Ceiling("this machine", 20e9, 100e9)
POLICIES = {"plain": {" a": 0.7, " b": 0.3}, "greedy": {" a": 1.0}}
SPANS = [figures.Span("A", "prefill", 0.0, 0.03), figures.Span("A", "decode", 0.03, 0.04)]
CHARTED = {
    "roofline": lambda: figures.roofline(MACHINE, [figures.Point("decode", 0.5, 10e9, 8e9)], "t"),
    "lines": lambda: figures.lines([figures.Series("a", [1, 2], [3, 4])], "x (s)", "y (B)", "t"),
    "ttft_lines": lambda: figures.ttft_lines([8, 16], [0.1, 0.2], [0.1, 0.15], "t"),
    "tpot_lines": lambda: figures.tpot_lines([1, 2], [0.1, 0.1], [0.1, 0.2], "t"),
    "timeline": lambda: figures.timeline(SPANS, "t"),
    "predicted_measured": lambda: figures.predicted_measured([("head", 1e-3, 2e-3)], "s", "t"),
    "attention_map": lambda: figures.attention_map([[1, 0], [0.5, 0.5]], ["a", "b"], "t"),
    "bars": lambda: figures.bars({"a": 1.5}, "tokens per word", "t", ylabel="language"),
}
DIAGRAMS = {
    "stack_map": lambda: figures.stack_map("device"),
    "shapes_flow": lambda: figures.shapes_flow([("embed", ("T", 4)), ("norm", "(T, 4)")], "t", [(0, 1)]),
    "merge_steps": lambda: figures.merge_steps([["a", "b"], ["ab"]], "t"),
    "token_strip": lambda: figures.token_strip(["a", b"\xf0\x9f"], "t", [1, 2]),
    "stacked_bars": lambda: figures.stacked_bars({"m": {"weights": 2e9, "cache": 1e9}}, "bytes", "t", {"80 GB": 80e9}),
    "distributions": lambda: figures.distributions(POLICIES, "t"),
    "recompute_map": lambda: figures.recompute_map(4, 3, "t"),
}


def texts(fig):
    return [text.get_text() for text in fig.findobj(plt.Text)]


# --- every picture


@pytest.mark.parametrize("name", [*CHARTED, *DIAGRAMS])
def test_a_picture_is_a_figure_shown_once_and_drawn_without_complaint(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fig = (CHARTED | DIAGRAMS)[name]()
        assert png(fig).startswith(b"\x89PNG")
    assert isinstance(fig, Figure)
    assert plt.get_fignums() == []
    assert fig.get_size_inches()[0] * fig.dpi == pytest.approx(900)


@pytest.mark.parametrize("name", CHARTED)
def test_a_chart_has_labels_on_both_axes_and_a_title(name):
    ax = CHARTED[name]().axes[0]
    assert ax.get_xlabel()
    assert ax.get_ylabel()
    assert ax.get_title(loc="left")


@pytest.mark.parametrize("name", [*CHARTED, *DIAGRAMS])
def test_no_label_leaves_the_picture(name):
    fig = (CHARTED | DIAGRAMS)[name]()
    fig.draw_without_rendering()
    drawn, (width, height) = fig.get_tightbbox(), fig.get_size_inches()
    assert drawn.x0 >= -0.01
    assert drawn.y0 >= -0.01
    assert drawn.x1 <= width + 0.01
    assert drawn.y1 <= height + 0.01


def test_the_style_outside_is_left_alone():
    before = dict(plt.rcParams)
    CHARTED["lines"]()
    assert dict(plt.rcParams) == before


def test_the_palette_survives_colour_blindness():
    """Simulated with the matrices of Viénot et al. (1999) in linear RGB; any two colours stay apart."""
    protan = np.array([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]])
    deutan = np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]])
    linear = np.array([to_rgb(colour) for colour in PALETTE[:6]]) ** 2.2
    for matrix in (np.eye(3), protan, deutan):
        seen = np.clip(linear @ matrix.T, 0, 1) ** (1 / 2.2)
        distances = [np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[:i]]
        assert min(distances) > 0.12


# --- data as given


def test_roofline_draws_the_ceilings_the_ridge_and_both_kinds_of_point():
    points = [figures.Point("decode", 0.5, 10e9, 8e9), figures.Point("prefill", 50, 100e9, None)]
    ax = figures.roofline(MACHINE, points, "t").axes[0]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert "FLOP/byte" in ax.get_xlabel()
    assert "GFLOP/s" in ax.get_ylabel()
    x, y = ax.lines[0].get_data()
    assert MACHINE.ridge == 5
    assert y == pytest.approx(np.minimum(x * 20, 100))
    (ridge,) = [line for line in ax.lines if line.get_gid() == "ridge"]
    assert ridge.get_xydata().tolist() == [[5, 100]]
    marks = {tuple(line.get_xydata()[0]): line for line in ax.lines if line.get_marker() == "o"}
    assert set(marks) == {(0.5, 10), (0.5, 8), (50, 100)}
    assert marks[0.5, 10].get_markerfacecolor() == "#FFFFFF"
    assert marks[0.5, 8].get_markerfacecolor() == marks[0.5, 8].get_color()
    assert {"decode", "prefill"} <= set(texts(ax.figure))


@pytest.mark.parametrize("count", [1, 5, 8])
def test_roofline_labels_cover_neither_each_other(count):
    points = [figures.Point(f"operator {i}", 0.5 + 0.02 * i, None, 8e9 + 1e8 * i) for i in range(count)]
    fig = figures.roofline(MACHINE, points, "t")
    png(fig)
    boxes = [text.get_window_extent() for text in fig.axes[0].texts]
    assert len(boxes) == count
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


@pytest.mark.parametrize("bad", [0, -1, math.nan])
def test_roofline_refuses_what_a_logarithm_cannot_show(bad):
    with pytest.raises(ValueError, match="positive"):
        figures.roofline(MACHINE, [figures.Point("x", 1, bad)])
    with pytest.raises(ValueError, match="positive"):
        figures.roofline(figures.Ceiling("x", bad, 1))
    with pytest.raises(ValueError, match="at least one"):
        figures.roofline([])


def test_lines_keep_the_data_and_pair_prediction_with_measurement():
    fig = figures.ttft_lines([8, 16], [0.1, 0.2], [0.05, 0.1], "t")
    measured, predicted = fig.axes[0].lines
    assert measured.get_xydata().tolist() == [[8, 100], [16, 200]]
    assert predicted.get_xydata().tolist() == [[8, 50], [16, 100]]
    assert measured.get_color() == predicted.get_color()
    assert (measured.get_linestyle(), predicted.get_linestyle()) == ("-", "--")
    assert predicted.get_markerfacecolor() == "#FFFFFF"
    assert fig.axes[0].get_ylim()[0] == 0


def test_stacked_bars_add_up():
    parts = {"a": {"weights": 2e9, "cache": 1e9}, "b": {"weights": 2e9}}
    ax = figures.stacked_bars(parts, "bytes", "t", {"limit": 4e9}).axes[0]
    assert ax.get_xlabel() == "GB"
    widths = {container.get_label(): [bar.get_width() for bar in container] for container in ax.containers}
    assert widths == {"weights": [2, 2], "cache": [1, 0]}
    assert [bar.get_x() for bar in ax.containers[1]] == [2, 2]
    assert {"3", "2", "limit"} <= {text.get_text() for text in ax.texts}
    assert ax.get_xlim()[1] > 4


def test_bars_and_distributions_show_every_value():
    ax = figures.bars(
        {"English": 1.25, "digits": 3}, "tokens per word", "t", {"English": "words", "digits": "other"}
    ).axes[0]
    assert [bar.get_width() for bar in ax.patches] == [1.25, 3]
    assert {"1.25", "3"} <= {text.get_text() for text in ax.texts}
    plain, greedy = figures.distributions(POLICIES, "t").axes
    assert [bar.get_width() for bar in plain.patches] == [0.7, 0.3]
    assert [bar.get_width() for bar in greedy.patches] == [1.0, 0.0]
    assert [tick.get_text() for tick in plain.get_yticklabels()] == ["·a", "·b"]
    fig = figures.distributions({str(i): POLICIES["plain"] for i in range(5)}, "t")
    assert [ax.get_visible() for ax in fig.axes] == [True] * 5 + [False]


def test_timeline_lays_spans_in_their_lanes():
    spans = [*SPANS, figures.Span("B", "decode", 0.03, 0.05)]
    ax = figures.timeline(spans, "t").axes[0]
    assert ax.get_xlabel() == "time (ms)"
    drawn = [(round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_width()) for bar in ax.patches]
    assert drawn == [(0, 0, 30), (0, 30, pytest.approx(10)), (1, 30, pytest.approx(20))]


def test_predicted_and_measured_stand_in_one_row():
    ax = figures.predicted_measured([("head", 1e-3, 2e-3), ("norm", 1e-4, 1e-3)], "s", "t").axes[0]
    predicted, measured = (points.get_offsets().tolist() for points in ax.collections)
    assert predicted == [[1, 0], [0.1, 1]]
    assert measured == [[2, 0], [1, 1]]
    assert {"× 2", "× 10"} <= {text.get_text() for text in ax.texts}


def test_attention_map_hides_exactly_the_future():
    weights = np.tril(np.ones((4, 4))) / np.arange(1, 5)[:, None]
    for rows in (4, 2, 1):
        ax = figures.attention_map(weights[-rows:], "abcd", "t").axes[0]
        shown = ax.images[0].get_array()
        hidden = np.ma.getmaskarray(shown)
        assert hidden.tolist() == (~np.tri(4, dtype=bool))[-rows:].tolist()
        assert np.ma.getdata(shown)[~hidden] == pytest.approx(weights[-rows:][~hidden])
        assert len(ax.patches) == hidden.sum()
        assert [tick.get_text() for tick in ax.get_yticklabels()] == list("abcd")[-rows:]
    assert not figures.attention_map(weights, "abcd", "t", causal=False).axes[0].patches
    with pytest.raises(ValueError, match="shape"):
        figures.attention_map(weights, "abc", "t")


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12))
def test_recompute_map_counts_as_brute_force_does(prompt, output):
    fig = figures.recompute_map(prompt, output, "t")
    without, with_cache = (ax.get_title(loc="left").split(": ")[1] for ax in fig.axes)
    assert without == f"{sum(len(range(prompt + step)) for step in range(output)):,} tokens"
    assert with_cache == f"{prompt + output - 1:,} tokens"


def test_stack_map_lights_what_it_is_asked_to():
    boxes = {name: text for name, *_ in figures.STACK for text in figures.stack_map(name).axes[0].texts}
    assert len(boxes) == 6
    for name, *_ in figures.STACK:
        bold = [text.get_text() for text in figures.stack_map(name).axes[0].texts if text.get_weight() == "bold"]
        assert name in bold
        assert len(bold) == 2
    with pytest.raises(ValueError, match="the layers are request"):
        figures.stack_map("cloud")


def test_merge_steps_light_what_was_just_joined():
    ax = figures.merge_steps([list("hug pug"), ["h", "ug", " ", "p", "ug"], ["hug", " ", "p", "ug"]], "t").axes[0]
    chips = [text.get_text() for text in ax.texts if "pieces" not in text.get_text()]
    colours = [tuple(patch.get_facecolor()) for patch in ax.patches]
    lit = [text for text, colour in zip(chips, colours, strict=True) if colour != colours[0]]
    assert lit == ["ug", "ug", "hug"]
    assert [text.get_text() for text in ax.texts if "pieces" in text.get_text()] == ["7 pieces", "5 pieces", "4 pieces"]


# --- chips, tables, numbers


def test_pieces_are_made_visible():
    assert visible(" a\n\t") == "·a↵⇥"
    assert visible(b"\xf0\x9f") == "<f0 9f>"
    assert visible(" 🦊".encode()) == "·🦊"
    assert visible("\x00") == "<00>"
    assert drawable("a½日") == "a½U+65E5"


def test_chips_and_tables_escape_what_they_are_given():
    evil = '<script>&"'
    for thing in (
        figures.token_chips([evil], [1]),
        table([{evil: evil}], [evil], evil),
        table([[evil]], [evil]),
    ):
        assert "<script>" not in thing._repr_html_()
        assert "&lt;script&gt;" in thing._repr_html_()
        assert "<script>" in repr(thing)


def test_table_in_text_is_aligned_and_complete():
    made = table(
        [{"operator": "head", "ms": 1.23456, "ok": True}, {"operator": "norm", "ms": 12345}], ["operator", "ms", "ok"]
    )
    assert repr(made).split("\n") == [
        "operator      ms  ok",
        "--------  ------  ---",
        "head       1.235  yes",
        "norm      12,345  –",
    ]
    assert made._repr_html_().count("<tr>") == 3
    assert "text-align:right" in made._repr_html_()
    assert repr(table([], ["a"])) == "a\n-"
    with pytest.raises(ValueError, match="3 entries in a table of 2"):
        table([[1, 2, 3]], ["a", "b"])


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (28_311_552, "bytes", "28.31 MB"),
        (0.0123, "s", "12.3 ms"),
        (1500, "s", "1,500 s"),
        (3e-10, "s", "0.3 ns"),
        (1e9, "FLOP", "1 GFLOP"),
        (999.9, "B", "999.9 B"),
        (1000, "B", "1 kB"),
        (0, "bytes", "0 B"),
        (-2.5e6, "B/s", "-2.5 MB/s"),
        (134_515_008, "parameters", "134.5 M parameters"),
        (35, "tokens/s", "35 tokens/s"),
        (1234567, "tokens", "1,234,567 tokens"),
        (1e30, "FLOP", "1,000,000,000,000 EFLOP"),
    ],
)
def test_numbers_are_written_as_a_reader_would(value, unit, text):
    assert human(value, unit) == text


@given(st.floats(1e-8, 1e20), st.sampled_from(["bytes", "FLOP", "s", "tokens"]))
def test_scaling_loses_nothing(value, unit):
    divisor, name = scale([value], unit)
    shown = float(number(value / divisor).replace(",", ""))
    assert shown * divisor == pytest.approx(value, rel=6e-4)
    assert name


# --- the ledger


@given(st.floats(-1e12, 1e12), st.floats(-1e12, 1e12))
def test_ledger_arithmetic(predicted, measured):
    book = Ledger()
    book.predict("x", predicted, "bytes")
    entry = book.reveal("x", measured)
    assert entry.residual == measured - predicted
    assert entry.ratio == (None if predicted == 0 else measured / predicted)
    assert len(entry.cells()) == 5


def test_a_line_of_the_ledger_shows_both_under_one_prefix(capsys):
    viz.start_chapter("03")
    viz.predict("cache", 2e9, "bytes", "2 · layers · heads")
    viz.reveal("cache", 500e6)
    predicted, revealed = capsys.readouterr().out.strip().split("\n")
    assert predicted == "cache: predicted 2 GB (2 · layers · heads)"
    assert revealed == "cache: predicted 2 GB, measured 0.5 GB, ratio × 0.25, residual -1.5 GB (-75 %)"


def test_the_ledger_at_the_end_shows_every_pair():
    viz.start_chapter("04")
    for name, value, seen in (("a", 1, 2), ("b", 0, 3), ("<c>", 5, None)):
        viz.predict(name, value, "ms")
        if seen is not None:
            viz.reveal(name, seen)
    text = repr(viz.ledger())
    assert "Chapter 04" in text
    assert [line.split()[0] for line in text.split("\n")[3:]] == ["a", "b", "<c>"]
    assert "not measured" in text
    assert "<c>" not in viz.ledger()._repr_html_()
    assert [(e.predicted, e.measured) for e in viz.entries()] == [(1, 2), (0, 3), (5, None)]
    viz.start_chapter("05")
    assert viz.entries() == []


def test_a_prediction_after_the_fact_is_refused():
    book = Ledger()
    with pytest.raises(LedgerError, match="predicted so far: none"):
        book.reveal("x", 1)
    book.predict("x", 1, "s")
    book.predict("x", 2, "s")
    with pytest.raises(LedgerError, match="'x'"):
        book.reveal("y", 1)
    book.reveal("x", 3)
    with pytest.raises(LedgerError, match="no prediction"):
        book.predict("x", 3, "s")
    assert (book.entries["x"].predicted, book.entries["x"].measured) == (2, 3)
    assert book.reveal("x", 4).measured == 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, "many", None, [1]])
def test_only_finite_numbers_enter_the_ledger(bad):
    book = Ledger()
    with pytest.raises(LedgerError, match="'x'"):
        book.predict("x", bad, "s")
    book.predict("x", np.float32(1.5), "s")
    with pytest.raises(LedgerError, match="'x'"):
        book.reveal("x", bad)
    assert issubclass(LedgerError, errors.MinillmError)


def test_a_notebook_gets_html_and_a_terminal_gets_text(monkeypatch, capsys):
    shown = []
    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=shown.append))
    viz.start_chapter("01")
    viz.predict("<b>", 1, "s", "<i>")
    assert capsys.readouterr().out == ""
    assert "<b>&lt;b&gt;</b>: predicted" in shown[0]._repr_html_()
    assert "&lt;i&gt;" in shown[0]._repr_html_()


# --- show


def decorated(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)

    return inner


@pytest.mark.parametrize(
    ("thing", "file", "begins"),
    [
        (config.ModelConfig, "minillm/config.py", "@dataclass"),
        (config.ModelConfig.from_file, "minillm/config.py", "@classmethod"),
        (config.ModelConfig.window, "minillm/config.py", "def window"),
        (config.ModelConfig.is_moe, "minillm/config.py", "@property"),
        (decorated(human), "minillm/viz/units.py", "def human"),
        (types.SimpleNamespace(fn=human), "minillm/viz/units.py", "def human"),
        (errors, "minillm/errors.py", '"""One family'),
        (ledger_function, "minillm/viz/ledger.py", "def ledger"),
    ],
)
def test_show_prints_what_the_file_holds(thing, file, begins):
    shown = repr(show(thing))
    head, *lines = shown.split("\n")
    path, _, where = head.removeprefix("# ").partition(", lines ")
    first, last = map(int, where.split("–"))
    assert path == file
    assert lines[0].split(maxsplit=1)[1].startswith(begins)
    from_file = (viz.show.__globals__["PACKAGE"].parent / file).read_text(encoding="utf-8").split("\n")
    for number_, line in zip(range(first, last + 1), lines, strict=False):
        shown_number, _, code = line.lstrip().partition(" ")
        assert int(shown_number) == number_
        assert code.strip() == from_file[number_ - 1].strip()


def test_show_escapes_and_names_the_place():
    markup = show(figures.token_chips)._repr_html_()
    assert "minillm/viz/chips.py, lines" in markup
    assert '<span style="display:inline-block' not in markup.replace("&lt;", "")


@pytest.mark.parametrize("thing", [np.mean, len, 7, "text", lambda: 0, test_show_escapes_and_names_the_place, Figure])
def test_show_refuses_what_is_not_shipped(thing):
    with pytest.raises(ShowError):
        show(thing)


def test_show_is_not_fooled_by_a_name():
    def human():
        return 0

    human.__module__ = "minillm.viz.units"
    with pytest.raises(ShowError, match="human"):
        show(human)


# --- widgets


def test_a_widget_has_its_static_figure_and_redraws():
    seen = []

    def draw(batch, model):
        seen.append((batch, model))
        if batch == 4:
            raise errors.ConfigError("<too large>")
        return figures.bars({model: batch}, "sequences", "t")

    explorer = explore(draw, {"batch": [1, 2, 4], "model": ["a", "b"]}, {"model": "b"})
    assert seen == [(1, "b")]
    assert isinstance(explorer.figure, Figure)
    assert explorer.widget is explorer.widget
    static = explorer.image.value
    assert static == png(explorer.figure)
    explorer.sliders["batch"].value = 2
    assert seen[-1] == (2, "b")
    changed = explorer.image.value
    assert changed != static
    explorer.sliders["batch"].value = 4
    assert explorer.message.value == "&lt;too large&gt;"
    assert explorer.image.value == changed
    explorer.sliders["model"].value = "a"
    explorer.sliders["batch"].value = 1
    assert seen[-1] == (1, "a")
    assert explorer.message.value == ""


def test_a_control_without_its_start_is_refused():
    for controls, start in (({"batch": []}, None), ({"batch": [1]}, {"batch": 2})):
        with pytest.raises(ValueError, match="batch"):
            Explorer(lambda batch: None, controls, start)


def test_displaying_an_explorer_shows_the_figure_first(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda thing, raw=False: shown.append(thing))
    explorer = explore(lambda n: figures.bars({"a": n}, "n", "t"), {"n": [1, 2]})
    explorer._ipython_display_()
    assert shown[0].data == png(explorer.figure)
    assert shown[1]["application/vnd.jupyter.widget-view+json"]["model_id"] == explorer.widget.model_id
    assert shown[1]["text/plain"] == WITHOUT_KERNEL  # what GitHub shows


def test_the_roofline_explorer_asks_the_cost_model_it_is_given():
    def compute(model, hardware, batch, context, precision):
        intensity = 2 * batch / {"bf16": 2, "int4": 0.5}[precision]
        return RooflineData(MACHINE, [figures.Point(model, intensity, 1e9)], f"{hardware}, {context} tokens")

    explorer = RooflineExplorer(compute, ["small"], ["cpu"], [1, 8], [512], ["bf16", "int4"], {"batch": 8})
    ax = explorer.figure.axes[0]
    assert ax.get_title(loc="left") == "cpu, 512 tokens"
    assert [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "o"] == [8]
    explorer.widget.children[0].children[4].value = "int4"
    assert explorer.values["precision"] == "int4"


def test_pictures_need_no_torch():
    code = "import minillm.viz, sys; print('torch' in sys.modules, 'ipywidgets' in sys.modules)"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.split() == ["False", "False"]
