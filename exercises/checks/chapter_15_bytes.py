"""Chapter 15, bytes of a sparse matrix in four formats. The right answer writes them out, piece by piece."""

from __future__ import annotations

import random

from exercises import Exercise, Judge, Mistake


def laid_out(rows: int, columns: int, nonzeros: int, bits: int, index_bits: int) -> dict[str, int]:
    """Each format as a list of the bits of its pieces, rows padded to whole bytes where the statement says so."""
    values = [bits] * nonzeros
    pieces = {
        "dense": [bits] * (rows * columns),
        "csr": values + [index_bits] * nonzeros + [index_bits] * (rows + 1),
        "bitmap": values + [8 * ((columns + 7) // 8)] * rows,
        "2:4": [bits] * (rows * columns // 2) + [8 * ((columns // 4 + 1) // 2)] * rows,
    }
    return {name: sum(piece) // 8 for name, piece in pieces.items()}


def told(format_bytes, case: tuple, names: tuple[str, ...], judge: Judge, hint: str) -> None:
    got, want = format_bytes(*case), laid_out(*case)
    judge.type(got, dict)
    for name in names:
        judge.equal(got.get(name), want[name], f"({name}) for format_bytes{case}. Likely mistake: {hint}")


def dense_as_before(format_bytes, judge: Judge) -> None:
    for case in ((4, 8, 16, 16, 32), (3, 12, 5, 8, 32)):
        told(
            format_bytes,
            case,
            ("dense",),
            judge,
            "zeros left out, though they stand in their places here; or bits for bytes.",
        )


def places_cost(format_bytes, judge: Judge) -> None:
    hint = "places or row pointers left out, one pointer short, or of another width than index_bits."
    told(format_bytes, (4, 8, 16, 16, 32), ("csr",), judge, hint)
    told(format_bytes, (4, 8, 16, 32, 64), ("csr",), judge, hint)


def and_one_more(format_bytes, judge: Judge) -> None:
    hint = "one pointer short; rows + 1 say where each row begins and where the last ends."
    told(format_bytes, (7, 16, 0, 16, 32), ("csr",), judge, hint)


def a_bit_a_column(format_bytes, judge: Judge) -> None:
    hint = "a byte for each column, or a bit only where a number is; every column has one bit."
    told(format_bytes, (4, 16, 10, 16, 32), ("bitmap",), judge, hint)


def whole_bytes(format_bytes, judge: Judge) -> None:
    told(
        format_bytes,
        (5, 12, 10, 8, 16),
        ("bitmap",),
        judge,
        "the bits of all rows laid end to end; each row's are filled up to whole bytes.",
    )


def half_and_two_bits(format_bytes, judge: Judge) -> None:
    hint = "values that are zero left out, though half of all places have one; or not two bits for the place of each."
    told(format_bytes, (4, 16, 32, 16, 32), ("2:4",), judge, hint)
    told(format_bytes, (4, 16, 10, 8, 32), ("2:4",), judge, hint)
    told(
        format_bytes,
        (3, 12, 18, 16, 32),
        ("2:4",),
        judge,
        "half a byte lost, or shared by two rows, where a row has an odd number of groups.",
    )


def any_matrix(format_bytes, judge: Judge) -> None:
    rng = random.Random(4)
    for _ in range(30):
        rows, columns = rng.randint(1, 40), 4 * rng.randint(1, 40)
        case = (rows, columns, rng.randint(0, rows * columns // 2), rng.choice((8, 16, 32)), rng.choice((16, 32, 64)))
        told(
            format_bytes,
            case,
            ("dense", "csr", "bitmap", "2:4"),
            judge,
            "a case that small matrices do not show, such as rounding up once for all rows.",
        )


BYTES = Exercise(
    name="format_bytes",
    title="Bytes of four formats",
    chapter="15",
    difficulty=2,
    minutes=15,
    checks=[dense_as_before, places_cost, and_one_more, a_bit_a_column, whole_bytes, half_and_two_bits, any_matrix],
    mistakes=[
        Mistake(
            "dense without its zeros",
            "dense_as_before",
            edit=('"dense": rows * columns * bits // 8', '"dense": nonzeros * bits // 8'),
        ),
        Mistake(
            "bits for bytes",
            "dense_as_before",
            edit=('"dense": rows * columns * bits // 8', '"dense": rows * columns * bits'),
        ),
        Mistake("places are free", "places_cost", edit=("nonzeros * (bits + index_bits)", "nonzeros * bits")),
        Mistake(
            "places of four bytes always",
            "places_cost",
            edit=("nonzeros * (bits + index_bits)", "nonzeros * (bits + 32)"),
        ),
        Mistake("no row pointers", "places_cost", edit=(" + (rows + 1) * index_bits", "")),
        Mistake("one pointer short", "places_cost", edit=("(rows + 1)", "rows")),
        Mistake("a byte a column", "a_bit_a_column", edit=("rows * -(-columns // 8)", "rows * columns")),
        Mistake("a bit for each number", "a_bit_a_column", edit=("rows * -(-columns // 8)", "-(-nonzeros // 8)")),
        Mistake("one row after another", "whole_bytes", edit=("rows * -(-columns // 8)", "-(-rows * columns // 8)")),
        Mistake(
            "2:4 holds the nonzeros",
            "half_and_two_bits",
            edit=("rows * columns // 2 * bits // 8", "nonzeros * bits // 8"),
        ),
        Mistake(
            "a bit a place", "half_and_two_bits", edit=("rows * -(-columns // 4 // 2)", "rows * -(-columns // 4 // 4)")
        ),
        Mistake(
            "half bytes lost", "half_and_two_bits", edit=("rows * -(-columns // 4 // 2)", "rows * (columns // 4 // 2)")
        ),
    ],
)
