"""Promise: a layout changes how a matrix is stored, and its product by no more than the rounding it names."""

from __future__ import annotations

import datetime
import json

import pytest
import torch

from minillm import checkpoint, packing, storage
from minillm.errors import CheckpointError
from minillm.kv_cache import NoCache
from minillm.layers import Linear, SwiGLU
from minillm.packing import Choice, GroupedInt4, PackedLinear, available, choose_layouts, linear_maker, stack_rows
from tests import tiny

# relative error of one product: half a unit in the last place of the weights, and of x where the layout rounds x
ROUNDING = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3, "int4": 8e-3}


def grouped(rows=64, columns=96, seed=0):
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), generator=g, dtype=torch.uint8)
    scale = torch.rand(rows, columns // 32, generator=g) / 50 + 0.001
    return GroupedInt4(codes, scale, -scale * 8 + torch.randn(rows, columns // 32, generator=g) / 100)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", available())
def test_products_equal_float64_to_the_layouts_rounding(name, rows, bias):
    weight = grouped()
    b = torch.randn(64) if bias else None
    x = torch.randn(rows, 96)
    expected = x.double() @ weight.dequantize().double().T + (0 if b is None else b.double())
    y = PackedLinear(weight, b, Choice(name, name if name != "int4" else "float16", 100))(x)
    assert y.dtype == torch.float32
    assert (y - expected).norm() < ROUNDING[name] * expected.norm()


def test_every_layout_of_this_cpu_is_found_by_multiplying():
    assert set(available()) <= set(packing.LAYOUTS)


def test_bytes_are_those_of_the_tensors():
    weight = grouped()
    for name in available():
        layout = packing.LAYOUTS[name](weight, None)
        bits = {"float32": 32, "float16": 16, "bfloat16": 16, "int4": 5}[name]
        assert layout.weight_bytes * 8 == bits * 64 * 96


def test_rows_choose_the_layout():
    if "int4" not in available():
        return  # nothing to choose between on this CPU
    layer = PackedLinear(grouped(), None, Choice("int4", "float16", 2))
    x = torch.randn(3, 96)
    assert torch.equal(layer(x[:2]), layer.few(x[:2]))
    assert torch.equal(layer(x), layer.many(x))


def test_stacking_keeps_codes_only_when_all_have_them():
    a, b = grouped(seed=1), grouped(rows=32, seed=2)
    both = stack_rows([a, b])
    assert isinstance(both, GroupedInt4)
    assert torch.equal(both.dequantize(), torch.cat([a.dequantize(), b.dequantize()]))
    mixed = stack_rows([a, b.dequantize()])
    assert torch.equal(mixed, both.dequantize())


def test_float16_refuses_what_it_cannot_hold():
    with pytest.raises(CheckpointError, match="exceeds 65504, the range of float16; load with --dtype float32"):
        packing.Float16(torch.full((16, 32), 1e5), None)


def test_the_choice_is_measured_once_and_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    calls = []
    measure = packing._measure
    monkeypatch.setattr(packing, "_measure", lambda int4: calls.append(int4) or measure(int4))
    first = choose_layouts(True)
    assert choose_layouts(True) == first
    assert calls == [True]
    assert first.many != "int4"


NOW = datetime.datetime.now(datetime.UTC)
GOOD = {"few": "float32", "many": "float32", "turn": 0, "date": NOW.isoformat(), "spread": 1.1}
OLD = (NOW - datetime.timedelta(hours=2)).isoformat()


@pytest.mark.parametrize(
    "value",
    [{}, {"few": "zz"}, {"many": "int4"}, {"few": ["float16"]}, {"many": {}}, {"turn": "1"}, {"turn": -1},
     {"turn": True}, {"turn": None}, {"few": "int4"}, {"date": "yesterday"}, {"date": None}, {"spread": "wide"},
     {"spread": 9.0, "date": OLD}],
)  # fmt: skip
def test_a_remembered_choice_that_cannot_be_believed_is_measured_again(tmp_path, monkeypatch, value):
    """The file holds the right key. Of these weights none is in 4-bit codes; the last was taken on a busy machine."""
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    monkeypatch.setattr(packing, "_measure", lambda int4: GOOD)
    assert choose_layouts(False) == Choice("float32", "float32", 0)
    (path,) = tmp_path.iterdir()
    damaged = {**GOOD, **value} if value else value
    path.write_text(json.dumps({**json.loads(path.read_text()), "value": damaged}))
    assert choose_layouts(False) == Choice("float32", "float32", 0)
    assert json.loads(path.read_text())["value"] == GOOD


def test_a_choice_of_a_busy_machine_holds_for_an_hour(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    calls = []
    monkeypatch.setattr(packing, "_measure", lambda int4: calls.append(int4) or {**GOOD, "spread": 9.0})
    assert choose_layouts(False) == choose_layouts(False)
    assert calls == [False]


def test_a_remembered_layout_that_this_cpu_lost_is_measured_again(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    values = [{**GOOD, "few": "bfloat16", "many": "float16", "turn": 4}, GOOD]
    monkeypatch.setattr(packing, "_measure", lambda int4: values.pop(0))
    monkeypatch.setattr(packing, "available", lambda: ["float32", "float16", "bfloat16"])
    assert choose_layouts(False) == choose_layouts(False) == Choice("bfloat16", "float16", 4)
    monkeypatch.setattr(packing, "available", lambda: ["float32", "float16"])
    assert choose_layouts(False) == Choice("float32", "float32", 0)


@pytest.mark.parametrize(
    ("seconds", "choice"),
    [
        ({"float32": (9, 9), "float16": (5, 9), "int4": (4.9, 99)}, ("float16", "float16", 0)),
        ({"float32": (9, 9), "float16": (5, 9), "int4": (3, 99)}, ("int4", "float16", 1)),
        ({"float32": (9, 9), "bfloat16": (20, 900), "int4": (3, 99)}, ("int4", "float32", 1)),
        ({"float32": (9, 900), "bfloat16": (9.5, 50)}, ("bfloat16", "bfloat16", 0)),
        ({"float32": (9, 9), "float16": (12, 12)}, ("float32", "float32", 0)),
    ],
)
def test_the_fastest_are_chosen(seconds, choice):
    """(one row, many rows) of each: 4 bits for few rows beside whatever is best for many, float32 included."""
    by_rows = {name: {r: one if r == 1 else many for r in packing.ROWS} for name, (one, many) in seconds.items()}
    assert packing._choose(by_rows) == choice


def test_codes_for_few_rows_beside_float32_for_many(monkeypatch):
    monkeypatch.setattr(packing, "choose_layouts", lambda int4: Choice("int4", "float32", 1))
    if "int4" not in available():
        return  # this CPU has no kernel for the pair
    make, name = linear_maker("auto", True)
    weight = grouped()
    layer, x = make([weight], None), torch.randn(3, 96)
    assert name == "int4 up to 1 rows, float32 above"
    assert torch.equal(layer(x), x @ weight.dequantize().T)
    assert layer.weight_bytes * 8 == 5 * 64 * 96


def test_an_unwritable_cache_costs_a_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "file" / "inside"))
    with pytest.warns(UserWarning, match="cannot be written"):
        assert storage.remembered("x.json", {"a": 1}, lambda: {"b": 2}) == {"b": 2}


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": {"a": 1}}', '{"key": {"a": 2}, "value": {"b": 9}}'])
def test_damaged_or_foreign_measurements_are_made_again(tmp_path, monkeypatch, damage):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    (tmp_path / "x.json").write_text(damage)
    assert storage.remembered("x.json", {"a": 1}, lambda: {"b": 2}) == {"b": 2}
    assert storage.remembered("x.json", {"a": 1}, lambda: {"b": 3}) == {"b": 2}  # and now it is kept


def test_a_failed_write_leaves_nothing(tmp_path):
    def fail(file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        storage.write_atomically(tmp_path / "deep" / "x", fail)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["auto", "float16", "bfloat16"])
def test_a_packed_model_is_the_model_to_its_rounding(tmp_path, dtype):
    """On families with biases too. KL to the exact model stays small on a random model of sharp attention."""
    tiny.save("llama-mha-bias", tmp_path)
    if dtype not in ("auto", *available()):
        with pytest.raises(CheckpointError, match="has no fast kernel on this CPU"):
            linear_maker(dtype, False)
        return
    exact, packed = checkpoint.load_model(tmp_path), checkpoint.load_model(tmp_path, dtype)
    tokens, positions = torch.arange(20), torch.arange(20)
    p = exact.logits(exact(tokens, positions, NoCache(exact.config))).log_softmax(-1)
    q = packed.logits(packed(tokens, positions, NoCache(packed.config))).log_softmax(-1)
    assert (p.exp() * (p - q)).sum(-1).mean() < 0.05


@torch.inference_mode()
def test_what_auto_changes_on_the_default_model_is_measured(smollm2, smollm2_path):
    """The loss that README states: mean KL to the exact model and agreement of the likeliest token, on real text."""
    from pydoc_data.topics import topics

    model, tokenizer = smollm2
    fast, _ = checkpoint.load(smollm2_path, "auto")
    ids = torch.tensor(tokenizer.encode(topics["lambda"] + topics["while"] + topics["with"])[:256])
    p = model.logits(model(ids, torch.arange(256), NoCache(model.config))).log_softmax(-1)
    cache, rows = packing_cache(fast), []
    for start in range(0, 256, 2):  # two rows at a time, as decode does, so that the layout for few rows runs
        rows.append(fast.logits(fast(ids[start : start + 2], torch.arange(start, start + 2), cache)))
    q = torch.cat(rows).log_softmax(-1)
    assert (p.exp() * (p - q)).sum(-1).mean() < 5e-3
    assert (p.argmax(-1) == q.argmax(-1)).float().mean() > 0.96


def packing_cache(model):
    from minillm.kv_cache import ContiguousCache

    return ContiguousCache(model.config, 256)


@pytest.mark.parametrize(("few", "many"), [("int4", "bfloat16"), ("int4", "float16"), ("float32", "bfloat16")])
@pytest.mark.parametrize("hidden", [64, 72])
def test_the_feed_forward_layer_rounds_only_what_its_matrices_round(few, many, hidden):
    """In any mix of layouts, one of which a matrix of 72 rows cannot have: the type of x, and the error of the layers
    alone, within what one more rounding of the hidden values adds."""
    if {few, many} - set(available()):
        pytest.skip("this CPU has no kernel for one of these layouts")
    generator = torch.Generator().manual_seed(0)

    def weight(rows, columns):
        codes = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
        scale = torch.rand((rows, columns // packing.GROUP), generator=generator) / columns
        return GroupedInt4(codes, scale, -7.5 * scale)

    choice = Choice(few, many, 4)
    gate_up, down = weight(2 * 64, 64), weight(hidden, 64)
    layer = SwiGLU(PackedLinear(gate_up, None, choice), PackedLinear(down, None, choice))
    exact = SwiGLU(Linear(gate_up.dequantize()), Linear(down.dequantize()))
    for rows in (1, 4, 5, 40):
        x = torch.randn(rows, 64, generator=generator)
        y, wanted = layer(x), exact(x)
        assert y.dtype == torch.float32
        assert (y - wanted).norm() < 0.02 * wanted.norm()
