"""Promise: a damaged model is told in one line that names the file and the remedy."""

from __future__ import annotations

import json
import shutil
import struct

import pytest
import safetensors.torch
import torch

from minillm import cli
from minillm.config import FIELD_NAMES, SUPPORTED, ModelConfig
from minillm.errors import ConfigError
from tests.cli.models import change_config, generate_command, one_line


@pytest.fixture
def folder(folder, tmp_path):
    """A copy of the tiny model, to be damaged."""
    return shutil.copytree(folder, tmp_path / "model")


def test_the_sound_models_run(capsys, folder, whole_gguf):
    """Or the tests below would prove nothing."""
    for model in (folder, whole_gguf):
        assert cli.main([str(a) for a in generate_command(model)]) == 0


def test_missing_gguf(refused, tmp_path):
    line = refused(*generate_command(tmp_path / "none.gguf"))
    assert "none.gguf" in line
    assert "no such file" in line


@pytest.mark.parametrize("share", [0, 0.0005, 0.01, 0.1, 0.5, 0.999])
def test_truncated_gguf(refused, tmp_path, whole_gguf, share):
    data = whole_gguf.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: int(len(data) * share)])
    line = refused(*generate_command(path))
    assert "cut.gguf" in line
    assert "download it again" in line


def test_bit_flips_are_refused_or_harmless(capsys, tmp_path, whole_gguf):
    """In the header, where sizes and offsets are: no traceback, whatever the bit."""
    data = bytearray(whole_gguf.read_bytes())
    path = tmp_path / "flip.gguf"
    codes = []
    for position in range(0, 1200, 13):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        codes.append(cli.main([str(a) for a in generate_command(path)]))
        captured = capsys.readouterr()
        assert codes[-1] in (0, 2)
        if codes[-1]:
            one_line(captured.err)
    assert codes.count(2) > 10


def test_unsupported_gguf_architecture(refused, tmp_path, whole_gguf):
    path = tmp_path / "falcon.gguf"
    path.write_bytes(whole_gguf.read_bytes().replace(b"llama", b"lemma"))
    line = refused(*generate_command(path))
    assert "'lemma' is not supported" in line
    assert "llama, qwen2" in line


def test_unsupported_gguf_tensor_type(refused, tmp_path, whole_gguf):
    """F64 in place of F32 in the table of tensors."""
    data = whole_gguf.read_bytes()
    name = b"output_norm.weight"
    at = data.index(name) + len(name) + 4 + 8  # number of dimensions, one dimension, then the type
    path = tmp_path / "f64.gguf"
    path.write_bytes(data[:at] + struct.pack("<I", 28) + data[at + 4 :])
    line = refused(*generate_command(path))
    assert "tensor type F64 is not supported" in line
    assert "Q4_K" in line


def first_shard(folder):
    return sorted(folder.glob("*.safetensors"))[0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: struct.pack("<Q", 1 << 60) + data[8:],
        lambda data: data[:8] + b"\xff" * 20 + data[28:],
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"not a safetensors file at all",
    ],
    ids=["length", "json", "half", "empty", "text"],
)
def test_corrupt_safetensors(refused, folder, damage):
    shard = first_shard(folder)
    shard.write_bytes(damage(shard.read_bytes()))
    line = refused(*generate_command(folder))
    assert shard.name in line
    assert "download it again" in line


def test_missing_shard(refused, folder):
    shard = first_shard(folder)
    shard.unlink()
    line = refused(*generate_command(folder))
    assert shard.name in line
    assert "missing" in line


def test_pickled_weights_are_not_read(refused, folder):
    for path in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert "does not read pickled weights" in refused(*generate_command(folder))


def test_unsupported_tensor_type(refused, folder):
    for shard in folder.glob("*.safetensors"):
        tensors = safetensors.torch.load_file(shard)
        safetensors.torch.save_file({name: t.to(torch.int8) for name, t in tensors.items()}, shard)
    line = refused(*generate_command(folder))
    assert "stored as I8" in line
    assert str(folder) in line


