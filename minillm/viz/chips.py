"""Token pieces as coloured chips, and byte-pair merges growing on a sentence."""

from __future__ import annotations

import html
from collections.abc import Sequence
from functools import cache

from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import FancyBboxPatch

from .style import GREY, INK, PALETTE, blank, colour_of, figure, tint
from .tables import Html

_MARKS = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"}


def visible(piece: str | bytes) -> str:
    """A piece as one can see it: spaces as dots, line ends as arrows, bytes that are no character in hexadecimal."""
    if isinstance(piece, bytes):
        try:
            piece = piece.decode("utf-8")
        except UnicodeDecodeError:
            return "<" + piece.hex(" ") + ">"
    return "".join(_MARKS.get(char, char if char.isprintable() else f"<{ord(char):02x}>") for char in piece)


def token_chips(pieces: Sequence[str | bytes], ids: Sequence[int] | None = None) -> Html:
    """The pieces in alternating colours, with their ids below where given. HTML, with text between bars elsewhere."""
    shown = [visible(piece) for piece in pieces]
    chips = []
    for i, text in enumerate(shown):
        ground = to_hex(tint(PALETTE[i % 6], 0.7))
        below = f'<br><span style="font-size:70%;color:{INK}">{int(ids[i])}</span>' if ids is not None else ""
        chips.append(
            f'<span style="display:inline-block;background:{ground};color:{INK};border-radius:4px;padding:1px 5px;'
            f'margin:2px 1px;text-align:center;font-family:monospace">{html.escape(text)}{below}</span>'
        )
    plain = "|" + "|".join(shown) + "|"
    if ids is not None:
        plain += "\n" + " ".join(str(int(i)) for i in ids)
    return Html(f'<div style="line-height:1.9">{"".join(chips)}</div>', plain)


@cache
def _font():
    return get_font(findfont(FontProperties(family="DejaVu Sans Mono")))


def drawable(text: str) -> str:
    """Characters that the figure's font lacks as their code points, so that no picture shows an empty box."""
    return "".join(char if _font().get_char_index(ord(char)) else f"U+{ord(char):04X}" for char in text)


def token_strip(pieces: Sequence[str | bytes], title: str, ids: Sequence[int] | None = None) -> Figure:
    """The pieces as chips, going on in a new line when one is full. `ids` are printed below each."""
    lines = _wrapped([drawable(visible(piece)) for piece in pieces])
    pitch = 1.0 if ids is None else 1.35
    with figure(height=0.75 + 0.42 * pitch * len(lines)) as (fig, ax):
        ax.set_title(title)
        done = 0
        for row, line in enumerate(lines):
            left = 0.0
            for text in line:
                width = _chip(ax, left, -pitch * row, text, tint(PALETTE[done % 6], 0.65))
                if ids is not None:
                    ax.text(
                        left + width / 2,
                        -pitch * row - 0.6,
                        str(ids[done]),
                        ha="center",
                        va="center",
                        size=7,
                        color=INK,
                    )
                left, done = left + width + 0.25, done + 1
        _frame(ax, _ROOM + 2, -pitch * len(lines) + 0.4, 0.6)
    return fig


def merge_steps(rows: Sequence[Sequence[str | bytes]], title: str, labels: Sequence[str] = ()) -> Figure:
    """Merges growing: each row is the sentence's pieces after one more merge. What has just been joined is coloured.

    rows: pieces from the bytes (top) to the final tokens (bottom); `labels` names each row at its left.
    """
    shown = [[drawable(visible(piece)) for piece in row] for row in rows]
    longest = max(sum(_width(text) + 0.25 for text in row) for row in shown)
    with figure(height=0.8 + 0.46 * len(rows)) as (fig, ax):
        ax.set_title(title)
        edges = {0.0}
        for i, row in enumerate(shown):
            before, edges, left = edges, set(), 0.0
            starts = _starts(row)
            for j, text in enumerate(row):
                fresh = i > 0 and not set(starts[j : j + 2]) >= {p for p in before if starts[j] <= p <= starts[j + 1]}
                colour = tint(colour_of(0), 0.45) if fresh else tint(GREY, 0.8)
                left += _chip(ax, left, -1.1 * i, text, colour) + 0.25
            edges = set(starts)
            if labels:
                ax.text(-0.8, -1.1 * i, labels[i], ha="right", va="center", size=9, color=INK)
            ax.text(longest + 0.8, -1.1 * i, f"{len(row)} pieces", ha="left", va="center", size=9, color=INK)
        room = max((len(label) for label in labels), default=0) * 0.75
        _frame(ax, longest + 7, -1.1 * len(rows) + 0.5, 0.6, left=-room - 1.2)
    return fig


_ROOM = 74.0  # characters in a line of chips


def _starts(row: list[str]) -> list[int]:
    """Where each piece begins, in characters, and where the last ends."""
    places = [0]
    for text in row:
        places.append(places[-1] + len(text))
    return places


def _width(text: str) -> float:
    return len(text) + 0.7


def _wrapped(texts: list[str]) -> list[list[str]]:
    lines, used = [[]], 0.0
    for text in texts:
        if lines[-1] and used + _width(text) > _ROOM:
            lines, used = [*lines, []], 0.0
        lines[-1].append(text)
        used += _width(text) + 0.25
    return lines


def _chip(ax: Axes, left: float, middle: float, text: str, colour) -> float:
    width = _width(text)
    box = FancyBboxPatch(
        (left, middle - 0.36), width, 0.72, boxstyle="round,pad=0,rounding_size=0.15", mutation_aspect=0.6
    )
    box.set(facecolor=colour, edgecolor="none")
    ax.add_patch(box)
    ax.text(left + width / 2, middle, text, ha="center", va="center", family="monospace", size=10, color=INK)
    return width


def _frame(ax: Axes, right: float, bottom: float, top: float, left: float = -0.3) -> None:
    ax.set(xlim=(left, right), ylim=(bottom, top))
    blank(ax)
