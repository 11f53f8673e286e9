"""Promise: with ttft_slo_s a request is refused when, and only when, its first token is predicted to come too late."""

from __future__ import annotations

import time

import pytest

from minillm.batching import SchedulerConfig
from minillm.errors import EngineError, OverloadedError, QueueFullError
from minillm.pace import Pace
from minillm.request import Request
from minillm.sampling_params import SamplingParams
from tests.serving import make_engine, make_tiny, run

PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_tiny("llama", tmp_path_factory)


def engine_of(pair, **options):
    engine = make_engine(pair, **{"ttft_slo_s": 1.0, "block_size": 4, "num_blocks": 200, **options})
    engine.pace.observe_step(1.0, 100)  # as if 100 prompt tokens had taken a second
    return engine


def test_refused_when_the_queue_is_too_long_for_the_promise(pair):
    engine = engine_of(pair)
    for i in range(3):
        engine.add_request(f"{i}", [5] * 30, PARAMS)  # 30, 60, 90 tokens: under a second each
    with pytest.raises(OverloadedError, match=r"after about 1\.2 s and 1 s are promised; try again later") as refused:
        engine.add_request("3", [5] * 30, PARAMS)
    assert isinstance(refused.value, QueueFullError)
    assert refused.value.retry_after_s == pytest.approx(0.2)
    assert engine.events.of("refused", request="3")[0].data["predicted_ttft_s"] == pytest.approx(1.2)
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


def test_a_queue_that_does_not_move_counts_too():
    """No prefill left to do, but 5 requests wait for memory and one is admitted every 2 seconds."""
    pace = Pace(16)
    pace.observe_step(0.01, 100)
    for _ in range(4):
        pace.observe_admissions(1.0, 0, 5)
        pace.observe_admissions(1.0, 1, 5)
    assert pace.predicted_ttft(10, 5) == pytest.approx(10, rel=0.05)
    assert pace.predicted_ttft(10, 0) == pytest.approx(0.001)


def test_an_empty_queue_says_nothing_about_its_speed():
    pace = Pace(16)
    pace.observe_admissions(1.0, 0, 0)
    assert pace.admission.value is None
    assert pace.predicted_ttft(1000, 10) == 0  # nothing is known yet, so nobody is refused


def test_the_prediction_is_that_of_the_running_engine(pair):
    """Predicted from what was measured, within a factor of 4 of what then happens on a busy machine."""
    engine = make_engine(pair, block_size=4, num_blocks=400, max_num_batched_tokens=32)
    engine.add_request("warm", [5] * 60, PARAMS)
    run(engine)
    for i in range(11):
        engine.add_request(f"{i}", [i + 3] * 60, PARAMS)
    tokens, ahead = engine.scheduler.queued_before(Request("11", [20] * 60, PARAMS))
    assert (tokens, ahead) == (12 * 60, 11)
    engine.add_request("11", [20] * 60, PARAMS)
    predicted = engine.pace.predicted_ttft(tokens, 0)
    started = time.perf_counter()
    done = run(engine, check=False)
    measured = done["11"].metrics.first_token_time - started
    assert measured / 4 < predicted < measured * 4


def test_a_queue_takes_at_least_one():
    with pytest.raises(EngineError, match="max_waiting is 0; it must be at least 1, or None for no limit"):
        SchedulerConfig(max_waiting=0)


def test_a_promise_has_a_length():
    with pytest.raises(EngineError, match="ttft_slo_s is 0; give seconds above 0"):
        SchedulerConfig(ttft_slo_s=0)
