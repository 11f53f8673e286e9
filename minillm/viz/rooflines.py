"""The roofline: what a machine can reach at each arithmetic intensity, and where work lies under it.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model" (2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox

from .style import GREY, INK, PAPER, colour_of, figure
from .units import human, number


class Ceiling(NamedTuple):
    """A machine: bytes/s that it reads and FLOP/s that it computes."""

    name: str
    bytes_per_s: float
    flops_per_s: float

    @property
    def ridge(self) -> float:
        """The intensity (FLOP/byte) above which computing, not reading, is the limit."""
        return self.flops_per_s / self.bytes_per_s


class Point(NamedTuple):
    """Work at an intensity (FLOP/byte): the rate predicted for it and the one measured (FLOP/s), either may be None."""

    label: str
    intensity: float
    predicted: float | None = None
    measured: float | None = None


def roofline(
    ceilings: Ceiling | Sequence[Ceiling], points: Sequence[Point] = (), title: str = "", path: bool = False
) -> Figure:
    """Log-log, FLOP/byte against GFLOP/s. Predicted points are hollow, measured ones filled; each ridge is marked.

    path: join the points in their order, to show something moving. Raises ValueError when a figure is not positive.
    """
    ceilings = [ceilings] if isinstance(ceilings, Ceiling) else list(ceilings)
    _require_positive(ceilings, points)
    low, high = _span(ceilings, points)
    with figure(height=5.0) as (fig, ax):
        ax.set(xscale="log", yscale="log", xlim=(low, high), title=title)
        ax.set(xlabel="arithmetic intensity (FLOP/byte)", ylabel="rate (GFLOP/s)")
        for i, ceiling in enumerate(ceilings):
            _draw_ceiling(ax, ceiling, colour_of(i) if len(ceilings) > 1 else GREY, low, high)
        taken = _draw_points(ax, points, len(ceilings) > 1, path)
        ax.set_ylim(*_rates(ceilings, points, low))
        _place_labels(fig, ax, taken)
        _legend(ax, ceilings, points)
    return fig


def _require_positive(ceilings: Sequence[Ceiling], points: Sequence[Point]) -> None:
    for thing in (*ceilings, *points):
        if any(value is not None and not value > 0 for value in thing[1:]):
            raise ValueError(f"{thing[0]}: a roofline has positive figures only, got {tuple(thing[1:])}")
    if not ceilings:
        raise ValueError("a roofline needs at least one machine")


def _span(ceilings: Sequence[Ceiling], points: Sequence[Point]) -> tuple[float, float]:
    places = [ceiling.ridge for ceiling in ceilings] + [point.intensity for point in points]
    return min(min(places) / 6, 0.3), max(places) * 6


def _rates(ceilings: Sequence[Ceiling], points: Sequence[Point], low: float) -> tuple[float, float]:
    rates = [rate / 1e9 for point in points for rate in (point.predicted, point.measured) if rate]
    rates += [ceiling.bytes_per_s * low / 1e9 for ceiling in ceilings]
    return min(rates) / 2, max(ceiling.flops_per_s for ceiling in ceilings) / 1e9 * 4


def _draw_ceiling(ax: Axes, ceiling: Ceiling, colour: str, low: float, high: float) -> None:
    x = np.array([low, ceiling.ridge, high])
    y = np.minimum(x * ceiling.bytes_per_s, ceiling.flops_per_s) / 1e9
    ax.plot(x, y, color=colour, linewidth=2.4, label=ceiling.name, zorder=1)
    ax.plot([ceiling.ridge] * 2, [1e-12, y[1]], color=colour, linestyle=":", linewidth=1.2, zorder=0)
    ax.plot(ceiling.ridge, y[1], marker="D", markersize=6, color=colour, linestyle="", zorder=2, gid="ridge")


def _draw_points(ax: Axes, points: Sequence[Point], many: bool, path: bool) -> list[tuple[str, float, float]]:
    """The marks -> (label, x, y) of each, in data coordinates, for the labels."""
    marks = []
    for i, point in enumerate(points):
        colour = INK if many else colour_of(i if not path else 0)
        rates = [(rate / 1e9, filled) for rate, filled in ((point.predicted, False), (point.measured, True)) if rate]
        if len(rates) == 2:
            ax.plot([point.intensity] * 2, [rate for rate, _ in rates], color=colour, linewidth=1, zorder=2)
        for rate, filled in rates:
            face = colour if filled else PAPER
            ax.plot(
                point.intensity,
                rate,
                marker="o",
                color=colour,
                markerfacecolor=face,
                markersize=9,
                linestyle="",
                zorder=3,
            )
        if rates:
            marks.append((point.label, point.intensity, rates[-1][0]))
    if path:
        ax.plot([mark[1] for mark in marks], [mark[2] for mark in marks], color=colour_of(0), linewidth=1, alpha=0.6)
    return marks


_OFFSETS = ((10, -4), (-10, -4), (0, -20), (0, 12), (12, -18), (-12, -18), (12, 12), (-12, 12), (14, -34), (-14, -34))


def _place_labels(fig: Figure, ax: Axes, marks: list[tuple[str, float, float]]) -> None:
    """Each label beside its mark, at the first place where it covers neither another label nor a mark."""
    fig.draw_without_rendering()
    frame = ax.get_window_extent()
    taken = [Bbox.from_bounds(x - 7, y - 7, 14, 14) for x, y in (ax.transData.transform(mark[1:]) for mark in marks)]
    for label, x, y in marks:
        for dx, dy in _OFFSETS:
            side = "left" if dx > 0 else "right" if dx < 0 else "center"
            text = ax.annotate(label, (x, y), (dx, dy), textcoords="offset points", ha=side, size=9.5, color=INK)
            text.set_path_effects([withStroke(linewidth=3, foreground=PAPER)])
            box = text.get_window_extent().padded(1)
            inside = frame.x0 < box.x0 and box.x1 < frame.x1 and frame.y0 < box.y0 and box.y1 < frame.y1
            if inside and not any(box.overlaps(other) for other in taken):
                break
            if (dx, dy) != _OFFSETS[-1]:
                text.remove()
        taken.append(box)


def _legend(ax: Axes, ceilings: Sequence[Ceiling], points: Sequence[Point]) -> None:
    handles = [
        Line2D(
            [],
            [],
            color=colour_of(i) if len(ceilings) > 1 else GREY,
            linewidth=2.4,
            label=f"{c.name}: {human(c.bytes_per_s, 'B/s')}, {human(c.flops_per_s, 'FLOP/s')}, "
            f"ridge {number(float(f'{c.ridge:.3g}'))}",
        )
        for i, c in enumerate(ceilings)
    ]
    for attribute, face in (("predicted", PAPER), ("measured", INK)):
        if any(getattr(point, attribute) for point in points):
            style = {"marker": "o", "linestyle": "", "markersize": 8, "color": INK, "markerfacecolor": face}
            handles.append(Line2D([], [], label=attribute, **style))
    ax.legend(handles=handles, loc="upper left", fontsize=9, frameon=True, framealpha=0.9, edgecolor=PAPER)
