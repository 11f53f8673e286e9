"""Random numbers, the distribution of the tokens drawn with them, and what the draws may not depend on."""

import copy
import functools
import itertools
import math
from collections import Counter

import pytest
import torch

from minillm.sampling import SamplingState, inverse_cdf, philox, sample, uniform
from minillm.sampling_params import SamplingParams
from tests.sampling_reference import by_definition


def noise(*shape, seed=0, scale=3.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def chi_square_p(counts, expected):
    """P(a chi-square variable is at least this large): a tiny value says that the counts do not fit."""
    statistic = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))
    degrees = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)).item()


def test_chi_square_against_table_values():
    for degrees, critical in ((1, 3.841), (10, 18.307), (100, 124.342)):  # the 5% points
        counts = [1 + math.sqrt(critical)] + [1.0] * degrees
        assert chi_square_p(counts, [1.0] * (degrees + 1)) == pytest.approx(0.05, abs=2e-5)


def test_philox_known_answers():
    """The three vectors that accompany the authors' own code."""
    ones = 0xFFFFFFFF
    assert philox((0,) * 4, (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((ones,) * 4, (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert philox(*pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_uniform_is_a_pure_function_of_its_arguments():
    assert uniform(0, 0) == ((0x6627E8D5 << 32 | 0xE169C58D) >> 11) / 2**53
    calls = [(s, p, q, d) for s in (0, 1, -1, 1 << 40) for p in (0, 1, 1 << 33) for q in (0, 1) for d in (0, 1)]
    first = {call: uniform(*call) for call in calls}
    assert {call: uniform(*call) for call in reversed(calls)} == first
    assert len(set(first.values())) == len(calls)


STREAMS = {
    "positions": lambda i: uniform(1, i),
    "seeds": lambda i: uniform(i, 5),
    "seeds far apart": lambda i: uniform(i << 40, 5),
    "sequences": lambda i: uniform(1, 5, i),
    "draws": lambda i: uniform(1, 5, 0, i),
}


@pytest.mark.parametrize("name", STREAMS)
def test_uniform_and_independent_along_every_argument(name):
    n, cells = 40_000, 16
    values = [STREAMS[name](i) for i in range(n)]
    assert all(0 <= u < 1 for u in values)
    bins = Counter(int(u * 100) for u in values)
    assert chi_square_p([bins[i] for i in range(100)], [n / 100] * 100) > 1e-3
    low_bits = Counter(int(u * 2**53) % cells for u in values)
    assert chi_square_p([low_bits[i] for i in range(cells)], [n / cells] * cells) > 1e-3
    for lag in (1, 2, 7):
        pairs = Counter((int(a * cells), int(b * cells)) for a, b in zip(values, values[lag:], strict=False))
        counts = [pairs[i, j] for i in range(cells) for j in range(cells)]
        assert chi_square_p(counts, [(n - lag) / cells**2] * cells**2) > 1e-3
        centred = torch.tensor(values, dtype=torch.float64) - 0.5
        correlation = (centred[lag:] * centred[:-lag]).mean() * 12  # in standard errors below
        assert abs(correlation) * math.sqrt(n) < 3.5


def test_the_randomness_tests_catch_a_weak_generator():
    n, cells = 40_000, 16
    weak = [(i * 0.6180339887498949) % 1 for i in range(n)]  # evenly spread, and each value tells the next
    pairs = Counter((int(a * cells), int(b * cells)) for a, b in itertools.pairwise(weak))
    counts = [pairs[i, j] for i in range(cells) for j in range(cells)]
    assert chi_square_p(counts, [(n - 1) / cells**2] * cells**2) < 1e-12


def test_inverse_cdf_edges():
    weights = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0], dtype=torch.float64)
    assert inverse_cdf(weights, 0.0) == 1
    assert inverse_cdf(weights, 0.29) == 1
    assert inverse_cdf(weights, 0.31) == 3
    assert inverse_cdf(weights, 1 - 2**-53) == 3
    assert inverse_cdf(weights * 1e-5, 0.29) == 1  # weights need not sum to one
    assert inverse_cdf(weights * 1e-320, 1 - 2**-53) == 3  # u times the total rounds up to the total


LOGITS = (2.0, 1.5, 1.5, 1.0, 0.3, 0.0, -0.4, -1.0, -1.0, -2.5, -4.0, 0.8)
PROMPT, OUTPUT = [0, 4], [1, 5, 5]
COMBOS = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=2.5),
    "top_k": SamplingParams(top_k=3),  # through a tie
    "top_p": SamplingParams(top_p=0.77),
    "min_p": SamplingParams(min_p=0.21),
    "all cuts": SamplingParams(temperature=1.4, top_k=7, top_p=0.87, min_p=0.1),
    "penalties": SamplingParams(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=-0.3),
    "all": SamplingParams(
        temperature=0.8, top_k=8, top_p=0.95, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.3,
        frequency_penalty=0.2, logit_bias={10: 5.0}, min_tokens=9, stop_token_ids=[3],
    ),
}  # fmt: skip
DRAWS = 20_000


def seeded(params, seed):
    """dataclasses.replace without a second look at all the other values."""
    changed = copy.copy(params)
    object.__setattr__(changed, "seed", seed)
    return changed


@functools.cache
def drawn(params):
    """Counts of ids over DRAWS rows of the whole sampler, each with its own seed."""
    rows, counts = 500, Counter()
    logits, states = torch.tensor([LOGITS] * rows), [SamplingState(PROMPT, OUTPUT)] * rows
    for start in range(0, DRAWS, rows):
        rows_of = [seeded(params, seed) for seed in range(start, start + rows)]
        counts.update(t.id for t in sample(logits, rows_of, states, eos_ids=[11]))
    return [counts[i] for i in range(len(LOGITS))]


def fit(counts, probs):
    """The p-value of counts under probabilities; 0 if something impossible was drawn."""
    if any(c and not p for c, p in zip(counts, probs, strict=True)):
        return 0.0
    live = [(c, p * sum(counts)) for c, p in zip(counts, probs, strict=True) if p]
    return chi_square_p([c for c, _ in live], [e for _, e in live])


@pytest.mark.parametrize("name", COMBOS)
def test_draws_follow_the_definition(name):
    expected = by_definition(LOGITS, COMBOS[name], PROMPT, OUTPUT, eos=[11])
    assert fit(drawn(COMBOS[name]), expected) > 1e-3


@pytest.mark.parametrize(
    "mistaken",
    [
        SamplingParams(temperature=1.1),
        SamplingParams(presence_penalty=0.2),
        SamplingParams(frequency_penalty=0.2),
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(top_k=11),
        SamplingParams(top_p=0.98),
        SamplingParams(min_p=0.02),
    ],
)
def test_the_distribution_test_catches_a_small_mistake(mistaken):
    counts = drawn(SamplingParams())
    assert fit(counts, by_definition(LOGITS, mistaken, PROMPT, OUTPUT)) < 1e-6


def test_positions_of_one_seed_follow_the_distribution_too():
    params, rows = SamplingParams(seed=3, top_k=5), 500
    logits, counts = torch.tensor([LOGITS] * rows), Counter()
    for start in range(0, DRAWS, rows):
        states = [SamplingState(range(start), range(i)) for i in range(rows)]
        counts.update(t.id for t in sample(logits, [params] * rows, states))
    assert fit([counts[i] for i in range(len(LOGITS))], by_definition(LOGITS, params)) > 1e-3


# ---- reproducible, and independent of batch-mates ----


def mixed_batch(rows, vocab):
    params = [
        SamplingParams(
            temperature=(0, 0.7, 1.3)[r % 3], top_k=(0, 40)[r % 2], top_p=(1.0, 0.9, 0.5)[r % 3],
            min_p=(0, 0.01)[r % 2], repetition_penalty=(1, 1.2)[r // 2 % 2],
            frequency_penalty=(0, 0.3)[r // 3 % 2], logprobs=r % 4, logit_bias={r: 3.0}, seed=r // 2,
        )
        for r in range(rows)
    ]  # fmt: skip
    states = [SamplingState(list(range(r)), list(range(r, 2 * r)), sequence=r % 2) for r in range(rows)]
    logits = noise(rows, vocab).to(torch.bfloat16).float()  # coarse: with ties
    return logits, params, states


def test_a_row_is_bitwise_the_same_alone_and_in_any_batch():
    logits, params, states = mixed_batch(24, 5003)  # an odd width: rows begin at unlike alignments
    together = sample(logits, params, states)
    assert [sample(logits[r : r + 1], params[r : r + 1], states[r : r + 1])[0] for r in range(24)] == together
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sample(logits[order], [params[r] for r in order], [states[r] for r in order])
    assert shuffled == [together[r] for r in order]


def generated(params, sequence, steps=16, resume_at=None):
    """A toy sequence whose logits depend on its last token; `resume_at` rebuilds it half-way from its tokens."""
    table, output = noise(32, 32, scale=1.0), []
    for step in range(steps):
        if step == resume_at:
            output = list(output)
        state = SamplingState([1, 2, 3], output, sequence)
        output.append(sample(table[(output or [0])[-1]][None], [params], [state])[0].id)
    return output


def test_n_sequences_of_one_seed_are_distinct_and_reproducible():
    """vllm#11898."""
    for params in (SamplingParams(seed=5, n=8), SamplingParams(n=8).seeded()):
        outputs = [generated(params, i) for i in range(params.n)]
        assert len({tuple(o) for o in outputs}) == 8
        assert [generated(params, i) for i in reversed(range(params.n))] == outputs[::-1]
        assert [generated(params, i, resume_at=7) for i in range(params.n)] == outputs


def test_seeds_give_different_sequences():
    assert len({tuple(generated(SamplingParams(seed=s), 0)) for s in range(50)}) == 50


def test_a_continuation_resent_as_a_prompt_draws_the_same_tokens():
    params = SamplingParams(seed=9)
    for n in range(1, 9):
        as_output, as_prompt = SamplingState([1, 2], [3] * n), SamplingState([1, 2] + [3] * n, [])
        first, second = sample(torch.zeros(2, 1000), [params] * 2, [as_output, as_prompt])
        assert first == second


def test_the_draw_leaves_every_other_generator_alone():
    before = torch.get_rng_state()
    sample(noise(2, 50), [SamplingParams(seed=1)] * 2)
    assert torch.get_rng_state().equal(before)
