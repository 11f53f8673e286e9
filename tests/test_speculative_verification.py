"""Promise: verified tokens are distributed as the target's own, whatever drafted them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.sampling import SamplingParams, SamplingState, inverse_cdf, probabilities, sample, uniform
from minillm.speculative import Proposal, verification
from tests.planted import planted

V = 5
EOS = (4,)
GENERATOR = torch.Generator().manual_seed(7)
TARGET = torch.randn(V, V, generator=GENERATOR) * 1.5  # logits after each token: a language of one token's memory
DRAFT = TARGET + torch.randn(V, V, generator=GENERATOR) * 1.2
PROMPT = [2, 0]


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """How many standard deviations the statistic lies above its mean. Cells that cannot occur must be empty."""
    counts, probs = counts.flatten().double(), probs.flatten().double()
    assert counts[probs == 0].sum() == 0
    seen = probs > 0
    wanted = probs[seen] * counts.sum()
    freedom = int(seen.sum()) - 1
    return float((((counts[seen] - wanted) ** 2 / wanted).sum() - freedom) / math.sqrt(2 * freedom))


# --- the rule alone, 10^5 tokens at once ---


def many_tokens(rule, p: torch.Tensor, q: torch.Tensor, count: int = 100_000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    draft = torch.multinomial(q, count, replacement=True, generator=generator)
    u, v = torch.rand(2, count, generator=generator, dtype=torch.float64)
    kept = rule.accept(p.expand(count, -1), q.expand(count, -1), draft, u)
    replaced = (rule.residual(p, q).cumsum(-1) <= v[:, None]).sum(-1).clamp(max=len(p) - 1)
    return torch.where(kept, draft, replaced).bincount(minlength=len(p))


P, Q = (
    torch.tensor(x, dtype=torch.float64) for x in ([0.4, 0.3, 0.05, 0.25, 0.0, 0.0], [0.1, 0.2, 0.5, 0.0, 0.1, 0.1])
)


def test_hundred_thousand_tokens_are_the_targets():
    """One of them is likely for the draft and rare for the target, one is the target's alone, two are the draft's."""
    assert chi_square(many_tokens(verification, P, Q), P) < 4
    assert chi_square(many_tokens(verification, P, P), P) < 4


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("u * q.gather(-1, at).squeeze(-1) < p.gather", "u * p.gather(-1, at).squeeze(-1) < q.gather"),  # q/p for p/q
        ("left / total", "left"),  # not renormalized
        ("(p - q).clamp", "(p + 0 * q).clamp"),  # replaced from p itself
        ("u * q.gather", "0.9 * u * q.gather"),  # a biased acceptance
    ],
)
def test_a_biased_rule_is_caught(right, wrong):
    counts = many_tokens(planted(verification, right, wrong), P, Q)
    assert counts[P == 0].sum() > 0 or chi_square(counts, P) > 20


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=9), st.integers(0, 3))
def test_kept_and_replaced_add_up_to_the_target(pairs, peaks):
    """By the formula rather than by drawing: min(q, p) + r · residual = p."""
    weights = torch.tensor(pairs, dtype=torch.float64).T + 1e-3
    weights[0, : min(peaks, weights.shape[1] - 1)] = 0
    p, q = weights / weights.sum(-1, keepdim=True)
    kept = torch.minimum(p, q)
    out = kept + (1 - kept.sum()) * verification.residual(p, q)
    assert torch.allclose(out, p, atol=1e-12)


# --- whole chains, with everything a request may ask for ---


def propose(params: SamplingParams, output: list[int], count: int) -> Proposal:
    """As a draft model does it."""
    tokens, probs = [], []
    for _ in range(count):
        last = (PROMPT + output + tokens)[-1]
        probs.append(probabilities(DRAFT[last], params, PROMPT, output + tokens, EOS))
        u = uniform(params.seed, len(PROMPT) + len(output) + len(tokens), 0, verification.DRAFT)
        tokens.append(inverse_cdf(probs[-1], u))
    return Proposal(tokens, torch.stack(probs))


def speculate(rule, params: SamplingParams, total: int, counts: tuple[int, ...]) -> list[int]:
    """The first `total` tokens of an answer, from steps of counts[0], counts[1], … drafts, then of none."""
    output, step = [], 0
    while len(output) < total:
        count = counts[step] if step < len(counts) else 0
        proposal = propose(params, output, count) if count else Proposal([])
        logits = TARGET[[(PROMPT + output)[-1], *proposal.tokens]]
        state = SamplingState(PROMPT, output)
        output += [t.id for t in rule.verify(logits, proposal, params, state, V, EOS)]
        step += 1
    return output[:total]


def pair_counts(rule, params: dict, samples: int) -> torch.Tensor:
    counts = torch.zeros(V, V)
    for seed in range(samples):
        p = SamplingParams(seed=seed, max_tokens=9, **params)
        first, second = speculate(rule, p, 2, ((2, 1), (1, 0))[seed % 2])
        counts[first, second] += 1
    return counts


def pair_probs(params: dict) -> torch.Tensor:
    p = SamplingParams(seed=0, max_tokens=9, **params)
    first = probabilities(TARGET[PROMPT[-1]], p, PROMPT, [], EOS)
    second = [probabilities(TARGET[y], p, PROMPT, [y], EOS) for y in range(V)]
    return first[:, None] * torch.stack(second)


CUTS = {"temperature": 1.4, "top_k": 4, "top_p": 0.95}
PENALTIES = {
    "temperature": 0.9, "repetition_penalty": 1.6, "presence_penalty": 1.2, "frequency_penalty": 0.8,
    "logit_bias": {1: 1.5, 3: -1.0}, "min_tokens": 1,
}  # fmt: skip


@pytest.mark.parametrize("params", [CUTS, PENALTIES, {"temperature": 2.0, "min_p": 0.15, "stop_token_ids": [3]}])
def test_pairs_of_tokens_are_the_targets(params):
    """Penalties and min_tokens change between the first and the second token, so each position must see its own."""
    assert chi_square(pair_counts(verification, params, 1600), pair_probs(params)) < 4


HERE = "here = SamplingState(state.prompt_ids, output, "
MISTAKES = {
    "penalties without the step's tokens": (PENALTIES, HERE, HERE.replace("output", "state.output_ids")),
    "penalties from drafts": (PENALTIES, HERE, HERE.replace("output", "[*state.output_ids, *proposal.tokens]")),
    "bonus from the row before": (PENALTIES, "sample(logits[i : i + 1]", "sample(logits[max(0, i - 1), None]"),
    "judged by the number that drew it": (
        PENALTIES,
        "PLAIN, DRAFT, ACCEPT = 0, 1, 2",
        "PLAIN, DRAFT, ACCEPT = 0, 1, 1",
    ),
    "position off by one": (CUTS, "position, state.sequence, PLAIN)", "position + 1, state.sequence, PLAIN)"),
    "biased": (CUTS, "u * q.gather", "0.7 * u * q.gather"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_chain_is_caught(name):
    params, right, wrong = MISTAKES[name]
    counts, probs = pair_counts(planted(verification, right, wrong), params, 900), pair_probs(params)
    assert counts[probs == 0].sum() > 0 or chi_square(counts, probs) > 7


def test_a_draft_that_misstates_its_distribution_is_caught():
    """vllm#40149: drawn at one temperature, recorded at another."""

    def misstated(logits, proposal, *rest):
        flat = None if proposal.probs is None else (proposal.probs + 0.2) / (1 + V * 0.2)
        return verification.verify(logits, Proposal(proposal.tokens, flat), *rest)

    class Rule:
        verify = staticmethod(misstated)

    assert chi_square(pair_counts(Rule, CUTS, 1500), pair_probs(CUTS)) > 7


