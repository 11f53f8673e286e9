"""Experts: who goes where, how many are read by a step, what sorting does to the rows, and who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .style import BLUE, GREY, INK, ORANGE, PAPER, RED, blank, colour_of, figure, tint
from .units import number


class Read(NamedTuple):
    """One model or one load: `experts` of it are there, and of those a step of each size was to read and did read."""

    name: str
    experts: int
    formula: Sequence[float]
    measured: Sequence[float]


def routing_map(
    choices: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]],
    num_experts: int,
    title: str,
    tokens: Sequence[str] | None = None,
) -> Figure:
    """Tokens above, experts below, a line for each choice, as wide as its weight. Experts nobody chose are pale.

    Raises ValueError for an expert that is not there; a negative one was dropped, and its line is left out.
    """
    if any(expert >= num_experts for row in choices for expert in row):
        raise ValueError(f"a choice names an expert beyond the {num_experts} there are")
    names = [f"t{i}" for i in range(len(choices))] if tokens is None else tokens
    counts = [sum(row.count(e) for row in map(list, choices)) for e in range(num_experts)]
    width = max(len(choices), num_experts)
    with figure(height=3.2) as (fig, ax):
        ax.set_title(title)
        for t, (row, shares) in enumerate(zip(choices, weights, strict=True)):
            x = _place(t, len(choices), width)
            ax.text(x, 1.12, names[t], ha="center", va="bottom", size=10, color=INK)
            for expert, share in zip(row, shares, strict=True):
                if expert >= 0:
                    end = _place(expert, num_experts, width)
                    ax.plot([x, end], [1.06, 0.2], color=colour_of(t), linewidth=0.5 + 5 * share, alpha=0.75)
        for e, count in enumerate(counts):
            _expert(ax, _place(e, num_experts, width), e, count)
        ax.text(-0.6, 1.2, "tokens", ha="right", va="center", size=10, color=INK)
        ax.text(-0.6, 0.08, "experts", ha="right", va="center", size=10, color=INK)
        ax.text(-0.6, -0.17, "their tokens", ha="right", va="center", size=10, color=INK)
        ax.set(xlim=(-2.2, width - 0.4), ylim=(-0.3, 1.35))
        blank(ax)
    return fig


def _place(index: int, of: int, width: int) -> float:
    """Both rows are as wide as the longer one."""
    return (index + 0.5) * width / of - 0.5


def _expert(ax: Axes, x: float, e: int, count: int) -> None:
    fill = tint(BLUE, 0.35) if count else tint(GREY, 0.8)
    ax.add_patch(Rectangle((x - 0.36, 0), 0.72, 0.18, facecolor=fill, edgecolor=PAPER, zorder=3))
    ax.text(x, 0.09, str(e), ha="center", va="center", size=9, color=INK, zorder=4)
    ax.text(x, -0.17, str(count), ha="center", va="center", size=10, color=INK if count else GREY)


def experts_read(
    tokens: Sequence[int],
    models: Sequence[Read],
    title: str,
    share: bool = True,
    marks: Mapping[str, int] | None = None,
) -> Figure:
    """Distinct experts against the tokens of a step: the formula dashed, what was counted as dots.

    share: as percent of each model's experts, so that models compare; else their number. marks: label -> tokens.
    Raises ValueError when a model has not a value for each size of step.
    """
    if any(len(side) != len(tokens) for one in models for side in (one.formula, one.measured)):
        raise ValueError(f"each model needs a value for each of the {len(tokens)} sizes of a step")
    with figure(height=4.4) as (fig, ax):
        for i, one in enumerate(models):
            unit = 100 / one.experts if share else 1
            ax.plot(tokens, [unit * y for y in one.formula], color=colour_of(i), linestyle="--", linewidth=1.6)
            ax.plot(
                tokens, [unit * y for y in one.measured], color=colour_of(i), linestyle="", marker="o", label=one.name
            )
        for label, at in (marks or {}).items():
            ax.axvline(at, color=GREY, linestyle=":", linewidth=1.2, zorder=0)
            ax.annotate(
                label, (at, 0), (4, 4), xycoords=("data", "axes fraction"), textcoords="offset points", size=9.5
            )
        ax.plot([], [], color=INK, linestyle="--", linewidth=1.6, label="formula")
        ax.set(title=title, xlabel="tokens in the step", ylabel="experts read (%)" if share else "experts read")
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(lambda value, _: number(value))
        ax.set_ylim(0, 108 if share else 1.08 * max(one.experts for one in models))
        ax.legend(loc="lower right")
    return fig


def sorted_tiles(
    experts: Sequence[int], source: Sequence[int], owners: Sequence[int], top_k: int, title: str
) -> Figure:
    """Pairs as the router leaves them, above; sorted into tiles of one expert each, below. Padding is empty.

    experts: the expert of each pair, negative if dropped. source: the pair of each sorted row, `len(experts)` for
    padding. owners: the expert of each tile.
    """
    block, pairs = len(source) // len(owners), len(experts)
    with figure(height=2.5) as (fig, ax):
        ax.set_title(title)
        for p, expert in enumerate(experts):
            _row(ax, p + 0.35 * (p // top_k), 1.0, expert, f"t{p // top_k}")
        for i, pair in enumerate(source):
            x = i + 0.35 * (i // block)
            if pair < pairs:
                _row(ax, x, 0.0, experts[pair], f"t{pair // top_k}")
            else:
                ax.add_patch(Rectangle((x, 0), 0.92, 0.5, facecolor=PAPER, edgecolor=tint(GREY, 0.5), linewidth=0.8))
        for b, owner in enumerate(owners):
            name = f"expert {owner}" if owner >= 0 else "nobody"
            ax.text(b * (block + 0.35) + block / 2, -0.22, name, ha="center", va="center", size=9, color=INK)
        ax.text(-0.3, 1.25, "as routed", ha="right", va="center", size=10, color=INK)
        ax.text(-0.3, 0.25, "sorted", ha="right", va="center", size=10, color=INK)
        ax.set(xlim=(-0.12 * len(source), 1 + len(source) + 0.35 * len(owners)), ylim=(-0.4, 1.6))
        blank(ax)
    return fig


def _row(ax: Axes, x: float, y: float, expert: int, name: str) -> None:
    fill = tint(colour_of(expert), 0.45) if expert >= 0 else tint(GREY, 0.75)
    ax.add_patch(Rectangle((x, y), 0.92, 0.5, facecolor=fill, edgecolor=PAPER))
    ax.text(x + 0.46, y + 0.25, name, ha="center", va="center", size=8, color=INK)


def waiting_devices(loads: Mapping[str, Sequence[float]], title: str, ylabel: str = "tokens of each device") -> Figure:
    """A panel for each case: what every device has to do, and above it, pale, how long it waits for the fullest."""
    with figure(height=3.6, columns=len(loads), squeeze=False) as (fig, axes):
        fig.suptitle(title, x=0.01, ha="left", weight="bold", size=13)
        for ax, (name, work) in zip(axes[0], loads.items(), strict=True):
            most, mean = max(work), sum(work) / len(work)
            where = range(len(work))
            colours = [RED if one == most else BLUE for one in work]
            ax.bar(where, [most - one for one in work], bottom=work, color=tint(ORANGE, 0.75), width=0.85)
            ax.bar(where, work, color=colours, width=0.85)
            ax.axhline(mean, color=INK, linestyle="--", linewidth=1.4)
            ax.set_title(f"{name}: × {most / mean:.2f}", size=11)
            ax.set(xlabel="device", ylim=(0, 1.05 * most))
            ax.grid(False, axis="x")
        axes[0, 0].set_ylabel(ylabel)
    return fig
