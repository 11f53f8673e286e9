"""Promise: bench reports what it measured, against the same weights, with arithmetic that can be checked."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

import minillm.analysis
from minillm import checkpoint, cli
from minillm.analysis.quality import TEXT, compare_to_float32, kl_divergence, loss, step_logits
from minillm.cli import bench, measure, workload
from minillm.cli.transformers_engine import TransformersEngine
from minillm.generate import generate
from minillm.kv_cache import NoCache
from minillm.sampling_params import SamplingParams
from tests import gguf_files, tiny
from tests.cli.models import MACHINE

SMALL = ["--prompt-tokens", "8", "--output-tokens", "6", "--prefill-tokens", "40", "--rounds", "2"]
NEEDED = {
    "decode_tok_s", "prefill_tok_s", "peak_rss_mb", "read_bandwidth_gb_s", "decode_fraction_of_roofline", "load_s",
    "layout", "layout_measurement_s", "dtype", "threads", "torch", "device", "date", "decode_ms", "bytes_per_step",
    "prompt_tokens", "output_tokens", "prefill_tokens",
}  # fmt: skip


@pytest.fixture
def run(monkeypatch, capsys, folder):
    monkeypatch.setattr(minillm.analysis, "measure", lambda device: MACHINE)
    monkeypatch.setattr(workload, "REQUESTS", 2)  # test_throughput.py has the whole workload

    def run(*arguments) -> str:
        assert cli.main(["bench", "--model", str(folder), "--dtype", "float32", *SMALL, *arguments]) == 0
        return capsys.readouterr().out

    return run


def test_bench_json(run, folder):
    v = json.loads(run("--json"))
    assert set(v) >= NEEDED
    model = checkpoint.load_model(folder)
    per_token = 2 * 3 * 2 * 16 * 4  # keys and values, layers, kv heads, head_dim, bytes
    assert v["weight_bytes_per_step"] == model.decode_bytes()
    assert v["kv_bytes_per_step"] == 11 * per_token  # 8 of the prompt, and half of 6
    assert v["bytes_per_step"] == v["weight_bytes_per_step"] + v["kv_bytes_per_step"]
    assert v["read_bandwidth_gb_s"] == 20
    expected = v["bytes_per_step"] / 20e9 * v["decode_tok_s"]
    assert v["decode_fraction_of_roofline"] == pytest.approx(expected)
    assert 0 < v["decode_ms"]["p10"] <= v["decode_ms"]["median"] <= v["decode_ms"]["p90"]
    assert v["load_s"] > 0
    assert v["layout"] == "float32"


def test_bench_against_transformers_and_float32(run):
    v = json.loads(run("--json", "--compare", "transformers", "--quality"))
    theirs = v["transformers"]
    assert theirs["decode_speedup"] == v["decode_tok_s"] / theirs["decode_tok_s"]
    assert theirs["prefill_speedup"] == v["prefill_tok_s"] / theirs["prefill_tok_s"]
    assert theirs["same_tokens"] == 7  # all of them: both are exact and greedy
    assert v["quality"]["kl_to_float32"] == 0
    assert v["quality"]["top1_agreement"] == 1
    assert v["quality"]["loss"] == v["quality"]["loss_float32"]


def test_bench_table_has_every_figure(run):
    shown = run("--compare", "transformers", "--quality")
    for words in ("decode, batch 1", "prefill", "load", "peak memory", "read bandwidth", "fraction reached",
                  "Against transformers", "times as fast", "KL divergence", "medians of 2 rounds"):  # fmt: skip
        assert words in shown


def test_medians_by_hand():
    """Three rounds of two steps, one of them disturbed."""
    runs = [
        measure.Run(0.5, [0.1, 0.1], [1, 2, 3]),
        measure.Run(0.25, [0.2, 0.2], [1, 2, 3]),
        measure.Run(9.0, [0.1, 9.0], [1, 2, 3]),
    ]
    v = bench._speeds(runs, measure.Sizes(prompt=4, output=2, prefill=10, rounds=3))
    assert v["decode_tok_s"] == 2 / 0.4
    assert v["prefill_tok_s"] == 10 / 0.5
    assert v["decode_ms"]["median"] == pytest.approx(150)


def test_agreement_counts_to_the_first_difference():
    assert bench._agreeing([1, 2, 3], [1, 2, 4]) == 2
    assert bench._agreeing([1, 2], [1, 2]) == 2
    assert bench._agreeing([5, 2], [1, 2]) == 0


def test_engines_take_turns():
    """What slows the machine for a while must slow both."""
    order = []

    class Engine:
        version = ""

        def __init__(self, name):
            self.name = name

        def token_times(self, ids, count):
            order.append((self.name, len(ids), count))
            return [0.1 * (i + 1) for i in range(count)], [0] * count

    runs = measure.take_turns({"a": Engine("a"), "b": Engine("b")}, list(range(9)), measure.Sizes(2, 3, 9, 2))
    assert order == [("a", 2, 4), ("a", 9, 1), ("b", 2, 4), ("b", 9, 1)] * 2
    assert runs["a"][0].decode_steps == pytest.approx([0.1, 0.1, 0.1])
    assert runs["a"][0].prefill_s == pytest.approx(0.1)


def test_peak_memory_follows_what_is_allocated():
    """In a process of its own, since this one may have held more before; and it does not count its parent's."""
    code = (
        "from minillm.cli.measure import peak_rss_bytes as peak; before = peak(); held = bytearray(b'x') * 200_000_000;"
        "after = peak(); del held; print(before, after, peak())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after, later = map(int, done.stdout.split())
    assert 50e6 < before < 2e9  # an interpreter with torch in it
    assert after - before == pytest.approx(200e6, rel=0.1)
    assert later == pytest.approx(after, rel=0.01)  # giving it back does not lower the peak


@pytest.mark.parametrize("family", ["llama", "llama-3.1-rope", "llama-mqa-tied", "mistral-window", "qwen2", "qwen3"])
def test_the_rival_computes_what_transformers_loads_itself(tmp_path, family):
    """Handing over tensors must not change the model; nor may its own file's settings end an answer early."""
    theirs = tiny.save(family, tmp_path)
    engine = TransformersEngine(tmp_path)
    tokens = torch.randint(0, tiny.VOCAB, (1, 50), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert torch.allclose(engine.model(tokens).logits, theirs(tokens).logits, atol=1e-5)
    times, ids = engine.token_times([3, 4, 5], 30)
    assert len(times) == len(ids) == 30
    assert times == sorted(times)


def test_the_rival_reads_gguf(tmp_path):
    tiny.write_tokenizer(tmp_path)
    theirs = tiny.make("llama", hidden_size=96, intermediate_size=96, head_dim=32)
    gguf_files.write(tmp_path / "tiny.gguf", theirs, tmp_path / "tokenizer.json", "Q8_0")
    engine = TransformersEngine(tmp_path / "tiny.gguf")
    model, tokenizer = checkpoint.load(tmp_path / "tiny.gguf", "float32")
    ours = generate(model, tokenizer, [3, 4, 5], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert engine.token_times([3, 4, 5], 20)[1] == ours.token_ids
    with torch.inference_mode():
        tokens = torch.tensor([[3, 4, 5, 6]])
        assert torch.allclose(engine.model(tokens).logits, theirs(tokens).logits, atol=1e-4)


def test_quality_measures_the_change_of_weights(folder):
    """Against a disturbed model: KL as scipy would sum it, agreement below one, and the text named."""
    model, tokenizer = checkpoint.load(folder, "float32")
    generator = torch.Generator().manual_seed(0)
    weight = model.lm_head.weight
    weight.data = weight + 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)
    v = compare_to_float32(model, tokenizer, folder, "cpu")
    assert 0 < v["kl_to_float32"] < 0.1
    assert 0.5 < v["top1_agreement"] <= 1
    assert v["loss"] != v["loss_float32"]
    assert v["characters"] <= len(TEXT)
    assert v["tokens"] == 256


def test_kl_divergence_and_loss_by_hand():
    p, q = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.25, 0.75], [0.9, 0.1]])
    expected = (0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)) / 2
    assert kl_divergence(p.log(), q.log()) == pytest.approx(expected)
    assert kl_divergence(q.log(), p.log()) != pytest.approx(expected)  # it has a direction
    assert loss(p.log(), [0, 1]) == pytest.approx(-np.log(0.5))


def test_step_logits_are_those_of_one_pass(folder):
    model = checkpoint.load_model(folder)
    ids = list(range(3, 40))
    with torch.inference_mode():
        whole = model.logits(model(torch.tensor(ids), torch.arange(len(ids)), NoCache(model.config)))
    assert torch.allclose(step_logits(model, ids), whole, atol=1e-4)
