"""Charts that take plain numbers: bars, stacked bars, lines, distributions, timelines, predicted against measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter

from .chips import drawable, visible
from .style import BLUE, GREY, ORANGE, PAPER, RED, colour_of, figure, tint
from .units import number, scale


def bars(
    values: Mapping[str, float], xlabel: str, title: str, groups: Mapping[str, str] | None = None, ylabel: str = ""
) -> Figure:
    """Horizontal bars in the given order, each with its number. `groups` (name -> group) colours them."""
    kinds = list(dict.fromkeys((groups or {}).values()))
    colours = [colour_of(kinds.index(groups[name])) if groups else BLUE for name in values]
    with figure(height=1.3 + 0.36 * len(values)) as (fig, ax):
        drawn = ax.barh(list(values), list(values.values()), color=colours, height=0.7)
        ax.bar_label(drawn, [number(value) for value in values.values()], padding=4, size=10)
        ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
        ax.invert_yaxis()
        ax.margins(x=0.1)
        ax.grid(False, axis="y")
        if groups:
            ax.legend(handles=[Patch(color=colour_of(i), label=kind) for i, kind in enumerate(kinds)])
    return fig


def stacked_bars(
    parts: Mapping[str, Mapping[str, float]], unit: str, title: str, limits: Mapping[str, float] | None = None
) -> Figure:
    """One horizontal bar for each outer key, its parts stacked; a part has one colour throughout.

    parts: bar -> part -> value in `unit` ("bytes" and "FLOP" take a prefix). limits: label -> value, drawn as a line:
    a device's memory, say.
    """
    names = list(dict.fromkeys(part for bar in parts.values() for part in bar))
    totals = {bar: sum(values.values()) for bar, values in parts.items()}
    divisor, unit = scale([*totals.values(), *(limits or {}).values()], unit)
    with figure(height=1.9 + 0.5 * len(parts)) as (fig, ax):
        left = np.zeros(len(parts))
        for i, name in enumerate(names):
            widths = np.array([values.get(name, 0) / divisor for values in parts.values()])
            ax.barh(list(parts), widths, left=left, color=_part_colour(i), label=name, height=0.65, edgecolor=PAPER)
            left += widths
        room = max([*left, *(value / divisor for value in (limits or {}).values())], default=1)
        for i, total in enumerate(left):
            ax.text(total + 0.012 * room, i, number(float(f"{total:.4g}")), va="center", size=10)
        for label, value in (limits or {}).items():
            ax.axvline(value / divisor, color=RED, linestyle="--", linewidth=1.6)
            ax.annotate(
                label,
                (value / divisor, len(parts) - 0.25),
                (-5, 0),
                textcoords="offset points",
                ha="right",
                va="center",
                size=9.5,
            )
        ax.set(xlabel=unit, title=title, xlim=(0, 1.12 * room))
        ax.set_ylim(len(parts) - (0.0 if limits else 0.5), -0.5)
        ax.grid(False, axis="y")
        _legend_below(fig, names)
    return fig


def _part_colour(index: int):
    """The palette, then the palette lighter: more parts than colours still differ."""
    return colour_of(index) if index < 7 else tint(colour_of(index), 0.5)


def _legend_below(fig: Figure, names: Sequence[str]) -> None:
    """One row where it fits, rows of four otherwise."""
    fits = sum(map(len, names)) + 6 * len(names) < 105
    fig.legend(loc="outside lower center", ncols=len(names) if fits else 4)


class Series(NamedTuple):
    """Points of one line. kind: "measured" is solid with filled marks, "predicted" dashed with hollow ones."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    kind: str = "measured"


def lines(
    series: Sequence[Series], xlabel: str, ylabel: str, title: str, log: str = "", from_zero: bool = True
) -> Figure:
    """Lines over one pair of axes. One name has one colour, so that a prediction and its measurement pair up.

    log: "", "x", "y" or "xy". from_zero: let a linear y axis begin at zero.
    """
    names = list(dict.fromkeys(one.name for one in series))
    with figure(height=4.2) as (fig, ax):
        for one in series:
            colour, measured = colour_of(names.index(one.name)), one.kind == "measured"
            ax.plot(
                one.x,
                one.y,
                color=colour,
                linestyle="-" if measured else "--",
                marker="o" if len(one.x) <= 25 else "",
                markerfacecolor=colour if measured else PAPER,
                label=one.name if len({s.kind for s in series}) == 1 else f"{one.name}, {one.kind}",
            )
        ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
        if "x" in log:
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter(lambda value, _: number(value))
        if "y" in log:
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter(lambda value, _: number(value))
            ax.yaxis.set_minor_formatter(NullFormatter())
        elif from_zero:
            ax.set_ylim(bottom=0)
        if len(series) > 1:
            ax.legend()
    return fig


def ttft_lines(lengths: Sequence[int], measured_s: Sequence[float], predicted_s: Sequence[float], title: str) -> Figure:
    """Time to first token against prompt length, measured and predicted. Seconds in, milliseconds drawn."""
    series = [Series("TTFT", lengths, [1e3 * s for s in measured_s])]
    series.append(Series("TTFT", lengths, [1e3 * s for s in predicted_s], "predicted"))
    return lines(series, "prompt length (tokens)", "time to first token (ms)", title)


