"""load_sparse and load_quantized take the backend that checkpoint.load takes, and only arithmetic differs."""

from __future__ import annotations

import pytest
import torch

from minillm import cli
from minillm.analysis.quality import window_logits
from minillm.errors import EngineError
from minillm.quantization.loading import load_quantized
from minillm.sparsity.loading import load_sparse
from tests import tiny

IDS = torch.randint(2, tiny.VOCAB, (9,), generator=torch.Generator().manual_seed(0)).tolist()
CHANGES = {
    "sparse": lambda folder, backend: load_sparse(folder, "magnitude-2:4", backend=backend)[0],
    "sparse and quantized": lambda folder, backend: load_sparse(
        folder, "magnitude-0.5", scheme="int8", exact=True, backend=backend
    )[0],
    "quantized": lambda folder, backend: load_quantized(folder, "int8", exact=True, backend=backend)[0],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    tiny.save("llama", path, num_hidden_layers=2)
    return path


@pytest.mark.parametrize("name", CHANGES)
def test_a_backend_is_taken(folder, name):
    torch_model, triton_model, auto = (CHANGES[name](folder, backend) for backend in ("torch", "triton", "auto"))
    assert [m.backend for m in (torch_model, triton_model, auto)] == ["torch", "triton", "torch"]
    assert triton_model.layout == torch_model.layout
    want = window_logits(torch_model, IDS)
    assert torch.equal(window_logits(auto, IDS), want)
    assert (window_logits(triton_model, IDS) - want).norm() < 1e-4 * want.norm()


@pytest.mark.parametrize("name", CHANGES)
def test_a_backend_that_is_none_is_told_before_anything_is_loaded(name, tmp_path):
    with pytest.raises(EngineError, match="backend 'fast' is not known"):
        CHANGES[name](tmp_path / "no model here", "fast")


@pytest.mark.parametrize("option", [("--sparsify", "magnitude-0.5"), ("--quantize", "int8")])
def test_the_commands_pass_it_on(folder, option, monkeypatch, capsys):
    from minillm.cli import common

    loaded, load = [], common.load
    monkeypatch.setattr(common, "load", lambda args: loaded.append(load(args)) or loaded[0])
    options = ["generate", "the cat", "--model", str(folder), "--device", "cpu", "--max-tokens", "2", *option]
    assert cli.main([*options, "--backend", "triton"]) == 0
    assert loaded[0][0].backend == "triton"
