"""How `bench --speculate` measures: with drafts and without, in turns, where they help and where they do not."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..analysis.speculation import expected_tokens, speculative_speedup
from ..engine import Engine
from ..generate import generate
from ..llm import scheduler_config
from ..sampling_params import SamplingParams
from ..speculative import SpeculativeConfig, Speculator, make_speculator
from ..tokenizer import Tokenizer
from ..transformer import Transformer
from .common import cache_maker
from .measure import text_ids

PASSAGE = 64  # tokens that the copying task repeats
BATCHES = (1, 4, 16)
_ROUNDS = 3


def prompts(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """ "copy": a passage twice and its beginning once more, so that what follows stands in the prompt. "text": the
    passage alone, so that what follows seldom does."""
    ids = text_ids(tokenizer, 2 * PASSAGE)
    passage = ids[:PASSAGE]
    return {"copy": [*passage, *passage, *passage[:8]], "text": ids}


def measure(
    model: Transformer,
    tokenizer: Tokenizer,
    config: SpeculativeConfig,
    tokens: int,
    rounds: int,
    kv_cache_dtype: str = "auto",
) -> dict[str, Any]:
    """Of both tasks at batch 1, and of batches in the engine."""
    rounds, new_cache = min(rounds, _ROUNDS), cache_maker(model, kv_cache_dtype) or (lambda tokens: None)
    found = {
        name: _alone(model, tokenizer, config, ids, tokens, rounds, new_cache)
        for name, ids in prompts(tokenizer).items()
    }
    values = {"method": config.method, "num_tokens": config.num_tokens, "adaptive": config.adaptive, **found}
    if not config.tree:
        values["batches"] = _batches(model, tokenizer, config, tokens, rounds, kv_cache_dtype)
    return values


def _alone(model, tokenizer, config, ids: Sequence[int], tokens: int, rounds: int, new_cache) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=tokens + 1, ignore_eos=True)
    fixed = make_speculator(replace(config, adaptive=False), model, tokenizer)
    chosen = Speculator(config, fixed.proposer)  # its lengths as the config says
    ways: dict[str, Speculator | None] = {"plain": None, "fixed": fixed, "chosen": chosen}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    answers = {}
    for i in range(rounds + 1):  # the first is a warm-up
        for name, speculator in ways.items():
            cache = new_cache(len(ids) + tokens + 1)
            done = generate(model, tokenizer, ids, params, cache=cache, speculative=speculator)
            answers[name] = done.token_ids
            if i:
                seconds[name].append(done.token_times[-1] - done.token_times[0])
    step, *with_drafts = (statistics.median(seconds[name]) / tokens for name in ways)
    return {
        "plain_tok_s": 1 / step,
        "tok_s": 1 / with_drafts[1],
        "speedup": step / with_drafts[1],
        "speedup_fixed": step / with_drafts[0],
        **_counts(chosen),
        **_formula(fixed, config.num_tokens, step),
        "same_tokens": next((i for i, (a, b) in enumerate(zip(*list(answers.values())[::2], strict=True)) if a != b),
                            len(answers["plain"])),
    }  # fmt: skip


def _counts(speculator: Speculator) -> dict[str, Any]:
    stats = speculator.stats
    return {
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance": stats.acceptance,
        "tokens_per_step": stats.tokens_per_step,
        "per_position": stats.per_position,
    }


def _formula(speculator: Speculator, gamma: int, step: float) -> dict[str, Any]:
    """What the formula expects of γ drafts every step, with the measured α, draft's time and rows."""
    stats, price = speculator.stats, speculator.price
    if stats.acceptance is None:
        return {}
    cost, verify = (price.draft.value or 0.0) / step, price.seconds(1 + gamma) / step
    return {
        "acceptance_fixed": stats.acceptance,
        "tokens_per_step_fixed": stats.tokens_per_step,
        "tokens_per_step_formula": expected_tokens(stats.acceptance, gamma),
        "draft_cost": cost,
        "verify_cost": verify,
        "speedup_formula": speculative_speedup(stats.acceptance, gamma, cost, verify),
    }


def _batches(model, tokenizer, config: SpeculativeConfig, tokens: int, rounds: int, dtype: str) -> list[dict[str, Any]]:
    """Tokens a second of so many requests at once: without drafts, with num_tokens always, and as many as pay."""
    ways = {"plain": None, "fixed": replace(config, adaptive=False), "adaptive": replace(config, adaptive=True)}
    ids, found = text_ids(tokenizer, PASSAGE + max(BATCHES)), []
    for batch in BATCHES:
        many = [ids[i : i + PASSAGE] for i in range(batch)]
        times = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                times[name].append(_serve(model, tokenizer, way, many, tokens, dtype))
        speeds = {f"{name}_tok_s": batch * tokens / statistics.median(t) for name, t in times.items()}
        found.append({"sequences": batch, **speeds})
    return found


def _serve(model, tokenizer, way: SpeculativeConfig | None, many: Sequence[Sequence[int]], tokens: int, dtype: str):
    """Seconds from the first token of the last request to the end."""
    config = scheduler_config(model, 1 << 28, {"prefix_cache": "off"}, dtype)
    engine = Engine(model, tokenizer, config, kv_cache_dtype=dtype, speculative=way)
    params = SamplingParams(temperature=0, max_tokens=tokens + 1, ignore_eos=True)
    for i, ids in enumerate(many):
        engine.add_request(str(i), ids, params)
    engine.step()  # the prompts; a step holds them all
    started = time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - started
