"""quantize_ on whole models: what is replaced, what is refused, and that methods keep what they promise."""

from __future__ import annotations

import pytest
import torch

from minillm import checkpoint
from minillm.analysis.quality import compare_models, window_logits
from minillm.errors import QuantizationError
from minillm.quantization import QuantizedLinear, parse, quantize_, quantize_weight
from minillm.quantization.calibration import for_each_block
from minillm.quantization.rotation import rotate_
from tests import tiny

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = torch.randint(2, tiny.VOCAB, (600,), generator=torch.Generator().manual_seed(0)).tolist()
SCHEMES = [
    "int8",
    "int8-dynamic",
    "int4-g32",
    "int4-g32-asym",
    "int3-g32",
    "fp8",
    "fp8-tensor",
    "fp8-block",
    "fp8-e5m2",
    "mxfp4",
    "nvfp4",
    "gptq-int4-g32",
    "awq-int4-g32",
    "awq-int4-g32-asym",
    "hqq-int4-g32",
    "smoothquant-int8-dynamic",
    "hadamard-int4-g32",
    "hadamard-gptq-int4-g32",
]


@pytest.fixture(scope="module", params=["llama-mha-bias", "qwen3-tied"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    tiny.make(request.param, **SHAPE).save_pretrained(path)
    return path


def loaded(folder):
    return checkpoint.load_model(folder, "float32")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_runs_and_stays_near(folder, scheme):
    model, reference = loaded(folder), loaded(folder)
    report = quantize_(model, scheme, TOKENS[:300])
    assert all(isinstance(layer, QuantizedLinear) for layer in model.linears())
    assert report.layers == 4 * 3 + 1
    assert report.stored_bytes == sum(layer.stored_bytes for layer in model.linears())
    assert report.stored_bytes < report.float32_bytes / (3.3 if "8" in scheme else 4.5)
    found = compare_models(model, reference, TOKENS[300:450], window=64)
    assert found.kl < {"int8": 0.01, "fp8": 0.1}.get(scheme, 0.6 if "int3" not in scheme else 3)


def test_better_methods_are_better(folder):
    """On the model's outputs, with the head left alone, over text that calibration has not seen."""
    reference, kl = loaded(folder), {}
    for scheme in ("int3-g32", "gptq-int3-g32", "awq-int3-g32"):
        model = loaded(folder)
        quantize_(model, scheme, TOKENS[:400], head=None, exact=True)
        kl[scheme] = compare_models(model, reference, TOKENS[400:], window=100).kl
    assert kl["gptq-int3-g32"] < 0.9 * kl["int3-g32"]
    assert kl["awq-int3-g32"] < 0.9 * kl["int3-g32"]


def test_the_head_is_int8_unless_told(folder):
    for head, wanted in (("int8", "int8"), ("int4-g32", "int4-g32"), (None, None)):
        model = loaded(folder)
        quantize_(model, "int4-g32", head=head)
        found = getattr(model.lm_head, "weight", None)
        assert getattr(getattr(found, "scheme", None), "name", None) == wanted


@pytest.mark.parametrize("name", ["llama", "llama-mha-bias", "qwen3-tied", "llama-mqa-tied"])
def test_rotation_changes_nothing(name, tmp_path):
    tiny.make(name, **SHAPE).save_pretrained(tmp_path)
    model = loaded(tmp_path)
    before, weights = window_logits(model, TOKENS[:50]), model.blocks[0].mlp.down_proj.weight.clone()
    rotate_(model)
    assert torch.allclose(window_logits(model, TOKENS[:50]), before, rtol=1e-3, atol=2e-3)
    assert not torch.allclose(weights, model.blocks[0].mlp.down_proj.weight, atol=0.01)


def test_folded_factors_change_nothing(folder):
    """With codes of 8 bits AWQ's rounding is nothing, so what is left is its folding."""
    model, reference = loaded(folder), loaded(folder)
    quantize_(model, "awq-int8-g32", TOKENS[:300], head=None, exact=True)
    assert compare_models(model, reference, TOKENS[300:400]).kl < 2e-3


def test_statistics_are_those_of_the_inputs(folder):
    model, seen = loaded(folder), {}
    layer = model.blocks[1].mlp.down_proj
    handle = layer.register_forward_pre_hook(lambda _, args: seen.setdefault("x", []).append(args[0].double()))
    window_logits(model, TOKENS[:40])
    window_logits(model, TOKENS[40:60])
    handle.remove()
    found = {}
    for_each_block(model, TOKENS[:60], lambda i, _, statistics: found.setdefault(i, statistics), window=40)
    x, got = torch.cat(seen["x"]), found[1]["mlp.down_proj"]
    assert got.tokens == 60
    assert torch.allclose(got.moments.double(), x.t() @ x, rtol=1e-3, atol=1e-4)
    assert torch.allclose(got.mean.double(), x.abs().mean(0), rtol=1e-4)
    assert torch.allclose(got.largest.double(), x.abs().amax(0), rtol=1e-4)


def test_later_blocks_see_the_rounded_ones(folder):
    """The inputs that block 1 is fitted to are those that the quantized block 0 makes."""
    model, found = loaded(folder), {}

    def spoil(i, block, statistics):
        found[i] = statistics["attention.qkv_proj"].moments
        block.mlp.down_proj.weight.data *= 0

    for_each_block(model, TOKENS[:60], spoil)
    again = {}
    for_each_block(model, TOKENS[:60], lambda i, _, s: again.setdefault(i, s["attention.qkv_proj"].moments))
    assert torch.allclose(found[1], again[1], rtol=1e-4, atol=1e-3)


REFUSED = {
    ("int4-g64", None): "down_proj has 96 columns, which groups of 64",
    ("gptq-int4-g32", None): "give calibration tokens",
    ("gptq-int4-g32", (5,)): "at least two ids",
    ("awq-int4-g32", (1, tiny.VOCAB)): "ids from 0 to 319",
}


@pytest.mark.parametrize("scheme", REFUSED)
def test_refusals_leave_the_model_alone(folder, scheme):
    model = loaded(folder)
    before = window_logits(model, TOKENS[:20])
    with pytest.raises(QuantizationError, match=REFUSED[scheme]):
        quantize_(model, *scheme)
    assert torch.equal(window_logits(model, TOKENS[:20]), before)


def test_groups_shrink_when_allowed(folder):
    model = loaded(folder)
    report = quantize_(model, "int4-g64", shrink_groups=True)
    assert dict(report.groups) == {64: 10, 32: 3}  # 64 columns three times a layer and in the head, 96 in down_proj


def test_a_broken_weight_is_named(folder):
    model = loaded(folder)
    model.blocks[2].mlp.gate_up_proj.weight.data[3, 4] = torch.nan
    with pytest.raises(QuantizationError, match=r"blocks\.2\.mlp\.gate_up_proj holds NaN"):
        quantize_(model, "int8")
    assert not any(isinstance(layer, QuantizedLinear) for layer in model.linears())


def test_twice_and_packed_are_refused(folder):
    model = loaded(folder)
    quantize_(model, "int8")
    with pytest.raises(QuantizationError, match="quantized already"):
        quantize_(model, "int8")
    with pytest.raises(QuantizationError, match="float32"):
        quantize_(checkpoint.load_model(folder, "bfloat16"), "int8")


@pytest.mark.parametrize("name", ["deepseek", "qwen3-next", "mixtral"])
@pytest.mark.parametrize("scheme", ["int8", "int8-dynamic", "fp8", "gptq-int8"])
def test_other_families(name, scheme, tmp_path):
    """Latent attention, linear attention and experts: what can be quantized is, and the answer stays near."""
    family = next(n for n in tiny.FAMILIES if n.startswith(name))
    tiny.make(family).save_pretrained(tmp_path)
    model, reference = loaded(tmp_path), loaded(tmp_path)
    report = quantize_(model, scheme, TOKENS[:200])
    assert report.layers == sum(isinstance(layer, QuantizedLinear) for layer in model.modules()) > 6
    assert compare_models(model, reference, TOKENS[300:400]).kl < (0.3 if "dynamic" in scheme else 0.1)


@pytest.mark.parametrize("columns", [8, 15, 24, 40, 48])
def test_int8_at_odd_widths(columns):
    """torch's operator reads 16 columns at a time and past the end of shorter rows."""
    weight = torch.randn(20, columns, generator=torch.Generator().manual_seed(columns))
    layer = QuantizedLinear(quantize_weight(weight, parse("int8")))
    x = torch.randn(3, columns)
    exact = x @ layer.weight.dequantize().t()
    assert (layer(x) - exact).norm() < 0.01 * exact.norm()
