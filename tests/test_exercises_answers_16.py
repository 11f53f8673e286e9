"""Chapter 16's exercises, answered in another way than the solutions do. Each follows the statement to the letter."""

import pytest

from exercises import registry
from exercises.child import execute
from exercises.grade import grade

ANSWERS = {
    "keep_or_replace": """
import bisect, itertools
def keep_or_replace(p, q, draft, u, v):
    if p[draft] > 0 and u < p[draft] / q[draft]:
        return draft
    gaps = [a - b if a > b else 0.0 for a, b in zip(p, q)]
    total = sum(gaps)
    sums = list(itertools.accumulate(gap / total for gap in gaps))
    return min(bisect.bisect_right(sums, v), len(p) - 1)
""",
    "tokens_per_step": """
def tokens_per_step(rates):
    if not rates:
        return 1
    return 1 + rates[0] * tokens_per_step(rates[1:])
""",
    "look_up": """
def look_up(tokens, longest, shortest, count):
    found = {}
    for end in range(1, len(tokens)):
        for n in range(shortest, min(longest, end) + 1):
            found[tuple(tokens[end - n:end])] = end
    for n in sorted(range(shortest, longest + 1), reverse=True):
        tail = tuple(tokens[len(tokens) - n:]) if n <= len(tokens) else None
        if tail in found:
            end = found[tail]
            return [tokens[i] for i in range(end, min(end + count, len(tokens)))]
    return []
""",
    "verify_greedy": """
def verify_greedy(drafts, logits):
    tokens = []
    for i, row in enumerate(logits):
        choice = int(row.max(dim=0).indices)
        tokens.append(choice)
        if i == len(drafts) or drafts[i] != choice:
            break
    return tokens, len(tokens)
""",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_another_right_answer_passes(name):
    exercise = registry.find("16", name)
    namespace, errors = execute([ANSWERS[name]])
    assert errors == {}
    outcome = grade(exercise, namespace[exercise.entry])
    assert outcome.passed, outcome
