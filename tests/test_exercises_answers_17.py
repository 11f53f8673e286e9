"""Chapter 17's exercises, answered in another way than the solutions do. Each follows the statement to the letter."""

import pytest

from exercises import registry
from exercises.child import execute
from exercises.grade import grade

ANSWERS = {
    "experts_read": """
def experts_read(chances, tokens):
    left_alone = [1.0] * len(chances)
    for _ in range(tokens):
        left_alone = [before * (1 - chance) for before, chance in zip(left_alone, chances)]
    return len(chances) - sum(left_alone)
""",
    "choose_experts": """
import torch
def choose_experts(logits, bias, k, groups, top_groups, scale):
    experts, weights = [], []
    size = logits.shape[1] // groups
    for row in logits:
        scores = 1 / (1 + torch.exp(-row))
        ranks = scores + bias
        parts = ranks.view(groups, size).sort(dim=1, descending=True).values
        best = (parts[:, 0] + parts[:, 1]).argsort(descending=True)[:top_groups].tolist()
        places = torch.cat([torch.arange(g * size, (g + 1) * size) for g in best])
        mine = places[ranks[places].argsort(descending=True)[:k]]
        experts.append(mine)
        weights.append(scores[mine] / scores[mine].sum() * scale)
    return torch.stack(experts), torch.stack(weights)
""",
    "move_bias": """
import torch
def move_bias(bias, experts, speed):
    loads = torch.tensor([(experts == e).sum().item() for e in range(len(bias))])
    new = bias.clone()
    new[loads * len(bias) > loads.sum()] -= speed
    new[loads * len(bias) < loads.sum()] += speed
    return new
""",
    "grouped": """
import torch
def grouped(x, experts, weights, num_experts, block, run):
    out = torch.zeros_like(x)
    for e in range(num_experts):
        t, j = (experts == e).nonzero(as_tuple=True)
        while len(t):
            here = min(block, len(t))
            rows = torch.cat([x[t[:here]], x.new_zeros(block - here, x.shape[1])])
            out.index_add_(0, t[:here], run(e, rows)[:here] * weights[t[:here], j[:here]][:, None])
            t, j = t[here:], j[here:]
    return out
""",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_another_right_answer_passes(name):
    exercise = registry.find("17", name)
    namespace, errors = execute([ANSWERS[name]])
    assert errors == {}
    outcome = grade(exercise, namespace[exercise.entry])
    assert outcome.passed, outcome
