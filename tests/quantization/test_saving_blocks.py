"""Scales for 128 x 128 numbers, in files whose rows lie elsewhere: saved and loaded again, no number changes."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from minillm import SamplingParams, checkpoint
from minillm.analysis.quality import window_logits
from minillm.generate import generate
from minillm.quantization import quantize_
from minillm.quantization.saving import save_quantized
from tests import tiny
from tests.quantization.kept import CALIBRATION as TOKENS

HYBRID = {"hidden_size": 160, "intermediate_size": 192, "head_dim": 32, "linear_key_head_dim": 24,
          "linear_value_head_dim": 40}  # fmt: skip
ALIGNED = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 128, "num_attention_heads": 2,
           "num_key_value_heads": 1, "linear_key_head_dim": 128, "linear_value_head_dim": 128}  # fmt: skip
SHAPES = {  # name -> (family, what it changes, the strategies that its file has)
    "hybrid": ("qwen3-next", HYBRID, {"block", "group"}),
    "hybrid with experts": ("qwen3-next-experts", {**HYBRID, "moe_intermediate_size": 72}, {"block", "group"}),
    "hybrid with biases": ("qwen3-next-bias", HYBRID, {"block", "group"}),
    "hybrid of narrow matrices": ("qwen3-next", {"hidden_size": 64, "head_dim": 32}, {"block", "channel"}),
    "hybrid of heads of 128, as published": ("qwen3-next", ALIGNED, {"block"}),
    "dense": ("llama-mha-bias", {"hidden_size": 192, "intermediate_size": 224, "head_dim": 32}, {"block", "group"}),
    "dense, its parts whole blocks": ("qwen3-tied", ALIGNED, {"block"}),
    "latent": ("deepseek-experts", {"hidden_size": 160, "intermediate_size": 192}, {"block", "group"}),
}
SCHEMES = ["fp8-block", "fp8-e5m2-block"]


@pytest.fixture(scope="module", params=SHAPES)
def shape(request, tmp_path_factory):
    family, changes, strategies = SHAPES[request.param]
    tiny.save(family, folder := tmp_path_factory.mktemp("plain"), **changes)
    return folder, strategies


def saved(folder, scheme, out):
    model, tokenizer = checkpoint.load(folder, "float32")
    quantize_(model, scheme)
    save_quantized(model, out, tokenizer)
    return model, load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())


def greedy(model, tokenizer):
    return generate(
        model, tokenizer, range(20, 28), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    ).tokens


@pytest.mark.parametrize("scheme", SCHEMES)
def test_reloaded_is_equal(shape, tmp_path, scheme):
    model, *_ = saved(shape[0], scheme, tmp_path)
    again, tokenizer = checkpoint.load(tmp_path, "auto")
    for ids in (TOKENS[:3], TOKENS):  # few rows and many
        assert torch.equal(window_logits(again, ids), window_logits(model, ids))
    assert greedy(again, tokenizer) == greedy(model, tokenizer)
    exact = checkpoint.load_model(shape[0], "float32")
    quantize_(exact, scheme, exact=True)
    assert torch.equal(window_logits(checkpoint.load_model(tmp_path, "float32"), TOKENS), window_logits(exact, TOKENS))


def spread(scale, weights, shape):
    """A number's scale, by the words of the config alone."""
    if weights["strategy"] == "block":
        assert weights["block_structure"] == [128, 128]
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    elif weights["strategy"] == "group":
        assert shape[1] % weights["group_size"] == 0
        scale = scale.repeat_interleave(weights["group_size"], 1)
    else:
        assert weights["strategy"] == "channel"
        scale = scale.expand(shape)
    return scale[: shape[0], : shape[1]]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_matrix_is_its_own_read_by_the_config_alone(shape, tmp_path, scheme):
    _, tensors, config = saved(shape[0], scheme, tmp_path)
    before, strategies = checkpoint.SafetensorsFolder(shape[0]), set()
    groups = config["quantization_config"]["config_groups"].values()
    for group in groups:
        for module in group["targets"]:
            if module == "lm_head":
                continue
            strategies.add(group["weights"]["strategy"])
            codes, want = tensors[f"{module}.weight"].double(), before[f"{module}.weight"].double()
            assert codes.shape == want.shape
            numbers = codes * spread(tensors[f"{module}.weight_scale"].double(), group["weights"], codes.shape)
            assert (numbers - want).norm() < (0.07 if "e5m2" in scheme else 0.035) * want.norm(), module
    assert strategies == shape[1]


def test_saved_again_is_equal(shape, tmp_path):
    """From the file's parts to one matrix and back."""
    _, tensors, _ = saved(shape[0], "fp8-block", tmp_path / "first")
    again = checkpoint.load_model(tmp_path / "first", "auto")
    save_quantized(again, tmp_path / "second")
    third = checkpoint.load_model(tmp_path / "second", "auto")
    assert torch.equal(window_logits(third, TOKENS), window_logits(again, TOKENS))
    codes = load_file(tmp_path / "second" / "model.safetensors")
    assert codes.keys() == tensors.keys()
    for name in codes:
        if name.endswith(".weight"):
            assert torch.equal(codes[name].view(torch.uint8), tensors[name].view(torch.uint8)), name


@pytest.mark.parametrize(("size", "message"), [(0, "groups of no size"), (-1, "groups of no"), ("32", "of no size"),
                                               (None, "groups of no size"), (48, "scale has shape")])  # fmt: skip
def test_groups_that_a_config_says_wrongly(tmp_path, size, message):
    family, changes, _ = SHAPES["dense"]
    tiny.save(family, tmp_path / "plain", **changes)
    *_, config = saved(tmp_path / "plain", "fp8-block", tmp_path / "out")
    for group in config["quantization_config"]["config_groups"].values():
        if group["weights"]["strategy"] == "group":
            group["weights"]["group_size"] = size
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        checkpoint.load_model(tmp_path / "out")
