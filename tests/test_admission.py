"""Promise: with ttft_slo_s a request is refused when, and only when, its first token is predicted to come too late."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from minillm.batching import SchedulerConfig
from minillm.errors import EngineError, OverloadedError, QueueFullError
from minillm.pace import Pace
from minillm.request import Request
from minillm.sampling_params import SamplingParams
from tests.noise import calmly
from tests.serving import make_engine, make_tiny, run

PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_tiny("llama", tmp_path_factory)


def engine_of(pair, **options):
    engine = make_engine(pair, **{"ttft_slo_s": 1.0, "block_size": 4, "num_blocks": 200, **options})
    on_the_line(engine.pace, 0.0, 0.01)
    return engine


def on_the_line(pace, fixed, per_token, steps=200):
    """As if the engine had run steps of 1 and of 32 tokens at this price."""
    for tokens in (1, 32) * (steps // 2):
        pace.observe_step(fixed + per_token * tokens, tokens)


def test_refused_when_the_queue_is_too_long_for_the_promise(pair):
    engine = engine_of(pair)
    for i in range(3):
        engine.add_request(f"{i}", [5] * 30, PARAMS)  # 30, 60, 90 tokens: under a second each
    with pytest.raises(OverloadedError, match=r"after about 1\.2 s and 1 s are promised; try again later") as refused:
        engine.add_request("3", [5] * 30, PARAMS)
    assert isinstance(refused.value, QueueFullError)
    assert refused.value.retry_after_s == pytest.approx(0.2, rel=0.1)
    assert engine.events.of("refused", request="3")[0].data["predicted_ttft_s"] == pytest.approx(1.2, rel=0.02)
    engine.add_request("3", [5] * 8, PARAMS)  # the id is free, and a short one still meets it
    assert set(run(engine)) == {"0", "1", "2", "3"}


def test_an_idle_engine_takes_what_it_cannot_do_in_time(pair):
    """Nobody else would do it sooner, and a limit on length is max_model_len's business."""
    engine = engine_of(pair)
    engine.add_request("long", [5] * 60, PARAMS)
    assert run(engine)["long"].finished


def test_who_goes_first_is_not_charged_for_those_behind(pair):
    engine = engine_of(pair, policy="priority")
    for i in range(3):
        engine.add_request(f"{i}", [5] * 30, PARAMS)
    with pytest.raises(OverloadedError):
        engine.add_request("same", [5] * 30, PARAMS)
    engine.add_request("urgent", [5] * 30, PARAMS, priority=-1)
    assert set(run(engine)) == {"0", "1", "2", "urgent"}


def test_a_step_has_a_fixed_price_and_one_for_each_token():
    """Prompt tokens wait for whole steps, which the running decodes share."""
    pace = Pace(16, budget=32)
    on_the_line(pace, 0.05, 0.001)
    assert (pace.step.fixed, pace.step.per_token) == (pytest.approx(0.05, rel=0.02), pytest.approx(0.001, rel=0.02))
    assert pace.predicted_ttft(30, 0) == pytest.approx(0.05 + 0.03, rel=0.02)
    assert pace.predicted_ttft(60, 0, running=12) == pytest.approx(3 * 0.05 + (60 + 36) * 0.001, rel=0.02)


def test_small_steps_that_look_alike_say_nothing_about_a_large_one():
    """30 prompts of two tokens beside decodes cost what decodes cost; 480 tokens are not 240 times as much."""
    pace = Pace(16)
    for i in range(300):
        pace.observe_step(0.02, 8 + 2 * (i % 10 == 0))
    assert pace.predicted_ttft(480, 0, 8) < 0.05


def test_a_hiccup_of_the_machine_is_not_the_price_of_a_token():
    pace = Pace(16)
    for tokens in (8, 60) * 20:
        pace.observe_step(0.02 + 0.0005 * tokens, tokens)
    pace.observe_step(3.0, 60)
    assert pace.predicted_ttft(60, 0, 8) < 0.2


def test_what_was_slow_long_ago_is_forgotten():
    """The first step of all, a cold one: while only decodes follow, nobody is refused because of it for ever."""
    pace = Pace(16)
    pace.observe_step(2.0, 400)
    assert pace.predicted_ttft(400, 0) > 1.0
    for _ in range(150):
        pace.observe_step(0.02, 8)
    assert pace.predicted_ttft(400, 0, 8) < 0.25


def test_a_full_house_is_one_turn_and_a_free_place_none(pair):
    engine = make_engine(pair, max_num_seqs=2)
    new = Request("new", [5] * 9, PARAMS)
    assert engine.scheduler.queued_before(new) == (9, 0)
    engine.add_request("a", [5] * 9, replace(PARAMS, max_tokens=20))
    engine.step()
    assert engine.scheduler.queued_before(new) == (9, 0)
    engine.add_request("b", [6] * 9, replace(PARAMS, max_tokens=20))
    engine.step()
    assert engine.scheduler.queued_before(new) == (9, 1)
    assert engine.scheduler.queued_before(Request("pair", [5] * 9, replace(PARAMS, n=2))) == (9, 1)


def test_a_queue_that_does_not_move_counts_too():
    """No prefill left to do, but 5 requests wait for memory and one is admitted every 2 seconds."""
    pace = Pace(16)
    for _ in range(4):
        pace.observe_step(0.01, 100)
        pace.observe_admissions(1.0, 0, 5)
        pace.observe_admissions(1.0, 1, 5)
    assert pace.predicted_ttft(10, 5) == pytest.approx(10, rel=0.05)
    assert pace.predicted_ttft(10, 0) == pytest.approx(0.01)


def test_an_empty_queue_says_nothing_about_its_speed():
    pace = Pace(16)
    pace.observe_admissions(1.0, 0, 0)
    assert pace.admission.value is None
    assert pace.predicted_ttft(1000, 10) == 0  # nothing is known yet, so nobody is refused


@calmly
def test_the_prediction_is_that_of_the_running_engine(pair):
    """Predicted from what was measured, within a factor of 4 of what then happens on a busy machine."""
    engine = make_engine(pair, block_size=4, num_blocks=400, max_num_batched_tokens=32)
    for _ in range(5):
        engine.add_request("warm", [5] * 60, replace(PARAMS, max_tokens=20))
        run(engine, check=False)
    for i in range(11):
        engine.add_request(f"{i}", [i + 3] * 60, PARAMS)
    tokens, turns = engine.scheduler.queued_before(Request("11", [20] * 60, PARAMS))
    assert (tokens, turns) == (12 * 60, 12)  # it is the twelfth in a queue that has not moved yet
    engine.add_request("11", [20] * 60, PARAMS)
    predicted = engine.pace.predicted_ttft(tokens, 0)
    started = time.perf_counter()
    done = run(engine, check=False)
    measured = done["11"].metrics.first_token_time - started
    assert measured / 4 < predicted < measured * 4


def test_a_queue_takes_at_least_one():
    with pytest.raises(EngineError, match="max_waiting is 0; it must be a whole number of at least 1, or None"):
        SchedulerConfig(max_waiting=0)


def test_a_promise_has_a_length():
    with pytest.raises(EngineError, match="ttft_slo_s is 0; it must be a number above 0, or None"):
        SchedulerConfig(ttft_slo_s=0)
