"""Chapter 13, quantization: nibbles, groups, MXFP4, and the bytes of a scheme.

The right answers come from bit strings, from single weights in exact fractions, and from counting one by one.
"""

from __future__ import annotations

import torch

from exercises import Exercise, Judge, Mistake

from .chapter_13_groups import GROUPS
from .chapter_13_mxfp4 import MXFP4

# --- nibbles


def bit_strings(codes: list[list[int]]) -> list[list[int]]:
    """Bytes, from the two's complement of each code written out as text."""
    result = []
    for row in codes:
        words = [format(code % 16, "04b") for code in row] + ["0000"] * (len(row) % 2)
        result.append([int(words[i + 1] + words[i], 2) for i in range(0, len(words), 2)])
    return result


def random_codes(rows: int, columns: int, low: int = -8, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(low, 8, (rows, columns), generator=made).to(torch.int8)


def packs(Nibbles, codes: torch.Tensor, judge: Judge, hint: str) -> None:
    got = Nibbles().pack(codes)
    judge.type(got, torch.Tensor)
    judge.equal(got, bit_strings(codes.tolist()), f"pack({codes.tolist()}). Likely mistake: {hint}")
    judge.true(got.dtype == torch.uint8, "pack must return uint8.")


def packs_two_a_byte(Nibbles, judge: Judge) -> None:
    packs(Nibbles, torch.tensor([[3, 5, 7, 0]], dtype=torch.int8), judge, "the even column belongs in the low half.")
    packs(Nibbles, random_codes(3, 6, low=0), judge, "columns and halves mixed up.")


def packs_negative_codes(Nibbles, judge: Judge) -> None:
    packs(
        Nibbles,
        torch.tensor([[-1, 3, 3, -8]], dtype=torch.int8),
        judge,
        "a negative code was not cut to its four lowest bits, or was shifted by 8.",
    )
    packs(Nibbles, random_codes(4, 10), judge, "a negative code was not cut to its four lowest bits.")


def packs_odd_columns(Nibbles, judge: Judge) -> None:
    packs(
        Nibbles, random_codes(2, 7), judge, "the last column of an odd number was dropped, or its high half is not 0."
    )
    packs(Nibbles, random_codes(3, 1), judge, "a single column still needs a byte.")


def unpacks(Nibbles, columns: int, low: int, judge: Judge, hint: str) -> None:
    codes = random_codes(3, columns, low, seed=columns)
    packed = torch.tensor(bit_strings(codes.tolist()), dtype=torch.uint8)
    got = Nibbles().unpack(packed, columns)
    judge.type(got, torch.Tensor)
    judge.equal(got, codes, f"unpack of {columns} columns. Likely mistake: {hint}")
    judge.true(got.dtype == torch.int8, "unpack must return int8.")


def unpacks_in_order(Nibbles, judge: Judge) -> None:
    unpacks(Nibbles, 6, 0, judge, "all low halves first, then all high ones; they alternate.")


def unpacks_signs(Nibbles, judge: Judge) -> None:
    unpacks(Nibbles, 8, -8, judge, "nibbles from 8 up stand for negative codes.")


def unpacks_odd_columns(Nibbles, judge: Judge) -> None:
    unpacks(Nibbles, 7, -8, judge, "the padding was returned as a column.")


NIBBLES = Exercise(
    name="nibbles",
    title="Nibbles",
    chapter="13",
    difficulty=1,
    minutes=15,
    entry="Nibbles",
    checks=[
        packs_two_a_byte,
        packs_negative_codes,
        packs_odd_columns,
        unpacks_in_order,
        unpacks_signs,
        unpacks_odd_columns,
    ],
    mistakes=[
        Mistake(
            "even column high",
            "packs_two_a_byte",
            edit=("nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)", "nibbles[:, 1::2] | (nibbles[:, 0::2] << 4)"),
        ),
        Mistake(
            "halves of the row",
            "packs_two_a_byte",
            edit=(
                "nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)",
                "nibbles[:, : nibbles.shape[1] // 2] | (nibbles[:, nibbles.shape[1] // 2 :] << 4)",
            ),
        ),
        Mistake("no mask", "packs_negative_codes", edit=("(codes & 15).to(torch.uint8)", "codes.to(torch.uint8)")),
        Mistake("shifted by 8", "packs_two_a_byte", edit=("(codes & 15)", "(codes + 8)")),
        Mistake(
            "odd column dropped",
            "packs_odd_columns",
            edit=("torch.cat([nibbles, torch.zeros_like(nibbles[:, :1])], dim=1)", "nibbles[:, :-1]"),
        ),
        Mistake(
            "low halves first",
            "unpacks_in_order",
            edit=("torch.stack([low, high], dim=-1).flatten(1)", "torch.cat([low, high], dim=1)"),
        ),
        Mistake("signs lost", "unpacks_signs", edit=("nibbles - 16", "nibbles")),
        Mistake(
            "subtracts 8", "unpacks_in_order", edit=("torch.where(nibbles > 7, nibbles - 16, nibbles)", "nibbles - 8")
        ),
        Mistake("padding returned", "unpacks_odd_columns", edit=("[:, :columns]", "")),
        Mistake(
            "unpacks in place",
            "unpacks_in_order",
            edit=("low, high = packed & 15, packed >> 4", "high = packed >> 4; low = packed.bitwise_and_(15)"),
        ),
    ],
    forbids=("minillm.quantization",),
)


# --- checkpoint_bytes


def counted(matrices: list, bits: int, group: int, scale_bits: int, zero_bits: int, keep: list) -> int:
    """Walks along every row of every matrix, and begins a group where one is due."""
    total = 0
    for name, rows, columns, count in matrices:
        row_bits = 0
        for column in range(columns):
            row_bits += 16 if name in keep else bits
            if name not in keep and (column % group == 0 if group else column == 0):
                row_bits += scale_bits + zero_bits
        matrix_bits = row_bits * rows
        while matrix_bits % 8:
            matrix_bits += 1
        total += count * (matrix_bits // 8)
    return total


def billed(checkpoint_bytes, case: tuple, judge: Judge, hint: str) -> None:
    got = checkpoint_bytes(*case)
    judge.type(got, int)
    judge.equal(got, counted(*case), f"for checkpoint_bytes{case}. Likely mistake: {hint}")


def codes_and_scales(checkpoint_bytes, judge: Judge) -> None:
    billed(checkpoint_bytes, ([("a", 2, 64, 1)], 4, 32, 16, 0, []), judge, "scales left out, or one for a whole row.")
    billed(checkpoint_bytes, ([("a", 4, 64, 1)], 8, 32, 16, 0, []), judge, "bits taken for bytes.")


def zero_points_too(checkpoint_bytes, judge: Judge) -> None:
    billed(checkpoint_bytes, ([("a", 6, 128, 1)], 4, 32, 16, 8, []), judge, "zero points were not counted.")


def every_copy(checkpoint_bytes, judge: Judge) -> None:
    case = ([("a", 4, 64, 3), ("b", 8, 32, 5)], 4, 32, 16, 0, [])
    billed(checkpoint_bytes, case, judge, "each matrix counted once, where `count` says how many there are.")


def whole_rows(checkpoint_bytes, judge: Judge) -> None:
    billed(checkpoint_bytes, ([("a", 10, 96, 2)], 8, 0, 32, 0, []), judge, "group 0 means one scale for each row.")


def short_last_groups(checkpoint_bytes, judge: Judge) -> None:
    hint = "the last, shorter group of a row has a scale too, and groups do not run on into the next row."
    billed(checkpoint_bytes, ([("a", 6, 80, 1)], 4, 32, 16, 8, []), judge, hint)
    billed(checkpoint_bytes, ([("a", 8, 16, 1)], 4, 32, 16, 0, []), judge, hint)


def kept_ones(checkpoint_bytes, judge: Judge) -> None:
    case = ([("head", 10, 64, 1), ("a", 4, 64, 2)], 4, 32, 16, 0, ["head", "embedding"])
    billed(checkpoint_bytes, case, judge, "a kept matrix takes 16 bits a weight and has no scales.")


def whole_bytes(checkpoint_bytes, judge: Judge) -> None:
    hint = "each matrix ends on a whole byte: round up, and before you multiply by the count."
    billed(checkpoint_bytes, ([("a", 1, 9, 7)], 3, 0, 16, 0, []), judge, hint)
    billed(checkpoint_bytes, ([("a", 1, 5, 1), ("b", 3, 3, 1)], 3, 4, 8, 0, []), judge, hint)


BYTES = Exercise(
    name="checkpoint_bytes",
    title="The bytes of a scheme",
    chapter="13",
    difficulty=2,
    minutes=15,
    checks=[codes_and_scales, zero_points_too, every_copy, whole_rows, short_last_groups, kept_ones, whole_bytes],
    mistakes=[
        Mistake("no scales", "codes_and_scales", edit=(" + groups * (scale_bits + zero_bits)", "")),
        Mistake("one scale a row", "codes_and_scales", edit=("(-(-columns // group) if group else 1)", "1")),
        Mistake("no zero points", "zero_points_too", edit=("(scale_bits + zero_bits)", "scale_bits")),
        Mistake("counts each once", "every_copy", edit=("count * -(-matrix_bits // 8)", "-(-matrix_bits // 8)")),
        Mistake("short groups dropped", "short_last_groups", edit=("-(-columns // group)", "columns // group")),
        Mistake(
            "groups run on into the next row",
            "short_last_groups",
            edit=("rows * (-(-columns // group) if group else 1)", "-(-rows * columns // group) if group else rows"),
        ),
        Mistake(
            "group 0 is one scale a matrix",
            "whole_rows",
            edit=(
                "rows * (-(-columns // group) if group else 1)",
                "rows * -(-columns // group) if group else 1",
            ),
        ),
        Mistake("keeps nothing", "kept_ones", edit=("name in keep", "False")),
        Mistake("keeps in 32 bits", "kept_ones", edit=("count * 2 *", "count * 4 *")),
        Mistake("rounds down", "whole_bytes", edit=("-(-matrix_bits // 8)", "(matrix_bits // 8)")),
        Mistake(
            "rounds at the end", "whole_bytes", edit=("count * -(-matrix_bits // 8)", "-(-count * matrix_bits // 8)")
        ),
    ],
    forbids=("minillm.analysis", "minillm.quantization"),
)


EXERCISES = [NIBBLES, GROUPS, MXFP4, BYTES]
