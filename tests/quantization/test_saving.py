"""Saved and loaded again: the same bits, under names that others know, and damage is told."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm import checkpoint
from minillm.analysis.quality import window_logits
from minillm.errors import CheckpointError, QuantizationError
from minillm.quantization import quantize_
from minillm.quantization.saving import save_quantized
from tests import tiny

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = torch.randint(2, tiny.VOCAB, (300,), generator=torch.Generator().manual_seed(0)).tolist()
SCHEMES = [
    "int8", "int8-dynamic", "int8-g32-asym", "int4-g32", "int4-g32-asym", "int3-g32", "fp8", "fp8-tensor", "fp8-e5m2",
    "mxfp4", "nvfp4", "ternary", "gptq-int4-g32", "awq-int4-g32-asym", "hqq-int4-g32", "hadamard-int4-g32",
]  # fmt: skip


@pytest.fixture(scope="module", params=["llama-mha-bias", "qwen3-tied"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    tiny.make(request.param, **SHAPE).save_pretrained(path)
    return path


@pytest.mark.parametrize("head", ["int8", None])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_reloaded_is_equal(folder, tmp_path, scheme, head):
    if scheme.startswith("hadamard") and head is None:
        head = "int8"  # a rotated head is a matrix of its own
    model = checkpoint.load_model(folder, "float32")
    quantize_(model, scheme, TOKENS, head=head)
    save_quantized(model, tmp_path)
    again = checkpoint.load_model(tmp_path, "auto")
    for ids in (TOKENS[:3], TOKENS[:40]):  # few rows and many: two kernels
        assert torch.equal(window_logits(again, ids), window_logits(model, ids))
    exact = window_logits(checkpoint.load_model(tmp_path, "float32"), TOKENS[:40])
    assert (exact - window_logits(model, TOKENS[:40])).norm() < 0.05 * exact.norm()


def test_the_names_are_those_of_compressed_tensors(folder, tmp_path):
    model = checkpoint.load_model(folder, "float32")
    quantize_(model, "int4-g32-asym")
    save_quantized(model, tmp_path)
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    q = "model.layers.0.self_attn.q_proj"
    assert tensors[f"{q}.weight_packed"].dtype == torch.int32
    assert tensors[f"{q}.weight_packed"].shape == (64, 8)
    assert tensors[f"{q}.weight_scale"].shape == (64, 2)
    assert tensors[f"{q}.weight_zero_point"].shape == (8, 2)  # eight rows an int32
    assert tensors[f"{q}.weight_shape"].tolist() == [64, 64]
    # read independently, eight codes an int32, lowest bits first
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    codes = ((tensors[f"{q}.weight_packed"][..., None] >> shifts) & 15).flatten(1).float()
    zero = ((tensors[f"{q}.weight_zero_point"][:, None] >> shifts[:, None]) & 15).flatten(0, 1).float()
    scale = tensors[f"{q}.weight_scale"].float()
    numbers = (codes.view(64, 2, 32) - zero[..., None]) * scale[..., None]
    assert torch.equal(numbers.view(64, 64), model.blocks[0].attention.qkv_proj.weight.dequantize()[:64])
    quantization = config["quantization_config"]
    assert quantization["quant_method"] == "compressed-tensors"
    (group,) = [g for g in quantization["config_groups"].values() if q in g["targets"]]
    assert group["weights"] == {
        "num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32,
        "block_structure": None, "dynamic": False,
    }  # fmt: skip


def test_files_of_others_with_classes_and_patterns(folder, tmp_path):
    """vLLM's files name targets by class or regular expression, and know nothing of minillm."""
    model = checkpoint.load_model(folder, "float32")
    quantize_(model, "int4-g32")
    save_quantized(model, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for group in config["quantization_config"]["config_groups"].values():
        del group["minillm_scheme"]
        group["targets"] = ["re:.*lm_head"] if "lm_head" in group["targets"] else ["Linear"]
    path.write_text(json.dumps(config))
    assert torch.equal(
        window_logits(checkpoint.load_model(tmp_path, "auto"), TOKENS[:20]), window_logits(model, TOKENS[:20])
    )


@pytest.fixture
def saved(folder, tmp_path):
    model = checkpoint.load_model(folder, "float32")
    quantize_(model, "int4-g32-asym")
    save_quantized(model, tmp_path)
    return tmp_path


def damage(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


O_PROJ = "model.layers.1.self_attn.o_proj"
DAMAGES = {
    "scale": (lambda t: t.pop(f"{O_PROJ}.weight_scale"), "o_proj"),
    "zero": (lambda t: t.pop(f"{O_PROJ}.weight_zero_point"), "weight_zero_point is missing"),
    "packed": (lambda t: t.pop(f"{O_PROJ}.weight_packed"), "weight_packed is missing"),
    "shape": (lambda t: t.update({f"{O_PROJ}.weight_shape": torch.tensor([64, 32])}), "has shape"),
    "nan": (lambda t: t[f"{O_PROJ}.weight_scale"].fill_(torch.nan), "no finite numbers"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(saved, name):
    change, message = DAMAGES[name]
    damage(saved, change)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load_model(saved, "auto")


def each(quantization):
    return quantization["config_groups"].values()


CONFIGS = {
    "method": (lambda q: q.update(quant_method="awq"), "'awq' is not supported"),
    "no groups": (lambda q: q.pop("config_groups"), "no config_groups"),
    "bits": (lambda q: [g.update(minillm_scheme="int5") or g["weights"].update(num_bits=5) for g in each(q)],
             "not supported"),
    "targets": (lambda q: [g.update(targets=["Conv"]) for g in each(q)], "no config group names it"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_say_nothing(saved, name):
    change, message = CONFIGS[name]
    config = json.loads((saved / "config.json").read_text())
    change(config["quantization_config"])
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load_model(saved, "auto")


def test_what_cannot_be_saved_is_told(folder, tmp_path):
    model = checkpoint.load_model(folder, "float32")
    with pytest.raises(QuantizationError, match="not quantized"):
        save_quantized(model, tmp_path)


def test_the_default_tokenizer_survives(smollm2_path, tmp_path):
    """Against the tokenizers library, which reads the file too."""
    import tokenizers

    from minillm.gguf_file import GGUFFile
    from minillm.tokenizer import Tokenizer
    from minillm.tokenizer_export import save_tokenizer

    ours = Tokenizer.from_gguf(GGUFFile(smollm2_path).fields)
    save_tokenizer(ours, tmp_path)
    again, theirs = Tokenizer.from_file(tmp_path), tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in (
        "Hello, world: 1234 naïve\n\tdef f(x): return x**2",
        "漢字 and 🙂 emoji",
        "<|im_start|>user\nhi<|im_end|>\n",
    ):
        assert again.encode(text) == ours.encode(text)
        assert (
            again.encode(text, allow_special=True) == ours.encode(text, allow_special=True) == theirs.encode(text).ids
        )
    assert again.eos_ids == ours.eos_ids
    chat = [{"role": "user", "content": "What is 2 + 2?"}]
    assert again.apply_chat_template(chat) == ours.apply_chat_template(chat)


def test_files_are_whole_and_readable_by_others(folder, tmp_path, monkeypatch):
    """Their mode is the umask's; a disk that fills up leaves no file by half, and no config that promises weights."""
    model = checkpoint.load_model(folder, "float32")
    quantize_(model, "int8")
    old = os.umask(0o022)
    try:
        save_quantized(model, tmp_path / "good")
    finally:
        os.umask(old)
    assert {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "good").iterdir()} == {
        "config.json": 0o644, "model.safetensors": 0o644,
    }  # fmt: skip

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("minillm.storage.os.replace", full)
    with pytest.raises(OSError, match="No space"):
        save_quantized(model, tmp_path / "bad")
    assert not list((tmp_path / "bad").iterdir())
