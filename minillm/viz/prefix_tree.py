"""What prompts share, drawn: as chains of block keys, one row a prompt, and as a radix tree.

Prompts are sequences of anything hashable, one entry a block. Two entries are the same block only if everything before
them is the same too, which is what a chained key says and what a tree shows by its shape.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from .chips import drawable
from .style import BLUE, GREEN, GREY, INK, ORANGE, RULE, blank, figure, tint

Prompts = Mapping[str, Sequence[Hashable]]


@dataclass
class Edge:
    """A run of blocks that all of `users` have in common, and what follows it. `start` counts blocks before it."""

    start: int
    blocks: list[Hashable]
    users: list[str]
    children: list[Edge] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.blocks)


def radix_edges(prompts: Prompts) -> list[Edge]:
    """The radix tree of the prompts, split only where two part or one ends. Each block lies on one edge."""
    return _grow({name: list(blocks) for name, blocks in prompts.items() if blocks}, 0)


def _grow(prompts: dict[str, list[Hashable]], start: int) -> list[Edge]:
    groups: dict[Hashable, dict[str, list[Hashable]]] = {}
    for name, blocks in prompts.items():
        groups.setdefault(blocks[start], {})[name] = blocks
    edges = []
    for group in groups.values():
        shortest = min(map(len, group.values()))
        first = next(iter(group.values()))
        end = start + 1
        while end < shortest and all(blocks[end] == first[end] for blocks in group.values()):
            end += 1
        longer = {name: blocks for name, blocks in group.items() if len(blocks) > end}
        edges.append(Edge(start, first[start:end], list(group), _grow(longer, end)))
    return edges


def walk(edges: Sequence[Edge]) -> list[Edge]:
    """All edges, parents before children."""
    return [edge for top in edges for edge in (top, *walk(top.children))]


def prefix_tree(prompts: Prompts, title: str) -> Figure:
    """The radix tree of the prompts: blocks run to the right, a branch is where two prompts part."""
    return prefix_trees({"": prompts}, title)


def prefix_trees(panels: Mapping[str, Prompts], title: str) -> Figure:
    """A radix tree for each panel, over one scale of blocks. Dark runs are shared, light ones are one prompt's own.

    Each panel's heading counts the blocks asked for and the blocks that differ: the rest is what a cache can save.
    """
    trees = [radix_edges(prompts) for prompts in panels.values()]
    rows = [max(1, len(_leaves(tree))) for tree in trees]
    longest = max((edge.end for tree in trees for edge in walk(tree)), default=1)
    height = 1.5 + sum(0.62 + 0.34 * count for count in rows)
    ratios = {"height_ratios": [count + 1.2 for count in rows]}
    with figure(height, rows=len(trees), squeeze=False, sharex=True, gridspec_kw=ratios) as (fig, grid):
        fig.suptitle(title, x=0.01, ha="left", weight="bold", size=13)
        for ax, tree, (name, prompts), count in zip(grid[:, 0], trees, panels.items(), rows, strict=True):
            asked = sum(map(len, prompts.values()))
            held = sum(len(edge.blocks) for edge in walk(tree))
            heading = f"{asked} blocks asked for, {held} different: {1 - held / asked if asked else 0:.0%} found"
            ax.set_title(f"{name}: {heading}" if name else heading, size=10.5, pad=4, weight="normal")
            _draw_tree(ax, tree, longest)
            ax.set(xlim=(-0.02 * longest, 1.24 * longest), ylim=(count - 0.4, -0.75), yticks=[])
            ax.spines["left"].set_visible(False)
            ax.grid(False, axis="y")
        grid[-1, 0].set_xlabel("position in the prompt (blocks)")
        keys = [
            Patch(color=BLUE, label="shared by several prompts"),
            Patch(color=tint(ORANGE, 0.3), label="one prompt's own"),
        ]
        fig.legend(handles=keys, loc="outside lower right", ncols=2)
    return fig


def _leaves(edges: Sequence[Edge]) -> list[Edge]:
    return [edge for edge in walk(edges) if not edge.children]


def _draw_tree(ax: Axes, tree: Sequence[Edge], longest: int) -> None:
    """Leaves on whole rows from the top, every other edge in the row of its first leaf."""
    row_of = {id(leaf): row for row, leaf in enumerate(_leaves(tree))}
    for edge in reversed(walk(tree)):
        if edge.children:
            row_of[id(edge)] = row_of[id(edge.children[0])]
    for edge in walk(tree):
        row, shared = row_of[id(edge)], len(edge.users) > 1
        for child in edge.children:
            ax.plot([edge.end] * 2, [row, row_of[id(child)]], color=GREY, linewidth=1.2, zorder=1)
        colour = BLUE if shared else tint(ORANGE, 0.3)
        for block in range(edge.start, edge.end):
            ax.add_patch(Rectangle((block + 0.04, row - 0.27), 0.92, 0.54, color=colour, linewidth=0, zorder=2))
        ending = [name for name in edge.users if not any(name in child.users for child in edge.children)]
        if not edge.children:
            ax.text(edge.end + 0.012 * longest, row, _names(ending), va="center", size=9, color=INK)
        elif ending:  # a prompt that others continue
            ax.plot([edge.end] * 2, [row - 0.34, row + 0.34], color=INK, linewidth=1.6, zorder=3)
            ax.text(edge.end, row - 0.38, _names(ending), ha="right", va="bottom", size=8.5, color=INK)


def _names(names: Sequence[str], most: int = 2) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return drawable(", ".join(names[:most]) + more)


@dataclass(frozen=True)
class Link:
    """One block of a chain: the text in it, the key that stands for it, and what became of it."""

    text: str
    key: str
    state: str = "computed"  # or "found", or "unpublished": a block that is not full


_STATES = {"found": (BLUE, "found in the cache"), "computed": (ORANGE, "computed, then published"),
           "unpublished": (GREY, "not full: no key")}  # fmt: skip


def hash_chain(rows: Mapping[str, Sequence[Link]], title: str) -> Figure:
    """Each prompt a row of blocks with their keys below the text, coloured by what became of them.

    Raises ValueError on an unknown state or when there is nothing to draw.
    """
    links = [link for row in rows.values() for link in row]
    if not links or any(link.state not in _STATES for link in links):
        raise ValueError(f"every row needs links, each in one of the states {', '.join(_STATES)}")
    longest = max(map(len, rows.values()))
    with figure(height=1.2 + 0.86 * len(rows)) as (fig, ax):
        ax.set_title(title)
        for y, (name, row) in enumerate(rows.items()):
            ax.text(-0.08, y, drawable(name), ha="right", va="center", size=10, color=INK)
            for x, link in enumerate(row):
                _draw_link(ax, x, y, link, arrow=x > 0)
        used = [state for state in _STATES if any(link.state == state for link in links)]
        keys = [Patch(facecolor=tint(_STATES[s][0], 0.7), edgecolor=_STATES[s][0], label=_STATES[s][1]) for s in used]
        fig.legend(handles=keys, loc="outside lower center", ncols=3)
        margin = 0.012 * longest * max(map(len, rows)) + 0.1
        ax.set(xlim=(-margin - 0.1, longest), ylim=(len(rows) - 0.5, -0.55))
        blank(ax)
    return fig


def _draw_link(ax: Axes, x: int, y: int, link: Link, arrow: bool) -> None:
    colour = _STATES[link.state][0]
    ax.add_patch(Rectangle((x, y - 0.34), 0.86, 0.68, facecolor=tint(colour, 0.7), edgecolor=colour, linewidth=1.4))
    ax.text(x + 0.43, y - 0.13, drawable(link.text), ha="center", va="center", size=9, color=INK)
    ax.text(x + 0.43, y + 0.17, link.key, ha="center", va="center", size=8.5, color=INK, family="monospace")
    if arrow:
        ax.annotate("", (x, y + 0.17), (x - 0.14, y + 0.17), arrowprops={"arrowstyle": "-|>", "color": GREY})


def hit_bars(hits: Sequence[float], asked: Sequence[float], title: str, unit: str = "blocks") -> Figure:
    """One bar a request, in order: what was found below, what was computed above."""
    computed = [a - h for a, h in zip(asked, hits, strict=True)]
    order = range(len(hits))
    with figure(height=3.6) as (fig, ax):
        ax.bar(order, hits, width=0.9, color=GREEN, label="found")
        ax.bar(order, computed, width=0.9, bottom=hits, color=tint(ORANGE, 0.2), label="computed")
        ax.set(xlabel="request, in order of arrival", ylabel=unit, title=title, facecolor=tint(RULE, 0.9))
        ax.grid(False, axis="x")
        ax.margins(x=0.01)
        fig.legend(loc="outside lower center", ncols=2)
    return fig
