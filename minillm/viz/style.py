"""One look for every picture: light ground, colours that survive colour blindness, titles that say one thing.

The palette is that of Okabe and Ito (2008), told apart under the three common colour-vision deficiencies. Sizes are
set so that a figure 9 inches wide reads well in a notebook about 900 pixels wide.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib as mpl
import matplotlib.pyplot as plt
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PINK, GREY, INK = "#56B4E9", "#CC79A7", "#8A929C", "#24303C"
PALETTE = (BLUE, ORANGE, GREEN, RED, SKY, PINK, GREY)
PAPER, RULE = "#FFFFFF", "#D9DEE4"

WIDTH = 9.0  # inches, at 100 dots an inch

STYLE = {
    "figure.dpi": 100,
    "savefig.dpi": 100,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "text.color": INK,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.labelsize": 11,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=PALETTE),
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "lines.linewidth": 2.0,
    "lines.markersize": 7,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "hatch.linewidth": 0.6,
}


def set_style() -> None:
    """Make every later matplotlib figure of this process look like the course's own."""
    mpl.rcParams.update(STYLE)


@contextmanager
def figure(height: float = 4.0, columns: int = 1, rows: int = 1, **kwargs) -> Iterator[tuple[Figure, Axes]]:
    """A styled figure and its axes, closed on leaving so that a notebook shows it once, as the cell's value.

    height in inches; the width is always the notebook's. Further arguments go to `plt.subplots`.
    """
    with mpl.rc_context(STYLE):
        fig, axes = plt.subplots(rows, columns, figsize=(WIDTH, height), **kwargs)
        try:
            yield fig, axes
        finally:
            plt.close(fig)


def tint(colour: str, amount: float = 0.75) -> tuple[float, float, float]:
    """The colour mixed with white; amount 0 leaves it, 1 is white."""
    red, green, blue = to_rgb(colour)
    return tuple(part + (1 - part) * amount for part in (red, green, blue))


def colour_of(index: int) -> str:
    """The palette, going round."""
    return PALETTE[index % len(PALETTE)]


def blank(ax: Axes) -> None:
    """No axes at all, for diagrams."""
    ax.set_axis_off()
    ax.grid(False)
