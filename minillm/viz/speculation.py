"""Speculation: drafts kept and refused step by step, and the two distributions that decide it.

steps = [Verified([" the", " cat"], 1, " dog"), ...]
draft_map(steps)            a row for each step: kept, refused, never judged, and the target's own token
draft_explorer(steps)       the same under a slider, beside its static figure
draft_animation(steps)      first the guesses, then the verdict, as a small animated picture
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import font_manager
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch
from PIL import Image, ImageDraw, ImageFont

from .chips import drawable, visible
from .style import BLUE, GREEN, GREY, INK, ORANGE, PAPER, RED, RULE, blank, colour_of, figure, tint
from .tables import Html
from .widgets import Explorer

COLUMNS = 112  # characters of a row
LABEL = 8

STATES = {  # state -> (fill, edge, what it means)
    "guess": (PAPER, GREY, "drafted"),
    "kept": (tint(GREEN, 0.55), GREEN, "draft kept"),
    "refused": (tint(RED, 0.5), RED, "draft refused"),
    "unread": (tint(GREY, 0.85), RULE, "never judged"),
    "new": (tint(BLUE, 0.6), BLUE, "the target's own"),
}


class Verified(NamedTuple):
    """One step of one sequence: the drafts, how many of them were kept, and the token that the target added."""

    drafts: Sequence[str]
    kept: int
    token: str

    @property
    def gained(self) -> int:
        return self.kept + 1


class Chip(NamedTuple):
    text: str
    state: str
    x: int  # in characters
    width: int


def chips_of(step: Verified, judged: bool = True) -> list[Chip]:
    """What a row shows, cut where the row ends. Raises ValueError if more were kept than drafted."""
    if not 0 <= step.kept <= len(step.drafts):
        raise ValueError(f"{step.kept} kept of {len(step.drafts)} drafts")
    states = ["kept"] * step.kept + ["refused"] * (step.kept < len(step.drafts))
    states += ["unread"] * (len(step.drafts) - len(states)) + ["new"]
    shown = list(zip([*step.drafts, step.token], states, strict=True))
    if not judged:
        shown = [(text, "guess") for text in step.drafts]
    found, x = [], LABEL
    for text, state in shown:
        text = drawable(visible(text))
        width = len(text) + 1
        if x + width > COLUMNS:
            break
        found.append(Chip(text, state, x, width))
        x += width + 1
    return found


def _headline(steps: Sequence[Verified]) -> str:
    tokens = sum(step.gained for step in steps)
    return f"{len(steps)} steps of the target, {tokens} tokens"


def draft_map(steps: Sequence[Verified], title: str = "", rows: int | None = None) -> Figure:
    """A row for each step. `rows`: room for so many, so that a growing picture keeps its size."""
    rows = rows or len(steps)
    with figure(height=1.1 + 0.3 * bool(title) + 0.27 * rows) as (fig, ax):
        blank(ax)
        ax.set(xlim=(0, COLUMNS), ylim=(rows, 0))
        ax.set_title((f"{title}\n" if title else "") + _headline(steps))
        for row, step in enumerate(steps):
            ax.text(0, row + 0.5, f"step {row + 1}", size=9, color=GREY, va="center")
            for chip in chips_of(step):
                _chip(ax, chip, row)
        present = {chip.state for step in steps for chip in chips_of(step)}
        handles = [
            Patch(facecolor=fill, edgecolor=edge, label=label)
            for state, (fill, edge, label) in STATES.items()
            if state in present
        ]
        fig.legend(handles=handles, loc="outside lower center", ncols=5)
    return fig


def _chip(ax, chip: Chip, row: float) -> None:
    fill, edge, _ = STATES[chip.state]
    box = FancyBboxPatch(
        (chip.x, row + 0.12), chip.width, 0.76, boxstyle="square,pad=0", facecolor=fill, edgecolor=edge
    )
    ax.add_patch(box)
    colour = GREY if chip.state == "unread" else INK
    middle = chip.x + chip.width / 2
    ax.text(middle, row + 0.51, chip.text, size=8.5, family="DejaVu Sans Mono", color=colour, ha="center", va="center")
    if chip.state == "refused":
        ax.plot([chip.x + 0.3, chip.x + chip.width - 0.3], [row + 0.5] * 2, color=RED, linewidth=1.2)


def draft_explorer(steps: Sequence[Verified], title: str = "") -> Explorer:
    """The first `steps` of it, under a slider; beside it stands the figure of all."""
    counts = list(range(1, len(steps) + 1))
    return Explorer(lambda shown: draft_map(steps[:shown], title, len(steps)), {"shown": counts}, {"shown": counts[-1]})


# --- the animation


def draft_animation(steps: Sequence[Verified], milliseconds: int = 700, line: int = 24) -> Html:
    """Two frames a step: what was guessed, then what the target made of it. A few tens of kilobytes."""
    pictures = [_frame(steps, 1, judged=False, line=line)]
    for done in range(1, len(steps) + 1):
        pictures.append(_frame(steps, done, judged=True, line=line))
        if done < len(steps):
            pictures.append(_frame(steps, done + 1, judged=False, line=line))
    buffer = io.BytesIO()
    durations = [milliseconds] * (len(pictures) - 1) + [4 * milliseconds]
    pictures[0].save(
        buffer, "GIF", save_all=True, append_images=pictures[1:], duration=durations, loop=0, optimize=True
    )
    data = base64.b64encode(buffer.getvalue()).decode()
    text = f"an animation: {_headline(steps)}; drafts appear, are kept or refused, and the target adds its own token"
    return Html(f'<img alt="{text}" src="data:image/gif;base64,{data}"/>', text)


def _frame(steps: Sequence[Verified], count: int, judged: bool, line: int) -> Image.Image:
    """The first `count` steps; the last of them still open if not `judged`."""
    letter = ImageFont.truetype(font_manager.findfont("DejaVu Sans Mono"), 12)
    wide = 7.3  # pixels of a character
    image = Image.new("RGB", (round(COLUMNS * wide) + 12, (len(steps) + 1) * line + 14), PAPER)
    draw = ImageDraw.Draw(image)
    draw.fontmode = "1"  # no grey edges of letters
    draw.text((6, 5), _headline(steps[: count if judged else count - 1]), fill=INK, font=letter)
    for row, step in enumerate(steps[:count]):
        y = 8 + (row + 1) * line
        draw.text((6, y + 3), f"step {row + 1}", fill=GREY, font=letter)
        for chip in chips_of(step, judged or row < count - 1):
            _draw_chip(draw, chip, y, wide, line, letter)
    return image.quantize(colors=32, dither=Image.Dither.NONE)


def _draw_chip(draw, chip: Chip, y: int, wide: float, line: int, letter) -> None:
    fill, edge, _ = STATES[chip.state]
    left, right = 6 + chip.x * wide, 6 + (chip.x + chip.width) * wide
    draw.rectangle((left, y, right, y + line - 5), fill=_rgb(fill), outline=_rgb(edge))
    draw.text((left + wide / 2, y + 2), chip.text, fill=GREY if chip.state == "unread" else INK, font=letter)
    if chip.state == "refused":
        draw.line((left + 2, y + line / 2 - 2, right - 2, y + line / 2 - 2), fill=RED, width=1)


def _rgb(colour) -> tuple[int, ...]:
    return tuple(round(255 * part) for part in to_rgb(colour))


# --- distributions


def residual_bars(names: Sequence[str], p: Sequence[float], q: Sequence[float], title: str) -> Figure:
    """Left: the target's p beside the draft's q, with what they share. Right: kept and replaced, together p."""
    p, q, x = np.asarray(p), np.asarray(q), np.arange(len(names))
    shared = np.minimum(p, q)
    with figure(height=3.9, columns=2, sharey=True) as (fig, (left, right)):
        left.bar(x - 0.2, p, 0.38, color=BLUE, label="target p")
        left.bar(x + 0.2, q, 0.38, color=ORANGE, label="draft q")
        right.bar(x, shared, 0.6, color=GREEN, label="draft kept: min(p, q)")
        right.bar(x, p - shared, 0.6, bottom=shared, color=tint(BLUE, 0.45), label="replaced: max(0, p − q)")
        over = q > p
        label = "draft refused: max(0, q − p)"
        right.bar(x[over], (q - p)[over], 0.6, p[over], fill=False, edgecolor=RED, linestyle="--", label=label)
        for ax in (left, right):
            ax.set_xticks(x, [visible(name) for name in names])
            ax.set(xlabel="token", ylim=(0, 1.35 * max(p.max(), q.max())))
            ax.grid(False, axis="x")
            ax.legend(loc="upper right")
        left.set(ylabel="probability", title=title)
        right.set_title(f"kept {shared.sum():.0%}")
    return fig


def sample_bars(
    names: Sequence[str], p: Sequence[float], counts: Mapping[str, Sequence[int]], title: str, each: str = "token"
) -> Figure:
    """Shares of each token (or whatever `each` names) in several samples side by side, and p as a line across each."""
    x, width = np.arange(len(names)), 0.8 / len(counts)
    with figure(height=3.9) as (fig, ax):
        for i, (label, values) in enumerate(counts.items()):
            shares = np.asarray(values) / np.sum(values)
            ax.bar(x + (i - (len(counts) - 1) / 2) * width, shares, 0.92 * width, color=colour_of(i), label=label)
        ax.hlines(p, x - 0.42, x + 0.42, color=INK, linewidth=1.4, label="target p", zorder=4)
        ax.set_xticks(x, [visible(name) for name in names])
        ax.set(xlabel=each, ylabel=f"share of all {each}s", title=title)
        ax.grid(False, axis="x")
        ax.legend()
    return fig
