"""Chapter 09's exercises, answered in another way than the solutions do. Each follows the statement to the letter."""

import pytest

from exercises import registry
from exercises.child import execute
from exercises.grade import grade

ANSWERS = {
    "slot_mapping": """
def slot_mapping(tables, starts, counts, block_size, rows):
    slots = [-1] * rows
    row = 0
    for i, table in enumerate(tables):
        for j in range(counts[i]):
            block, place = divmod(starts[i] + j, block_size)
            slots[row] = table[block] * block_size + place
            row += 1
    return slots
""",
    "account": """
def account(capacity, runs):
    line = [0] * capacity
    result = dict.fromkeys(("used", "reserved", "internal"), 0)
    for start, size, written, final in runs:
        line[start : start + size] = [1] * size
        result["used"] += written
        result["reserved"] += final - written
        result["internal"] += size - final
    here = largest = 0
    for taken in line:
        here = 0 if taken else here + 1
        largest = max(largest, here)
    return {"largest": largest, "free": line.count(0), **result}
""",
    "paged_attention": """
import torch
def paged_attention(q, key_blocks, value_blocks, table, length):
    (H, D), (_, size, Hkv, _) = q.shape, key_blocks.shape
    blocks = torch.tensor(table)[: (length + size - 1) // size]
    k = key_blocks[blocks].reshape(-1, Hkv, D)[:length]
    v = value_blocks[blocks].reshape(-1, Hkv, D)[:length]
    scores = torch.einsum("gjd,sgd->gjs", q.view(Hkv, H // Hkv, D), k) * D ** -0.5
    return torch.einsum("gjs,sgd->gjd", scores.softmax(-1), v).reshape(H, D)
""",
    "block_allocator": """
class BlockAllocator:
    def __init__(self, num_blocks, block_size):
        self.size, self.every, self.of = block_size, set(range(num_blocks)), {}
    def _free(self):
        return self.every - {block for blocks, _ in self.of.values() for block in blocks}
    def add(self, name, tokens):
        needed, free = (tokens + self.size - 1) // self.size, sorted(self._free())
        if len(free) < needed:
            return False
        self.of[name] = (tuple(free[:needed]), tokens)
        return True
    def fork(self, name, child):
        self.of[child] = self.of[name]
    def append(self, name):
        (blocks, length), free, copies = self.of[name], self._free(), []
        holders = sum(blocks[-1] in other for other, _ in self.of.values())
        if length == len(blocks) * self.size:
            if not free:
                return None
            blocks += (min(free),)
        elif holders > 1:
            if not free:
                return None
            copies = [(blocks[-1], max(free))]
            blocks = (*blocks[:-1], max(free))
        self.of[name] = blocks, length + 1
        return copies
    def remove(self, name):
        del self.of[name]
    def table(self, name):
        return [*self.of[name][0]]
    def num_free(self):
        return len(self._free())
""",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_another_right_answer_passes(name):
    exercise = registry.find("09", name)
    namespace, errors = execute([ANSWERS[name]])
    assert errors == {}
    outcome = grade(exercise, namespace[exercise.entry])
    assert outcome.passed, outcome
