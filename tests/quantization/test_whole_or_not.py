"""quantize_ changes a model whole or not at all: whatever ends it on the way, the model is the one it was."""

from __future__ import annotations

import copy

import pytest
import torch

from minillm import checkpoint
from minillm.analysis.quality import window_logits
from minillm.errors import QuantizationError
from minillm.quantization import apply, quantize_, rotation
from minillm.quantization.linear import QuantizedLinear
from tests import tiny

WIDE = {"hidden_size": 96, "intermediate_size": 96}
TOKENS = torch.randint(2, tiny.VOCAB, (40,), generator=torch.Generator().manual_seed(0)).tolist()
SCHEMES = ["int8", "int4-g32", "hqq-int4-g32", "fp8", "gptq-int4-g32", "awq-int4-g32", "smoothquant-int8-dynamic",
           "hadamard-int8", "hadamard-gptq-int4-g32"]  # fmt: skip


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            tiny.make(name, **WIDE).save_pretrained(folder := tmp_path_factory.mktemp(name))
            made[name] = checkpoint.load_model(folder)
        return copy.deepcopy(made[name])

    return get


class Kept:
    """What a model was: which objects, and copies of their numbers (buffers that no file holds among them)."""

    def __init__(self, model):
        self.model, self.layout = model, model.layout
        self.modules = dict(model.named_modules())
        self.tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        self.numbers = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self.logits = window_logits(model, TOKENS)

    def check(self):
        modules, tensors = dict(self.model.named_modules()), dict(self.model.named_parameters(remove_duplicate=False))
        tensors |= dict(self.model.named_buffers())
        assert modules.keys() == self.modules.keys()
        assert all(module is self.modules[name] for name, module in modules.items())
        assert tensors.keys() == self.tensors.keys()
        assert all(tensor is self.tensors[name] for name, tensor in tensors.items())
        assert all(torch.equal(tensor, self.numbers[name]) for name, tensor in tensors.items())
        assert self.model.layout == self.layout
        assert torch.equal(window_logits(self.model, TOKENS), self.logits)
        assert not any(module._forward_pre_hooks for module in self.model.modules())


def stop_at(monkeypatch, owner, name: str, call: int, error: type[BaseException], after: bool = False) -> None:
    """The function raises in its n-th call, before or after its work."""
    work, calls = getattr(owner, name), [0]

    def broken(*arguments, **options):
        calls[0] += 1
        if calls[0] == call and not after:
            raise error("stop")
        done = work(*arguments, **options)
        if calls[0] == call:
            raise error("stop")
        return done

    monkeypatch.setattr(owner, name, broken)


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