# --- guesses that were not drawn ---


@pytest.mark.parametrize("params", [CUTS, PENALTIES, {"temperature": 0, "frequency_penalty": 0.7}])
def test_a_certain_guess_leaves_every_token_as_it_was(params):
    """The plain run token for token, whatever is guessed, sampled runs too."""
    for seed in range(60):
        p = SamplingParams(seed=seed, max_tokens=9, logprobs=2, **params)
        plain: list = []
        while len(plain) < 6:
            ids = [t.id for t in plain]
            state = SamplingState(PROMPT, ids)
            plain += sample(TARGET[(PROMPT + ids)[-1], None], [p], [state], V, EOS)
        ids, found = [t.id for t in plain], []
        while len(found) < 6:
            guess = ids[len(found) : len(found) + 3]
            guess[seed % 3 : seed % 3 + 1] = [seed % V]  # one of them may be wrong
            state = SamplingState(PROMPT, ids[: len(found)])
            logits = TARGET[[(PROMPT + ids[: len(found)])[-1], *guess]]
            found += verification.verify(logits, Proposal(guess), p, state, V, EOS)
        assert found[:6] == plain[:6]


def test_greedy_keeps_what_the_target_would_have_said():
    best = [int(TARGET[2].argmax())]
    for _ in range(3):
        best.append(int(TARGET[best[-1]].argmax()))
    wrong = (best[2] + 1) % V
    params = SamplingParams(temperature=0, max_tokens=9)
    for guess, right in [(best[:3], 4), ([*best[:2], wrong], 3), ([wrong] * 3, 1 + (wrong == best[0]))]:
        tokens = verification.verify(TARGET[[2, *guess]], Proposal(guess), params, SamplingState([2]), V, EOS)
        assert [t.id for t in tokens] == best[:right]


def test_columns_of_padding_are_never_drawn():
    wide = torch.cat([TARGET, torch.full((V, 3), 50.0)], dim=1)
    q = torch.full((1, V), 1 / V, dtype=torch.float64)
    for seed in range(50):
        params = SamplingParams(seed=seed, max_tokens=9, logprobs=0)
        proposal = Proposal([seed % V], q)
        for token in verification.verify(wide[[0, seed % V]], proposal, params, SamplingState([0]), V, EOS):
            assert token.id < V
            assert token.logprob <= 0
