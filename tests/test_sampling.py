"""Logits to token: an independent definition, transformers' processors, and the faults reported in public."""

import math

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.errors import RequestError
from minillm.sampling import (
    SampledToken,
    SamplingError,
    SamplingState,
    adjust,
    apply_penalties,
    apply_temperature,
    min_p_mask,
    probabilities,
    rank,
    sample,
    top_k_mask,
    top_p_mask,
)
from minillm.sampling_params import SamplingParams
from tests.sampling_reference import by_definition

NEVER = -math.inf


def noise(*shape, seed=0, scale=3.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


# Odd cut values: a sum of equal weights such as 1/3 + 1/3 must not fall on the edge, where rounding decides.
some_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-4, 0.3, 0.7, 1.0, 1.9, 50.0]),
    top_k=st.integers(-1, 14),
    top_p=st.sampled_from([0.0123457, 0.3141593, 0.6180341, 0.8765433, 0.9871235, 1.0]),
    min_p=st.sampled_from([0.0, 0.0137731, 0.2718282, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.6, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.7]),
    logit_bias=st.dictionaries(st.integers(0, 4), st.sampled_from([-60.0, -1.0, 2.0, 60.0]), max_size=3),
    stop_token_ids=st.lists(st.integers(0, 2), max_size=2),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 4),
)
some_ids = st.lists(st.integers(0, 4), max_size=6)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(-4, 4), min_size=5, max_size=14), some_params, some_ids, some_ids)
def test_probabilities_equal_the_definition_ties_included(logits, params, prompt, output):
    found = probabilities(torch.tensor(logits, dtype=torch.float32), params, prompt, output, eos_ids=[3])
    expected = by_definition(logits, params, prompt, output, eos=[3])
    assert [x > 0 for x in found.tolist()] == [x > 0 for x in expected]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)


float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.one_of(float32, st.just(NEVER), st.floats(-30, 30, width=32)), min_size=5, max_size=20),
    st.builds(
        SamplingParams,
        temperature=st.floats(0, 1e30),
        top_k=st.integers(-1, 30),
        top_p=st.floats(0, 1, exclude_min=True),
        min_p=st.floats(0, 1),
        repetition_penalty=st.floats(0, 1e300, exclude_min=True),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        seed=st.integers(-(1 << 63), (1 << 63) - 1),
    ),
    some_ids,
)
def test_one_token_always_survives_and_nothing_is_nan(logits, params, output):
    row = torch.tensor([*logits, 0.0])
    probs = probabilities(row, params, (), output)
    assert not probs.isnan().any()
    assert (probs >= 0).all()
    assert abs(probs.sum().item() - 1) < 1e-9
    (token,) = sample(row[None], [params], [SamplingState((), output)])
    assert probs[token.id] > 0
    assert row[token.id] > NEVER
    assert (probs > 0).sum() <= (params.top_k if params.top_k > 0 else len(row))


# ---- transformers' processors, where the conventions coincide ----


def kept_by(warper, scores):
    return warper(None, scores[None].clone())[0] > NEVER


@pytest.mark.parametrize("seed", range(5))
def test_masks_equal_transformers(seed):
    scores = noise(2000, seed=seed)
    for k in (1, 7, 50, 1999, 2000, 5000):
        assert top_k_mask(scores, k).equal(kept_by(transformers.TopKLogitsWarper(k), scores))
    for p in (0.01, 0.3, 0.8, 0.95, 0.999):
        assert top_p_mask(scores.double(), p).equal(kept_by(transformers.TopPLogitsWarper(p), scores.double()))
    for p in (0.001, 0.05, 0.5, 1.0):
        assert min_p_mask(scores, p).equal(kept_by(transformers.MinPLogitsWarper(p), scores))


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 3.0])
def test_temperature_equals_transformers(temperature):
    scores = noise(2000)
    theirs = transformers.TemperatureLogitsWarper(temperature)(None, scores[None])[0]
    torch.testing.assert_close(apply_temperature(scores, temperature).softmax(-1), theirs.softmax(-1))


def test_repetition_penalty_equals_transformers():
    scores, prompt, output = noise(300), [3, 9, 9, 250], [7, 3, 299]
    theirs = transformers.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + output]), scores[None].clone())
    ours = apply_penalties(scores, SamplingParams(repetition_penalty=1.3), prompt, output)
    torch.testing.assert_close(ours, theirs[0])
    assert scores.equal(noise(300))  # the argument is left as it was


@pytest.mark.parametrize("seed", range(3))
def test_the_chain_equals_transformers(seed):
    logits = noise(5000, seed=seed)
    chain = transformers.LogitsProcessorList([
        transformers.RepetitionPenaltyLogitsProcessor(1.2), transformers.TemperatureLogitsWarper(0.8),
        transformers.MinPLogitsWarper(0.001), transformers.TopKLogitsWarper(60), transformers.TopPLogitsWarper(0.9),
    ])  # fmt: skip
    ids = [5, 17, 17, 4000]
    theirs = chain(torch.tensor([ids]), logits[None].double())[0].softmax(-1)
    params = SamplingParams(temperature=0.8, min_p=0.001, top_k=60, top_p=0.9, repetition_penalty=1.2)
    ours = probabilities(logits, params, ids[:2], ids[2:])
    assert (ours > 0).equal(theirs > 0)
    torch.testing.assert_close(ours, theirs)


