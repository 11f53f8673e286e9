"""A machine that runs tile programs one after another and remembers every access, and its pictures.

It has the vocabulary of triton.language on numpy arrays, with memory as one long row of numbers in which a pointer is
a place. So pointer arithmetic is arithmetic, and a store without its mask lands in whatever lies behind.
Source of the model: Tillet, Kung and Cox 2019 (Triton, MAPL 2019), section 3.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ..errors import MinillmError
from .style import BLUE, GREY, INK, ORANGE, PAPER, RED, RULE, blank, figure, tint
from .widgets import Explorer


class TileError(MinillmError):
    """A tile program that cannot run: an access outside of memory, a range that is no power of two."""


@dataclass(frozen=True)
class Access:
    """One load or store of one program: the places of its lanes, and which of them the mask let through."""

    program: tuple[int, ...]
    kind: str
    places: np.ndarray
    mask: np.ndarray

    @property
    def touched(self) -> np.ndarray:
        return self.places[self.mask]


class TileMachine:
    """Memory, a grid, and a log of accesses. Numbers are float32.

    gap: places left free behind each buffer, filled with NaN. Zero puts the next buffer right behind.
    """

    def __init__(self, gap: int = 0) -> None:
        self.gap, self.memory = gap, np.zeros(0, dtype=np.float32)
        self.buffers: dict[str, range] = {}
        self.accesses: list[Access] = []
        self.grid: tuple[int, ...] = ()
        self._program: tuple[int, ...] = ()

    def place(self, name: str, values: Sequence[float] | np.ndarray) -> int:
        """Puts a buffer behind the others -> the pointer to its first number."""
        flat = np.asarray(values, dtype=np.float32).ravel()
        start = len(self.memory)
        self.buffers[name] = range(start, start + len(flat))
        self.memory = np.concatenate([self.memory, flat, np.full(self.gap, np.nan, np.float32)])
        return start

    def read(self, name: str) -> np.ndarray:
        """What the buffer holds now, (numbers,)."""
        return self.memory[self.buffers[name].start : self.buffers[name].stop].copy()

    def run(self, program: Callable, grid: Sequence[int], *args, **constants) -> None:
        """Calls `program(machine, *args, **constants)` once for each place in the grid. A GPU runs them side by side,
        in no order, so a program may not wait for another."""
        self.grid = tuple(grid)
        for index in itertools.product(*map(range, self.grid)):
            self._program = index
            program(self, *args, **constants)

    def moved_bytes(self, kind: str = "", name: str = "") -> int:
        """Bytes of the loads and stores so far, of one kind and one buffer where named. Masked lanes move nothing."""
        chosen = [a.touched for a in self.accesses if kind in ("", a.kind)]
        inside = self.buffers[name] if name else range(len(self.memory))
        return sum(int(np.sum((t >= inside.start) & (t < inside.stop))) for t in chosen) * self.memory.itemsize

    def strays(self) -> list[tuple[tuple[int, ...], str, int]]:
        """(program, kind, place) of every access that hit no buffer, or another than the tile began in."""
        found = []
        for access in self.accesses:
            home = self.home(access)
            found += [(access.program, access.kind, int(p)) for p in access.touched if p not in home]
        return found

    def home(self, access: Access) -> range:
        """The buffer that the access's first lane points into: the one it was meant for."""
        first = int(access.places.flat[0]) if access.places.size else -1
        return next((r for r in self.buffers.values() if first in r), range(0))

    # What triton.language calls by the same names ----------------------------------------------------------------

    def program_id(self, axis: int) -> int:
        return self._program[axis]

    def num_programs(self, axis: int) -> int:
        return self.grid[axis]

    @staticmethod
    def arange(start: int, end: int) -> np.ndarray:
        """start … end - 1. As in Triton the length has to be a power of two."""
        length = end - start
        if length < 1 or length & (length - 1):
            raise TileError(
                f"arange({start}, {end}) has {length} lanes; a tile has a power of two, the mask does the rest"
            )
        return np.arange(start, end)

    def load(self, pointer, mask=None, other=None) -> np.ndarray | np.float32:
        """The numbers at the places. Lanes that the mask leaves out give `other`, and NaN where `other` is not given:
        Triton promises nothing about them."""
        places, allowed = self._access("load", pointer, mask)
        values = np.full(places.shape, np.nan if other is None else other, dtype=np.float32)
        values[allowed] = self.memory[places[allowed]]
        return values if values.ndim else values[()]

    def store(self, pointer, value, mask=None) -> None:
        """Writes the numbers to the places that the mask lets through."""
        places, allowed = self._access("store", pointer, mask)
        self.memory[places[allowed]] = np.broadcast_to(np.asarray(value, np.float32), places.shape)[allowed]

    def _access(self, kind: str, pointer, mask) -> tuple[np.ndarray, np.ndarray]:
        places = np.asarray(pointer)
        allowed = np.broadcast_to(np.asarray(True if mask is None else mask, dtype=bool), places.shape)
        wrong = places[allowed & ((places < 0) | (places >= len(self.memory)))]
        if wrong.size:
            raise TileError(
                f"program {self._program}: {kind} at {wrong[0]}, but memory has the places 0 to "
                f"{len(self.memory) - 1}; a GPU would stop here with an illegal memory access"
            )
        self.accesses.append(Access(self._program, kind, places, allowed))
        return places, allowed

    exp, sqrt, maximum, minimum = map(staticmethod, (np.exp, np.sqrt, np.maximum, np.minimum))
    where, sum, max = map(staticmethod, (np.where, np.sum, np.max))

    @staticmethod
    def rsqrt(x):
        return np.float32(1) / np.sqrt(x)


