"""Diagrams: the stack map, shapes flowing through a block, the attention matrix, what a step computes again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from .chips import drawable, visible
from .style import BLUE, GREY, INK, ORANGE, RULE, blank, figure, tint

# The stack of an inference service, from the user down: (layer, what it decides, chapters about it).
STACK = (
    ("request", "what was asked: tokens in, tokens out", "01"),
    ("router, scheduler", "which model, which request, how many tokens a step", "10–12, 24–27"),
    ("runtime", "what is kept between steps: KV cache, sampling, drafts", "03, 09, 11, 16"),
    ("graph and kernels", "which operators run, and how they are fused", "02, 06–08, 13–15, 17, 18"),
    ("device", "how fast it computes, how fast it reads memory", "04, 05"),
    ("interconnect", "what it costs to use more than one", "19–23"),
)


def stack_map(highlight: str | Sequence[str] = (), title: str = "Where an answer is made") -> Figure:
    """The stack, top to bottom, with the given layers highlighted. Raises ValueError on an unknown layer."""
    chosen = {highlight} if isinstance(highlight, str) else set(highlight)
    names = [layer for layer, _, _ in STACK]
    if not chosen <= set(names):
        raise ValueError(f"no such layer: {', '.join(sorted(chosen - set(names)))}; the layers are {', '.join(names)}")
    with figure(height=4.6) as (fig, ax):
        ax.set_title(title)
        for i, (name, decides, chapters) in enumerate(STACK):
            lit = name in chosen
            _box(ax, 0, -i, 2.6, 0.62, name, BLUE if lit else GREY, bold=lit)
            ax.text(2.85, -i, decides, va="center", size=10.5, color=INK, weight="bold" if lit else "normal")
            ax.text(8.9, -i, chapters, va="center", ha="right", size=9.5, color=INK if lit else "#5f6b7a")
            if i:
                _arrow(ax, (1.3, -i + 0.69), (1.3, -i + 0.31))
        ax.text(8.9, 0.62, "chapters", ha="right", va="center", size=9.5, color="#5f6b7a", style="italic")
        ax.set(xlim=(-0.1, 9.0), ylim=(-len(STACK) + 0.55, 0.85))
        blank(ax)
    return fig


def shapes_flow(
    steps: Sequence[tuple[str, str | Sequence]], title: str, residuals: Sequence[tuple[int, int]] = ()
) -> Figure:
    """Boxes from top to bottom, each with the shape of what it hands on.

    steps: (what happens, shape out), the shape a string or a sequence such as ("T", 576). residuals: (from, to) pairs
    of step indices; the output of `from` is added to the output of `to`, drawn as an arc at the left.
    """
    with figure(height=0.9 + 0.72 * len(steps)) as (fig, ax):
        ax.set_title(title)
        for i, (name, shape) in enumerate(steps):
            _box(ax, 0, -i, 5.2, 0.52, name, BLUE)
            ax.text(5.5, -i, shape_text(shape), va="center", family="monospace", size=11, color=INK)
            if i:
                _arrow(ax, (2.6, -i + 0.74), (2.6, -i + 0.26))
        for start, end in residuals:
            arc = FancyArrowPatch(
                (0, -start), (0, -end), connectionstyle="arc3,rad=0.35", arrowstyle="-|>", mutation_scale=12
            )
            arc.set(color=ORANGE, linewidth=2)
            ax.add_patch(arc)
            ax.text(
                -0.12 - 0.175 * (end - start), -(start + end) / 2, "add", ha="right", va="center", color=INK, size=9
            )
        reach = max((end - start for start, end in residuals), default=0)
        ax.set(xlim=(-1.1 - 0.2 * reach, 9), ylim=(-len(steps) + 0.5, 0.6))
        blank(ax)
    return fig


def shape_text(shape: str | Sequence) -> str:
    """("T", 9, 64) -> "(T, 9, 64)", (14,) -> "(14,)"."""
    if isinstance(shape, str):
        return shape
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def attention_map(
    weights: Sequence[Sequence[float]],
    tokens: Sequence[str],
    title: str,
    queries: Sequence[str] | None = None,
    causal: bool = True,
) -> Figure:
    """Attention weights, one row a query and one column a key, from white to dark; what the mask forbids is hatched.

    weights (Q, K), rows summing to one; the queries are the last Q of the K tokens, as with a cache. Raises ValueError
    when the shape and the labels disagree.
    """
    grid = np.asarray(weights, dtype=float)
    queries = list(tokens)[len(tokens) - grid.shape[0] :] if queries is None else list(queries)
    if grid.shape != (len(queries), len(tokens)):
        raise ValueError(f"weights of shape {grid.shape} for {len(queries)} queries and {len(tokens)} keys")
    hidden = _future(grid.shape) if causal else np.zeros(grid.shape, dtype=bool)
    shades = LinearSegmentedColormap.from_list("weight", ["#ffffff", tint(BLUE, 0.4), "#04324f"])
    side = min(8.0, max(3.2, 1.6 + 0.36 * len(queries)))
    with figure(height=side) as (fig, ax):
        image = ax.imshow(np.where(hidden, np.nan, grid), cmap=shades, vmin=0, vmax=1)
        ax.set_title(title)
        cells = [FancyBboxPatch((x - 0.5, y - 0.5), 1, 1, boxstyle="square,pad=0") for y, x in np.argwhere(hidden)]
        for cell in cells:
            cell.set(facecolor=RULE, edgecolor="#ffffff", hatch="///", linewidth=0.5)
            ax.add_patch(cell)
        ax.set_xticks(range(len(tokens)), [drawable(visible(token)) for token in tokens], rotation=60, ha="right")
        ax.set_yticks(range(len(queries)), [drawable(visible(token)) for token in queries])
        ax.set(xlabel="key: token that is read", ylabel="query: token that reads")
        ax.grid(False)
        fig.colorbar(image, ax=ax, label="attention weight", shrink=0.8)
    return fig


def _future(shape: tuple[int, int]) -> np.ndarray:
    """True where key > query, the queries being the last of the keys."""
    queries, keys = shape
    return np.arange(keys)[None, :] > np.arange(queries)[:, None] + (keys - queries)


def recompute_map(prompt: int, output: int, title: str) -> Figure:
    """Token positions run through the model at each step: a triangle without a cache, one a step with it.

    prompt, output: numbers of tokens. Each panel is titled with its sum.
    """
    steps = np.arange(output)
    without = prompt + steps
    with_cache = np.where(steps == 0, prompt, 1)
    with figure(height=3.6, columns=2, sharey=True) as (fig, axes):
        fig.suptitle(title, x=0.01, ha="left", weight="bold", size=13)
        for ax, counts, name, colour in zip(
            axes, (without, with_cache), ("without a cache", "with the cache"), (ORANGE, BLUE), strict=True
        ):
            starts = without - counts
            ax.bar(steps, counts, bottom=starts, width=0.9, color=colour, label="computed")
            ax.bar(steps, starts, width=0.9, color=RULE, label="remembered")
            ax.set_title(f"{name}: {int(counts.sum()):,} tokens", size=11)
            ax.set(xlabel="step")
            ax.grid(False, axis="x")
        axes[0].set_ylabel("position in the text (tokens)")
        axes[1].legend(loc="upper left")
    return fig


def _box(ax: Axes, left: float, middle: float, width: float, height: float, text: str, colour: str, bold=False) -> None:
    box = FancyBboxPatch(
        (left, middle - height / 2), width, height, boxstyle="round,pad=0,rounding_size=0.08", mutation_aspect=1
    )
    box.set(facecolor=colour if bold else tint(colour, 0.8), edgecolor=colour, linewidth=1.4)
    ax.add_patch(box)
    ax.text(
        left + width / 2,
        middle,
        text,
        ha="center",
        va="center",
        size=10.5,
        color="#ffffff" if bold else INK,
        weight="bold" if bold else "normal",
    )


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": GREY, "linewidth": 1.4})
