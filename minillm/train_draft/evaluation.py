"""Third stage: how often the target would accept what the draft proposes, on held-out text, and what that costs.

Acceptance at one position, given everything before it:
    greedy        1 if both have the same likeliest token
    sampled       sum over v of min(p(v), q(v)) = 1 - total variation distance, the chance that rejection sampling keeps
                  a token drawn from the draft's q under the target's p
Speed-up with γ drafted tokens a step, each costing c target steps: (1 - α^(γ+1)) / ((1 - α)(γ c + 1)).
Source: Leviathan et al. 2023 (arXiv 2211.17192), corollary 3.6 and theorem 3.8.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..analysis.speculation import speculative_speedup as speed_up
from ..errors import RequestError
from ..kv_cache import ContiguousCache, NoCache
from ..transformer import Transformer
from .sampling_stage import Texts

LENGTHS = (1, 2, 3, 4, 5, 6, 8)  # γ that are tried


class Acceptance(NamedTuple):
    """`greedy` and `sampled` are means over positions of answers written at temperature 0 and 1; `runs[γ]` is the mean
    of tokens that a greedy target step of γ drafts yields, counted on those answers and not from the formula."""

    greedy: float
    sampled: float
    positions: tuple[int, int]
    runs: dict[int, float]


class Answer(NamedTuple):
    """tokens (T,) int64 of prompt and answer; the answer begins at `start`."""

    tokens: Tensor
    start: int


def answers(texts: Texts, temperature: float, limit: int) -> list[Answer]:
    """At most `limit` answers of that temperature. Raises RequestError where there is none."""
    parts = texts.tokens.long().split(texts.lengths.tolist())
    wanted = (abs(t - temperature) < 1e-6 for t in texts.temperature.tolist())
    found = [Answer(p, s) for p, s, w in zip(parts, texts.starts.tolist(), wanted, strict=True) if w]
    found = [a for a in found if len(a.tokens) > a.start][:limit]
    if not found:
        raise RequestError(
            f"no held-out answer has temperature {temperature:g}; the recipe needs more requests a round"
        )
    return found


@torch.inference_mode()
def acceptance(draft: Transformer, target: Transformer, texts: Texts, limit: int = 50) -> Acceptance:
    """Over `limit` answers of each temperature. Both models see the same text, as in speculation up to a rejection."""
    same = [_same(draft, target, answer) for answer in answers(texts, 0.0, limit)]
    shared = torch.cat([_overlap(draft, target, answer) for answer in answers(texts, 1.0, limit)])
    every = torch.cat(same)
    runs = {count: statistics.fmean(n for row in same for n in _steps(row.tolist(), count)) for count in LENGTHS}
    return Acceptance(every.float().mean().item(), shared.mean().item(), (len(every), len(shared)), runs)


def _logits(model: Transformer, answer: Answer) -> Tensor:
    """(T - start, V): of the positions that the answer's tokens were drawn at."""
    tokens = answer.tokens[:-1]
    hidden = model(tokens, torch.arange(len(tokens)), NoCache(model.config))
    return model.logits(hidden[answer.start - 1 :])


def _same(draft: Transformer, target: Transformer, answer: Answer) -> Tensor:
    return _logits(draft, answer).argmax(-1) == _logits(target, answer).argmax(-1)


def _overlap(draft: Transformer, target: Transformer, answer: Answer) -> Tensor:
    return torch.minimum(_logits(draft, answer).softmax(-1), _logits(target, answer).softmax(-1)).sum(-1)


def _steps(same: Sequence[bool], count: int) -> list[int]:
    """Tokens of each verification: the agreeing run, at most `count` long, and the target's own token after it."""
    found, at = [], 0
    while at < len(same):
        run = 0
        while run < count and at + run < len(same) and same[at + run]:
            run += 1
        found.append(min(run + 1, len(same) - at))  # no token follows the end
        at += run + 1
    return found


def best_speed_up(alpha: float, cost: float) -> tuple[int, float]:
    """γ and its speed-up; 0 and 1.0 where no drafting pays."""
    return max([(0, 1.0), *((g, speed_up(alpha, g, cost)) for g in LENGTHS)], key=lambda pair: pair[1])


DRAFTS = 4  # steps of the draft between two of the target, as in speculation: its weights stay in the CPU's cache


@torch.inference_mode()
def step_seconds(draft: Transformer, target: Transformer, prompt: int = 128, rounds: int = 30) -> tuple[float, float]:
    """Median seconds of one decode step at batch 1, of draft and target in turns."""
    tokens = torch.arange(prompt) % target.config.vocab_size
    found = []
    turns = []
    for model, each in ((draft, DRAFTS), (target, 1)):
        cache = ContiguousCache(model.config, prompt + each * rounds, model.dtype)
        model(tokens, torch.arange(prompt), cache)
        found.append([])
        turns.append((model, cache, each, found[-1]))
    for _ in range(rounds):
        for model, cache, each, seconds in turns:
            for _ in range(each):
                started = time.perf_counter()
                model.logits(model(tokens[:1], torch.tensor([cache.length]), cache))
                seconds.append(time.perf_counter() - started)
    return tuple(statistics.median(seconds[len(seconds) // 4 :]) for seconds in found)
