"""Chapter 06's exercises, answered in another way than the solutions do. Each follows the statement to the letter."""

import pytest

from exercises import registry
from exercises.child import execute
from exercises.grade import grade

ANSWERS = {
    "swiglu_program": """
def swiglu_program(m, gate, up, y, gate_stride, up_stride, y_stride, f, BLOCK):
    gate, up, y = gate + m.program_id(0) * gate_stride, up + m.program_id(0) * up_stride, y + m.program_id(0) * y_stride
    first = BLOCK * m.program_id(1)
    lanes = m.arange(0, BLOCK)
    mask = lanes < f - first
    places = m.where(mask, first + lanes, 0)
    g = m.load(gate + places, mask=mask)
    sigmoid = 1 / (1 + m.exp(-g))
    m.store(y + places, m.load(up + places, mask) * (g * sigmoid), mask)
""",
    "bytes_moved": """
def bytes_moved(operators, sizes, kept):
    apart, fused, known = 0, 0, []
    for output, inputs in operators:
        for name in dict.fromkeys(inputs):
            apart += sizes[name]
            if name not in known:
                known.append(name)
                fused += sizes[name]
        known.append(output)
        apart += sizes[output]
    for name in kept:
        fused += sizes[name]
    return [apart, fused]
""",
    "add_norm_program": """
def add_norm_program(m, x, r, w, h, y, d, eps, BLOCK):
    x, r, h, y = (pointer + m.program_id(0) * d for pointer in (x, r, h, y))
    tiles, squares, held = (d + BLOCK - 1) // BLOCK, 0.0, []
    for t in reversed(range(tiles)):
        i = m.arange(t * BLOCK, (t + 1) * BLOCK)
        tile = m.load(x + i, i < d) + m.load(r + i, i < d)
        m.store(h + i, tile, i < d)
        squares += m.sum(m.where(i < d, tile, 0.0) ** 2)
    root = m.sqrt(squares / d + eps)
    for t in range(tiles):
        i = m.arange(t * BLOCK, (t + 1) * BLOCK)
        m.store(y + i, m.load(h + i, i < d) / root * m.load(w + i, i < d), i < d)
""",
    "resident_programs": """
def resident_programs(kernel, chip):
    a_thread = (kernel["registers"] + 7) // 8 * 8
    needs = [("registers", a_thread * 32 * kernel["warps"]), ("warps", kernel["warps"]), ("programs", 1)]
    needs.append(("shared", kernel["shared"] + chip["reserved"]))
    best = None
    for name, need in needs:
        if need and (best is None or chip[name] // need < best[0]):
            best = (chip[name] // need, name)
    return best
""",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_another_right_answer_passes(name):
    exercise = registry.find("06", name)
    namespace, errors = execute([ANSWERS[name]])
    assert errors == {}
    outcome = grade(exercise, namespace[exercise.entry])
    assert outcome.passed, outcome


RETURNS = """
def swiglu_program(m, gate, up, y, gate_stride, up_stride, y_stride, f, BLOCK):
    g, u = m.load(gate + m.arange(0, BLOCK)), m.load(up + m.arange(0, BLOCK))
    return g / (1 + m.exp(-g)) * u
"""


@pytest.mark.parametrize(
    ("name", "source"),
    [("swiglu_program", RETURNS), ("add_norm_program", "def add_norm_program(m, x, r, w, h, y, d, eps, BLOCK): ...")],
)
def test_a_program_that_stores_nothing_is_told_so(name, source):
    namespace, _ = execute([source])
    outcome = grade(registry.find("06", name), namespace[name])
    assert not outcome.passed
    assert "m.store" in outcome.message