# ---- the order of the steps ----


def test_the_order_decides_and_is_the_stated_one():
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0])
    # top_p after top_k: of the two left, the first holds 0.73, so 0.7 keeps it alone; before, it holds 0.64.
    both = probabilities(logits, SamplingParams(top_k=2, top_p=0.7))
    assert (both > 0).tolist() == [True, False, False, False]
    # min_p after temperature: at T = 2 the third is exp(-1) = 0.37 of the first; at T = 1 it would be 0.14.
    warm = probabilities(logits, SamplingParams(temperature=2, min_p=0.3))
    assert (warm > 0).tolist() == [True, True, True, False]
    # bias before the repetition penalty: (3 + 2) / 2 = 2.5, not 3 / 2 + 2 = 3.5.
    params = SamplingParams(logit_bias={0: 2}, repetition_penalty=2)
    assert adjust(logits, params, prompt_ids=[0]).tolist() == [2.5, 2, 1, 0]
    # repetition over prompt and output, presence and frequency over the output alone.
    params = SamplingParams(repetition_penalty=2, presence_penalty=0.25, frequency_penalty=0.5)
    assert adjust(logits, params, [0, 2], [2, 2, 3]).tolist() == [1.5, 2, 0.5 - 0.25 - 1.0, -0.25 - 0.5]


def test_min_tokens_masks_end_and_stop_ids_until_they_are_out():
    logits = torch.tensor([9.0, 8.0, 7.0, 6.0])
    params = SamplingParams(min_tokens=2, stop_token_ids=[1], temperature=0)
    ids = [sample(logits[None], [params], [SamplingState([3], [3] * n)], eos_ids=[0])[0].id for n in range(4)]
    assert ids == [2, 2, 0, 0]
    ignoring = SamplingParams(min_tokens=2, ignore_eos=True, temperature=0)
    assert sample(logits[None], [ignoring], eos_ids=[0])[0].id == 0  # then it is a token like any other


@pytest.mark.parametrize(
    ("change", "token"),
    [({}, 0), ({"logit_bias": {3: 100}}, 3), ({"repetition_penalty": 2.0}, 1), ({"presence_penalty": 2.0}, 1),
     ({"frequency_penalty": 2.0}, 1), ({"min_tokens": 3}, 2)],
)  # fmt: skip
def test_greedy_takes_the_argmax_after_bias_masks_and_penalties(change, token):
    logits, state = torch.tensor([[4.0, 3.5, 3.0, 2.0]]), SamplingState([], [0, 0])
    eos_ids = [0, 1] if "min_tokens" in change else []
    assert sample(logits, [SamplingParams(temperature=0, **change)], [state], eos_ids=eos_ids)[0].id == token


# ---- ties, cuts, temperature ----


def test_ties_at_the_edge_of_top_k_go_to_the_lower_id_at_any_batch_size():
    """vllm#50979."""
    row = torch.tensor([0.0, 1.0, 1.0, 5.0, 1.0, 1.0])
    assert rank(row, 3).tolist() == [3, 1, 2]
    assert top_k_mask(row, 3).tolist() == [False, True, True, True, False, False]
    assert top_p_mask(torch.zeros(10), 0.35).tolist() == [True] * 4 + [False] * 6
    for batch in (1, 2, 33):
        params = [SamplingParams(top_k=3, temperature=30, seed=s) for s in range(batch)]
        assert {t.id for t in sample(row.repeat(batch, 1), params)} <= {1, 2, 3}
        assert [t.id for t in sample(torch.zeros(batch, 9), [SamplingParams(temperature=0)] * batch)] == [0] * batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_argmax_ties_go_to_the_lowest_id_in_wide_rows(dtype):
    row = torch.zeros(5, 49152, dtype=dtype)
    row[:, [48000, 31, 20000, 49151]] = 2
    assert [t.id for t in sample(row, [SamplingParams(temperature=0)] * 5)] == [31] * 5


def test_top_k_then_top_p_leaves_one():
    """mlx-lm#388."""
    for logits in (noise(50), torch.zeros(50), torch.full((50,), -1e4)):
        probs = probabilities(logits, SamplingParams(top_k=1, top_p=0.8))
        assert probs.max() == 1
        assert probs.argmax() == logits.argmax()


@pytest.mark.parametrize("temperature", [0.0, 1e-320, 1e-10, 1e-5, 1e-4, 0.00099])
def test_tiny_temperature_is_argmax(temperature):
    """vllm#3063, #2937: also between equal logits, and where x / T overflows."""
    logits = torch.tensor([1e38, 3e38, -3e38, 3e38])
    params = SamplingParams(temperature=temperature, seed=1)
    assert probabilities(logits, params).tolist() == [0, 1, 0, 0]
    assert {sample(logits[None], [params], [SamplingState((), [0] * n)])[0].id for n in range(20)} == {1}


