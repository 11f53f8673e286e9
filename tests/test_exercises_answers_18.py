"""Chapter 18's exercises, answered in another way than the solutions do. Each follows the statement to the letter."""

import pytest

from exercises import registry
from exercises.child import execute
from exercises.grade import grade

ANSWERS = {
    "fuse": """
def fuse(chain):
    kernels, before = [], "matmul"
    for i in range(len(chain)):
        if chain[i] == "view":
            pass
        elif chain[i] == "matmul" or before in {"matmul", "column"}:
            kernels += [[i]]
            before = chain[i]
        else:
            kernels[-1] += [i]
            before = chain[i]
    return kernels
""",
    "outcomes": """
def outcomes(calls, dynamic, limit):
    codes, told = [], []
    def holds(code, call):
        if code[1] != call[1] or repr(code[2]) != repr(call[2]) or len(code[0]) != len(call[0]):
            return False
        for i in range(len(code[0])):
            a, b = code[0][i], call[0][i]
            if a != b and not (i in dynamic and a > 1 and b > 1):
                return False
        return True
    for call in calls:
        word = "found" if any(holds(code, call) for code in codes) else "eager"
        if word == "eager" and limit > len(codes):
            codes.append(call)
            word = "compiled"
        told.append(word)
    return told
""",
    "choose_buckets": """
from functools import lru_cache
def choose_buckets(trace, compile_s, row_s):
    steps = sorted(trace)
    @lru_cache(None)
    def best(last):
        # the steps up to this place, whose largest is a bucket
        if last < 0:
            return 0, ()
        found = None
        for first in range(last + 1):
            seconds, buckets = best(first - 1)
            padded = sum(steps[last] - size for size in steps[first : last + 1])
            option = seconds + compile_s + padded * row_s, buckets + (steps[last],)
            if found is None or option[0] < found[0] or (option[0] == found[0] and len(option[1]) < len(found[1])):
                found = option
        return found
    return sorted(set(best(len(steps) - 1)[1]))
""",
    "break_even": """
def break_even(compile_s, before_s, after_s, tokens):
    steps = tokens - 1
    if compile_s <= 0:
        return None if after_s > before_s else 0
    if steps == 0 or after_s >= before_s:
        return None
    whole, rest = divmod(compile_s, steps * before_s - steps * after_s)
    return int(whole) + (1 if rest else 0)
""",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_another_right_answer_passes(name):
    exercise = registry.find("18", name)
    namespace, errors = execute([ANSWERS[name]])
    assert errors == {}
    outcome = grade(exercise, namespace[exercise.entry])
    assert outcome.passed, outcome
