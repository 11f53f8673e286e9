"""Promise: FP8 files as DeepSeek-V3 is published are read as the numbers they say; damage is one clear error."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm import checkpoint
from minillm.analysis.quality import window_logits
from minillm.errors import CheckpointError
from minillm.fp8_checkpoint import FP8Blocks, dequantized
from tests import tiny

# wider than a block in both directions, and no multiple of it
SIZES = {"hidden_size": 160, "intermediate_size": 200, "moe_intermediate_size": 136, "num_hidden_layers": 2,
         "q_lora_rank": 136}  # fmt: skip
BLOCK = (128, 128)
E4M3 = torch.float8_e4m3fn
TOKENS = torch.randint(2, tiny.VOCAB, (30,), generator=torch.Generator().manual_seed(0)).tolist()
UP = "model.layers.1.mlp.experts.3.up_proj.weight"


def published(name: str) -> bool:
    """Which matrices the published files hold in FP8: all but embedding, head and router."""
    return name.endswith("_proj.weight") or name.endswith(("q_a_proj.weight", "kv_a_proj_with_mqa.weight"))


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block by block, written as loops: codes e4m3 and the float32 scale they are multiplied by."""
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=E4M3)
    scale = torch.empty(-(-rows // 128), -(-columns // 128))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scale[i, j] = weight[at].abs().max() / 448
            codes[at] = (weight[at] / scale[i, j]).to(E4M3)
    return codes, scale


def exact(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """In float64, number by number's block."""
    rows, columns = (torch.arange(size) // 128 for size in codes.shape)
    return codes.to(torch.float64) * scale.to(torch.float64)[rows[:, None], columns]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(folder of the FP8 file, folder of the same numbers in float32, what the file holds)."""
    fp8, plain = (tmp_path_factory.mktemp(name) for name in ("fp8", "plain"))
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        kind, extra = tiny.FAMILIES["deepseek-experts"]
        patch.setitem(tiny.FAMILIES, "deepseek-experts", (kind, extra | SIZES))
        tiny.make("deepseek-experts").save_pretrained(plain)
    stored, numbers = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if published(name):
            stored[name], scale = quantize(tensor)
            stored[f"{name}_scale_inv"] = scale
            numbers[name] = exact(stored[name], scale).to(torch.float32)
        else:
            stored[name] = numbers[name] = tensor
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, fp8 / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    }  # fmt: skip
    (fp8 / "config.json").write_text(json.dumps(config))
    return fp8, plain, stored


def damaged(files, tmp_path, change, config=lambda raw: None):
    fp8, _, stored = files
    tensors, raw = dict(stored), json.loads((fp8 / "config.json").read_text())
    change(tensors)
    config(raw["quantization_config"])
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return tmp_path


def test_every_matrix_is_the_float64_product_rounded_once(files):
    fp8, _, stored = files
    read = FP8Blocks(checkpoint.SafetensorsFolder(fp8), {"weight_block_size": [128, 128]})
    assert set(read) == {name for name in stored if not name.endswith("_scale_inv")}
    matrices = [name for name in read if stored[name].dtype == E4M3]
    assert len(matrices) > 30
    assert max(stored[f"{name}_scale_inv"].numel() for name in matrices) > 2  # more than one block, both ways
    for name in matrices:
        want = exact(stored[name], stored[f"{name}_scale_inv"])
        assert torch.equal(read[name], want.to(torch.float32)), name
    for name in set(read) - set(matrices):
        assert torch.equal(read[name], stored[name])


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_the_model_is_the_one_of_those_numbers(files, dtype):
    fp8, plain, _ = files
    found, want = (window_logits(checkpoint.load_model(path, dtype), TOKENS) for path in (fp8, plain))
    if dtype == "float32":
        assert torch.equal(found, want)
    assert (found - want).norm() <= 0.02 * want.norm()


def test_loaded_by_name_and_quantized_again(files, tmp_path):
    from minillm.quantization import quantize_
    from minillm.quantization.saving import save_quantized

    model = checkpoint.load_model(files[0])
    quantize_(model, "int8")
    save_quantized(model, tmp_path)
    again = checkpoint.load_model(tmp_path, "auto")
    assert torch.equal(window_logits(again, TOKENS), window_logits(model, TOKENS))


CHANGES = {
    "no scale": (lambda t: t.pop(f"{UP}_scale_inv"), r"experts\.3\.up_proj\.weight_scale_inv is missing"),
    "shape": (lambda t: t.update({f"{UP}_scale_inv": torch.ones(1, 2)}), r"shape \(1, 2\).* need \(2, 2\)"),
    "nan": (lambda t: t.update({f"{UP}_scale_inv": torch.full((2, 2), torch.nan)}), "holds NaN or infinity"),
    "not fp8": (lambda t: t.update({UP: torch.ones(136, 160)}), "is torch.float32 and has a scale"),
    "no matrix": (lambda t: t.update({UP: torch.ones(136).to(E4M3)}), "in fp8 a matrix is stored"),
    "gone": (lambda t: t.pop(UP), r"experts\.3\.up_proj\.weight is missing"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_damage_is_one_clear_error(files, tmp_path, name):
    change, message = CHANGES[name]
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.load_model(damaged(files, tmp_path, change))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("size", [None, 128, [128], [128, 0], [128, 128.0], [True, 128], "128", [1 << 40, 128]])
def test_a_block_size_that_says_nothing(files, tmp_path, size):
    path = damaged(files, tmp_path, lambda t: None, lambda q: q.update(weight_block_size=size))
    with pytest.raises(CheckpointError, match="weight_block_size is"):
        checkpoint.load_model(path)


def test_other_blocks_are_read_as_they_say():
    codes, scale = torch.randn(5, 7).to(E4M3), torch.tensor([[1.0, 2, 4, 8], [16, 32, 64, 128], [3, 5, 7, 9]])
    got = dequantized(codes, scale, (2, 2))
    assert got[4, 6] == codes[4, 6].float() * 9
    assert got[1, 2] == codes[1, 2].float() * 2
