"""Fixtures of the tests of the command line."""

from __future__ import annotations

import pytest

import minillm.analysis
from minillm import checkpoint, cli
from tests import gguf_files, tiny
from tests.cli import models
from tests.cli.models import MACHINE, one_line


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny random Llama with a tokenizer and a chat template. Not to be changed."""
    return models.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def loaded(folder):
    return checkpoint.load(folder, "float32")


@pytest.fixture
def options(folder):
    return ["--model", str(folder), "--dtype", "float32", "--device", "cpu"]


@pytest.fixture(scope="session")
def whole_gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tiny.write_tokenizer(path.parent)
    gguf_files.write(path, tiny.make("llama"), path.parent / "tokenizer.json")
    return path


@pytest.fixture
def run(capsys):
    """Runs a command in this process; it must succeed, and stderr must be empty. Returns stdout."""

    def run(*arguments, code=0) -> str:
        capsys.readouterr()
        assert cli.main([str(a) for a in arguments]) == code
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return run


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


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Measuring the real one takes seconds."""
    (tmp_path / "ceilings-cpu.json").write_text("{}")
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    monkeypatch.setattr(minillm.analysis, "this_machine", lambda device, refresh=False: MACHINE)
    monkeypatch.setattr(minillm.analysis, "measure", lambda device: MACHINE)
