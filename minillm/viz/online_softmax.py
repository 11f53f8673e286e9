"""Online softmax, step by step: a row of scores read tile by tile, and what is kept of it.

    steps = online_steps(scores, tile)                  the maximum, the sum and the correction after each tile
    online_softmax(scores, tile, step)                  one step: the row as read so far, its weights, what shrank
    online_walk(scores, tile, title)                    all steps side by side
    online_explorer(scores, tiles)                      one step under two sliders, beside its static figure

Source: Milakov and Gimelshein 2018 (arXiv 1805.02867), algorithm 3, with tiles in place of single scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .style import BLUE, GREY, ORANGE, PAPER, RED, figure, tint
from .widgets import Explorer

NOTHING = float("-inf")
UNREAD, READ, NOW = tint(GREY, 0.6), tint(BLUE, 0.45), ORANGE


@dataclass(frozen=True)
class OnlineStep:
    """What is known after the tile of scores start ... stop - 1.

    `peak` is the maximum so far and `before` the one before this tile; `mass` is the sum of exp(score - peak);
    `correction`, exp(before - peak), is what everything kept was multiplied by: 0 at first, 1 if the peak stayed.
    """

    start: int
    stop: int
    before: float
    peak: float
    correction: float
    mass: float


def online_steps(scores: Sequence[float], tile: int) -> list[OnlineStep]:
    """A step for each tile. A score of -inf is a masked one. Raises ValueError on a tile below 1."""
    if tile < 1:
        raise ValueError(f"tile is {tile}; at least 1 is needed")
    steps, peak, mass = [], NOTHING, 0.0
    for start in range(0, len(scores), tile):
        part = [float(score) for score in scores[start : start + tile]]
        before, peak = peak, max(peak, *part)
        correction = weight(before, peak)
        mass = mass * correction + sum(weight(score, peak) for score in part)
        steps.append(OnlineStep(start, start + len(part), before, peak, correction, mass))
    return steps


def weight(score: float, peak: float) -> float:
    """exp(score - peak), and 0 for a score of -inf even where nothing else has been seen."""
    return 0.0 if score == NOTHING else math.exp(score - peak)


def online_softmax(scores: Sequence[float], tile: int, step: int, title: str = "") -> Figure:
    """Step 1, 2 ... of a row: above the scores with the running maximum, below the weights before and after."""
    steps = online_steps(scores, tile)
    now = steps[min(step, len(steps)) - 1]
    with figure(height=5.0, rows=2, sharex=True, height_ratios=(1, 1)) as (fig, (top, bottom)):
        _scores(top, scores, now)
        top.set(ylabel="score", title=title or f"Step {min(step, len(steps))} of {len(steps)}: {_words(now)}")
        _weights(bottom, scores, now)
        bottom.set(ylabel="exp(score − m)", xlabel="key", ylim=(0, 1.08))
        fig.legend(handles=_legend(), loc="outside lower center", ncols=4)
    return fig


def online_walk(scores: Sequence[float], tile: int, title: str, columns: int = 3) -> Figure:
    """The weights after each tile, side by side. Hollow bars are what had been kept before the correction."""
    steps = online_steps(scores, tile)
    rows = -(-len(steps) // columns)
    with figure(1.1 + 1.9 * rows, columns, rows, sharex=True, sharey=True, squeeze=False) as (fig, axes):
        fig.suptitle(title, x=0.01, ha="left", weight="bold", size=13)
        for i, ax in enumerate(axes.flat):
            if i >= len(steps):
                ax.set_visible(False)
                continue
            _weights(ax, scores, steps[i])
            ax.set_title(f"tile {i + 1}: {_words(steps[i])}", size=9.5, weight="normal", pad=6)
            ax.set(ylim=(0, 1.08), ylabel="exp(score − m)" if i % columns == 0 else "")
            if i >= len(steps) - columns:
                ax.set_xlabel("key")
                ax.tick_params(labelbottom=True)
        fig.legend(handles=_legend(), loc="outside lower center", ncols=4)
    return fig


def online_explorer(scores: Sequence[float], tiles: Sequence[int], tile: int | None = None, step: int = 2) -> Explorer:
    """`online_softmax` under sliders for the step and the tile; a step past the last shows the last."""
    tile = tiles[0] if tile is None else tile
    most = len(online_steps(scores, min(tiles)))
    controls = {"step": range(1, most + 1), "tile": list(tiles)}
    return Explorer(lambda step, tile: online_softmax(scores, tile, step), controls, {"step": step, "tile": tile})


def _words(step: OnlineStep) -> str:
    if step.before == NOTHING:
        change = f"m = {step.peak:.1f}"
    elif step.correction == 1:
        change = f"m stays {step.peak:.1f}, × 1"
    else:
        change = f"m {step.before:.1f} → {step.peak:.1f}, × {step.correction:.2g}"
    return f"{change}, l = {step.mass:.2f}"


def _colour(i: int, step: OnlineStep):
    return READ if i < step.start else NOW if i < step.stop else UNREAD


def _scores(ax: Axes, scores: Sequence[float], step: OnlineStep) -> None:
    known = [(i, score) for i, score in enumerate(scores) if score != NOTHING]
    ax.bar([i for i, _ in known], [s for _, s in known], color=[_colour(i, step) for i, _ in known], width=0.8)
    ax.axhline(0, color=GREY, linewidth=0.8)
    ax.hlines(step.peak, -0.6, step.stop - 0.4, color=RED, linewidth=1.8)
    if step.before != NOTHING and step.before != step.peak:
        ax.hlines(step.before, -0.6, step.start - 0.4, color=RED, linewidth=1.4, linestyle=":")
    ax.annotate("m", (step.stop - 0.3, step.peak), color=RED, va="center", size=11)
    ax.set_ylim(top=max(s for _, s in known) + 0.6)
    ax.grid(False, axis="x")


def _weights(ax: Axes, scores: Sequence[float], step: OnlineStep) -> None:
    """Filled: after this step. Hollow: the same keys before it, where the correction has changed them."""
    seen = range(step.stop)
    ax.bar(seen, [weight(scores[i], step.peak) for i in seen], color=[_colour(i, step) for i in seen], width=0.8)
    if step.correction != 1 and step.start:
        old = range(step.start)
        heights = [weight(scores[i], step.before) for i in old]
        ax.bar(old, heights, facecolor="none", edgecolor=GREY, linewidth=1.0, linestyle=":", width=0.8)
    ax.bar(range(step.stop, len(scores)), 0.02, color=UNREAD, width=0.8)
    ax.set_xlim(-0.8, len(scores) - 0.2)
    ax.grid(False, axis="x")


def _legend() -> list[Patch]:
    return [
        Patch(facecolor=READ, label="read before"),
        Patch(facecolor=NOW, label="this tile"),
        Patch(facecolor=UNREAD, label="not read yet"),
        Patch(facecolor=PAPER, edgecolor=GREY, linestyle=":", label="before the correction"),
    ]