def test_a_small_temperature_does_not_overflow_what_it_divides():
    assert apply_temperature(torch.tensor([1e38, 3e38, 0.0]), 0.01).softmax(-1).tolist() == [0, 1, 0]


def test_wide_rows_rank_more_when_the_first_few_hundred_fall_short():
    scores = noise(20_000, scale=0.5).double()
    order = scores.argsort(descending=True, stable=True)
    mass = scores.softmax(-1)[order].cumsum(-1)
    kept = order[: int((mass < 0.97).sum()) + 1]
    assert len(kept) > 10_000
    assert top_p_mask(scores, 0.97).nonzero().squeeze(-1).equal(kept.sort().values)


def test_padded_vocabulary_rows_never_win():
    """mirage#751: zeros beyond the vocabulary beat logits that are all negative; here they are NaN besides."""
    logits = torch.cat([-5 - noise(4, 10).abs(), torch.zeros(4, 6)], dim=1)
    logits[1, 12] = math.nan
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=5, seed=1, logprobs=20)):
        tokens = sample(logits, [params] * 4, vocab_size=10)
        assert all(t.id < 10 and all(i < 10 for i, _ in t.top_logprobs) for t in tokens)
        assert sum(len(t.top_logprobs) for t in tokens) == (40 if params.logprobs else 0)


# ---- logits that cannot be sampled, ids that do not exist ----


@pytest.mark.parametrize(("bad", "message"), [(math.nan, "NaN"), (math.inf, r"\+inf"), (NEVER, "-inf")])
@pytest.mark.parametrize("temperature", [0, 1])
def test_unsound_logits_raise_and_name_the_row(bad, message, temperature):
    logits = noise(3, 8)
    logits[1, 3 if bad != NEVER else slice(None)] = bad
    params = SamplingParams(temperature=temperature, seed=1, top_k=2, top_p=0.5, min_p=0.1, logprobs=1)
    with pytest.raises(SamplingError, match=rf"row 1: .*{message}") as caught:
        sample(logits, [params] * 3)
    assert caught.value.row == 1
    with pytest.raises(SamplingError, match=message):
        probabilities(logits[1], params)
    with pytest.raises(SamplingError, match=message):
        top_p_mask(logits[1], 0.5)


def test_masking_every_token_raises():
    params = SamplingParams(min_tokens=1, stop_token_ids=[0, 1], seed=1)
    with pytest.raises(SamplingError, match="row 0: every logit is -inf"):
        sample(torch.zeros(1, 2), [params])


def test_ids_outside_the_vocabulary_raise():
    with pytest.raises(RequestError, match="token id 9 is outside the vocabulary of 8"):
        probabilities(torch.zeros(8), SamplingParams(logit_bias={9: 1}))
    with pytest.raises(RequestError, match="token id -1 is outside"):
        apply_penalties(torch.zeros(8), SamplingParams(presence_penalty=1), (), [-1])


def test_rows_parameters_and_states_must_agree():
    with pytest.raises(RequestError, match=r"shape \(2, 8\) need 1 rows"):
        sample(torch.zeros(2, 8), [SamplingParams()])
    with pytest.raises(RequestError, match="logits of shape"):
        sample(torch.zeros(8), [SamplingParams()])


def test_a_random_row_without_a_seed_is_refused():
    with pytest.raises(RequestError, match=r"seed is None; call params\.seeded"):
        sample(torch.zeros(1, 8), [SamplingParams()])


# ---- log-probabilities ----


def test_log_probabilities_are_taken_from_the_raw_logits():
    """vllm#9453: before bias, penalties, temperature and cuts, all of which are at work here."""
    logits = noise(1, 100)
    params = SamplingParams(
        temperature=0.2, top_k=1, top_p=0.1, min_p=0.5, logit_bias={40: 100}, repetition_penalty=1.5,
        presence_penalty=2, logprobs=4, seed=1,
    )  # fmt: skip
    (token,) = sample(logits, [params], [SamplingState([1, 2], [3])])
    expected = logits[0].double().log_softmax(-1)
    assert token.id == 40
    assert token.logprob == pytest.approx(expected[40].item(), abs=1e-12)
    top = expected.topk(4)
    assert [i for i, _ in token.top_logprobs] == top.indices.tolist()
    assert [x for _, x in token.top_logprobs] == pytest.approx(top.values.tolist(), abs=1e-12)


def test_log_probabilities_asked_for_or_not():
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    assert sample(logits, [SamplingParams(temperature=0)]) == [SampledToken(1)]
    (token,) = sample(logits, [SamplingParams(temperature=0, logprobs=0)])
    assert token.logprob == pytest.approx(2 - math.log(math.e + 2 * math.e**2 + 1))
    assert token.top_logprobs == ()
    (token,) = sample(logits, [SamplingParams(temperature=0, logprobs=9)])
    assert [i for i, _ in token.top_logprobs] == [1, 2, 0, 3]
