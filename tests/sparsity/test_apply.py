"""sparsify_ on whole models: what changes, what is refused, what goes together with quantization."""

from __future__ import annotations

import pytest
import torch

from minillm import checkpoint
from minillm.analysis.quality import compare_models, window_logits
from minillm.cli.roof import held_bytes
from minillm.errors import QuantizationError, SparsityError
from minillm.quantization import quantize_
from minillm.sparsity import SparseLinear, Sparsity, pack_, sparsify_
from minillm.sparsity.methods import wanda
from tests import tiny

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = torch.randint(2, tiny.VOCAB, (600,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module", params=["llama-mha-bias", "qwen3-tied"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    tiny.make(request.param, **SHAPE).save_pretrained(path)
    return path


def loaded(folder):
    return checkpoint.load_model(folder, "float32")


def matrices(model) -> dict[str, torch.Tensor]:
    return {
        f"{i}.{name}": layer.weight
        for i, block in enumerate(model.blocks)
        for name, layer in block.named_modules()
        if hasattr(layer, "weight") and layer.weight.dim() == 2
    }


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize("pattern", ["2:4", "4:8", None])
def test_half_of_every_matrix_and_nothing_else(folder, method, pattern):
    model, dense = loaded(folder), loaded(folder)
    report = sparsify_(model, method, None if pattern else 0.5, pattern, TOKENS[:300])
    assert report.layers == 4 * 3
    assert report.fraction == pytest.approx(0.5, abs=1e-3)
    assert report.stored_bytes == report.float32_bytes == sum(w.nbytes for w in matrices(model).values())
    for name, weight in matrices(model).items():
        assert (weight == 0).float().mean().item() == pytest.approx(0.5, abs=1e-2), name
    for name, parameter in dense.named_parameters():
        changed = "blocks" in name and parameter.dim() == 2
        assert torch.equal(parameter, dict(model.named_parameters())[name]) != changed, name


def test_better_methods_are_better(folder):
    reference, kl = loaded(folder), {}
    for method in ("magnitude", "wanda", "sparsegpt"):
        model = loaded(folder)
        sparsify_(model, method, pattern="2:4", calibration=TOKENS[:400])
        kl[method] = compare_models(model, reference, TOKENS[400:], window=100).kl
    assert kl["sparsegpt"] < 0.9 * kl["magnitude"]
    assert kl["wanda"] < kl["magnitude"]


def test_later_blocks_see_the_sparse_ones(folder):
    """Wanda in block 1 is judged by the inputs that the sparse block 0 makes."""
    model, dense = loaded(folder), loaded(folder)
    sparsify_(model, "wanda-0.6", calibration=TOKENS[:100], blocks=[0])
    seen = []
    name = "mlp.gate_up_proj"
    handle = model.blocks[1].get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    window_logits(model, TOKENS[:100])
    handle.remove()
    expected = wanda(dense.blocks[1].get_submodule(name).weight, seen[0].t() @ seen[0], Sparsity("wanda", 0.6))
    whole = loaded(folder)
    sparsify_(whole, "wanda-0.6", calibration=TOKENS[:100])
    assert ((whole.blocks[1].get_submodule(name).weight == 0) == (expected == 0)).float().mean() > 0.9


def test_only_the_blocks_that_were_named(folder):
    model, dense = loaded(folder), loaded(folder)
    assert sparsify_(model, "magnitude-0.5", blocks=[1]).layers == 4
    for name, weight in matrices(model).items():
        assert torch.equal(weight, matrices(dense)[name]) != name.startswith("1.")


def test_packing_changes_nothing_but_bytes(folder):
    model, same = loaded(folder), loaded(folder)
    report = sparsify_(model, "magnitude", pattern="2:4")
    sparsify_(same, "magnitude", pattern="2:4")
    before = held_bytes(model)
    stored = pack_(model)
    assert torch.equal(window_logits(model, TOKENS[:50]), window_logits(same, TOKENS[:50]))
    assert stored == report.float32_bytes * 17 // 32
    assert held_bytes(model) == before - report.float32_bytes + stored
    assert report.packed_bytes == report.float32_bytes * 9 // 32
    assert all(isinstance(layer, SparseLinear) for layer in model.linears()[:-1])
    steps = model.decode_bytes(), same.decode_bytes()
    assert steps[0] > steps[1]  # unpacking on a CPU moves more, and the bound says so


@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "int4-g32-asym", "awq-int4-g32", "fp8", "mxfp4", "nvfp4"])
def test_zeros_survive_quantization(folder, scheme):
    model = loaded(folder)
    sparsify_(model, "magnitude", pattern="2:4")
    lost = [weight == 0 for weight in matrices(model).values()]
    quantize_(model, scheme, TOKENS[:200])
    for layer, zeros in zip(model.linears(), lost, strict=False):
        assert (layer.weight.dequantize()[zeros] == 0).all()
    assert model.layout == f"{scheme}, magnitude-2:4"


