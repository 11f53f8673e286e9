"""What the sampler must compute, written a second time: on lists of floats, one rule a line, with no tensors."""

import math

from minillm.sampling_params import GREEDY_BELOW

NEVER = -math.inf


def by_definition(logits, p, prompt=(), output=(), eos=()):
    scores = [float(x) + dict(p.logit_bias).get(i, 0) for i, x in enumerate(logits)]
    if len(output) < p.min_tokens:
        ends = {*p.stop_token_ids, *(() if p.ignore_eos else eos)}
        scores = [NEVER if i in ends else x for i, x in enumerate(scores)]
    for i in range(len(scores)):
        if i in prompt or i in output:
            r = p.repetition_penalty
            scores[i] = scores[i] / r if scores[i] > 0 else scores[i] * r
        times = list(output).count(i)
        scores[i] -= p.presence_penalty * (times > 0) + p.frequency_penalty * times
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if p.temperature < GREEDY_BELOW:
        return [float(i == ranked[0]) for i in range(len(scores))]
    weights = [math.exp((x - scores[ranked[0]]) / p.temperature) for x in scores]
    ranked = [i for i in ranked if weights[i] >= p.min_p]
    ranked = ranked[: p.top_k] if p.top_k > 0 else ranked
    total, kept, mass = math.fsum(weights[i] for i in ranked), [], 0.0
    for i in ranked:
        if p.top_p == 1 or mass < p.top_p:
            kept.append(i)
        mass += weights[i] / total
    total = math.fsum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(scores))]
