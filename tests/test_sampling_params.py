"""Sampling parameters: what is accepted, what is refused and how the refusal reads."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.errors import RequestError
from minillm.sampling_params import SamplingParams

NAN, INF = math.nan, math.inf
REFUSED = {
    "temperature": [-0.1, NAN, INF, -INF, "1", None, True, 10**400],
    "top_p": [0, -0.5, 1.0001, NAN, INF, None],
    "top_k": [-2, 1.5, NAN, True, "4", None],
    "min_p": [-0.01, 1.01, NAN, INF],
    "repetition_penalty": [0, -1, NAN, INF],
    "presence_penalty": [-2.01, 2.01, NAN, INF],
    "frequency_penalty": [-2.01, 2.01, NAN, -INF],
    "logit_bias": [{1: 101}, {1: -100.5}, {1: NAN}, {-1: 0}, {1.5: 0}, {"1": 0}, {1: "0"}, 5, "ab", [1, 2]],
    "seed": [1.5, NAN, "7", True, 1 << 63, -(1 << 63) - 1],
    "stop": ["", ["a", ""], [1], 5, b"ab", [None]],
    "stop_token_ids": [[-1], [1.5], 5, "12", [True], [None]],
    "include_stop_str_in_output": [1, None, "yes"],
    "ignore_eos": [0, None],
    "min_tokens": [-1, 1.5, None, NAN],
    "max_tokens": [0, -1, 2.5, NAN, True],
    "logprobs": [-1, 21, 1.5, True],
    "n": [0, -1, 1.5, None],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_bad_value_is_refused_with_name_value_and_remedy(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(name)
    assert "it must be" in message
    assert len(message) < 200
    assert "\n" not in message


def test_every_parameter_has_refused_values():
    assert set(REFUSED) == {f.name for f in dataclasses.fields(SamplingParams)}


def test_the_edges_are_accepted():
    SamplingParams(temperature=0, top_k=-1, top_p=1, min_p=0, presence_penalty=-2, frequency_penalty=2)
    SamplingParams(min_p=1, top_p=1e-9, repetition_penalty=1e-9, logprobs=0, max_tokens=1, min_tokens=1)
    SamplingParams(logprobs=20, seed=-(1 << 63), logit_bias={0: -100, 1: 100}, max_tokens=None, min_tokens=9**9)


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(RequestError, match="min_tokens is 5; it must be at most max_tokens, which is 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_values_are_frozen_copies_and_hashable():
    stops, bias = ["a", "b"], {7: 1, 3: -2}
    params = SamplingParams(stop=stops, logit_bias=bias, stop_token_ids=[4])
    stops.append("c")
    bias[9] = 5
    assert (params.stop, params.logit_bias, params.stop_token_ids) == (("a", "b"), ((3, -2.0), (7, 1.0)), (4,))
    assert params == SamplingParams(stop=("a", "b"), logit_bias={3: -2, 7: 1}, stop_token_ids=(4,))
    assert len({params, dataclasses.replace(params)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 2.0


def test_one_stop_string_becomes_a_tuple_and_none_becomes_empty():
    assert SamplingParams(stop="END").stop == ("END",)
    params = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (), ())


def test_ids_outside_the_vocabulary():
    """vllm#16529."""
    SamplingParams(logit_bias={99: 1}, stop_token_ids=[99]).validate(100)
    with pytest.raises(RequestError, match="logit_bias id is 100; it must be below the vocabulary size, 100"):
        SamplingParams(logit_bias={100: 1}).validate(100)
    with pytest.raises(RequestError, match="stop_token_ids id is 100"):
        SamplingParams(stop_token_ids=[3, 100]).validate(100)


def test_a_missing_seed_is_drawn_once_and_a_given_one_kept():
    fresh = SamplingParams().seeded()
    assert fresh.seed is not None
    assert fresh.seeded() is fresh
    assert len({SamplingParams().seeded().seed for _ in range(50)}) == 50
    assert SamplingParams(seed=7).seeded().seed == 7
    full = SamplingParams(logit_bias={1: 2}, stop="a", temperature=0.5)
    assert dataclasses.replace(full.seeded(), seed=None) == full


anything = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3),
    st.lists(st.one_of(st.integers(-2, 9), st.floats(), st.text(max_size=2)), max_size=3),
    st.dictionaries(st.one_of(st.integers(-2, 9), st.text(max_size=2)), st.one_of(st.floats(), st.none()), max_size=3),
)  # fmt: skip


@settings(deadline=None)
@given(st.sampled_from(sorted(REFUSED)), anything)
def test_anything_at_all_is_accepted_or_refused_in_one_way(name, value):
    try:
        message = str(hash(SamplingParams(**{name: value})))
    except RequestError as error:
        message = str(error)
    assert message.lstrip("-").isdigit() or name in message