# Pictures -----------------------------------------------------------------------------------------------------------

_READ, _WRITE, _OTHER = tint(BLUE, 0.25), tint(ORANGE, 0.15), tint(GREY, 0.45)


def tile_walk(machine: TileMachine, program: int | tuple[int, ...], title: str = "") -> Figure:
    """What one program touched: each buffer a strip of cells, the grid above, masked lanes hatched, strays red.

    Raises TileError when the grid has no such program.
    """
    index = (program,) if isinstance(program, int) else tuple(program)
    programs = list(itertools.product(*map(range, machine.grid)))
    if index not in programs:
        raise TileError(f"the grid {machine.grid} has no program {index}; it has {len(programs)} of them")
    mine = [access for access in machine.accesses if access.program == index]
    extent = max(
        [len(r) for r in machine.buffers.values()]
        + [int(a.places.max()) - machine.home(a).start + 1 for a in machine.accesses if machine.home(a)]
    )
    with figure(height=1.75 + 0.62 * len(machine.buffers)) as (fig, ax):
        ax.set_title(title or f"Program {_named(index)} of a grid of {len(programs)}{_summary(machine, mine)}")
        _draw_grid(ax, programs, index, extent)
        for row, (name, places) in enumerate(machine.buffers.items()):
            _draw_buffer(ax, machine, mine, name, places, -1.5 * row)
        ax.set(xlim=(-0.13 * extent, extent + 0.5), ylim=(-1.5 * len(machine.buffers) + 0.55, 2.75))
        blank(ax)
        fig.legend(handles=_legend(machine), loc="outside lower center", ncols=5)
    return fig


def tile_explorer(
    make: Callable[..., TileMachine], controls: dict[str, Sequence], start: dict | None = None
) -> Explorer:
    """The walk under controls, beside its static figure. `make(**values)` runs a machine for each choice but the last,
    `program`; what cannot run says why."""

    def draw(program, **values) -> Figure:
        return tile_walk(make(**values), program)

    return Explorer(draw, controls, start)


def _named(index: tuple[int, ...]) -> str:
    return str(index[0] if len(index) == 1 else index)


def _summary(machine: TileMachine, mine: list[Access]) -> str:
    """What there is to see of one program: strays before masked lanes, masked lanes before a full tile."""
    if not mine:
        return ""
    strays = sum(int(p) not in machine.home(access) for access in mine for p in access.touched)
    if strays:
        return f": {strays} accesses to another buffer"
    widest = max(mine, key=lambda access: access.places.size)
    lanes, off = widest.places.size, int((~widest.mask).sum())
    return f": {off} of {lanes} lanes masked off" if off else f": all {lanes} lanes at work"


def _draw_grid(ax: Axes, programs: list, index: tuple[int, ...], extent: float) -> None:
    ax.text(-0.02 * extent, 1.95, "grid", ha="right", va="center", size=10, color=INK)
    width = extent / len(programs)
    for i, program in enumerate(programs):
        lit = program == index
        box = Rectangle((i * width + 0.04 * width, 1.55), 0.92 * width, 0.8)
        box.set(facecolor=BLUE if lit else tint(GREY, 0.8), edgecolor="none")
        ax.add_patch(box)
        if len(programs) <= 16 or lit:
            colour, middle = (PAPER if lit else INK), (i + 0.5) * width
            ax.text(middle, 1.95, _named(program), ha="center", va="center", size=9, color=colour)


def _draw_buffer(ax: Axes, machine: TileMachine, mine: list[Access], name: str, places: range, y: float) -> None:
    """One strip. Places are coloured by what this program did there; lanes beyond the end stand behind it."""
    ax.text(-0.02 * max(len(places), 1) - 0.4, y + 0.5, name, ha="right", va="center", size=10, color=INK)
    earlier = {int(p) for a in machine.accesses if a.program < mine[0].program for p in a.touched} if mine else set()
    done = {int(p): a.kind for a in mine for p in a.touched if machine.home(a) == places}
    strange = {int(p) for a in mine for p in a.touched if machine.home(a) != places}
    off = {int(p) for a in mine for p in a.places[~a.mask] if machine.home(a) == places}
    for place in sorted(set(places) | done.keys() | off):
        inside = place in places
        if place in strange or (place in done and not inside):
            face = RED
        elif place in done:
            face = _READ if done[place] == "load" else _WRITE
        else:
            face = PAPER if not inside else _OTHER if place in earlier else tint(GREY, 0.82)
        cell = Rectangle((place - places.start, y), 1, 1)
        cell.set(facecolor=face, edgecolor=PAPER if inside else RULE, linewidth=0.8)
        if place in off and not inside:
            cell.set(hatch="////", edgecolor=GREY)
        ax.add_patch(cell)


def _legend(machine: TileMachine) -> list[Patch]:
    handles = [
        Patch(facecolor=_READ, label="read"),
        Patch(facecolor=_WRITE, label="written"),
        Patch(facecolor=_OTHER, label="by earlier programs"),
        Patch(facecolor=PAPER, edgecolor=GREY, hatch="////", label="masked off"),
    ]
    return handles + ([Patch(facecolor=RED, label="not this buffer's")] if machine.strays() else [])
