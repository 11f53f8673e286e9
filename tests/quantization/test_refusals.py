"""What quantize_ and sparsify_ cannot do is told before anything is changed, and no matrix is lost on the way."""

from __future__ import annotations

import pytest
import torch

from minillm.analysis.quality import window_logits
from minillm.compilation import CompiledTransformer
from minillm.errors import MinillmError
from minillm.moe_offload import offload_experts
from minillm.quantization import quantize_
from minillm.quantization.linear import QuantizedLinear
from minillm.quantization.rotation import rotate_
from minillm.sparsity import pack_, sparsify_
from tests import tiny
from tests.quantization.kept import CALIBRATION as TOKENS


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    return tiny.copies(tmp_path_factory)


def test_experts_that_no_calibration_token_reached_are_rounded_and_not_lost(load):
    """GPTQ sets weights to zero whose inputs never come, and of an expert that nobody chose none came."""
    model, reference = load("qwen3-moe"), load("qwen3-moe")
    report = quantize_(model, "gptq-int8", [5, 6], exact=True)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}
    assert report.unseen
    for name in report.unseen:
        weight = reference.get_submodule(name).weight
        assert (layers[name].weight.dequantize() - weight).abs().max() <= weight.abs().max() / 200
    exact = window_logits(reference, TOKENS)
    assert (window_logits(model, TOKENS) - exact).norm() < 0.05 * exact.norm()
    assert not quantize_(load("llama"), "gptq-int8", TOKENS).unseen


CHANGES = {
    "quantize_": lambda model: quantize_(model, "int8"),
    "gptq": lambda model: quantize_(model, "gptq-int8", TOKENS),
    "magnitude": lambda model: sparsify_(model, "magnitude-0.5"),
    "wanda": lambda model: sparsify_(model, "wanda-0.5", calibration=TOKENS),
    "pack_": pack_,
    "rotate_": rotate_,
}


@pytest.mark.parametrize("name", CHANGES)
def test_matrices_that_are_held_elsewhere_are_refused(load, name):
    """A device would keep the old experts, a compiled step the old matrices."""
    offloaded = load("mixtral")
    offload_experts(offloaded, 2)
    compiled = load("llama")
    compiled.__class__ = CompiledTransformer
    for model, reason in ((offloaded, "experts are offloaded"), (compiled, "model is compiled")):
        before = {n: p.clone() for n, p in model.named_parameters()}
        with pytest.raises(MinillmError, match=reason):
            CHANGES[name](model)
        assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


def test_a_rotation_keeps_the_zeros_that_were_asked_for(load):
    model = load("llama")
    sparsify_(model, "magnitude-0.5")
    before = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(MinillmError, match=r"would fill the zeros of magnitude-0\.5"):
        rotate_(model)
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


@pytest.mark.parametrize(
    ("family", "changes", "scheme"),
    [
        ("qwen3-moe-some", {}, "smoothquant-int8-dynamic"),  # its first block is dense, its second has experts
        ("qwen3-moe-some", {}, "awq-int8"),
        ("llama", {"head_dim": 12}, "hadamard-int8"),
    ],
)
def test_a_model_that_one_block_keeps_from_it_is_left_whole(load, family, changes, scheme):
    model = load(family, **changes)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(MinillmError, match=r"dense blocks alone|leave out hadamard-"):
        quantize_(model, scheme, TOKENS)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