IMPOSSIBLE = [
    {"hidden_size": 0},
    {"hidden_size": -48},
    {"hidden_size": 1 << 40},
    {"hidden_size": 1 << 30},
    {"hidden_size": "many"},
    {"hidden_size": 48.5},
    {"num_hidden_layers": 10**9},
    {"num_hidden_layers": None},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 0},
    {"head_dim": 15},
    {"vocab_size": 0},
    {"vocab_size": (1 << 31) - 1},
    {"rms_norm_eps": "NaN"},
    {"intermediate_size": True},
    {"model_type": "qwen3", "layer_types": ["full_attention"]},
    {"model_type": "qwen3", "layer_types": 3},
    {"rope_parameters": {"rope_type": "unheard-of", "rope_theta": 1e4}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
    {"rope_parameters": 3},
    {"rope_parameters": {"rope_type": "linear", "factor": "x"}},
    {"rope_parameters": {"rope_type": "linear", "factor": 0}},
    {"max_position_embeddings": -1},
    {"num_attention_heads": 0},
]


@pytest.mark.parametrize("changes", IMPOSSIBLE, ids=str)
def test_impossible_config(refused, folder, changes):
    change_config(folder, **changes)
    assert str(folder) in refused(*generate_command(folder))


WRONG = [None, True, -1, 0, 1 << 70, 1.5, float("nan"), "x", [], ["x"], {}, {"a": 1}]


def test_no_field_of_a_config_can_break_the_reader(folder):
    """Every field with every kind of wrong value, for every family: a ModelConfig or a ConfigError."""
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "sliding_window": 8, "layer_types": None}
    raw |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "original_max_position_embeddings": 64}
    others = ("rope_scaling", "n_routed_experts", "num_local_experts", "max_window_layers", "sliding_window_pattern",
              "use_sliding_window", "text_config")  # fmt: skip
    messages = []
    for model_type in SUPPORTED:
        for name in {*FIELD_NAMES, *raw, *others}:
            for value in WRONG:
                try:
                    ModelConfig.from_dict({**raw, "use_sliding_window": True, "model_type": model_type, name: value})
                except ConfigError as error:
                    messages.append(str(error))
    assert len(messages) > 1000
    assert not any("\n" in message for message in messages)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\x00\x01", "[" * 100_000], ids=lambda t: repr(t[:4]))
def test_a_config_that_is_no_config(refused, folder, text):
    (folder / "config.json").write_text(text)
    assert "config.json" in refused(*generate_command(folder))
    assert "config.json" in refused("size", folder)


@pytest.mark.parametrize("model_type", ["bert", None, "", 7, ["llama"], "gpt_oss"])
def test_unsupported_architecture(refused, folder, model_type):
    change_config(folder, model_type=model_type, num_local_experts=4, num_experts_per_tok=1)
    assert f"model_type {model_type!r}" in refused(*generate_command(folder))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": {"type": "Unigram"}}'])
def test_damaged_tokenizer(refused, folder, text):
    (folder / "tokenizer.json").write_text(text)
    assert "tokenizer.json" in refused(*generate_command(folder))
    assert "tokenizer.json" in refused("tokenize", "x", "--model", folder)


def test_no_tokenizer(refused, folder):
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json" in refused("tokenize", "x", "--model", folder)


def test_no_chat_template(refused, folder):
    (folder / "chat_template.jinja").unlink()
    line = refused("chat", "--message", "hello", "--model", folder, "--dtype", "float32")
    assert "no chat template" in line


def test_a_chat_template_that_fails(refused, folder):
    (folder / "chat_template.jinja").write_text("{{ messages[9].content.nothing }}")
    assert "chat template failed" in refused("chat", "--message", "x", "--model", folder, "--dtype", "float32")


def test_a_folder_name_cannot_write_to_the_terminal(refused, tmp_path):
    line = refused(*generate_command(tmp_path / "a\nb\x1b[2Jc.gguf"))
    assert "\\x1b[2Jc.gguf" in line
