"""Promise: --offload-experts changes where experts are, and no token; where it cannot be done, one line says so."""

from __future__ import annotations

import json

import pytest

import minillm.analysis
from minillm import checkpoint, cli
from minillm.cli import workload
from minillm.moe import expert_layers
from minillm.moe_offload import OffloadedExperts
from minillm.quantization import quantize_
from minillm.quantization.saving import save_quantized
from tests import tiny
from tests.cli.models import MACHINE


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtral")
    tiny.save("mixtral", folder, hidden_size=64)
    return folder


def test_generate_says_the_same_and_counts(run, mixtral):
    options = ["generate", "the cat sat", "--model", mixtral, "--device", "cpu", "--max-tokens", 8, "--json"]
    plain = json.loads(run(*options, "--dtype", "float32"))
    assert "experts" not in plain
    uses = set()
    for resident in (1, 7, 18):
        values = json.loads(run(*options, "--offload-experts", resident))
        assert values["token_ids"] == plain["token_ids"]
        assert values["layout"] == "float32"
        counts = values["experts"]
        uses.add(counts["hits"] + counts["misses"])
        assert (counts["evictions"] > 0) == (resident < 18)
        assert counts["copied_bytes"] == counts["misses"] * 3 * 64 * 80 * 4
    assert len(uses) == 1


def test_bench_counts_too(run, mixtral, monkeypatch):
    monkeypatch.setattr(minillm.analysis, "measure", lambda device: MACHINE)
    monkeypatch.setattr(workload, "REQUESTS", 2)
    sizes = ["--prompt-tokens", 8, "--output-tokens", 6, "--prefill-tokens", 40, "--rounds", 2]
    values = json.loads(run("bench", "--model", mixtral, "--offload-experts", 4, *sizes, "--json"))
    assert values["experts"]["misses"] > 0
    assert 0 <= values["experts"]["hit_rate"] < 1


def test_one_cache_for_all_layers(mixtral):
    model, _ = checkpoint.load(mixtral, offload_experts=5)
    assert all(isinstance(layer.experts, OffloadedExperts) for layer in expert_layers(model))
    assert model.expert_cache.slots == 5
    assert {layer.experts.cache for layer in expert_layers(model)} == {model.expert_cache}


def test_what_cannot_be_offloaded_is_one_line(refused, mixtral, folder):
    options = ["generate", "x", "--device", "cpu", "--offload-experts"]
    assert "has no experts, so there are none to offload" in refused(*options, 4, "--model", folder)
    assert "resident_experts is 0" in refused(*options, 0, "--model", mixtral)
    packed = refused(*options, 4, "--model", mixtral, "--dtype", "float16")
    assert "experts stored as PackedLinear cannot be offloaded; load with dtype float32" in packed


@pytest.mark.parametrize("scheme", ["int8", "int4-g32"])
def test_quantized_experts_say_the_same_from_host_memory(said, tmp_path, scheme):
    """Quantized as it is loaded, and read from a file that holds codes: with the kernels of the model that has them all
    on the device, and multiplied exactly."""
    tiny.save("mixtral", tmp_path / "whole", hidden_size=96, intermediate_size=96)
    model, _ = checkpoint.load(tmp_path / "whole", "float32")
    quantize_(model, scheme)
    save_quantized(model, tmp_path / "codes")
    tiny.write_tokenizer(tmp_path / "codes")
    sources = (
        ["--model", tmp_path / "whole", "--quantize", scheme],
        ["--model", tmp_path / "codes"],
        ["--model", tmp_path / "codes", "--dtype", "float32"],
    )
    for source in sources:
        plain = said(*source)
        for resident in (1, 7, 18):
            values = said(*source, "--offload-experts", resident)
            assert values["token_ids"] == plain["token_ids"]
            assert values["logprobs"] == plain["logprobs"]  # bit for bit
            assert values["layout"] == plain["layout"]
            assert (values["experts"]["evictions"] > 0) == (resident < 18)


def test_a_sparse_model_can_be_offloaded(said, mixtral):
    options = ["--model", mixtral, "--sparsify", "magnitude-0.5"]
    assert said(*options, "--offload-experts", 3)["logprobs"] == said(*options)["logprobs"]


@pytest.fixture
def said(capsys):
    """What `generate` says, logits of each token included."""

    def run(*options):
        options = ["generate", "the cat sat", *options, "--device", "cpu", "--max-tokens", 8, "--logprobs", 2, "--json"]
        capsys.readouterr()
        assert cli.main([str(option) for option in options]) == 0
        return json.loads(capsys.readouterr().out)

    return run
