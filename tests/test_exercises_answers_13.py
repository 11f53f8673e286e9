"""Chapter 13's exercises, answered in another way than the solutions do. Each follows the statement to the letter."""

import pytest

from exercises import registry
from exercises.child import execute
from exercises.grade import grade

ANSWERS = {
    "nibbles": """
import torch
class Nibbles:
    def pack(self, codes):
        result = []
        for row in codes.tolist():
            row = [code % 16 for code in row] + [0] * (len(row) % 2)
            result.append([low + 16 * high for low, high in zip(row[::2], row[1::2])])
        return torch.tensor(result, dtype=torch.uint8)
    def unpack(self, packed, columns):
        codes = torch.empty(len(packed), 2 * packed.shape[1], dtype=torch.int8)
        codes[:, 0::2] = (packed << 4).view(torch.int8) >> 4
        codes[:, 1::2] = packed.view(torch.int8) >> 4
        return codes[:, :columns]
""",
    "quantize_groups": """
import torch
def quantize_groups(weight, group, symmetric):
    rows, columns = weight.shape
    codes = torch.zeros(rows, columns, dtype=torch.int32)
    scale = torch.ones(rows, columns // group)
    zero = torch.zeros(rows, columns // group, dtype=torch.int32)
    for r in range(rows):
        for g in range(columns // group):
            here = slice(g * group, (g + 1) * group)
            part = weight[r, here]
            low, high = min(part.min().item(), 0.0), max(part.max().item(), 0.0)
            if low == high:
                continue
            if symmetric:
                scale[r, g] = part.abs().max() / 7
                codes[r, here] = torch.round(part / scale[r, g]).clamp(-8, 7).int()
            else:
                scale[r, g] = (torch.tensor(high) - torch.tensor(low)) / 15
                zero[r, g] = round(-low / scale[r, g].item())
                codes[r, here] = (torch.round(part / scale[r, g]).int() + zero[r, g]).clamp(0, 15)
    return codes, scale, zero
""",
    "mxfp4": """
import math
import torch
def mxfp4(blocks):
    grid = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    scales, codes = [], []
    for block in blocks.tolist():
        largest = max(map(abs, block))
        power = max(math.frexp(largest)[1] - 3, -127) if largest else 0
        scales.append(power + 127)
        row = []
        for w in block:
            size = math.ldexp(abs(w), -power)
            gap = min(abs(size - g) for g in grid)
            best = [i for i, g in enumerate(grid) if abs(size - g) == gap]
            code = best[0] if len(best) == 1 or best[0] % 2 == 0 else best[1]
            row.append(code + 8 if w < 0 and code else code)
        codes.append(row)
    return torch.tensor(scales, dtype=torch.uint8), torch.tensor(codes, dtype=torch.uint8)
""",
    "checkpoint_bytes": """
def checkpoint_bytes(matrices, bits, group, scale_bits, zero_bits, keep):
    def one(name, rows, columns):
        if name in keep:
            return 2 * rows * columns
        width = group or columns
        full, rest = divmod(columns, width)
        needed = rows * (columns * bits + (full + (rest > 0)) * (scale_bits + zero_bits))
        return (needed + 7) // 8
    return sum(count * one(name, rows, columns) for name, rows, columns, count in matrices)
""",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_another_right_answer_passes(name):
    exercise = registry.find("13", name)
    namespace, errors = execute([ANSWERS[name]])
    assert errors == {}
    outcome = grade(exercise, namespace[exercise.entry])
    assert outcome.passed, outcome
