"""Promise: a request that cannot be served is told in one line that names the value and what would be accepted."""

from __future__ import annotations

import io
import shutil
import sys

import pytest
import torch

import minillm.analysis
from tests.cli import models
from tests.cli.models import change_config, generate_command


@pytest.fixture
def folder(folder, tmp_path):
    """A copy of the tiny model, to be damaged."""
    return shutil.copytree(folder, tmp_path / "model")


def test_empty_prompt(refused, folder):
    assert "the prompt is empty" in refused(*generate_command(folder, prompt=""))
    line = refused("generate", "--prompt-ids", "", "--model", folder, "--dtype", "float32")
    assert "the prompt is empty" in line


def test_prompt_longer_than_the_context(refused, folder):
    line = refused(*generate_command(folder, prompt="the cat " * 1000))
    assert "the model's context is 512" in line
    assert "shorten the prompt" in line
    line = refused("chat", "--message", "the cat " * 1000, "--model", folder, "--dtype", "float32")
    assert "the context holds 512" in line


@pytest.mark.parametrize("data", [b"\xff\xfe", b"a\xc3"])
def test_stdin_that_is_not_utf8(monkeypatch, refused, folder, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert "stdin is not UTF-8" in refused(*generate_command(folder, prompt="-"))


def test_half_a_surrogate_pair(refused, folder):
    """What Python makes of an argument that is not UTF-8."""
    assert "surrogate" in refused(*generate_command(folder, prompt="caf\udce9"))
    assert "surrogate" in refused("tokenize", "caf\udce9", "--model", folder)


@pytest.mark.parametrize("ids", ["320", "-1", "1,2,99999999999999999999"])
def test_prompt_id_out_of_range(refused, folder, ids):
    line = refused("generate", f"--prompt-ids={ids}", "--model", folder, "--dtype", "float32")
    assert f"prompt token {ids.rpartition(',')[2]} is not an id of this vocabulary" in line


@pytest.mark.parametrize("ids", ["a", "1;2", "1.5"])
def test_prompt_ids_that_are_no_ids(refused, ids):
    assert repr(ids) in refused("generate", "--prompt-ids", ids)


def test_one_prompt_and_one_only(refused):
    assert "give one prompt" in refused("generate")
    assert "give one prompt" in refused("generate", "x", "--prompt-ids", "1")


BAD_VALUES = {
    "--temperature": ["-1", "nan", "inf", "x"],
    "--top-k": ["-2", "1.5"],
    "--top-p": ["0", "-0.5", "1.01", "nan"],
    "--min-p": ["-0.1", "2", "nan"],
    "--repetition-penalty": ["0", "-1", "nan", "inf"],
    "--presence-penalty": ["-2.5", "3", "nan"],
    "--frequency-penalty": ["-2.5", "3", "nan"],
    "--max-tokens": ["0", "-1", "x"],
    "--min-tokens": ["-1", "1000"],
    "--seed": ["99999999999999999999", "x"],
    "--n": ["0", "-1"],
    "--logprobs": ["-1", "21", "1"],
    "--stop": [""],
    "--stop-token-id": ["-1", "x"],
    "--logit-bias": ["5", "5=x", "x=1", "5=nan", "5=101", "-1=1"],
    "--threads": ["0", "-1", "x", "100000"],
    "--dtype": ["int3"],
    "--device": ["tpu"],
}


@pytest.mark.parametrize(("flag", "value"), [(flag, value) for flag, values in BAD_VALUES.items() for value in values])
def test_bad_value(refused, flag, value):
    """Refused before a model is loaded: none is given, and none is looked for."""
    line = refused("generate", "x", "--model", "/no/such/model", f"{flag}={value}")
    assert "/no/such/model" not in line
    name = flag.removeprefix("--").replace("-", "_")
    assert flag in line or name in line


@pytest.mark.parametrize(
    ("flags", "named"), [(["--stop-token-id", 320], "stop_token_ids id is 320"), (["--logit-bias", "320=1"], "320")]
)
def test_token_id_out_of_range(refused, folder, flags, named):
    """The tokenizer knows 278 ids, and the model has rows for 320: only those that both have can be drawn or told."""
    line = refused(*generate_command(folder, *flags))
    assert named in line
    assert "below the vocabulary size, 278" in line


def test_cuda_where_there_is_none(monkeypatch, refused, folder):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in refused(*generate_command(folder, "--device", "cuda"))


def test_a_cache_larger_than_memory(refused, folder):
    change_config(folder, max_position_embeddings=(1 << 31) - 1, num_hidden_layers=3)
    line = refused(*generate_command(folder, "--max-tokens", (1 << 31) - 100))
    assert "memory" in line
    line = refused("chat", "--message", "x", "--context", (1 << 31) - 1, "--model", folder, "--dtype", "float32")
    assert "memory" in line


@pytest.mark.parametrize("command", [["generate", "x"], ["tokenize", "x"], ["chat", "--message", "x"]])
@pytest.mark.parametrize(
    ("model", "named"),
    [("", "the model's name is empty"), ("~nobodyxyz/x", "home folder of ~nobodyxyz"), ("x" * 5000, "xxx")],
)
def test_a_model_without_a_name_or_a_home(refused, command, model, named):
    line = refused(*command, "--model", model)
    assert named in line
    assert len(line) < 1200


def test_chat_json_needs_a_message(refused):
    assert "add --message" in refused("chat", "--json")


@pytest.mark.parametrize(
    "words",
    [
        ["no-such-command"],
        ["x" * 5000],
        ["tokenize", "x", "a\nb\x1b[1m" * 999],
        ["generate", "x", "--no-such-flag"],
        ["generate", "x", "y"],
        ["tokenize"],
        ["--nothing"],
    ],
)
def test_wrong_usage(refused, words):
    assert "--help" in refused(*words)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["Llama-9-8B"], "'Llama-9-8B'"),
        (["missing/config.json"], "missing/config.json"),
        (["missing.gguf"], "missing.gguf"),
        ([], "config.json"),
        (["Llama-3-8B", "--gpu", "h900"], "'h900'"),
        (["Llama-3-8B", "--weights", "int9"], "'int9'"),
        (["Llama-3-8B", "--kv", "nothing"], "'nothing'"),
        (["Llama-3-8B", "--tokens", "0"], "tokens is 0"),
        (["Llama-3-8B", "--sequences", "-1"], "sequences is -1"),
        (["Llama-3-8B", "--tp", "0"], "tensor_parallel is 0"),
        (["Llama-3-8B", "--tokens", "x"], "--tokens"),
        (["Llama-3-8B", "--sequences", "9" * 400], "sequences is 999"),
        (["Llama-3-8B", "--tokens", "9" * 5000], "--tokens"),
        (["Llama-3-8B", "--weights", "int4-g" + "9" * 5000], "int4-g999"),
        (["Llama-3-8B", "--tp", "3"], "must divide the model's 32 attention heads"),
        (["Llama-3-8B", "--tp", "1000"], "must divide the model's 32 attention heads"),
        (["Llama-3-8B", "--gpu", "x" * 5000], "no device called"),
        (["x" * 5000], "no model called"),
        (["x" * 5000 + ".json"], "xxx"),
        (["x" * 5000 + ".gguf"], "xxx"),
        ([""], "config.json"),
        (["  "], "config.json"),
        (["~nobodyxyz/x"], "the home folder of ~nobodyxyz is not known"),
    ],
)
def test_size(refused, words, named):
    line = refused("size", *words)
    assert named in line
    assert len(line) < 1200
    assert named in refused("size", *words, "--json")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--rounds", 0], "rounds is 0"),
        (["--output-tokens", -1], "output is -1"),
        (["--prefill-tokens", 512], "513 tokens"),
        (["--compare", "vllm"], "vllm"),
    ],
)
def test_bench(refused, folder, words, named):
    assert named in refused("bench", "--model", folder, "--dtype", "float32", *words)


def test_bench_without_transformers(monkeypatch, refused, folder):

    monkeypatch.setattr(minillm.analysis, "measure", lambda device: models.MACHINE)
    monkeypatch.setitem(sys.modules, "transformers", None)
    sizes = ["--prompt-tokens", 4, "--output-tokens", 2, "--prefill-tokens", 8]
    line = refused("bench", "--model", folder, "--dtype", "float32", "--compare", "transformers", *sizes)
    assert "pip install transformers" in line
