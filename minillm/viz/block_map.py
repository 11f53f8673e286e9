"""The block pool alive: who held which block at each step, rebuilt from the event log alone.

    history = block_history(engine.events, num_blocks)     one frame a step
    block_map(history, step)         the pool as a grid, coloured by owner
    block_strip(history)             every block over every step
    block_explorer(history)          the grid under a slider, beside its static figure
    block_animation(history)         the grid as a small animated picture

A frame is the pool while its step is computed: after the step's allocations, before what ends in it is released. A log
without "scheduled" events, of a pool played by hand, has a frame for each event.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from matplotlib import font_manager
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from PIL import Image, ImageDraw, ImageFont

from ..events import Event
from .style import GREY, INK, PALETTE, PAPER, RULE, blank, figure, tint
from .tables import Html
from .widgets import Explorer

FREE: tuple[str, ...] = ()
CACHED = None  # nobody holds the block and its contents are kept

Cell = tuple[str, ...] | None  # who holds a block: nobody, several, or CACHED

OWNERS = [*PALETTE[:6], *(tint(colour, 0.5) for colour in PALETTE[:6])]
SHARED, KEPT = INK, tint(GREY, 0.45)
LISTED = 12  # owners that a legend names
COLUMNS = 32


@dataclass(frozen=True)
class BlockHistory:
    """`frames[i][block]` is who held that block at `steps[i]`; block 0, the null block, is always free."""

    steps: list[int]
    frames: list[list[Cell]]

    @property
    def num_blocks(self) -> int:
        return len(self.frames[0])

    @property
    def owners(self) -> list[str]:
        """In the order of their first block; a colour belongs to each."""
        return list(dict.fromkeys(owner for frame in self.frames for cell in frame for owner in cell or ()))

    def frame(self, step: int) -> list[Cell]:
        """The frame of a step, or of the last one before it."""
        at = [i for i, known in enumerate(self.steps) if known <= step]
        return self.frames[at[-1] if at else 0]

    def counts(self, step: int) -> dict[str, int]:
        """Blocks held (by one or more), shared (by more than one), cached and free."""
        cells = self.frame(step)[1:]
        held = sum(bool(cell) for cell in cells)
        cached = sum(cell is CACHED for cell in cells)
        shared = sum(len(cell or ()) > 1 for cell in cells)
        return {"held": held, "shared": shared, "cached": cached, "free": len(cells) - held - cached}


def block_history(events: Iterable[Event], num_blocks: int) -> BlockHistory:
    """Replays a log that begins with an empty pool. Raises ValueError if it has no events that a pool writes."""
    events, replay = list(events), _Replay(num_blocks)
    by_step = any(event.kind == "scheduled" for event in events)
    for event in events:
        moved = replay.apply(event)
        if event.kind == "scheduled" or (moved and not by_step):
            replay.note(event.step if by_step else len(replay.frames))
    if by_step:
        replay.note(events[-1].step + 1)
    if not replay.frames:
        raise ValueError("the log has no events of a block pool; was it kept from the beginning?")
    return BlockHistory(replay.steps, replay.frames)


class _Replay:
    """The pool as the log tells it, and its frames."""

    def __init__(self, num_blocks: int) -> None:
        self.steps: list[int] = []
        self.frames: list[list[Cell]] = []
        self._holders: list[list[str]] = [[] for _ in range(num_blocks)]
        self._published: set[int] = set()

    def apply(self, event: Event) -> bool:
        """Whether it was an event of the pool."""
        owner, data = str(event.request), event.data
        match event.kind:
            case "allocated" | "shared":
                for block in filter(None, data["blocks"]):
                    self._holders[block].append(owner)
            case "released":
                for block in filter(None, data["blocks"]):
                    self._holders[block].remove(owner)
            case "copied":
                for source, _ in data["pairs"]:  # its own block was allocated before
                    self._holders[source].remove(owner)
            case "published":
                self._published.add(data["block"])
            case "evicted" | "withdrawn":
                self._published.discard(data["block"])
            case _:
                return False
        return True

    def note(self, step: int) -> None:
        self.steps.append(step)
        self.frames.append(
            [tuple(holders) or (CACHED if i in self._published else FREE) for i, holders in enumerate(self._holders)]
        )


# --- pictures


def _colours(history: BlockHistory) -> dict[str, tuple[float, float, float]]:
    return {owner: to_rgb(OWNERS[i % len(OWNERS)]) for i, owner in enumerate(history.owners)}


def _colour(cell: Cell, colours: dict) -> tuple[float, float, float]:
    if cell is CACHED:
        return to_rgb(KEPT)
    if not cell:
        return to_rgb(PAPER)
    return to_rgb(SHARED) if len(cell) > 1 else colours[cell[0]]


def _legend(history: BlockHistory, colours: dict) -> list[Patch]:
    """The states that occur, and the owners where there are few."""
    cells = {cell for frame in history.frames for cell in frame[1:]}
    patches = [Patch(facecolor=PAPER, edgecolor=GREY, label="free")]
    if CACHED in cells:
        patches.append(Patch(facecolor=KEPT, label="cached"))
    if any(len(cell or ()) > 1 for cell in cells):
        patches.append(Patch(facecolor=SHARED, label="shared"))
    if len(colours) <= LISTED:
        return [*(Patch(facecolor=colour, label=owner) for owner, colour in colours.items()), *patches]
    return [*patches, Patch(facecolor=OWNERS[0], label="held, a colour for each request")]


def block_map(history: BlockHistory, step: int, title: str = "", columns: int = COLUMNS) -> Figure:
    """The pool at one step: a square a block, in the order of their ids, with its holder, or × and their number."""
    cells, colours = history.frame(step)[1:], _colours(history)
    columns = min(columns, len(cells))
    rows = -(-len(cells) // columns)
    side = 9.0 / (columns + 1)
    with figure(height=1.0 + 0.45 * bool(title) + rows * side) as (fig, ax):
        blank(ax)
        ax.set(xlim=(-0.5, columns + 0.5), ylim=(rows + 0.1, -0.1), aspect="equal")
        ax.set_title(_headline(history, step, title))
        for i, cell in enumerate(cells):
            _square(ax, i % columns, i // columns, cell, colours, side)
        fig.legend(handles=_legend(history, colours), loc="outside lower center", ncols=8)
    return fig


def _headline(history: BlockHistory, step: int, title: str) -> str:
    """The title and the counts; what does not occur is not listed."""
    counts = {name: count for name, count in history.counts(step).items() if count or name in ("held", "free")}
    return (f"{title}\n" if title else "") + f"step {step}: " + ", ".join(f"{n} {name}" for name, n in counts.items())


def _square(ax, x: float, y: float, cell: Cell, colours: dict, side: float) -> None:
    face = _colour(cell, colours)
    edge = RULE if not cell else PAPER
    ax.add_patch(Rectangle((x + 0.05, y + 0.05), 0.9, 0.9, facecolor=face, edgecolor=edge))
    label = cell[0] if cell and len(cell) == 1 else f"×{len(cell)}" if cell else ""
    if 0 < len(label) <= 3 and side > 0.25:
        ax.text(x + 0.5, y + 0.5, label, color=_ink(face), size=min(10, 26 * side), ha="center", va="center")


def _ink(face: tuple[float, float, float]) -> str:
    red, green, blue = face
    return INK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else PAPER


def block_strip(history: BlockHistory, title: str) -> Figure:
    """Time to the right, a row for each block: a sequence grows as a staircase of its colour."""
    colours = _colours(history)
    pixels = np.array([[_colour(cell, colours) for cell in frame[1:]] for frame in history.frames])
    with figure(height=4.6) as (fig, ax):
        left, right = history.steps[0] - 0.5, history.steps[-1] + 0.5
        bottom, top = history.num_blocks - 0.5, 0.5
        ax.imshow(
            pixels.swapaxes(0, 1), aspect="auto", interpolation="nearest", extent=(left, right, bottom, top), zorder=2
        )
        ax.set(xlabel="step", ylabel="block id", title=title)
        ax.grid(False)
        fig.legend(handles=_legend(history, colours), loc="outside lower center", ncols=8)
    return fig


def block_explorer(
    history: BlockHistory, title: str = "", start: int | None = None, columns: int = COLUMNS
) -> Explorer:
    """The grid under a slider over the steps; beside it stands the figure of `start`, or of the fullest step."""
    if start is None:
        start = max(history.steps, key=lambda step: history.counts(step)["held"])
    return Explorer(lambda step: block_map(history, step, title, columns), {"step": history.steps}, {"step": start})


def block_animation(
    history: BlockHistory, columns: int = COLUMNS, most: int = 120, milliseconds: int = 120, square: int = 26
) -> Html:
    """The grid over time as one GIF within the page, of `most` frames or fewer; a few tens of kilobytes."""
    chosen = history.steps[:: -(-len(history.steps) // most)]
    if chosen[-1] != history.steps[-1]:
        chosen.append(history.steps[-1])
    pictures = [_picture(history, step, min(columns, history.num_blocks - 1), square) for step in chosen]
    buffer = io.BytesIO()
    pictures[0].save(
        buffer, "GIF", save_all=True, append_images=pictures[1:], duration=milliseconds, loop=0, optimize=True
    )
    data = base64.b64encode(buffer.getvalue()).decode()
    text = f"an animation of {len(pictures)} steps, from step {chosen[0]} to step {chosen[-1]}"
    return Html(f'<img alt="{text}" src="data:image/gif;base64,{data}"/>', text)


def _picture(history: BlockHistory, step: int, columns: int, square: int) -> Image.Image:
    """One frame, in a palette of the colours that occur and no more, so that it compresses well."""
    cells, colours = history.frame(step)[1:], _colours(history)
    rows = -(-len(cells) // columns)
    image = Image.new("RGB", (columns * square + 12, rows * square + 36), PAPER)
    draw = ImageDraw.Draw(image)
    draw.fontmode = "1"  # no grey edges of letters
    path = font_manager.findfont("DejaVu Sans")
    draw.text((6, 5), _headline(history, step, ""), fill=INK, font=ImageFont.truetype(path, 15))
    for i, cell in enumerate(cells):
        x, y = 6 + i % columns * square, 30 + i // columns * square
        fill = tuple(round(255 * part) for part in _colour(cell, colours))
        draw.rectangle((x, y, x + square - 3, y + square - 3), fill=fill, outline=RULE if not cell else fill)
    return image.quantize(colors=32, dither=Image.Dither.NONE)