def tpot_lines(
    positions: Sequence[int], with_cache_s: Sequence[float], without_cache_s: Sequence[float], title: str
) -> Figure:
    """Time of each output token against its position, with and without the cache. Seconds in, milliseconds drawn."""
    series = [Series("with the cache", positions, [1e3 * s for s in with_cache_s])]
    series.append(Series("without", positions, [1e3 * s for s in without_cache_s]))
    return lines(series, "position of the token (tokens)", "time per output token (ms)", title)


def distributions(policies: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """Probabilities of the likeliest tokens under each policy, side by side over one list of tokens.

    policies: policy -> token -> probability. The first policy's tokens and order rule; where a policy leaves a token
    none, its place stays empty.
    """
    first = next(iter(policies.values()))
    tokens = list(first)
    columns = len(policies) if len(policies) <= 4 else min(4, -(-len(policies) // 2))
    rows = -(-len(policies) // columns)
    height = 0.9 + rows * (1.0 + 0.26 * len(tokens))
    with figure(height, columns, rows, sharex=True, sharey=True, squeeze=False) as (fig, axes):
        fig.suptitle(title, x=0.01, ha="left", weight="bold", size=13)
        flat = axes.ravel()
        for i, (name, weights) in enumerate(policies.items()):
            values = [weights.get(token, 0.0) for token in tokens]
            flat[i].barh(range(len(tokens)), values, color=colour_of(0 if i == 0 else 2), height=0.75)
            flat[i].set_title(name, size=11)
            flat[i].set_yticks(range(len(tokens)), [drawable(visible(token)) for token in tokens])
            flat[i].set(xlabel="probability", ylabel="token" if i % columns == 0 else "")
            flat[i].grid(False, axis="y")
            flat[i].tick_params(labelbottom=True)
        flat[0].invert_yaxis()
        for ax in flat[len(policies) :]:
            ax.set_visible(False)
    return fig


class Span(NamedTuple):
    """Something that ran in a lane from `start` to `end` (seconds). `kind` colours it; the name is its default."""

    lane: str
    name: str
    start: float
    end: float
    kind: str = ""


def timeline(spans: Sequence[Span], title: str) -> Figure:
    """Spans in lanes over time, coloured by kind. Seconds in; the axis takes the unit that suits."""
    lanes = list(dict.fromkeys(span.lane for span in spans))
    kinds = list(dict.fromkeys(span.kind or span.name for span in spans))
    divisor, unit = scale([span.end for span in spans], "s")
    with figure(height=1.9 + 0.5 * len(lanes)) as (fig, ax):
        for i, kind in enumerate(kinds):
            chosen = [span for span in spans if (span.kind or span.name) == kind]
            ax.barh(
                [lanes.index(span.lane) for span in chosen],
                [(span.end - span.start) / divisor for span in chosen],
                left=[span.start / divisor for span in chosen],
                color=_part_colour(i),
                edgecolor=PAPER,
                linewidth=0.5,
                height=0.62,
                label=kind,
            )
        ax.set_yticks(range(len(lanes)), lanes)
        ax.set(xlabel=f"time ({unit})", ylabel="lane", title=title)
        ax.invert_yaxis()
        ax.grid(False, axis="y")
        _legend_below(fig, kinds)
    return fig


def predicted_measured(
    rows: Sequence[tuple[str, float, float]], unit: str, title: str, log: bool = True, ylabel: str = "operator"
) -> Figure:
    """Each row a name with its prediction (hollow) and its measurement (filled), joined by a line, and their ratio.

    rows: (name, predicted, measured), both in `unit`.
    """
    divisor, unit = scale([value for _, *pair in rows for value in pair], unit)
    with figure(height=1.7 + 0.36 * len(rows)) as (fig, ax):
        for i, (_, predicted, measured) in enumerate(rows):
            ax.plot([predicted / divisor, measured / divisor], [i, i], color=tint(GREY, 0.3), zorder=1)
            ax.annotate(
                f"× {measured / predicted:.3g}" if predicted else "–",
                (max(predicted, measured) / divisor, i),
                (9, 0),
                textcoords="offset points",
                va="center",
                size=9,
            )
        places = range(len(rows))
        hollow = {"facecolors": PAPER, "edgecolors": BLUE, "linewidths": 1.8}
        ax.scatter([row[1] / divisor for row in rows], places, s=55, label="predicted", zorder=2, **hollow)
        ax.scatter([row[2] / divisor for row in rows], places, s=55, color=ORANGE, label="measured", zorder=3)
        ax.set_yticks(places, [row[0] for row in rows])
        ax.set(xlabel=f"time ({unit})" if unit in ("s", "ms", "µs", "ns") else unit, ylabel=ylabel, title=title)
        if log:
            ax.set_xscale("log")
        ax.margins(x=0.12, y=0.08)
        ax.invert_yaxis()
        ax.legend(loc="best", title="× measured / predicted", title_fontsize=9)
    return fig