@pytest.mark.parametrize("scheme", ["gptq-int4-g32", "hqq-int4-g32", "hadamard-int4-g32"])
def test_what_would_fill_the_zeros_is_refused(folder, scheme):
    model = loaded(folder)
    sparsify_(model, "magnitude", pattern="2:4")
    with pytest.raises(QuantizationError, match="would fill the zeros of magnitude-2:4"):
        quantize_(model, scheme, TOKENS[:200])


def test_order_is_told(folder):
    model = loaded(folder)
    quantize_(model, "int8")
    with pytest.raises(SparsityError, match="sparsify first, then quantize"):
        sparsify_(model, "magnitude-2:4")
    model = loaded(folder)
    sparsify_(model, "magnitude-2:4")
    pack_(model)
    with pytest.raises(SparsityError, match="packed 2:4 already"):
        sparsify_(model, "magnitude-2:4")
    with pytest.raises(QuantizationError, match="packed 2:4"):
        quantize_(model, "int8")
    with pytest.raises(SparsityError, match="no Linear to pack"):
        pack_(model)


def test_a_packed_layout_is_refused(smollm2_path):
    model, _ = checkpoint.load(smollm2_path, "bfloat16")
    with pytest.raises(QuantizationError, match='dtype "float32"'):
        sparsify_(model, "magnitude-2:4")


def broken(model):
    model.blocks[1].mlp.down_proj.weight.data[3, 5] = torch.nan


def odd(model):
    layer = model.blocks[2].mlp.down_proj
    layer.weight.data = layer.weight.data[:, :94]


@pytest.mark.parametrize(
    ("spoil", "arguments", "told"),
    [
        (broken, {"sparsity": 0.5}, "blocks.1.mlp.down_proj holds NaN"),
        (odd, {"pattern": "2:4"}, "blocks.2.mlp.down_proj has 94 columns"),
        (None, {"sparsity": 1.5}, "from 0 to 1"),
        (None, {"pattern": "3:4"}, "choose 2:4 or 4:8"),
        (None, {"sparsity": 0.5, "pattern": "2:4"}, "give one of them"),
        (None, {"sparsity": 0.5, "blocks": [3]}, "blocks 0 to 2"),
        (None, {}, "write one like"),
    ],
)
def test_refused_whole(folder, spoil, arguments, told):
    model = loaded(folder)
    if spoil:
        spoil(model)
    before = {name: weight.clone() for name, weight in matrices(model).items()}
    with pytest.raises(SparsityError, match=told):
        sparsify_(model, "magnitude", **arguments)
    assert all(torch.equal(w, before[name]) or not w.isfinite().all() for name, w in matrices(model).items())


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_calibration_is_asked_for(folder, method):
    with pytest.raises(SparsityError, match="give calibration tokens"):
        sparsify_(loaded(folder), method, pattern="2:4")
    with pytest.raises(QuantizationError, match="calibration tokens must be"):
        sparsify_(loaded(folder), method, pattern="2:4", calibration=[tiny.VOCAB + 1, 2])


def test_a_packed_model_with_holes_is_refused(folder):
    model = loaded(folder)
    sparsify_(model, "magnitude", 0.5)
    with pytest.raises(SparsityError, match="more than two numbers"):
        pack_(model)
    assert not any(isinstance(layer, SparseLinear) for layer in model.modules())
