"""Right answers to chapter 12 that go about it another way than the solutions do: every one of them must pass."""

import pytest

from exercises import registry
from exercises.child import execute
from exercises.grade import grade

ANSWERS = {
    "latencies": """
def latencies(intended, sent, tokens):
    found = dict.fromkeys(("ttft", "tpot", "e2el"))
    found["itl"] = [tokens[i] - tokens[i - 1] for i in range(1, len(tokens))]
    if tokens:
        found["ttft"] = min(tokens) - intended
        found["e2el"] = found["ttft"] + sum(found["itl"])
    if found["itl"]:
        found["tpot"] = sum(found["itl"]) / len(found["itl"])
    return found
""",
    "goodput": """
def goodput(records, ttft, tpot):
    starts, ends, _, _ = zip(*records)
    def good(record):
        intended, end, ok, tokens = record
        if not (ok and tokens and tokens[0] <= intended + ttft):
            return False
        return tpot is None or tokens[-1] <= tokens[0] + tpot * (len(tokens) - 1)
    met = list(filter(good, records))
    return [len(met) / (max(ends) - min(starts)), len(met) / len(records)]
""",
    "waiting_times": """
def waiting_times(arrivals, services, slots):
    ends, waits = [], []
    for i, arrival in enumerate(arrivals):
        # the slot of the one that ends as the slots-th last is the first to come free
        free = sorted(ends)[-slots] if i >= slots else arrival
        start = arrival if free < arrival else free
        ends.append(start + services[i])
        waits.append(start - arrival)
    return waits
""",
    "admit": """
def admit(arrivals, tokens, rate, limit):
    done_at, verdicts = None, []
    for arrival, prompt in zip(arrivals, tokens):
        start = arrival if done_at is None or done_at < arrival else done_at
        end = start + prompt / rate
        verdicts.append(end - arrival <= limit)
        if verdicts[-1]:
            done_at = end
    return verdicts
""",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_another_right_answer_passes(name):
    exercise = registry.find("12", name)
    namespace, errors = execute([ANSWERS[name]])
    assert errors == {}
    outcome = grade(exercise, namespace[exercise.entry])
    assert outcome.passed, outcome
