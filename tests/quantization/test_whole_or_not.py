"""quantize_ and rotate_ change a model whole or not at all: whatever ends them on the way, it is the one it was."""

from __future__ import annotations

import pytest
import torch

from minillm.analysis.quality import window_logits
from minillm.errors import QuantizationError
from minillm.quantization import apply, quantize_, rotation
from minillm.quantization.linear import QuantizedLinear
from minillm.quantization.rotation import rotate_
from tests import tiny
from tests.quantization.kept import CALIBRATION as TOKENS
from tests.quantization.kept import Kept, stop_at

WIDE = {"hidden_size": 96, "intermediate_size": 96}
SCHEMES = ["int8", "int4-g32", "hqq-int4-g32", "fp8", "gptq-int4-g32", "awq-int4-g32", "smoothquant-int8-dynamic",
           "hadamard-int8", "hadamard-gptq-int4-g32"]  # fmt: skip


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    return tiny.copies(tmp_path_factory, **WIDE)


@pytest.mark.parametrize("family", ["llama-mha-bias", "llama-mqa-tied"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("call", [1, 6, 13])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_that_is_never_made(load, monkeypatch, family, scheme, call, error):
    """13: the head, when all else is replaced, folded and rotated."""
    model = load(family)
    kept = Kept(model)
    with monkeypatch.context() as patch:
        stop_at(patch, QuantizedLinear, "__init__", call, error)
        with pytest.raises(error):
            quantize_(model, scheme, TOKENS)
    kept.check()
    assert quantize_(model, scheme, TOKENS).layers == 13  # and it can be done afterwards


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("owner", "name", "call", "scheme"),
    [
        (rotation, "_fold_gain", 3, "hadamard-int8"),
        (rotation, "_rotate_values", 2, "hadamard-int4-g32"),
        (apply, "rotate_", 1, "hadamard-gptq-int8"),
        (apply, "for_each_block", 1, "gptq-int8"),
        (apply, "hqq", 5, "hqq-int4-g32"),
        (apply, "clipped", 6, "awq-int4-g32"),
    ],
)
def test_a_step_that_ends_half_way(load, monkeypatch, owner, name, call, scheme, after):
    model = load("llama-mha-bias")
    kept = Kept(model)
    stop_at(monkeypatch, owner, name, call, KeyboardInterrupt, after)
    with pytest.raises(KeyboardInterrupt):
        quantize_(model, scheme, TOKENS)
    kept.check()


# what rotate_ calls, and how often in a model of three blocks
STEPS = {"_fold_gain": 7, "_times": 8, "_rotate_values": 3}


@pytest.mark.parametrize("family", ["llama-mha-bias", "llama-mqa-tied"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("name", "call"), [(name, n + 1) for name, calls in STEPS.items() for n in range(calls)])
def test_a_rotation_that_ends_in_any_of_its_layers(load, monkeypatch, family, name, call, after, error):
    model = load(family)
    kept = Kept(model)
    with monkeypatch.context() as patch:
        stop_at(patch, rotation, name, call, error, after)
        with pytest.raises(error):
            rotate_(model)
    kept.check()
    rotate_(model)  # and it can be done afterwards
    assert (window_logits(model, TOKENS) - kept.logits).norm() < 1e-4 * kept.logits.norm()


def test_rotating_calls_no_more_than_was_stopped_at(load, monkeypatch):
    calls = dict.fromkeys(STEPS, 0)

    def counted(name, work):
        def count(*arguments):
            calls[name] += 1
            return work(*arguments)

        return count

    for name in STEPS:
        monkeypatch.setattr(rotation, name, counted(name, getattr(rotation, name)))
    rotate_(load("llama"))
    assert calls == STEPS


@pytest.mark.parametrize("scheme", ["gptq-int8", "awq-int8"])
def test_an_embedding_that_is_not_finite_is_found_while_calibrating(load, scheme):
    """The matrices pass every check; what flows through them does not."""
    model = load("llama")
    model.embedding.data[TOKENS[0], 3] = torch.inf
    before = {name: (p, p.clone()) for name, p in model.named_parameters()}
    with pytest.raises(QuantizationError):
        quantize_(model, scheme, TOKENS)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])


@pytest.mark.parametrize("family", ["mixtral", "deepseek-experts", "qwen3-next"])
def test_experts_and_other_blocks(load, monkeypatch, family):
    model = load(family)
    kept = Kept(model)
    stop_at(monkeypatch, QuantizedLinear, "__init__", 9, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        quantize_(model, "gptq-int8", TOKENS)
    kept.check()


def test_what_succeeded_keeps_nothing_of_the_old(load):
    model = load("llama")
    quantize_(model, "int8")
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 13
    assert {name.split(".")[-1] for name, _ in model.named_parameters()} == {"embedding", "weight"}  # of norms
