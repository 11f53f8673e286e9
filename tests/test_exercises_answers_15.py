"""Chapter 15's exercises, answered in another way than the solutions do. Each follows the statement to the letter."""

import pytest

from exercises import registry
from exercises.child import execute
from exercises.grade import grade

ANSWERS = {
    "pack_row": """
def pack_row(row):
    values, indices, pending = [], [], None
    for g in range(len(row) // 4):
        four = list(row[4 * g : 4 * g + 4])
        taken = {p for p in range(4) if four[p]}
        for p in range(4):
            if len(taken) < 2:
                taken.add(p)
        low, high = min(taken), max(taken)
        values.extend((four[low], four[high]))
        code = low + 4 * high
        if pending is None:
            pending = code
        else:
            indices.append(pending + 16 * code)
            pending = None
    if pending is not None:
        indices.append(pending)
    return [values, indices]
""",
    "wanda_mask": """
import torch

def wanda_mask(weight, x, sparsity):
    K = weight.shape[1]
    scores = weight**2 * (x**2).sum(0)
    ranks = scores.argsort(dim=1).argsort(dim=1)
    return ranks >= int(sparsity * K)
""",
    "remove_column": """
import torch

def remove_column(weight, H, j):
    rest = [c for c in range(len(H)) if c != j]
    new = torch.zeros_like(weight)
    new[:, rest] = weight[:, rest] + torch.linalg.solve(H[rest][:, rest], H[rest, j]).outer(weight[:, j]).t()
    change = new - weight
    return new, ((change @ H) * change).sum(1)
""",
    "format_bytes": """
def format_bytes(rows, columns, nonzeros, bits, index_bits):
    size = bits // 8
    return {
        "2:4": rows * (columns // 2 * size + (columns + 7) // 8),
        "bitmap": nonzeros * size + rows * ((columns + 7) // 8),
        "csr": nonzeros * size + (nonzeros + rows + 1) * index_bits // 8,
        "dense": rows * columns * size,
    }
""",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_another_right_answer_passes(name):
    exercise = registry.find("15", name)
    namespace, errors = execute([ANSWERS[name]])
    assert errors == {}
    outcome = grade(exercise, namespace[exercise.entry])
    assert outcome.passed, outcome
