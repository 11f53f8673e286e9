"""Chapter 08's exercises, answered in another way than the solutions do. Each follows the statement to the letter."""

import pytest

from exercises import registry
from exercises.child import execute
from exercises.grade import grade

ANSWERS = {
    "cache_bytes": """
def cache_bytes(layers, tokens, element):
    def numbers(kind, **of):
        if kind == "full":
            return tokens * of["kv_heads"] * of["head_dim"] * 2 * element
        if kind == "sliding":
            sinks = min(tokens, of["sinks"])
            recent = min(tokens - sinks, of["window"])
            return (sinks + recent) * of["kv_heads"] * of["head_dim"] * 2 * element
        if kind == "latent":
            return tokens * of["latent"] * element + tokens * of["rope"] * element
        return of["heads"] * of["key_dim"] * of["value_dim"] * 4
    return sum(numbers(**layer) for layer in layers)
""",
    "rolling_cache": """
def rolling_cache(length, window, sinks):
    slots = [None] * (sinks + window)
    for token in range(length):
        if None in slots:
            slots[slots.index(None)] = token
        else:
            slots[slots.index(min(slots[sinks:]))] = token
    return sorted((token, slot) for slot, token in enumerate(slots) if token is not None)
""",
    "absorbed_decode": """
import math
import torch
def absorbed_decode(q_nope, q_rope, latents, rope_keys, w_uk, w_uv):
    rows = torch.cat([latents, rope_keys], dim=1)
    out = []
    for h in range(q_nope.shape[0]):
        query = torch.cat([w_uk[h].T @ q_nope[h], q_rope[h]])
        scores = rows @ query / (q_nope.shape[1] + q_rope.shape[1]) ** 0.5
        top, total, latent = -math.inf, 0.0, torch.zeros_like(latents[0])
        for score, c in zip(scores.tolist(), latents):
            new = max(top, score)
            old, here = math.exp(top - new), math.exp(score - new)
            top, total, latent = new, total * old + here, latent * old + here * c
        out.append(w_uv[h] @ latent / total)
    return torch.stack(out)
""",
    "delta_rule": """
import torch
def delta_rule(q, k, v, g, beta, state):
    state, out = state.clone(), torch.zeros_like(v)
    for t, (query, key, value) in enumerate(zip(q, k, v)):
        state *= torch.exp(g[t])
        state -= beta[t] * key[:, None] * (key[None] @ state)
        state += beta[t] * key[:, None] * value[None]
        out[t] = query @ state
    return out, state
""",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_another_right_answer_passes(name):
    exercise = registry.find("08", name)
    namespace, errors = execute([ANSWERS[name]])
    assert errors == {}
    outcome = grade(exercise, namespace[exercise.entry])
    assert outcome.passed, outcome


def test_right_tokens_in_wrong_slots_are_told_apart_from_wrong_tokens():
    exercise = registry.find("08", "rolling_cache")
    kept = "[p for p in range(length) if p < sinks or p >= length - window]"
    phase = f"def rolling_cache(length, window, sinks):\n    return [(p, p % (window + sinks)) for p in {kept}]"
    early = phase.replace("length - window]", "length - window + 1]")
    messages = [grade(exercise, execute([source])[0]["rolling_cache"]).message for source in (phase, early)]
    assert "their slots are not" in messages[0]
    assert "their slots are not" not in messages[1]
