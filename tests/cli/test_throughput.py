"""Promise: bench measures the workload that it was given, whole, and counts the cache's slots exactly."""

from __future__ import annotations

import json
import shutil

import pytest

import minillm.analysis
from minillm import checkpoint, cli
from minillm.cli import measure, throughput, workload
from minillm.cli.common import load_tokenizer
from minillm.cli.transformers_engine import TransformersEngine
from minillm.cli.workload import Job
from minillm.engine import Engine
from minillm.errors import EngineError, RequestError
from minillm.scheduler_config import SchedulerConfig
from tests.cli.models import MACHINE, change_config

SMALL = ["--prompt-tokens", "8", "--output-tokens", "6", "--prefill-tokens", "40", "--rounds", "2"]
JOBS = [{"prompt_token_ids": [3, 4, 5], "max_tokens": 4}, {"prompt_token_ids": [7] * 9, "max_tokens": 7}]


@pytest.fixture
def bench(monkeypatch, capsys, folder):
    monkeypatch.setattr(minillm.analysis, "measure", lambda device: MACHINE)

    def bench(*arguments):
        code = cli.main(["bench", "--model", str(folder), "--dtype", "float32", *SMALL, *arguments])
        shown = capsys.readouterr()
        return shown.out if code == 0 else shown.err

    return bench


def test_bench_reports_throughput_of_a_file(bench, tmp_path):
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(JOBS))
    v = json.loads(bench("--json", "--workload", str(path)))
    assert v["workload"] == {"requests": 2, "prompt_tokens": 12, "output_tokens": 11}
    assert v["throughput_tok_s"] > 0
    assert 0 < v["kv_waste"] < v["kv_waste_reserved"] < 1
    assert v["throughput_static"] == {}


def test_bench_takes_turns_with_static_batches(bench, monkeypatch):
    monkeypatch.setattr(workload, "REQUESTS", 3)
    monkeypatch.setattr(throughput, "STATIC_BATCH", 2)
    v = json.loads(bench("--json", "--compare", "transformers"))
    assert v["workload"]["requests"] == 3
    assert v["transformers"]["static_batch"] == 2
    theirs = v["transformers"]
    assert theirs["throughput_tok_s"] == v["throughput_static"]["transformers_tok_s"]
    assert theirs["throughput_speedup"] == v["throughput_tok_s"] / theirs["throughput_tok_s"]
    assert v["throughput_static"]["static_tok_s"] > 0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "a list of at least one request"),
        ("{}", "a list of at least one request"),
        ("[3]", "entry 0 must have prompt_token_ids and max_tokens"),
        ('[{"prompt_token_ids": [3]}]', "entry 0 must have"),
        ('[{"prompt_token_ids": [3], "max_tokens": 2, "n": 1}]', "nothing else"),
        ('[{"prompt_token_ids": [], "max_tokens": 2}]', "not empty"),
        ('[{"prompt_token_ids": [true], "max_tokens": 2}]', "must be a list of ids"),
        ('[{"prompt_token_ids": [3, 99999999], "max_tokens": 2}]', "a list of ids, 0 to"),
        ('[{"prompt_token_ids": [3], "max_tokens": 0}]', "at least 1"),
        ('[{"prompt_token_ids": [3], "max_tokens": 1.5}]', "a whole number"),
        ('[{"prompt_token_ids": [3], "max_tokens": 999999}]', "and the engine holds 512"),
        (json.dumps([{"prompt_token_ids": [3] * 500, "max_tokens": 13}]), "needs 513 tokens"),
    ],
)
def test_a_bad_workload_is_named(bench, tmp_path, text, named):
    path = tmp_path / "jobs.json"
    path.write_text(text)
    line = bench("--workload", str(path))
    assert named in line
    assert "jobs.json" in line
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("context", "memory", "most"), [(16384, 1 << 30, 8192), (16384, 1 << 20, 1361), (512, 1 << 30, 512)]
)
def test_what_the_engine_will_not_hold_is_refused_before_anything_runs(
    bench, folder, tmp_path, monkeypatch, context, memory, most
):
    """By the engine's own limit below the context, by the cache's memory (85 blocks of 12 KiB), by the context."""
    monkeypatch.setattr(throughput, "CACHE_BYTES", memory)
    monkeypatch.setattr(measure, "warm_up", lambda *_: pytest.fail("something ran"))
    model = with_context(folder, tmp_path, context)
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps([JOBS[0], {"prompt_token_ids": [3] * (most - 2), "max_tokens": 20}]))
    line = bench("--model", str(model), "--workload", str(path))
    assert f"entry 1 needs {most + 18} tokens and the engine holds {most}; shorten it" in line
    config = throughput.config_of(checkpoint.load_model(model))
    assert throughput.longest(config) == most == Engine(*checkpoint.load(model), config).scheduler.max_sequence


