"""Chapter 06, Triton and fusion: a tile program with strides, bytes before and after fusing, a long row, what fits.

The right answers come from whole rows at once in numpy, from accesses written down one by one, and from a processor
that takes programs in until one does not fit.
"""

from __future__ import annotations

import numpy as np

from exercises import Exercise, Judge, Mistake
from minillm.viz.tiles import TileMachine

from .chapter_06_bytes import BYTES
from .chapter_06_norm import NORM

# --- swiglu_program


def rows_apart(machine: TileMachine, name: str, rows: np.ndarray, stride: int) -> int:
    """Places rows `stride` apart, 777 in between -> pointer."""
    wide = np.full((len(rows), stride), 777.0)
    wide[:, : rows.shape[1]] = rows
    return machine.place(name, wide)


def run_swiglu(swiglu_program, T: int, f: int, BLOCK: int, strides: tuple[int, int, int]):
    """(machine after the run, what y should hold, rows apart and all)."""
    draw = np.random.default_rng(T + f)
    gate, up = draw.normal(size=(2, T, f)).astype(np.float32)
    machine = TileMachine(gap=4 * BLOCK)
    pointers = [
        rows_apart(machine, name, rows, stride)
        for name, rows, stride in zip(("gate", "up", "y"), (gate, up, np.full((T, f), np.nan)), strides)
    ]
    machine.run(swiglu_program, (T, -(-f // BLOCK)), *pointers, *strides, f, BLOCK)
    want = np.full((T, strides[2]), 777.0)
    want[:, :f] = gate * up / (1 + np.exp(-gate.astype(np.float64)))
    return machine, want.ravel()


def made(swiglu_program, T: int, f: int, BLOCK: int, strides, judge: Judge, hint: str) -> TileMachine:
    machine, want = run_swiglu(swiglu_program, T, f, BLOCK, strides)
    stored = any(access.kind == "store" for access in machine.accesses)
    judge.true(stored, "nothing was stored. Likely mistake: the result is returned; a program gives it to m.store.")
    judge.close(machine.read("y").tolist(), want.tolist(), f"Likely mistake: {hint}", rtol=1e-4, atol=1e-5)
    return machine


def one_tile(swiglu_program, judge: Judge) -> None:
    made(swiglu_program, 1, 16, 16, (16, 16, 16), judge, "the formula: silu of the gate, times up.")


def several_tiles(swiglu_program, judge: Judge) -> None:
    hint = "the number of the tile is not multiplied by BLOCK, or the axes of the grid are exchanged."
    made(swiglu_program, 1, 64, 16, (64, 64, 64), judge, hint)
    made(swiglu_program, 3, 32, 8, (32, 32, 32), judge, hint)


def three_strides(swiglu_program, judge: Judge) -> None:
    made(swiglu_program, 3, 32, 16, (40, 33, 37), judge, "one stride used for all three, or rows taken as f apart.")


def the_tail(swiglu_program, judge: Judge) -> None:
    for f, strides in ((17, (17, 17, 17)), (49, (49, 60, 53)), (5, (5, 7, 8))):
        hint = f"a row of {f} in tiles of 16: the lanes past its end have to be masked in the store."
        machine = made(swiglu_program, 2, f, 16, strides, judge, hint)
        judge.equal(
            machine.strays(),
            [],
            "These are accesses (program, kind, place) outside of the buffer. Mask loads and store alike.",
        )


def nothing_twice(swiglu_program, judge: Judge) -> None:
    for T, f, BLOCK, strides in ((2, 49, 16, (53, 60, 57)), (3, 8, 32, (9, 8, 11))):
        machine = made(swiglu_program, T, f, BLOCK, strides, judge, "see the checks before.")
        for kind, name in (("load", "gate"), ("load", "up"), ("store", "y")):
            hint = (
                f"bytes of {kind}s in {name}, for {T} rows of {f} numbers. Likely mistake: lanes past the end of a row "
                "read what lies between rows, or a program does the work of several."
            )
            judge.equal(machine.moved_bytes(kind, name), 4 * T * f, hint)


_WHOLE_ROW = """
def swiglu_program(m, gate, up, y, gate_stride, up_stride, y_stride, f, BLOCK):
    t = m.program_id(0)
    for start in range(0, f, BLOCK):
        i = start + m.arange(0, BLOCK)
        g = m.load(gate + t * gate_stride + i, mask=i < f)
        u = m.load(up + t * up_stride + i, mask=i < f)
        m.store(y + t * y_stride + i, g / (1 + m.exp(-g)) * u, mask=i < f)
"""

SWIGLU = Exercise(
    name="swiglu_program",
    title="SwiGLU in tiles",
    chapter="06",
    difficulty=2,
    minutes=20,
    checks=[one_tile, several_tiles, three_strides, the_tail, nothing_twice],
    mistakes=[
        Mistake("sigmoid of minus the gate", "one_tile", edit=("m.exp(-g)", "m.exp(g)")),
        Mistake("sigmoid alone", "one_tile", edit=("g / (1 + m.exp(-g)) * u", "1 / (1 + m.exp(-g)) * u")),
        Mistake("gate and up exchanged", "one_tile", edit=("g / (1 + m.exp(-g)) * u", "u / (1 + m.exp(-u)) * g")),
        Mistake("tiles one number apart", "several_tiles", edit=("m.program_id(1) * BLOCK", "m.program_id(1)")),
        Mistake(
            "axes exchanged",
            "several_tiles",
            edit=(
                "t = m.program_id(0)\n    i = m.program_id(1) * BLOCK",
                "t = m.program_id(1)\n    i = m.program_id(0) * BLOCK",
            ),
        ),
        Mistake("one stride for all", "three_strides", edit=("t * up_stride", "t * gate_stride")),
        Mistake("rows end to end", "three_strides", edit=("t * y_stride", "t * f")),
        Mistake("no mask at the store", "the_tail", edit=("* u, mask=inside)", "* u)")),
        Mistake("no masks", "the_tail", edit=("inside = i < f", "inside = i == i")),
        Mistake("one lane too many", "the_tail", edit=("i < f", "i <= f")),
        Mistake(
            "loads without a mask",
            "the_tail",
            edit=("u = m.load(up + t * up_stride + i, mask=inside, other=0.0)", "u = m.load(up + t * up_stride + i)"),
        ),
        Mistake("each program makes the whole row", "nothing_twice", source=_WHOLE_ROW),
    ],
    forbids=("kernels", "torch"),
)


# --- resident_programs

H100 = {"registers": 65536, "warps": 64, "programs": 32, "shared": 233472, "reserved": 1024}
A100 = {"registers": 65536, "warps": 64, "programs": 32, "shared": 167936, "reserved": 1024}
SMALL = {"registers": 20000, "warps": 12, "programs": 5, "shared": 9000, "reserved": 0}


def taken_in(kernel: dict, chip: dict) -> tuple[int, str]:
    """Takes programs in one by one, until something has run out."""
    portions = 0
    while portions * 256 < kernel["registers"] * 32:
        portions += 1
    held = 0
    while True:
        next_one = held + 1
        for name, need in (
            ("registers", next_one * kernel["warps"] * portions * 256),
            ("warps", next_one * kernel["warps"]),
            ("programs", next_one),
            ("shared", next_one * (kernel["shared"] + chip["reserved"])),
        ):
            if need > chip[name]:
                return held, name
        held = next_one


def counted(resident_programs, cases: list, chip: dict, judge: Judge, hint: str) -> None:
    for registers, warps, shared in cases:
        kernel = {"registers": registers, "warps": warps, "shared": shared}
        got = resident_programs(kernel, chip)
        judge.type(got, (tuple, list))
        judge.equal(list(got), list(taken_in(kernel, chip)), f"for {kernel} on {chip}. Likely mistake: {hint}")


def registers_run_out(resident_programs, judge: Judge) -> None:
    hint = "registers are counted a thread; a warp has 32 threads, and a program several warps."
    counted(resident_programs, [(64, 8, 64), (128, 4, 64), (128, 16, 0), (32, 32, 64)], H100, judge, hint)


def dealt_in_portions(resident_programs, judge: Judge) -> None:
    hint = "a warp takes registers in portions of 256: round up what one warp needs, before anything is multiplied."
    counted(resident_programs, [(33, 8, 64), (113, 16, 64), (65, 4, 64), (41, 10, 64), (73, 7, 0)], H100, judge, hint)


def warps_and_programs_run_out(resident_programs, judge: Judge) -> None:
    hint = "a processor has so many warps, and so many programs, whatever they take."
    counted(resident_programs, [(20, 8, 64), (16, 1, 0), (24, 16, 64), (30, 2, 64), (20, 24, 64)], H100, judge, hint)


def shared_memory_runs_out(resident_programs, judge: Judge) -> None:
    hint = "each program takes its own shared memory and the reserved part."
    cases = [(64, 4, 65536), (40, 4, 77824), (40, 2, 115712), (168, 8, 115713), (40, 4, 18433)]
    counted(resident_programs, cases, H100, judge, hint)
    counted(resident_programs, cases, A100, judge, hint)


def not_even_one(resident_programs, judge: Judge) -> None:
    hint = "what does not fit at all gives 0, with the name of what it exceeds."
    counted(resident_programs, [(255, 32, 64), (64, 4, 233000)], H100, judge, hint)


def other_chips(resident_programs, judge: Judge) -> None:
    hint = "limits written as numbers, a division by no shared memory at all, or ties not in the given order."
    for registers in (8, 9, 40, 100):
        for warps in (1, 2, 3):
            counted(resident_programs, [(registers, warps, s) for s in (0, 1500, 3000)], SMALL, judge, hint)


FITS = Exercise(
    name="resident_programs",
    title="How many programs fit",
    chapter="06",
    difficulty=3,
    minutes=25,
    checks=[
        registers_run_out,
        dealt_in_portions,
        warps_and_programs_run_out,
        shared_memory_runs_out,
        not_even_one,
        other_chips,
    ],
    mistakes=[
        Mistake("registers of one thread", "registers_run_out", edit=("-(-32 * kernel", "-(-1 * kernel")),
        Mistake(
            "registers of one warp", "registers_run_out", edit=('(of_a_warp * kernel["warps"])', "max(1, of_a_warp)")
        ),
        Mistake(
            "not rounded",
            "dealt_in_portions",
            edit=('-(-32 * kernel["registers"] // 256) * 256', '32 * kernel["registers"]'),
        ),
        Mistake("rounded down", "dealt_in_portions", edit=("-(-32 * kernel", "(32 * kernel")),
        Mistake(
            "programs without a limit",
            "warps_and_programs_run_out",
            edit=('"programs": chip["programs"],', '"programs": 10**6,'),
        ),
        Mistake(
            "warps without a limit", "warps_and_programs_run_out", edit=('chip["warps"] // kernel["warps"]', "10**6")
        ),
        Mistake(
            "a part of a program",
            "warps_and_programs_run_out",
            edit=('chip["warps"] // kernel["warps"]', 'chip["warps"] / kernel["warps"]'),
        ),
        Mistake(
            "the reserved part forgotten",
            "shared_memory_runs_out",
            edit=('kernel["shared"] + chip["reserved"]', 'kernel["shared"]'),
        ),
        Mistake(
            "at least one", "not_even_one", edit=("return fits[limit], limit", "return max(1, fits[limit]), limit")
        ),
        Mistake("the H100's registers", "other_chips", edit=('chip["registers"] //', "65536 //")),
        Mistake(
            "divides by nothing",
            "other_chips",
            edit=('chip["shared"] // taken if taken else chip["programs"]', 'chip["shared"] // taken'),
        ),
    ],
    forbids=("kernels",),
)


EXERCISES = [SWIGLU, BYTES, NORM, FITS]
