"""Files that other tools write in compressed-tensors' naming: the right numbers, or one error that says what they are.

Codes are packed here as the format says, element by element, and not by minillm's own packing.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm import checkpoint
from minillm.analysis.quality import window_logits
from minillm.errors import CheckpointError
from tests import tiny
from tests.quantization.saved import saver

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_hidden_layers": 2}  # fmt: skip
TOKENS = torch.randint(2, tiny.VOCAB, (20,), generator=torch.Generator().manual_seed(0)).tolist()
NAME = "model.layers.1.self_attn.o_proj"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """scheme -> (folder, logits of the model that it was saved from, multiplied exactly)."""
    return saver(tmp_path_factory, SHAPE, TOKENS, exact=True, head=None)


def rewritten(saved, scheme, folder, tensors=None, config=None):
    """A copy of what was saved, as someone else would have written it, loaded."""
    shutil.copytree(saved(scheme)[0], folder, dirs_exist_ok=True)
    found = load_file(folder / "model.safetensors")
    if tensors is not None:
        tensors(found)
    save_file({n: t.contiguous().clone() for n, t in found.items()}, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    quantization = values["quantization_config"]
    for group in quantization["config_groups"].values():
        del group["minillm_scheme"]
        group["targets"] = ["Linear"]
    if config is not None:
        config(quantization)
    (folder / "config.json").write_text(json.dumps(values))
    return checkpoint.load_model(folder, "float32")


def packed(codes: torch.Tensor, bits: int = 8) -> torch.Tensor:
    """Signed codes (rows, columns) -> int32 (rows, words): shifted by half the range, the lowest bits first, a last
    word that is not full completed with zeros."""
    each = 32 // bits
    rows, columns = codes.shape
    words = np.zeros((rows, -(-columns // each)), dtype=np.uint32)
    for row in range(rows):
        for column in range(columns):
            code = np.uint32(int(codes[row, column]) + 2 ** (bits - 1))
            words[row, column // each] |= code << np.uint32(bits * (column % each))
    return torch.from_numpy(words.view(np.int32))


def pack_all(tensors):
    """Each int8 matrix, and its zero points along rows, in words."""
    for scale in [n for n in tensors if n.endswith(".weight_scale")]:
        module = scale.removesuffix(".weight_scale")
        codes = tensors.pop(f"{module}.weight")
        tensors[f"{module}.weight_packed"] = packed(codes)
        tensors[f"{module}.weight_shape"] = torch.tensor(codes.shape)
        if (zero := tensors.get(f"{module}.weight_zero_point")) is not None:
            tensors[f"{module}.weight_zero_point"] = packed(zero.t()).t()


def pack_quantized(quantization):
    quantization["format"] = "pack-quantized"
    for group in quantization["config_groups"].values():
        group["format"] = None


@pytest.mark.parametrize("scheme", ["int8", "int8-g32", "int8-g32-asym", "int8-asym"])
def test_8_bit_codes_packed_four_to_an_int32(saved, tmp_path, scheme):
    """W8A16 as llm-compressor writes it."""
    model = rewritten(saved, scheme, tmp_path, pack_all, pack_quantized)
    assert torch.equal(window_logits(model, TOKENS), saved(scheme)[1])
    kernels = checkpoint.load_model(tmp_path, "auto")
    assert (window_logits(kernels, TOKENS) - saved(scheme)[1]).norm() < 0.02 * saved(scheme)[1].norm()


def test_the_lowest_code_and_a_last_word_that_is_not_full():
    from minillm.quantization.compressed import weight_from
    from minillm.quantization.scheme import parse

    codes = torch.tensor([[-128, -1, 0, 1, 127, 64], [5, -6, 7, -8, 9, -10]], dtype=torch.int8)
    part = {"weight_packed": packed(codes), "weight_scale": torch.tensor([[0.5], [2.0]])}
    assert part["weight_packed"].shape == (2, 2)
    found = weight_from(parse("int8"), (2, 6), part, "x")
    assert torch.equal(found.dequantize(), codes * torch.tensor([[0.5], [2.0]]))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_channel_of_packed_codes(saved, tmp_path, bits):
    """strategy "channel": one scale a row, codes packed, 4 bits as well as 8."""
    generator, exact = torch.Generator().manual_seed(1), {}

    def change(tensors):
        for scale in [n for n in tensors if n.endswith(".weight_scale")]:
            module = scale.removesuffix(".weight_scale")
            shape = tensors.pop(f"{module}.weight").shape
            codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), shape, generator=generator, dtype=torch.int8)
            tensors[f"{module}.weight_packed"] = packed(codes, bits)
            tensors[f"{module}.weight_shape"] = torch.tensor(shape)
            tensors[scale] = tensors[scale].to(torch.bfloat16)
            exact[module] = codes * tensors[scale].float()

    def config(quantization):
        pack_quantized(quantization)
        for group in quantization["config_groups"].values():
            group["weights"].update(num_bits=bits, strategy="channel", group_size=-1)

    model = rewritten(saved, "int8", tmp_path, change, config)
    for i, block in enumerate(model.blocks):
        assert torch.equal(block.attention.o_proj.weight.dequantize(), exact[f"model.layers.{i}.self_attn.o_proj"])
        assert torch.equal(block.mlp.down_proj.weight.dequantize(), exact[f"model.layers.{i}.mlp.down_proj"])


def test_one_scale_a_tensor_of_integers(saved, tmp_path):
    def change(tensors):
        for name in [n for n in tensors if n.endswith(".weight_scale")]:
            tensors[name] = torch.tensor([0.01])

    model = rewritten(saved, "int8", tmp_path, change, lambda q: each(q, "weights", strategy="tensor"))
    codes = load_file(tmp_path / "model.safetensors")[f"{NAME}.weight"]
    assert torch.equal(model.blocks[1].attention.o_proj.weight.dequantize(), codes * torch.tensor(0.01))


def each(quantization, inside=None, **changes):
    for group in quantization["config_groups"].values():
        (group[inside] if inside else group).update(changes)


READ = {  # how it differs from ours -> (scheme, tensors, config); the weights are the same
    "actorder in the weights alone": ("int4-g32", None, lambda q: each(q, "weights", actorder="weight")),
    "ignore by pattern": ("int4-g32", None, lambda q: q.update(ignore=["re:.*lm_head", "re:visual.*"])),
    "scales of the KV cache": (
        "int8",
        lambda t: t.update({f"model.layers.{i}.self_attn.{n}": torch.tensor([0.1]) for i in (0, 1)
                            for n in ("k_scale", "v_scale", "k_zero_point", "v_proj.output_scale")}),
        lambda q: q.update(kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}),
    ),
    "scales of activations": (
        "fp8-tensor",
        lambda t: t.update({f"{NAME}.input_scale": torch.tensor([0.1])}),
        lambda q: each(q, input_activations={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}),
    ),
    "a group of attention, without weights": (
        "int8", None,
        lambda q: q["config_groups"].update(kv={"targets": ["re:.*self_attn$"], "weights": None, "format": None,
                                                "input_activations": {"num_bits": 8, "type": "float"}}),
    ),
    "rotations that are in the weights": (
        "int8", None,
        lambda q: q.update(transform_config={"config_groups": {"R1": {"apply": [{"location": "weight_output"}]}}}),
    ),
    "nothing transformed, nothing sparse": ("int8", None, lambda q: q.update(transform_config={}, sparsity_config={})),
    "its format said once": ("int4-g32", None, lambda q: (q.update(format="pack-quantized"), each(q, format=None))),
}  # fmt: skip


@pytest.mark.parametrize("what", READ)
def test_what_says_nothing_of_weights_is_passed_over(saved, tmp_path, what):
    scheme, tensors, config = READ[what]
    model = rewritten(saved, scheme, tmp_path, tensors, config)
    assert torch.equal(window_logits(model, TOKENS), saved(scheme)[1])


def test_groups_that_name_their_modules_differently(saved, tmp_path):
    """One by name, one by pattern, one by class; the first that fits, in this order, whatever theirs is in the file."""
    four = load_file(saved("int4-g32")[0] / "model.safetensors")
    wanted = [f"model.layers.{i}.mlp.down_proj" for i in (0, 1)]

    def change(tensors):
        for module in wanted:
            del tensors[f"{module}.weight"]
            tensors.update({n: t for n, t in four.items() if n.startswith(f"{module}.")})

    def config(quantization):
        (eight,) = quantization["config_groups"].values()
        weights = eight["weights"] | {"num_bits": 4, "strategy": "group", "group_size": 32}
        first, second = ({**eight, "format": "pack-quantized", "weights": weights} for _ in range(2))
        first["targets"], second["targets"] = [r"re:.*layers\.0\.mlp\.down_proj$"], ["model.layers.1.mlp.down_proj"]
        quantization.update(config_groups={"all": eight, "a": first, "b": second}, format="mixed-precision")

    model = rewritten(saved, "int8", tmp_path, change, config)
    plain, other = (checkpoint.load_model(saved(scheme)[0], "float32") for scheme in ("int8", "int4-g32"))
    for i, block in enumerate(model.blocks):
        for name, source in (("mlp.down_proj", other), ("mlp.gate_up_proj", plain), ("attention.o_proj", plain)):
            want = source.blocks[i].get_submodule(name).weight.dequantize()
            assert torch.equal(block.get_submodule(name).weight.dequantize(), want)


ORDER = torch.arange(64, dtype=torch.int32) % 2


def in_order(quantization):
    each(quantization, "weights", actorder="group")


REFUSED = {  # what it is -> (scheme, tensors, config, message)
    "an order that the config does not speak of": (
        "int4-g32", lambda t: t.update({f"{NAME}.weight_g_idx": ORDER}), None, r'o_proj.weight_g_idx .* "group"',
    ),
    "an order of other groups": (
        "int4-g32", lambda t: t.update({f"{NAME}.weight_g_idx": ORDER * 3}), in_order, "does not allot 32 columns",
    ),
    "an order of groups that are not equal": (
        "int4-g32", lambda t: t.update({f"{NAME}.weight_g_idx": ORDER * ORDER.roll(7)}), in_order, "does not allot 32",
    ),
    "an order of too few columns": (
        "int4-g32", lambda t: t.update({f"{NAME}.weight_g_idx": ORDER[:-1]}), in_order, "one whole number for each",
    ),
    "an order of fractions": (
        "int4-g32", lambda t: t.update({f"{NAME}.weight_g_idx": ORDER / 2}), in_order, "one whole number for each",
    ),
    "an order of negative groups": (
        "int4-g32", lambda t: t.update({f"{NAME}.weight_g_idx": ORDER - 2}), in_order, "does not allot 32",
    ),
    "orders that differ where matrices are multiplied as one": (
        "int4-g32", lambda t: t.update({"model.layers.0.self_attn.q_proj.weight_g_idx": ORDER}), in_order,
        'in different orders .*; they are multiplied as one, so quantize them with actorder "weight"',
    ),
    "2:4 in marlin's layout": ("int4-g32", None, lambda q: each(q, format="marlin-24"), "'marlin-24' are not supp"),
    "8-bit microscaling": ("fp8", None, lambda q: each(q, format="mxfp8-quantized"), "'mxfp8-quantized' are not"),
    "weights that are not rounded yet": ("int8", None, lambda q: (q.update(format="dense"), each(q, format=None)),
                                         "format 'dense' are not supported"),
    "sparse bit masks": ("fp8", None, lambda q: q.update(sparsity_config={"format": "sparse-24-bitmask"}),
                         "'sparse-24-bitmask' are not supported; save the model without"),
    "rotations while it runs": (
        "int8", None,
        lambda q: q.update(transform_config={"config_groups": {"R3": {"apply": [{"location": "q_attn"}]}}}),
        "rotated while it runs",
    ),
    "transforms that nobody can read": ("int8", None, lambda q: q.update(transform_config=[1]), "rotated while it run"),
    "activations alone": ("int8", None, lambda q: each(q, weights=None), "rounds activations alone"),
    "8-bit zero points that are not packed": (
        "int8-g32-asym", lambda t: (keep := t[f"{NAME}.weight_zero_point"].clone(), pack_all(t),
                                    t.update({f"{NAME}.weight_zero_point": keep})),
        pack_quantized, "o_proj.weight_zero_point has shape",
    ),
    "5 bits": ("int8", None, lambda q: each(q, "weights", num_bits=5), "not supported"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_is_named(saved, tmp_path, what):
    scheme, tensors, config, message = REFUSED[what]
    with pytest.raises(CheckpointError, match=message):
        rewritten(saved, scheme, tmp_path, tensors, config)


def test_asymmetric_weights_with_activations_are_multiplied_rightly(saved, tmp_path):
    """The kernel of int8 times int8 knows no zero points."""
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    rewritten(saved, "int8-asym", tmp_path, None, lambda q: each(q, input_activations=inputs))
    kernels = checkpoint.load_model(tmp_path, "auto")
    assert (window_logits(kernels, TOKENS) - saved("int8-asym")[1]).norm() < 0.02 * saved("int8-asym")[1].norm()
