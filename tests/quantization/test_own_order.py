"""actorder "group": a group's columns lie anywhere in the matrix, and weight_g_idx says where.

Files are written here element by element and read by compressed-tensors' own formula, in float64:
w[n, k] = (code[n, k] - zero[n, g_idx[k]]) · scale[n, g_idx[k]].
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from minillm import checkpoint
from minillm.analysis.quality import window_logits
from minillm.errors import QuantizationError
from minillm.quantization.compressed import tensors_of, weight_from
from minillm.quantization.linear import QuantizedLinear
from minillm.quantization.parts import named_parts
from minillm.quantization.saving import save_quantized, stack
from minillm.quantization.scheme import parse
from tests import tiny
from tests.quantization.saved import saver
from tests.quantization.test_files_of_others import each, packed, rewritten

SHAPE = {"hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_hidden_layers": 2}  # fmt: skip
TOKENS = torch.randint(2, tiny.VOCAB, (20,), generator=torch.Generator().manual_seed(0)).tolist()
READERS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
INPUTS = ["qkv", "o_proj", "gate_up", "down_proj"]
OF_BITS = {"int4-g32": 4, "int4-g32-asym": 4, "int8-g32": 8, "int8-g32-asym": 8}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return saver(tmp_path_factory, SHAPE, TOKENS, exact=True, head=None)


def order_of(module: str, columns: int, size: int = 32) -> torch.Tensor:
    """Each column's group, equal for matrices that have one input, as one Hessian makes them."""
    layer, name = module.split(".")[2], module.rsplit(".", 1)[-1]
    generator = torch.Generator().manual_seed(10 * int(layer) + INPUTS.index(READERS.get(name, name)))
    g_idx = torch.empty(columns, dtype=torch.int32)
    g_idx[torch.randperm(columns, generator=generator)] = (torch.arange(columns) // size).to(torch.int32)
    return g_idx


def written(bits: int, symmetric: bool, exact: dict):
    """Changes tensors into others' file of random codes in orders of their own; `exact` gets the numbers."""

    def change(tensors):
        generator = torch.Generator().manual_seed(2)
        for name in [n for n in tensors if n.endswith(".weight_scale")]:
            module, scale = name.removesuffix(".weight_scale"), tensors[name]
            rows, columns = scale.shape[0], scale.shape[1] * 32
            for old in ("weight", "weight_packed", "weight_zero_point"):
                tensors.pop(f"{module}.{old}", None)
            half = 2 ** (bits - 1)
            codes = torch.randint(-half, half, (rows, columns), generator=generator, dtype=torch.int8)
            zero = torch.zeros(rows, columns // 32, dtype=torch.int8)
            if not symmetric:
                zero = torch.randint(-half, half, zero.shape, generator=generator, dtype=torch.int8)
                tensors[f"{module}.weight_zero_point"] = packed(zero.t(), bits).t()
            g_idx = order_of(module, columns)
            tensors[f"{module}.weight_packed"] = packed(codes, bits)
            tensors[f"{module}.weight_shape"] = torch.tensor([rows, columns])
            tensors[f"{module}.weight_g_idx"] = g_idx
            exact[module] = torch.empty(rows, columns, dtype=torch.float64)
            for k, g in enumerate(g_idx.tolist()):
                exact[module][:, k] = (codes[:, k].double() - zero[:, g].double()) * scale[:, g].double()

    return change


def config(quantization):
    quantization["format"] = "pack-quantized"
    each(quantization, format=None)
    each(quantization, "weights", actorder="group")


def of_others(saved, scheme, folder):
    exact = {}
    model = rewritten(saved, scheme, folder, written(OF_BITS[scheme], "asym" not in scheme, exact), config)
    return model, exact


@pytest.mark.parametrize("scheme", OF_BITS)
def test_every_number_is_the_formulas(saved, tmp_path, scheme):
    model, exact = of_others(saved, scheme, tmp_path)
    parts = {name: part for name, part in named_parts(model) if name in exact}
    assert parts.keys() == exact.keys()
    assert len(parts) == 2 * 7
    for name, part in parts.items():
        assert part.order is not None
        assert torch.equal(part.dequantize(), exact[name].float()), name


@pytest.mark.parametrize("scheme", OF_BITS)
def test_what_is_multiplied_is_the_formulas(saved, tmp_path, scheme):
    """A plain model that has the numbers, and ours with the kernels it would choose."""
    model, exact = of_others(saved, scheme, tmp_path)
    plain = copy.deepcopy(model)
    for i, block in enumerate(plain.blocks):
        numbers = {name.rsplit(".", 1)[-1]: w.float() for name, w in exact.items() if f".layers.{i}." in name}
        for home, name, parts in (
            (block.attention, "qkv_proj", ("q_proj", "k_proj", "v_proj")), (block.attention, "o_proj", ("o_proj",)),
            (block.mlp, "gate_up_proj", ("gate_proj", "up_proj")), (block.mlp, "down_proj", ("down_proj",)),
        ):  # fmt: skip
            weight = torch.cat([numbers[part] for part in parts])
            setattr(home, name, torch.nn.Linear(*weight.shape[::-1], bias=False))
            getattr(home, name).weight.data = weight
    want = window_logits(plain, TOKENS)
    assert torch.equal(window_logits(model, TOKENS), want)
    kernels = checkpoint.load_model(tmp_path, "auto")
    for ids in (TOKENS[:3], TOKENS):  # few rows and many: two kernels
        ours, theirs = window_logits(kernels, ids), window_logits(plain, ids)
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize("scheme", OF_BITS)
def test_saved_again_it_is_the_same_file(saved, tmp_path, scheme):
    model, exact = of_others(saved, scheme, tmp_path / "first")
    save_quantized(model, tmp_path / "second")
    again = checkpoint.load_model(tmp_path / "second", "float32")
    assert torch.equal(window_logits(again, TOKENS), window_logits(model, TOKENS))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    for module in exact:
        assert torch.equal(after[f"{module}.weight_g_idx"], before[f"{module}.weight_g_idx"])
        if OF_BITS[scheme] == 4:
            assert torch.equal(after[f"{module}.weight_packed"], before[f"{module}.weight_packed"])


def part(**others):
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-8, 8, (16, 64), generator=generator, dtype=torch.int8)
    scale = torch.rand(16, 2, generator=generator).to(torch.bfloat16)
    return {"weight_packed": packed(codes, 4), "weight_scale": scale, **others}


@pytest.mark.parametrize(
    "g_idx", [torch.full((64,), -1, dtype=torch.int32), (torch.arange(64) // 32).to(torch.int32), None]
)
@pytest.mark.parametrize("own_order", [False, True])
def test_no_order_is_the_matrixs_own(g_idx, own_order):
    """Not set (-1), in order, or not there: as compressed-tensors takes them."""
    scheme = replace(parse("int4-g32"), own_order=own_order)
    found = weight_from(scheme, (16, 64), part() | ({} if g_idx is None else {"weight_g_idx": g_idx}), "x")
    plain = weight_from(parse("int4-g32"), (16, 64), part(), "x")
    assert found.order is None
    assert found.scheme == plain.scheme
    assert torch.equal(found.dequantize(), plain.dequantize())
    assert "weight_g_idx" not in tensors_of(found)


def test_orders_move_with_rows_and_into_a_layers_slot():
    """A slice of rows, and a layer that takes another one's place (experts in a device's slots)."""
    scheme = replace(parse("int4-g32"), own_order=True)
    first, second = (
        weight_from(scheme, (16, 64), part(weight_g_idx=(torch.arange(64) // by % 2).to(torch.int32)), "x")
        for by in (1, 2)
    )
    cut = first.map_rows(lambda tensor: tensor[4:9], 5)
    assert torch.equal(cut.dequantize(), first.dequantize()[4:9])
    assert torch.equal(stack([cut, first]).dequantize(), torch.cat([cut.dequantize(), first.dequantize()]))
    with pytest.raises(QuantizationError, match="grouped in different orders"):
        stack([first, second])
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(4))
    for exact in (False, True):
        layer, other = QuantizedLinear(first, exact=exact), QuantizedLinear(second, exact=exact)
        slot = layer.slot()
        assert slot.form() == other.form()
        slot.take(other)
        assert torch.equal(slot(x), other(x))
        assert not torch.equal(slot(x), layer(x))
