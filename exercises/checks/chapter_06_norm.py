"""Chapter 06, add + RMSNorm of rows longer than a tile, against whole rows in float64, traffic from the log."""

from __future__ import annotations

import numpy as np

from exercises import Exercise, Judge, Mistake
from minillm.viz.tiles import TileMachine


def run_norm(
    add_norm_program, T: int, d: int, BLOCK: int, eps: float, judge: Judge, hint: str, scale=1.0
) -> TileMachine:
    draw = np.random.default_rng(d)
    x, r = (scale * draw.normal(size=(2, T, d))).astype(np.float32)
    w = draw.normal(size=d).astype(np.float32)
    machine = TileMachine(gap=4 * BLOCK)
    values = {"x": x, "r": r, "w": w, "h": np.full((T, d), np.nan), "y": np.full((T, d), np.nan)}
    pointers = [machine.place(name, numbers) for name, numbers in values.items()]
    machine.run(add_norm_program, (T,), *pointers, d, eps, BLOCK)
    stored = any(access.kind == "store" for access in machine.accesses)
    judge.true(stored, "nothing was stored. Likely mistake: the result is returned; a program gives it to m.store.")
    h = x + r
    wide = h.astype(np.float64)
    y = w * wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + eps)
    for name, want in (("h", h), ("y", y)):
        got, right = machine.read(name).tolist(), want.ravel().tolist()
        judge.close(got, right, f"That is in {name}. Likely mistake: {hint}", rtol=1e-4, atol=1e-5)
    return machine


def one_tile(add_norm_program, judge: Judge) -> None:
    run_norm(add_norm_program, 1, 16, 16, 1e-6, judge, "the formula, or one of the two results not stored.")


def several_rows(add_norm_program, judge: Judge) -> None:
    run_norm(add_norm_program, 3, 16, 16, 1e-6, judge, "where row t begins; the weight begins at 0 for every row.")


def a_longer_row(add_norm_program, judge: Judge) -> None:
    hint = "the mean is over the whole row, so nothing can be scaled before the last tile has been added."
    run_norm(add_norm_program, 2, 64, 16, 1e-6, judge, hint)


def the_tail(add_norm_program, judge: Judge) -> None:
    hint = "lanes past the end of the row add something to the sum (give other=0.0), or the mean counts them."
    for d in (17, 49, 5):
        machine = run_norm(add_norm_program, 2, d, 16, 1e-6, judge, hint)
        judge.equal(
            machine.strays(), [], "These are accesses (program, kind, place) outside of the buffer. Mask them off."
        )


def eps_counts(add_norm_program, judge: Judge) -> None:
    hint = "eps is added to the mean, under the root; these rows are so small that it matters."
    run_norm(add_norm_program, 2, 49, 16, 1e-2, judge, hint, scale=0.05)


def one_tile_at_a_time(add_norm_program, judge: Judge) -> None:
    for d, BLOCK in ((49, 16), (130, 32)):
        machine = run_norm(add_norm_program, 2, d, BLOCK, 1e-6, judge, "see the checks before.")
        most = max(access.places.size for access in machine.accesses)
        hint = f"a load or store of {most} lanes, and a tile has {BLOCK}; walk along the row."
        judge.true(most <= BLOCK, f"Likely mistake: {hint}")


def no_more_traffic(add_norm_program, judge: Judge) -> None:
    for T, d in ((2, 49), (3, 64)):
        machine = run_norm(add_norm_program, T, d, 16, 1e-6, judge, "see the checks before.")
        for kind, name in (("load", "x"), ("load", "r"), ("load", "h"), ("load", "w"), ("store", "h"), ("store", "y")):
            passes = machine.moved_bytes(kind, name) / (4 * T * d)
            hint = f"{passes:.3g} times the row in {kind}s of {name}; once is enough."
            if name != "w":
                hint += " The sum x + r is in h by then: read that back, not x and r."
            judge.true(passes <= 1, f"Likely mistake: {hint}")
        others = sum(machine.moved_bytes("store", name) for name in ("x", "r", "w")) + machine.moved_bytes("load", "y")
        judge.equal(others, 0, "bytes stored into x, r or w, or read from y.")


_WHOLE_ROW = """
def add_norm_program(m, x, r, w, h, y, d, eps, BLOCK):
    while BLOCK < d:
        BLOCK *= 2
    i = m.arange(0, BLOCK)
    row, inside = m.program_id(0) * d + i, i < d
    tile = m.load(x + row, mask=inside, other=0.0) + m.load(r + row, mask=inside, other=0.0)
    m.store(h + row, tile, mask=inside)
    scale = m.rsqrt(m.sum(tile * tile) / d + eps)
    m.store(y + row, tile * scale * m.load(w + i, mask=inside, other=0.0), mask=inside)
"""

NORM = Exercise(
    name="add_norm_program",
    title="Add and normalise a long row",
    chapter="06",
    difficulty=3,
    minutes=30,
    checks=[one_tile, several_rows, a_longer_row, the_tail, eps_counts, one_tile_at_a_time, no_more_traffic],
    mistakes=[
        Mistake("h is not stored", "one_tile", edit=("        m.store(h + row + i, tile, mask=inside)\n", "")),
        Mistake("no weight", "one_tile", edit=(" * m.load(w + i, mask=inside, other=0.0)", "")),
        Mistake("sum for mean", "one_tile", edit=("total / d + eps", "total + eps")),
        Mistake("mean of h", "one_tile", edit=("m.sum(tile * tile)", "m.sum(tile)")),
        Mistake("all programs make row 0", "several_rows", edit=("m.program_id(0) * d", "m.program_id(0) * 0")),
        Mistake(
            "the weight moves with the row", "several_rows", edit=("m.load(w + i", "m.load(w + (row + i) % (d + 1)")
        ),
        Mistake("mean of the last tile", "a_longer_row", edit=("total += m.sum", "total = m.sum")),
        Mistake(
            "rows BLOCK apart",
            "a_longer_row",
            edit=("m.program_id(0) * d", "m.program_id(0) * BLOCK"),
        ),
        Mistake(
            "masked lanes undefined",
            "the_tail",
            edit=("m.load(x + row + i, mask=inside, other=0.0)", "m.load(x + row + i, mask=inside)"),
        ),
        Mistake(
            "masked lanes are one",
            "the_tail",
            edit=("m.load(x + row + i, mask=inside, other=0.0)", "m.load(x + row + i, mask=inside, other=1.0)"),
        ),
        Mistake("mean over the lanes", "the_tail", edit=("total / d", "total / (-(-d // BLOCK) * BLOCK)")),
        Mistake("no eps", "eps_counts", edit=("total / d + eps", "total / d")),
        Mistake("eps beside the root", "eps_counts", edit=("m.rsqrt(total / d + eps)", "(m.rsqrt(total / d) + eps)")),
        Mistake("a tile for the whole row", "one_tile_at_a_time", source=_WHOLE_ROW),
        Mistake(
            "adds again",
            "no_more_traffic",
            edit=(
                "tile = m.load(h + row + i, mask=inside, other=0.0)",
                "tile = m.load(x + row + i, mask=inside, other=0.0) + m.load(r + row + i, mask=inside, other=0.0)",
            ),
        ),
    ],
    forbids=("kernels", "torch"),
)
