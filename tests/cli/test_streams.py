"""Promise: a command ends as it should whatever its streams are: closed, full, or poor in characters."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from minillm.cli import streams
from minillm.generate import Completion
from minillm.sampling import SampledToken
from tests.cli import models
from tests.cli.models import one_line, strict


def command(words, redirections="", stdin=b"", **environment):
    """Runs the real command with a shell's redirections, such as ">&-"."""
    environment = {**{k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}, **environment}
    words = [sys.executable, "-m", "minillm", *map(str, words)]
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirections}', "sh", *words],
        input=stdin, capture_output=True, env=environment, timeout=120,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokenize(folder):
    return ["tokenize", "--model", folder]


@pytest.mark.parametrize("words", [["the cat"], ["the cat", "--json"], ["--help"]])
def test_a_closed_stdout_is_a_pipe_that_nobody_reads(tokenize, words):
    done = command([*tokenize, *words], ">&-")
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_closed_stdout_does_not_swallow_an_error(tokenize):
    done = command([*tokenize, "x", "--no-such-option"], ">&-")
    assert done.returncode == 2
    one_line(done.stderr.decode())


def test_a_closed_stdin_is_an_empty_one(tokenize, folder):
    done = command([*tokenize, "-"], "<&-")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"0 tokens" in done.stdout
    done = command(["generate", "-", "--model", folder], "<&-")
    assert "the prompt is empty" in one_line(done.stderr.decode())


def test_a_conversation_without_stdin_ends_at_once(folder):
    done = command(["chat", "--model", folder, "--dtype", "float32"], "<&-")
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr


def test_with_stderr_closed_an_error_is_not_mixed_into_the_result():
    done = command(["size", "nothing-of-the-kind"], "2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (2, b"", b"")


def test_with_every_stream_closed(tokenize):
    assert command([*tokenize, "-"], "<&- >&- 2>&-").returncode == 141
    assert command(["size", "nothing-of-the-kind"], "<&- >&- 2>&-").returncode == 2


def test_no_file_takes_the_place_of_a_closed_stream():
    """A file that got descriptor 1 would receive what a library prints."""
    code = "from minillm.cli import streams; streams.mend(); f = open(__file__); raise SystemExit(f.fileno() <= 2)"
    program = f"import sys; __file__ = sys.executable; {code}"
    assert subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program]).returncode == 0


def test_a_full_disk_behind_stdout(tokenize):
    if not os.path.exists("/dev/full"):
        return  # this system has no device that is always full
    done = command([*tokenize, "the cat"], ">/dev/full")
    assert done.returncode == 2
    assert "No space left on device" in one_line(done.stderr.decode())


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "ascii", "utf-8", "utf-16"])
def test_a_narrow_encoding_of_the_output(tokenize, encoding):
    """What it lacks is written out."""
    for words in (["你好 ½"], ["--help"]):
        done = command([*tokenize, *words], PYTHONIOENCODING=encoding, PYTHONUTF8="0")
        assert (done.returncode, done.stderr) == (0, b"")
        shown = done.stdout.decode(encoding)
        assert words == ["--help"] or ("你" in shown) == encoding.startswith("utf") or r"\x" in shown


def test_a_narrow_encoding_of_an_answer(folder):
    """A random model at a high temperature says anything."""
    for words in (["generate", "你好", "--max-tokens", 12], ["chat", "--message", "你好", "--max-tokens", 12]):
        done = command([*words, "--model", folder, "--dtype", "float32", "--temperature", 2], PYTHONIOENCODING="ascii")
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.isascii()


def test_an_error_in_a_narrow_encoding():
    done = command(["size", "你好"], PYTHONIOENCODING="ascii:strict")
    assert done.returncode == 2
    assert r"\u4f60\u597d" in one_line(done.stderr.decode("ascii"))


def test_half_a_surrogate_pair_can_be_printed():
    code = "from minillm.cli import streams; streams.mend(); print(chr(0xdce9), chr(0x4f60))"
    for encoding in ("utf-8", "ascii:surrogateescape"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding}
        )
        assert done.stdout.startswith(rb"\udce9 ")


def test_streams_that_work_are_left_alone():
    before = sys.stdin, sys.stdout, sys.stderr
    streams.mend()
    assert all(a is b for a, b in zip(before, (sys.stdin, sys.stdout, sys.stderr), strict=True))


def test_json_has_no_word_for_infinity(monkeypatch, run, options):
    """A token whose logit is -inf has that log-probability; a program that reads strict JSON gets null."""
    from minillm import generate

    tokens = [
        SampledToken(5, float("-inf"), ((5, float("-inf")), (7, float("nan")))),
        SampledToken(6, -0.5, ((6, -0.5),)),
    ]
    answer = Completion([1], tokens=tokens, text="x", finish_reason="length", token_times=[0.1, float("inf")])
    monkeypatch.setattr(generate, "generate_n", lambda *_: [answer])
    values = strict(run("generate", "the", "--json", "--logprobs", 2, *options))
    assert values["logprobs"][0] == {"token_id": 5, "logprob": None, "top": [[5, None], [7, None]]}
    assert values["logprobs"][1]["logprob"] == -0.5


def test_the_json_of_every_command_is_strict(run, options, folder, machine):
    strict(run("size", "--list", "--json"))
    strict(run("size", folder, "--json"))
    strict(run("tokenize", "the cat", "--model", folder, "--json"))
    strict(run("generate", "the cat", "--logprobs", 5, "--n", 2, "--max-tokens", 1, "--json", *options))
    strict(run("chat", "--message", "the cat", "--max-tokens", 1, "--json", *options))
    strict(run("demo", "--max-tokens", 1, "--json", *options))
    sizes = ["--prompt-tokens", 4, "--output-tokens", 2, "--prefill-tokens", 8, "--rounds", 1]
    strict(run("bench", *sizes, "--json", "--model", models.save(folder.parent / "copy"), "--dtype", "float32"))
    strict(run("doctor", "--json"))
