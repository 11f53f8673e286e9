"""Tiny EAGLE heads, and what the drafts of one must be."""

from __future__ import annotations

from functools import cache

import torch

from minillm.engine import Engine
from minillm.kv_cache import NoCache
from minillm.sampling import SamplingParams
from minillm.speculative import EagleHead, EagleProposer, SpeculativeConfig, Speculator, eagle, train_eagle
from tests.serving import alone, make_engine, run

GREEDY = {"temperature": 0, "ignore_eos": True}
SAMPLED = {"temperature": 0.2, "top_k": 3, "max_tokens": 4, "ignore_eos": True}
PROMPT = list(range(60, 77))


def trained(model, tokenizer, prompt: list[int], steps: int = 120) -> EagleHead:
    """On the target's own answers to this prompt and to others, drawn ones among them."""
    params = SamplingParams(max_tokens=40, **GREEDY)
    asked = [(ids, params) for ids in (prompt, *(list(range(i, i + 6)) for i in (10, 30, 60, 100)))]
    asked += [(prompt, SamplingParams(seed=seed, **SAMPLED)) for seed in range(900, 910)]
    texts = [[*ids, *alone(model, tokenizer, tuple(ids), p)[0].token_ids] for ids, p in asked]
    head = EagleHead(model)
    train_eagle(head, texts, steps, learning_rate=3e-3)
    return head


@cache
def head_of(model, tokenizer) -> EagleHead:
    return trained(model, tokenizer, PROMPT)


class Checked(EagleProposer):
    """Notes every greedy proposal that is not what the head says when it reads the whole sequence anew, without any
    cache, from features that the target computes anew."""

    def __init__(self, pair, **options) -> None:
        tokenizer = pair[1]
        super().__init__(head_of(*pair), tokenizer.vocab_size, tokenizer.eos_ids, **options)
        self.wrong, self.right, self.bases = [], 0, []

    def propose(self, contexts):
        proposals = super().propose(contexts)
        for context, proposal in zip(contexts, proposals, strict=True):
            if context.params.is_greedy and proposal.tokens:
                base = self._threads[context.key].base
                self.bases.append(base)
                ok = by_definition(self.head, context.token_ids, proposal.tokens, base, self.vocab_size)
                self.right += ok
                self.wrong += [] if ok else [(base, context.token_ids, proposal.tokens)]
        return proposals


@torch.inference_mode()
def by_definition(head: EagleHead, known: list[int], drafts: list[int], base: int, vocab_size: int) -> bool:
    """Is each draft the likeliest, but for rounding?"""
    hidden, tokens = eagle.features(head.target, known[:-1])[base:], known[base + 1 :]
    device = head.target.device
    for draft in drafts:
        positions = torch.arange(base, base + len(tokens), device=device)
        guess = head(torch.tensor(tokens, device=device), hidden, positions, NoCache(head.config))[-1:]
        logits = head.target.logits(guess)[0, :vocab_size]
        if logits[draft] < logits.max() - 1e-3:
            return False
        hidden, tokens = torch.cat([hidden, guess]), [*tokens, draft]
    return True


def checked(pair, count: int = 4, **options) -> Engine:
    config = SpeculativeConfig("eagle", count, draft=head_of(*pair), adaptive=False)
    return make_engine(pair, speculative=Speculator(config, Checked(pair, sampled=False)), **options)


def proposer_of(engine: Engine) -> Checked:
    return engine.speculation.speculator.proposer


def nothing_is_left(engine: Engine) -> bool:
    speculation = engine.speculation
    return not (proposer_of(engine)._threads or speculation._seen or speculation._forks or speculation._proposals)


def serve(engine, jobs) -> dict:
    for i, (prompt, params) in enumerate(jobs):
        engine.add_request(str(i), prompt, params)
    return run(engine)


JOBS = [
    (PROMPT, SamplingParams(max_tokens=30, **GREEDY)),
    (list(range(60, 72)), SamplingParams(max_tokens=25, logprobs=2, temperature=0.9, seed=3, ignore_eos=True)),
    (list(range(10, 15)) * 30, SamplingParams(max_tokens=28, frequency_penalty=1.0, **GREEDY)),
    (list(range(40, 57)), SamplingParams(max_tokens=12, n=3, **GREEDY)),
    (list(range(100, 106)), SamplingParams(max_tokens=40, **GREEDY)),
]
