"""The roofline: predictions, points, pairs, and the batch at which decode turns."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.analysis import (
    Hardware,
    OpCost,
    Precision,
    Step,
    critical_batch,
    find_hardware,
    join,
    model_config,
    point,
    predict,
    predict_op,
    predict_step,
    roof,
    step_costs,
    step_time,
    total,
)
from minillm.errors import ConfigError, RequestError

MACHINE = Hardware("toy", 1, 100.0, {"float32": 1000.0})  # ridge at 10 FLOPs a byte


@pytest.mark.parametrize(
    ("flops", "moved", "seconds", "bound"),
    [(50, 100, 1.0, "memory"), (5000, 100, 5.0, "compute"), (1000, 100, 1.0, "memory"), (0, 200, 2.0, "memory")],
)
def test_an_operator_is_bound_by_the_slower_of_the_two(flops, moved, seconds, bound):
    prediction = predict_op(OpCost("x", 1, flops, moved), MACHINE, "float32")
    assert (prediction.seconds, prediction.bound) == (seconds, bound)


@settings(deadline=None)
@given(flops=st.floats(1, 1e6), moved=st.floats(1, 1e6))
def test_every_predicted_point_lies_on_the_roof(flops, moved):
    dot = point(predict_op(OpCost("x", 1, flops, 0, moved), MACHINE, "float32"))
    assert dot.flops_per_s == pytest.approx(roof(MACHINE, [dot.intensity], "float32")[0])


def test_decode_is_memory_bound_and_prefill_compute_bound_on_an_h100():
    config, h100 = model_config("Llama-3-8B"), find_hardware("h100")
    decode = predict_step(step_costs(config, Step.decode(1000)), h100)
    prefill = predict_step(step_costs(config, Step.prefill(4096)), h100)
    assert (decode.bound, prefill.bound) == ("memory", "compute")
    whole = total(step_costs(config, Step.decode(1000)))
    assert decode.seconds == pytest.approx((whole.weight_bytes + whole.kv_bytes) / 3.35e12)


def test_the_step_floor_is_below_the_sum_of_unfused_operators():
    config, h100 = model_config("Llama-3-8B"), find_hardware("h100")
    for step in (Step.decode(1000), Step.prefill(4096), Step.decode(2000, 64)):
        ops = step_costs(config, step)
        assert predict_step(ops, h100).seconds < sum(p.seconds for p in predict(ops, h100))


def test_step_time_is_the_sum_of_its_parts():
    time = step_time(200, 5000, 100, MACHINE, "float32", communication=0.5, overhead=0.25)
    assert (time.kv, time.linear, time.bound) == (2.0, 5.0, "compute")
    assert time.seconds == 7.75


def test_join_pairs_by_name_and_says_the_fraction():
    predictions = predict([OpCost("a", 1, 0, 100), OpCost("b", 1, 500, 10), OpCost("c", 1, 1, 1)], MACHINE, "float32")
    pairs = join(predictions, {"b": 2.0, "a": 4.0, "unknown": 1.0})
    assert [pair.label for pair in pairs] == ["a", "b"]
    assert pairs[0].fraction == 0.25
    assert (pairs[1].bound, pairs[1].fraction, pairs[1].measured.flops_per_s) == ("compute", 0.25, 250)
    assert pairs[1].measured.intensity == pairs[1].predicted.intensity == 50
    assert (pairs[0].predicted.kind, pairs[0].measured.kind) == ("predicted", "measured")


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_time_that_cannot_be_is_refused(seconds):
    with pytest.raises(RequestError, match=f"a is {seconds}"):
        join(predict([OpCost("a", 1, 1, 1)], MACHINE, "float32"), {"a": seconds})


def test_a_dtype_that_the_device_lacks_is_refused():
    with pytest.raises(ConfigError, match="bfloat16"):
        predict([OpCost("a", 1, 1, 1)], MACHINE)


def test_critical_batch_of_a_dense_model_is_about_the_ridge():
    h100 = find_hardware("h100")
    batch = critical_batch(model_config("Llama-3-70B"), h100)
    assert batch == pytest.approx(h100.ridge(), rel=0.01)
    half = critical_batch(model_config("Llama-3-70B"), h100, Precision("fp8", kept="fp8"))
    assert half == pytest.approx(h100.ridge() / 2, rel=0.01)


@pytest.mark.parametrize("name", ["Llama-3-8B", "Mixtral-8x7B", "Qwen3-30B-A3B"])
def test_critical_batch_is_the_smallest_that_turns(name):
    config, h100 = model_config(name), find_hardware("h100")
    batch = critical_batch(config, h100)

    def bound(sequences):
        ops = [op for op in step_costs(config, Step.decode(0, sequences)) if op.name != "embed"]
        return predict_step(ops, h100).bound

    assert (bound(batch - 1), bound(batch)) == ("memory", "compute")


def test_experts_turn_later_by_about_experts_over_chosen():
    h100 = find_hardware("h100")
    sparse = critical_batch(model_config("Mixtral-8x7B"), h100)
    assert h100.ridge() * 3 < sparse < h100.ridge() * 4
    assert critical_batch(model_config("DeepSeek-V3"), h100, limit=1000) is None