def with_context(folder, tmp_path, context):
    model = shutil.copytree(folder, tmp_path / "model")
    change_config(model, max_position_embeddings=context)
    return model


def test_reserved_waste_reserves_no_more_than_the_context(folder):
    """8192 tokens each, where the context has 512, would be waste that no engine makes."""
    model = checkpoint.load_model(folder)
    assert model.config.max_position_embeddings == 512
    config = throughput.config_of(model)
    v = throughput.waste(config, [Job([3] * 10, 2)])
    assert v["kv_waste_reserved"] == pytest.approx(1 - (10 + 11) / (2 * 512))


def test_a_missing_workload_is_named(bench, tmp_path):
    assert "none.json cannot be read" in bench("--workload", str(tmp_path / "none.json"))


def test_the_drawn_workload_is_the_issues(smollm2_path):
    tokenizer = load_tokenizer(str(smollm2_path))
    jobs = workload.draw(tokenizer, 8192)
    prompts, outputs = [len(job.prompt_token_ids) for job in jobs], [job.max_tokens for job in jobs]
    assert len(jobs) == 32
    assert 16 <= min(prompts) < 60 < 200 < max(prompts) <= 256
    assert 16 <= min(outputs) < 40 < 100 < max(outputs) <= 128
    assert len({tuple(job.prompt_token_ids[:16]) for job in jobs}) == 32


def test_waste_by_hand():
    """Blocks of 4; a prompt of 5, three tokens out. Cached after each step: 5, 6, 7 of 8 slots; the last step's
    blocks are still held when it is counted."""
    config = SchedulerConfig(num_blocks=9, block_size=4, max_model_len=16, prefix_cache="off")
    v = throughput.waste(config, [Job([1, 2, 3, 4, 5], 3)])
    assert v["kv_waste"] == pytest.approx(1 - (5 + 6 + 7) / 24)
    assert v["kv_waste_reserved"] == pytest.approx(1 - (5 + 6 + 7) / 48)


def test_waste_at_the_issues_load(smollm2_path):
    """At most 4% of allocated slots, where reserving the maximum wastes nearly all."""
    tokenizer = load_tokenizer(str(smollm2_path))
    jobs = workload.draw(tokenizer, 8192)
    v = throughput.waste(SchedulerConfig(num_blocks=1000, prefix_cache="off"), jobs)
    assert v["kv_waste"] <= 0.04
    assert v["kv_waste_reserved"] > 0.9


def test_the_rival_pads_left_and_runs_to_the_longest(folder, monkeypatch):
    engine, calls = TransformersEngine(folder), []
    monkeypatch.setattr(
        engine.model, "generate", lambda ids, attention_mask, max_new_tokens, **_: calls.append(
            (ids.tolist(), attention_mask.tolist(), max_new_tokens)
        )
    )  # fmt: skip
    engine.static_batches([Job([3, 4, 5], 4), Job([6], 9), Job([7], 2)], 2)
    assert calls == [([[3, 4, 5], [0, 0, 6]], [[1, 1, 1], [0, 0, 1]], 9), ([[7]], [[1]], 2)]


def test_a_request_that_ends_early_is_no_measurement(folder):
    model, tokenizer = checkpoint.load(folder, "float32")
    config = SchedulerConfig(num_blocks=4, block_size=4, max_model_len=64)
    with pytest.raises(EngineError, match="request 0 of the workload ended early"):
        throughput.serve(model, tokenizer, config, [Job([3] * 8, 20)])
    with pytest.raises(RequestError, match="the prompt has 30 tokens"):
        throughput.serve(model, tokenizer, config, [Job([3] * 30, 20)])
