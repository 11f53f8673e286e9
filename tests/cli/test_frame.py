"""Promise: every command has help that is true, and ends as a command should, however it ends."""

from __future__ import annotations

import errno
import json
import re
import shlex
import shutil
import subprocess
import sys
import warnings

import pytest

import minillm.analysis
from minillm import checkpoint, cli
from minillm.cli import common
from minillm.generate import generate
from minillm.sampling_params import SamplingParams
from tests.cli.models import change_config, generate_command, one_line


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda c: c.__name__)
def test_help_has_examples_and_they_parse(run, command):
    name = command.__name__.rpartition(".")[2]
    shown = run(name, "--help")
    assert "examples:" in shown
    assert "--debug" in shown
    for line in command.EXAMPLES.strip().splitlines():
        words = shlex.split(line.rpartition(" | ")[2])
        assert words[:3] == ["python", "-m", "minillm"]
        args = cli._parser().parse_args(words[3:])
        assert args.run is command.run
        assert line in shown


def test_help_lists_every_command_and_nothing_prints_it_too(run):
    shown = run("--help")
    for command in (
        "demo",
        "chat",
        "generate",
        "tokenize",
        "serve",
        "load",
        "bench",
        "quality",
        "quantize",
        "train_eagle",
        "size",
        "doctor",
    ):
        assert re.search(rf"\n    {command}\s", shown)  # argparse puts what a long name does on the next line
    assert run(code=2) == shown


def test_help_imports_neither_torch_nor_numpy():
    code = (
        "import sys; from minillm.cli import main; main(['chat', '--help']); print({'torch', 'numpy'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("set()")


def test_version(run):
    assert run("--version") == f"minillm {minillm.__version__}\n"


def test_ctrl_c_is_130(monkeypatch, capsys, options):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(common, "load", interrupt)
    assert cli.main(["generate", "x", *options]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error():
    process = subprocess.Popen(
        [sys.executable, "-m", "minillm", "size", "--list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_fault_of_our_own_keeps_its_traceback(monkeypatch, options):
    def break_(args):
        raise RuntimeError("a bug")

    monkeypatch.setattr(common, "load", break_)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["generate", "x", *options])


def test_warnings_are_one_line(monkeypatch, capsys, options, loaded):
    def warn(args):
        warnings.warn("the disk is full", stacklevel=1)
        return loaded

    monkeypatch.setattr(common, "load", warn)
    assert cli.main(["generate", "the", "--max-tokens", "1", *options]) == 0
    assert capsys.readouterr().err == "minillm: warning: the disk is full\n"


def test_the_real_command_with_the_default_model(smollm2_path, smollm2):
    """What the README tells a newcomer to type."""
    command = [sys.executable, "-m", "minillm", "generate", "The capital of France is", "--max-tokens", "8"]
    done = subprocess.run(
        [*command, "--temperature", "0", "--dtype", "float32", "--json"], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    values = json.loads(done.stdout)
    expected = generate(*smollm2, "The capital of France is", SamplingParams(temperature=0, max_tokens=8))
    assert values["token_ids"] == expected.token_ids
    assert "Paris" in values["text"]


def test_debug_shows_the_traceback(capsys, folder, tmp_path):
    broken = shutil.copytree(folder, tmp_path / "broken")
    change_config(broken, hidden_size=0)
    assert cli.main([str(a) for a in generate_command(broken, "--debug")]) == 2
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
    def denied(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", "some/file")

    monkeypatch.setattr(checkpoint, "load", denied)
    assert "some/file" in refused(*generate_command(folder))
