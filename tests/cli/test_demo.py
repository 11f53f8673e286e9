"""Promise: the demo's bill is consistent, and its explanation true."""

from __future__ import annotations

import json

import pytest
import safetensors.torch

from minillm import checkpoint
from minillm.cli import demo
from minillm.cli.roof import DecodeBound, decode_bound, held_bytes
from minillm.generate import generate
from minillm.kv_cache import ContiguousCache
from minillm.packing import Choice, PackedLinear, available
from minillm.sampling_params import SamplingParams
from tests import tiny
from tests.cli.models import MACHINE


def test_demo_json_is_consistent(run, machine, options, loaded):
    v = json.loads(run("demo", "--question", "the cat?", "--max-tokens", 8, "--json", *options))
    model, tokenizer = loaded
    ids = tokenizer.encode_chat([{"role": "user", "content": "the cat?"}])
    expected = generate(model, tokenizer, ids, SamplingParams(temperature=0, max_tokens=8))
    assert v["token_ids"] == expected.token_ids
    assert v["weight_bytes_read_per_step"] == model.decode_bytes()
    per_token = 2 * 3 * 2 * 16 * 4  # keys and values, layers, kv heads, head_dim, bytes
    assert v["kv_bytes_held"] == (len(ids) + 8) * per_token
    assert v["kv_bytes_used"] == (len(ids) + 7) * per_token  # the last token was never fed
    mean = sum(len(ids) + i for i in range(1, 8)) / 7
    assert v["kv_bytes_read_per_step"] == pytest.approx(mean * per_token)
    assert v["predicted_tpot_s"] == (v["weight_bytes_read_per_step"] + v["kv_bytes_read_per_step"]) / 20e9
    assert v["decode_fraction_of_roofline"] == v["predicted_tpot_s"] / v["tpot_s"]
    assert v["read_bandwidth_gb_s"] == 20


def test_demo_streams_the_answer_and_reports(run, machine, options, loaded):
    shown = run("demo", "--question", "the cat?", "--max-tokens", 8, *options)
    ids = loaded[1].encode_chat([{"role": "user", "content": "the cat?"}])
    assert generate(*loaded, ids, SamplingParams(temperature=0, max_tokens=8)).text in shown
    for words in ("TTFT", "TPOT", "tokens/s", "weights", "KV cache", "read bandwidth, measured", "predicted TPOT",
                  "fraction of the roofline", "make lab", "minillm chat", "minillm bench", "minillm size"):  # fmt: skip
        assert words in shown


def test_demo_of_one_token_has_no_rate(run, machine, options):
    shown = run("demo", "--max-tokens", 1, *options)
    assert "fraction" not in shown
    assert json.loads(run("demo", "--max-tokens", 1, "--json", *options))["tpot_s"] is None


def test_the_explanation_names_the_limit():
    bound = DecodeBound(weight_bytes=10**8, kv_bytes=0, bandwidth=10**10, arithmetic_s=0.001)  # 10 ms to read
    assert "Memory bandwidth was the limit" in demo.explain(bound, 0.018)
    assert "The other 8 ms" in demo.explain(bound, 0.018)
    assert "sets the floor" in demo.explain(bound, 0.03)
    assert "cache" in demo.explain(bound, 0.005)
    slow = DecodeBound(weight_bytes=10**8, kv_bytes=0, bandwidth=10**10, arithmetic_s=0.015)
    assert "Arithmetic was the limit" in demo.explain(slow, 0.02)


def test_decode_bound_is_bytes_over_bandwidth(loaded):
    model = loaded[0]
    bound = decode_bound(model, 100, MACHINE)
    cache = ContiguousCache(model.config, 100)
    assert bound.kv_bytes == cache.allocated_bytes
    assert bound.seconds == (model.decode_bytes() + cache.allocated_bytes) / 20e9
    matrices = sum(layer.weight.numel() for layer in model.linears())
    assert 1 < bound.arithmetic_s / (2 * matrices / 1e11) < 2  # attention and norms come on top


@pytest.mark.parametrize("family", ["llama", "llama-mqa-tied", "llama-mha-bias"])
def test_held_bytes_are_those_of_the_files(tmp_path, family):
    """A tied head is in the file once and in memory once."""
    tiny.save(family, tmp_path)
    shards = [safetensors.torch.load_file(shard) for shard in tmp_path.glob("*.safetensors")]
    assert held_bytes(checkpoint.load_model(tmp_path)) == sum(t.nbytes for shard in shards for t in shard.values())


def test_held_bytes_counts_both_layouts_of_a_matrix(folder):
    model = checkpoint.load_model(folder)
    before, old = held_bytes(model), model.blocks[0].mlp.down_proj
    kinds = [name for name in available() if name != "int4"]
    new = PackedLinear(old.weight.data, None, Choice(kinds[0], kinds[-1], 1))
    model.blocks[0].mlp.down_proj = new
    layouts = {new.few, new.many}
    assert held_bytes(model) == before - old.weight.nbytes + sum(layout.weight_bytes for layout in layouts)
