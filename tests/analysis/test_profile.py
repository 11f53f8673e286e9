"""The profiler: regions joined with predictions, overhead by name, a timeline that Perfetto can read."""

import json
import subprocess
import sys
import time
from itertools import pairwise

import pytest
import torch
from hf_shapes import HF_CONFIGS, build, ours
from torch.profiler import record_function

from minillm.analysis import Hardware, OpCost, Precision, Step, profile_step, step_costs
from minillm.errors import RequestError
from minillm.kv_cache import ContiguousCache
from minillm.transformer import from_tensors

MACHINE = Hardware("toy", 1, 1e9, {"float32": 1e10})
COSTS = [
    OpCost("qkv_proj", 2, 5e7, 1e6),  # 5 ms of arithmetic
    OpCost("kv_write", 2, 0, 0, 0, 1e6),  # 1 ms of bytes
    OpCost("attention", 2, 1e6, 0, 0, 1e6),  # 1 ms of bytes
    OpCost("lm_head", 1, 1e6, 1e6),
]


def work():
    """Two layers: 20 ms in qkv_proj, 10 ms in attention, and 15 ms that no region covers."""
    for _ in range(2):
        with record_function("qkv_proj"):
            time.sleep(0.01)
            torch.ones(3) + 1
        time.sleep(0.0075)
        with record_function("attention"):
            time.sleep(0.005)


@pytest.fixture(scope="module")
def table():
    return profile_step(work, COSTS, MACHINE, "float32")


def test_rows_have_calls_time_prediction_and_fraction(table):
    row = table.row("qkv_proj")
    assert (row.calls, row.bound) == (2, "compute")
    assert row.predicted == pytest.approx(5e-3)
    assert 0.02 <= row.seconds < table.seconds
    assert row.fraction == pytest.approx(5e-3 / row.seconds)


def test_a_cache_write_inside_attention_is_predicted_with_it(table):
    assert table.row("attention").predicted == pytest.approx(2e-3)
    with pytest.raises(RequestError, match="kv_write"):
        table.row("kv_write")


def test_a_region_of_its_own_keeps_its_prediction():
    def separate():
        for name in ("kv_write", "attention"):
            with record_function(name):
                torch.ones(3) + 1

    told = profile_step(separate, COSTS, MACHINE, "float32", repeats=1)
    assert told.row("kv_write").predicted == told.row("attention").predicted == pytest.approx(1e-3)


def test_an_operator_that_did_not_run_shows_as_such(table):
    row = table.row("lm_head")
    assert (row.calls, row.seconds, row.fraction) == (0, 0, None)


def test_overhead_is_the_wall_time_that_no_region_covers(table):
    overhead = table.row("overhead")
    assert 0.015 <= overhead.seconds < 0.045
    assert (overhead.predicted, overhead.bound, overhead.fraction) == (None, None, None)
    assert sum(row.seconds for row in table.rows) == pytest.approx(table.seconds)
    assert table.unprofiled_seconds >= 0.045


def test_spans_lie_in_the_step_and_in_order(table):
    regions = [span for span in table.spans if span.kind == "operator"]
    assert [span.name for span in regions] == ["qkv_proj", "attention"] * 2
    for before, after in pairwise(regions):
        assert before.start + before.duration <= after.start
    assert all(0 <= span.start <= span.start + span.duration <= table.seconds * 1.001 for span in table.spans)
    assert any(span.name == "aten::add" and span.kind == "torch" for span in table.spans)


def test_the_table_prints_every_row(table):
    lines = str(table).splitlines()
    assert lines[0].split()[:3] == ["operator", "calls", "ms"]
    assert [line.split()[0] for line in lines[1:]] == [row.operator for row in table.rows] + ["step"]
    assert "(" in lines[-1]


def test_the_trace_is_chrome_format(table, tmp_path):
    path = table.export_perfetto(tmp_path / "step.json")
    trace = json.loads(path.read_text())
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(complete) == len(table.spans)
    for event in complete:
        assert {"name", "cat", "pid", "tid", "ts", "dur"} <= event.keys()
        assert all(isinstance(event[key], int | float) and event[key] >= 0 for key in ("ts", "dur", "pid", "tid"))
    region = next(event for event in complete if event["name"] == "qkv_proj")
    assert region["dur"] >= 10_000  # microseconds
    assert region["args"] == {"bound": "compute", "roofline_us": pytest.approx(5000)}
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert names == {"minillm step", "operator", "torch"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_that_cannot_be_written_is_one_line(table, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="cannot be written"):
        table.export_perfetto(tmp_path / "file" / "step.json")


def test_looking_prints_nothing():
    """In a process of its own: torch's tracer takes its log level when it is first used."""
    code = (
        "import torch; from minillm.analysis import Hardware, profile_step; from minillm.layers import region\n"
        "def work():\n    with region('attention'):\n        torch.ones(3) + 1\n"
        "profile_step(work, [], Hardware('toy', 1, 1e9, {'float32': 1e10}), 'float32', repeats=1)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert (told.stdout, told.stderr) == ("", "")


def test_a_step_without_regions_is_refused():
    with pytest.raises(RequestError, match="no region"):
        profile_step(lambda: torch.ones(3) + 1, COSTS, MACHINE, "float32", repeats=1)
    with pytest.raises(RequestError, match="repeats is 0"):
        profile_step(work, COSTS, MACHINE, "float32", repeats=0)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_models_own_regions_are_the_operators_of_the_cost_model(name):
    torch.manual_seed(0)
    config = ours(HF_CONFIGS[name])
    model = from_tensors(config, dict(build(name).state_dict()))
    tokens, cache = torch.arange(6), ContiguousCache(config, 6)

    def step():
        cache.reset()
        model.logits(model(tokens, torch.arange(6), cache)[-1:])

    costs = step_costs(config, Step.prefill(6), Precision("float32", "float32", "float32"))
    told = profile_step(step, costs, MACHINE, "float32", repeats=1)
    assert {row.operator for row in told.rows} == {op.name for op in costs} - {"kv_write"} | {"overhead"}
    for op in costs:
        if op.name != "kv_write":
            assert told.row(op.name).calls == op.count, op.name
            assert told.row(op.name).fraction > 0
