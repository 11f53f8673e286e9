"""Files of quantized weights that were cut, mixed up or written by somebody else: one clear error, or the right
numbers; never a traceback, and never numbers that look right."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm import checkpoint
from minillm.analysis.quality import window_logits
from minillm.errors import CheckpointError
from minillm.quantization.saving import named_parts, stack
from minillm.quantization.scheme import parse
from minillm.quantization.weight import quantize_weight
from tests import tiny
from tests.quantization.saved import saver

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = torch.randint(2, tiny.VOCAB, (20,), generator=torch.Generator().manual_seed(0)).tolist()
NAME = "model.layers.1.self_attn.o_proj"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """scheme -> (folder, logits of the model that it was saved from)."""
    return saver(tmp_path_factory, {**SHAPE, "num_hidden_layers": 2}, TOKENS)


def damaged(saved, scheme, folder, change=None, config=None):
    """A copy of what was saved, with `change` of its tensors and `config` of its weights' description."""
    shutil.copytree(saved(scheme)[0], folder, dirs_exist_ok=True)
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file({n: t.contiguous().clone() for n, t in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        values = json.loads((folder / "config.json").read_text())
        for group in values["quantization_config"]["config_groups"].values():
            if group["minillm_scheme"] == parse(scheme).format:
                config(group)
        (folder / "config.json").write_text(json.dumps(values))
    return checkpoint.load_model(folder, "auto")


def turned(suffix, change):
    return lambda tensors: tensors.update({f"{NAME}.{suffix}": change(tensors[f"{NAME}.{suffix}"])})


NAN = torch.nan
TENSORS = {  # what is wrong -> (scheme, change, what the error says)
    "codes of another type": ("int8", turned("weight", torch.Tensor.float), "stored as torch.float32"),
    "packed codes that are numbers": ("int4-g32", turned("weight_packed", torch.Tensor.float), "torch.float32"),
    "packed codes of another width": ("int4-g32", turned("weight_packed", lambda t: t.view(torch.uint8)), "shape"),
    "one packed code": ("int4-g32", turned("weight_packed", lambda t: t[0, 0]), "shape"),
    "three sizes": ("int4-g32", turned("weight_shape", lambda t: torch.tensor([1, 2, 3])), "not two sizes"),
    "no list of sizes": ("int4-g32", turned("weight_shape", lambda t: torch.tensor(3)), "not two sizes"),
    "fractional sizes": ("int4-g32", turned("weight_shape", torch.Tensor.float), "not two sizes"),
    "sizes below one": ("int4-g32", turned("weight_shape", torch.neg), "not two sizes"),
    "zero points that are unpacked": ("int4-g32-asym", turned("weight_zero_point", torch.Tensor.byte), "uint8"),
    "zero points of fewer groups": ("int4-g32-asym", turned("weight_zero_point", lambda t: t[:, :1]), "shape"),
    "zero points of fewer rows": ("int4-g32-asym", turned("weight_zero_point", lambda t: t[:2]), "shape"),
    "zero points beyond 8 bits": ("int8-g32-asym", turned("weight_zero_point", lambda t: t.int() * 999), "int32"),
    "zero points beyond 3 bits": ("int3-g32-asym", turned("weight_zero_point", lambda t: t + 8), "beyond 3 bits"),
    "fractional zero points of NaN": ("hqq-int4-g32", turned("weight_zero_point", lambda t: t * NAN), "no finite"),
    "a fourth ternary code": ("ternary", turned("weight_packed", lambda t: t | 3), "codes that ternary has not"),
    "float8 that is NaN": ("fp8", turned("weight", lambda t: (t.float() * NAN).to(t.dtype)), "codes that fp8"),
    "float8 that is infinite": ("fp8-e5m2", turned("weight", lambda t: (t.float() / 0).to(t.dtype)), "codes that"),
    "an exponent that is NaN": ("mxfp4", turned("weight_scale", lambda t: t | 255), "no finite numbers"),
    "exponents that are numbers": ("mxfp4", turned("weight_scale", torch.Tensor.float), "torch.float32"),
    "a global scale of 0": ("nvfp4", turned("weight_global_scale", lambda t: t * 0), "no positive number"),
    "a global scale of NaN": ("nvfp4", turned("weight_global_scale", lambda t: t * NAN), "no positive number"),
    "two global scales": ("nvfp4", turned("weight_global_scale", lambda t: t.repeat(2)), "no positive number"),
    "no global scale": ("nvfp4", lambda t: t.pop(f"{NAME}.weight_global_scale"), "is missing"),
}  # fmt: skip


@pytest.mark.parametrize("what", TENSORS)
def test_a_damaged_tensor_is_named(saved, tmp_path, what):
    scheme, change, message = TENSORS[what]
    with pytest.raises(CheckpointError, match=message) as told:
        damaged(saved, scheme, tmp_path, change)
    assert NAME in str(told.value)


GROUPS = {
    "zero points under a symmetric config": (
        "int4-g32-asym", lambda g: g["weights"].update(symmetric=True), "its config says symmetric",
    ),
    "neither symmetric nor not": ("int4-g32", lambda g: g["weights"].update(symmetric="no"), "not supported"),
    "groups that do not divide": ("int4-g32", lambda g: g["weights"].update(group_size=48), "do not divide"),
    "blocks of another size": (
        "fp8", lambda g: g["weights"].update(strategy="block", block_structure=[64, 64]), "not supported",
    ),
    "bits that are a list": ("int8", lambda g: (g.pop("minillm_scheme"), g["weights"].update(num_bits=[8])), "not"),
    "no targets": ("int8", lambda g: g.update(targets=None), "no list of targets"),
    "a target that is no pattern": ("int8", lambda g: g.update(targets=["re:("]), "no pattern"),
}  # fmt: skip


@pytest.mark.parametrize("what", GROUPS)
def test_a_config_that_does_not_fit_is_told(saved, tmp_path, what):
    scheme, change, message = GROUPS[what]
    with pytest.raises(CheckpointError, match=message):
        damaged(saved, scheme, tmp_path, config=change)


def test_groups_that_are_no_objects_are_told(saved, tmp_path):
    shutil.copytree(saved("int8")[0], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["config_groups"] = {"group_0": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="no list of targets"):
        checkpoint.load_model(tmp_path)


def test_one_scale_a_tensor_as_others_write_it(saved, tmp_path):
    """One number instead of a matrix of one; and q, k and v each with their own, though they are multiplied as one."""
    before = saved("fp8-tensor")

    def change(tensors):
        for name in [n for n in tensors if n.endswith("weight_scale") and "lm_head" not in n]:
            tensors[name] = tensors[name].view(1)

    model = damaged(saved, "fp8-tensor", tmp_path / "one", change)
    assert torch.equal(window_logits(model, TOKENS), before[1])
    keys = "model.layers.1.self_attn.k_proj.weight_scale"
    model = damaged(saved, "fp8-tensor", tmp_path / "own", lambda t: t.update({keys: t[keys] * 2}))
    plain = checkpoint.load_model(before[0], "float32")
    ours, theirs = (dict(named_parts(m)) for m in (model, plain))
    for name, times in (("q_proj", 1), ("k_proj", 2), ("v_proj", 1)):
        name = f"model.layers.1.self_attn.{name}"
        assert torch.equal(ours[name].dequantize(), theirs[name].dequantize() * times)


def test_blocks_are_stacked_and_cut_without_changing_a_number():
    """Where blocks meet they stay blocks; where not, rows keep their scales."""
    generator = torch.Generator().manual_seed(0)
    even = [torch.randn(rows, 160, generator=generator) for rows in (256, 128, 96)]
    parts = [quantize_weight(weight, parse("fp8-block")) for weight in even]
    assert torch.equal(stack(parts).dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert stack(parts).scheme == parts[0].scheme
    order = torch.randperm(256, generator=generator)
    cuts = {  # rows -> whether they are of one block each 128
        "of one block": (torch.arange(32), True),
        "blocks in another order": (torch.cat([torch.arange(128, 256), torch.arange(128)]), True),
        "from the middle of a block": (torch.arange(64, 224), False),
        "any": (order, False),
    }
    for name, (rows, whole) in cuts.items():
        cut = parts[0].map_rows(lambda tensor, rows=rows: tensor[rows], len(rows))
        assert torch.equal(cut.dequantize(), parts[0].dequantize()[rows]), name
        assert (cut.scheme.granularity == "block") == whole, name
    for first in (96, 192):
        pair = [
            quantize_weight(torch.randn(rows, 160, generator=generator), parse("fp8-block")) for rows in (first, 64)
        ]
        assert stack(pair).scheme.granularity == "group"
        assert torch.equal(stack(pair).dequantize(), torch.cat([part.dequantize() for part in pair]))
    halves = [parts[1].map_rows(lambda tensor, half=half: tensor[half::2], 64) for half in (0, 1)]
    assert stack(halves).scheme == parts[1].scheme  # both of one block, which they are again
    with pytest.raises(ValueError, match="quantized differently"):
        stack([parts[0], quantize_weight(even[1], parse("fp8"))])


def test_fractional_zero_points_are_minillms_own_format(saved):
    """No other reader knows them, whatever stands before the method's name."""
    for scheme in ("hqq-int4-g32", "hadamard-hqq-int4-g32"):
        config = json.loads((saved(scheme)[0] / "config.json").read_text())
        groups = config["quantization_config"]["config_groups"].values()
        assert [g["format"] for g in groups if g["minillm_scheme"] == "int4"] == ["minillm-packed"]
