"""Attention variants: what each keeps of a token, and how its cache grows with the sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .style import BLUE, GREEN, GREY, INK, ORANGE, PAPER, RED, blank, colour_of, figure, tint
from .units import human, number

KINDS = ("pairs", "window", "row", "state")


class Kept(NamedTuple):
    """One variant. kind: "pairs" of key and value heads, the same in a "window", one "row" for all heads, or a "state"
    that is not by token at all. `stores` is how many of them there are; `caption` stands below."""

    name: str
    kind: str
    stores: int
    caption: str


def remembered(variants: Sequence[Kept], title: str, heads: int = 8) -> Figure:
    """A column for each variant: its query heads above, joined to what they read below.

    Raises ValueError for a kind that is none, or stores that do not divide the heads.
    """
    for one in variants:
        if one.kind not in KINDS or heads % one.stores:
            raise ValueError(f"{one.name}: kind {one.kind!r} must be one of {KINDS}, and stores divide {heads} heads")
    with figure(height=3.3) as (fig, ax):
        ax.set_title(title)
        for column, one in enumerate(variants):
            _column(ax, 1.15 * column, one, heads)
        ax.text(-0.12, 2.0, "query\nheads", ha="right", va="center", size=9, color=INK)
        ax.text(-0.12, 0.85, "kept", ha="right", va="center", size=9, color=INK)
        ax.set(xlim=(-0.55, 1.15 * len(variants) - 0.1), ylim=(-0.75, 2.75))
        blank(ax)
    return fig


def _column(ax: Axes, left: float, one: Kept, heads: int) -> None:
    middle = left + 0.5
    for head in range(heads):
        x, share = left + (head + 0.5) / heads, heads // one.stores
        target = left + (head // share + 0.5) / one.stores
        ax.plot([x, target], [1.94, 1.2], color=tint(GREY, 0.4), linewidth=0.9, zorder=1)
        ax.plot(x, 2.0, marker="o", markersize=5.5, color=INK, zorder=2)
    draw = {"pairs": _pairs, "window": _pairs, "row": _row, "state": _state}[one.kind]
    draw(ax, left, one)
    ax.text(middle, 2.42, one.name, ha="center", va="center", weight="bold", size=10.5, color=INK)
    ax.text(middle, -0.35, one.caption, ha="center", va="center", size=9, color=INK)


def _box(ax: Axes, x: float, y: float, width: float, height: float, colour) -> None:
    ax.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor=PAPER, linewidth=0.8, zorder=2))


def _pairs(ax: Axes, left: float, one: Kept) -> None:
    """Key above value; in a window the oldest are pale: gone."""
    room, width = 1 / one.stores, min(0.62 / one.stores, 0.16)
    for store in range(one.stores):
        x = left + (store + 0.5) * room - width / 2
        for token in range(5):  # newest on top
            gone = one.kind == "window" and token in (2, 3)
            for side, colour in enumerate((BLUE, ORANGE)):
                fill = tint(colour, 0.88 if gone else 0.15)
                _box(ax, x + side * width / 2, 1.0 - 0.22 * token, width / 2, 0.18, fill)


def _row(ax: Axes, left: float, one: Kept) -> None:
    """The latent and the rotary key; nothing beside it."""
    for token in range(5):
        _box(ax, left + 0.3, 1.0 - 0.22 * token, 0.32, 0.18, tint(GREEN, 0.15))
        _box(ax, left + 0.63, 1.0 - 0.22 * token, 0.07, 0.18, tint(BLUE, 0.15))


def _state(ax: Axes, left: float, one: Kept) -> None:
    """Square matrices, as many as stores, of one size whatever the length."""
    room = 1 / one.stores
    for store in range(one.stores):
        side = min(0.8 * room, 0.3)
        x = left + (store + 0.5) * room - side / 2
        for i in range(3):
            for j in range(3):
                _box(ax, x + j * side / 3, 0.75 + 0.36 * i / 3, side / 3, 0.12, tint(RED, 0.25 + 0.12 * ((i + j) % 3)))


def cache_growth(
    tokens: Sequence[int], curves: Mapping[str, Sequence[float]], at: int, title: str, memory: float | None = None
) -> Figure:
    """Left: bytes of one sequence's cache against its length, both logarithmic. Right: the bytes at `at` tokens and,
    with `memory` (bytes), how many such sequences it holds.

    Raises ValueError when `at` is not among `tokens` or a curve has another length.
    """
    if at not in tokens or any(len(curve) != len(tokens) for curve in curves.values()):
        raise ValueError(
            f"{at} must be one of the lengths {list(tokens)}, and each curve have a value for each of them"
        )
    place = list(tokens).index(at)
    with figure(height=4.6, columns=2, gridspec_kw={"width_ratios": [1.25, 1]}) as (fig, (left, right)):
        fig.suptitle(title, x=0.01, ha="left", weight="bold", size=13)
        for i, (name, curve) in enumerate(curves.items()):
            left.plot(tokens, np.array(curve) / 1e9, color=colour_of(i), label=name)
            left.plot(at, curve[place] / 1e9, marker="o", markersize=6, color=colour_of(i))
        left.axvline(at, color=GREY, linestyle=":", linewidth=1.2, zorder=0)
        left.set(xscale="log", yscale="log", xlabel="sequence (tokens)", ylabel="cache of one sequence (GB)")
        _bars_at(right, {name: curve[place] for name, curve in curves.items()}, at, memory)
    return fig


def _bars_at(ax: Axes, values: Mapping[str, float], at: int, memory: float | None) -> None:
    names = list(values)
    drawn = ax.barh(names, [value / 1e9 for value in values.values()], height=0.66)
    for i, bar in enumerate(drawn):
        bar.set_color(colour_of(i))
    ax.bar_label(drawn, [_label(value, memory) for value in values.values()], padding=4, size=9)
    ax.set(xscale="log", xlabel=f"GB at {number(at)} tokens")
    low, high = min(values.values()) / 1e9, max(values.values()) / 1e9
    ax.set_xlim(low / 3, high * (3 * high / low) ** (0.9 if memory else 0.5))
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.minorticks_off()


def _label(value: float, memory: float | None) -> str:
    size = human(float(f"{value:.3g}"), "B")
    return size if memory is None else f"{size}, {number(memory // value)} fit"
