"""Models with experts, saved and loaded again: each expert's matrices under their own names, the same logits."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm import checkpoint
from minillm.analysis.quality import window_logits
from minillm.errors import CheckpointError
from minillm.mla import interleaved, paired_halves
from minillm.moe import expert_layers
from minillm.moe_offload import offload_experts
from minillm.quantization import quantize_
from minillm.quantization.compressed import tensors_of
from minillm.quantization.linear import QuantizedLinear
from minillm.quantization.saving import save_quantized
from minillm.quantization.scheme import parse
from minillm.quantization.weight import quantize_weight
from tests import tiny

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
LATENT = {"q_lora_rank": 32, "v_head_dim": 32, "qk_nope_head_dim": 16, "attention_bias": True}
HYBRID = {"num_hidden_layers": 4, "linear_num_key_heads": 2}
SHAPES = {
    "mixtral": {"num_local_experts": 4},
    "qwen3-moe": {"moe_intermediate_size": 32, "attention_bias": True},
    "qwen3-moe-some": {"moe_intermediate_size": 32, "num_hidden_layers": 3, "mlp_only_layers": []},
    "deepseek-experts": {"moe_intermediate_size": 32, **LATENT},
    "deepseek-halves": LATENT,  # rotary halves as they are
    "deepseek-yarn": {**LATENT, "q_lora_rank": None},
    "qwen3-next-experts": {**HYBRID, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "qwen3-next-bias": {**HYBRID, "linear_value_head_dim": 16},  # a query, a key, a value and a gate to each head
}
SCHEMES = ["int8", "int8-dynamic", "int4-g32", "int4-g32-asym", "int3-g32", "fp8", "fp8-tensor", "fp8-e5m2", "mxfp4",
           "nvfp4", "gptq-int4-g32", "hqq-int4-g32"]  # fmt: skip
TOKENS = torch.randint(2, tiny.VOCAB, (300,), generator=torch.Generator().manual_seed(0)).tolist()
HOMES = {"mixtral": ("block_sparse_moe", ("w1", "w3", "w2"))}


@pytest.fixture(scope="module", params=SHAPES)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param) / request.param
    tiny.make(request.param, **{**WIDE, **SHAPES[request.param]}).save_pretrained(path)
    return path


def quantized(folder, scheme, out, **options):
    model = checkpoint.load_model(folder, "float32")
    quantize_(model, scheme, TOKENS, **options)
    save_quantized(model, out)
    return model


@pytest.mark.parametrize("scheme", SCHEMES)
def test_reloaded_is_equal(folder, tmp_path, scheme):
    model = quantized(folder, scheme, tmp_path)
    again = checkpoint.load_model(tmp_path, "auto")
    for ids in (TOKENS[:3], TOKENS[:40]):  # few rows and many: two kernels
        assert torch.equal(window_logits(again, ids), window_logits(model, ids))


def test_every_matrix_has_the_name_that_the_unquantized_file_gives_it(folder, tmp_path):
    quantized(folder, "int4-g32", tmp_path, head=None)
    before, after = checkpoint.SafetensorsFolder(folder), load_file(tmp_path / "model.safetensors")
    packed = {name.removesuffix("_packed") for name in after if name.endswith(".weight_packed")}
    kept = {name for name in after if "weight_" not in name}
    assert packed | kept == set(before)
    assert not packed & kept
    ignored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"]
    matrices = {n for n in before if before[n].dim() == 2 and n != "model.embed_tokens.weight"}
    assert {f"{name}.weight" for name in ignored} == matrices - packed
    assert {name.rsplit(".", 1)[-1] for name in ignored} <= {"gate", "shared_expert_gate", "kv_b_proj", "lm_head"}


def test_an_experts_codes_are_its_own_matrix(folder, tmp_path):
    """Read from the file by name, beside the matrix that the unquantized file has under that name."""
    quantized(folder, "int8", tmp_path)
    before, after = checkpoint.SafetensorsFolder(folder), load_file(tmp_path / "model.safetensors")
    found = [name for name in after if name.endswith(".weight_scale") and name != "lm_head.weight_scale"]
    assert len(found) > 10
    for name in found:
        module = name.removesuffix(".weight_scale")
        numbers, want = after[f"{module}.weight"] * after[name], before[f"{module}.weight"]
        assert (numbers - want).norm() < 0.02 * want.norm(), module


def test_routers_stay_in_full_precision(folder, tmp_path):
    model = checkpoint.load_model(folder, "float32")
    quantize_(model, "int4-g32")
    save_quantized(model, tmp_path, dtype=torch.float16)  # what else is not quantized may be rounded
    before, after = checkpoint.SafetensorsFolder(folder), load_file(tmp_path / "model.safetensors")
    routers = [n for n in after if n.endswith((".gate.weight", "e_score_correction_bias"))]
    assert bool(routers) == bool(expert_layers(model))
    for name in routers:
        assert torch.equal(after[name], before[name])
    assert after["model.norm.weight"].dtype == torch.float16


def test_an_expert_that_no_calibration_token_chose_is_rounded_not_emptied(tmp_path):
    tiny.make("qwen3-moe", **WIDE, **SHAPES["qwen3-moe"]).save_pretrained(tmp_path)
    model, exact = (checkpoint.load_model(tmp_path, "float32") for _ in range(2))
    quantize_(model, "gptq-int4-g32", TOKENS[:2])
    for layer, other in zip(expert_layers(model), expert_layers(exact), strict=True):
        for mine, theirs in zip(layer.experts, other.experts, strict=True):
            assert isinstance(mine.down_proj, QuantizedLinear)
            want = theirs.down_proj.weight
            assert (mine.down_proj.weight.dequantize() - want).norm() < 0.5 * want.norm()


def test_an_offloaded_model_is_saved_as_it_is_in_host_memory(tmp_path):
    tiny.make("mixtral", **WIDE).save_pretrained(tmp_path)
    model = checkpoint.load_model(tmp_path, "float32")
    quantize_(model, "int4-g32")
    want = window_logits(model, TOKENS[:20])
    offload_experts(model, 2)
    assert torch.equal(window_logits(model, TOKENS[:20]), want)
    save_quantized(model, tmp_path / "out")
    again = checkpoint.load_model(tmp_path / "out", "auto")
    assert torch.equal(window_logits(again, TOKENS[:20]), want)
    assert again.decode_bytes() == model.decode_bytes()


@pytest.mark.parametrize("shape", [(24, 5), (24,)])
def test_interleaving_undoes_the_halves(shape):
    rows = torch.randn(shape)
    halves = paired_halves(rows, 2, 8)
    assert not torch.equal(halves, rows)
    assert torch.equal(interleaved(halves, 2, 8), rows)


def test_a_quantized_kv_b_is_read_as_numbers(tmp_path):
    """Others quantize this matrix too; it is multiplied by parts here, so it becomes numbers again."""
    tiny.make("deepseek", **WIDE, **LATENT).save_pretrained(tmp_path / "whole")
    model = quantized(tmp_path / "whole", "int8", tmp_path / "out")
    name = "model.layers.0.self_attn.kv_b_proj"
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    rounded = quantize_weight(tensors.pop(f"{name}.weight"), parse("int8"))
    tensors |= {f"{name}.{suffix}": t for suffix, t in tensors_of(rounded).items()}
    save_file(tensors, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["targets"].append(name)
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    model.blocks[0].attention.kv_b_proj.weight.data = rounded.dequantize()
    again = checkpoint.load_model(tmp_path / "out", "auto")
    assert torch.equal(window_logits(again, TOKENS[:9]), window_logits(model, TOKENS[:9]))


def test_a_missing_expert_is_named(tmp_path):
    tiny.make("qwen3-moe", **WIDE, **SHAPES["qwen3-moe"]).save_pretrained(tmp_path / "whole")
    quantized(tmp_path / "whole", "int4-g32", tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    for suffix in ("packed", "scale", "shape"):
        del tensors[f"model.layers.1.mlp.experts.3.up_proj.weight_{suffix}"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.3\.up_proj\.weight is missing"):
        checkpoint.load_model(tmp_path / "out", "auto")


@pytest.mark.parametrize("family", ["qwen3-next", "qwen3-next-experts", "qwen3-next-bias"])
def test_a_hybrids_norms_come_back_bit_for_bit(family, tmp_path):
    """A file has w - 1; with the bits that w lost when 1 was added, nothing more is lost."""
    tiny.make(family, hidden_size=64, intermediate_size=96).save_pretrained(tmp_path)
    model = quantized(tmp_path, "int8", tmp_path / "out")
    again = checkpoint.load_model(tmp_path / "out", "auto")
    norms = {name: p for name, p in model.named_parameters() if "norm" in name}
    assert len(norms) > 8
    for name, parameter in again.named_parameters():
        if name in norms:
            assert torch.equal(parameter, norms[name]), name
