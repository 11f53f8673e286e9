"""Promise: generate and tokenize print what the library computes, in a form for people and for programs."""

from __future__ import annotations

import io
import json
import sys

import pytest

from minillm import cli
from minillm.cli import common
from minillm.generate import generate, generate_n
from minillm.sampling_params import SamplingParams


def test_generate_json_is_what_the_library_generates(run, options, loaded):
    values = json.loads(run("generate", "the cat sat", "--max-tokens", 12, "--temperature", 0, "--json", *options))
    expected = generate(*loaded, "the cat sat", SamplingParams(temperature=0, max_tokens=12))
    assert values["text"] == expected.text
    assert values["token_ids"] == expected.token_ids
    assert values["prompt_token_ids"] == expected.prompt_token_ids
    assert values["prompt_tokens"] == len(expected.prompt_token_ids)
    assert values["output_tokens"] == len(expected.token_ids)
    assert (values["finish_reason"], values["layout"], values["device"]) == ("length", "float32", "cpu")
    assert 0 < values["ttft_s"] < 60
    assert 0 < values["tpot_s"] < 60


def test_generate_streams_the_same_text(run, options, loaded):
    expected = generate(*loaded, "the dog", SamplingParams(temperature=0, max_tokens=20))
    assert run("generate", "the dog", "--max-tokens", 20, *options) == expected.text + "\n"


def test_generate_streams_piece_by_piece(monkeypatch, options):
    """Something is written before the last token is drawn."""
    writes = []
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys.stdout, "flush", lambda: writes.append(sys.stdout.getvalue()), raising=False)
    assert cli.main(["generate", "the dog", "--max-tokens", "20", *options]) == 0
    assert len({len(text) for text in writes}) > 5


def test_generate_reads_stdin(monkeypatch, run, options):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("the cät".encode())))
    from_stdin = json.loads(run("generate", "-", "--max-tokens", 4, "--json", *options))
    given = json.loads(run("generate", "the cät", "--max-tokens", 4, "--json", *options))
    assert from_stdin["token_ids"] == given["token_ids"]
    assert from_stdin["prompt_token_ids"] == given["prompt_token_ids"]


def test_generate_takes_ids(run, options, loaded):
    ids = loaded[1].encode("the cat")
    values = json.loads(run("generate", "--prompt-ids", ",".join(map(str, ids)), "--max-tokens", 4, "--json", *options))
    assert values["prompt_token_ids"] == ids
    assert values["token_ids"] == generate(*loaded, ids, SamplingParams(temperature=0, max_tokens=4)).token_ids


FLAGS = {
    "--max-tokens=7": {"max_tokens": 7},
    "--temperature=0.5": {"temperature": 0.5},
    "--top-k=3": {"top_k": 3},
    "--top-p=0.9": {"top_p": 0.9},
    "--min-p=0.1": {"min_p": 0.1},
    "--seed=-5": {"seed": -5},
    "--stop=a --stop=b": {"stop": ("a", "b")},
    "--stop-token-id=3 --stop-token-id=4": {"stop_token_ids": (3, 4)},
    "--ignore-eos": {"ignore_eos": True},
    "--min-tokens=2": {"min_tokens": 2},
    "--repetition-penalty=1.2": {"repetition_penalty": 1.2},
    "--presence-penalty=-0.5": {"presence_penalty": -0.5},
    "--frequency-penalty=0.25": {"frequency_penalty": 0.25},
    "--logit-bias=3=-1.5 --logit-bias=1=2": {"logit_bias": ((1, 2.0), (3, -1.5))},
    "--logprobs=2": {"logprobs": 2},
    "--n=3": {"n": 3},
}


@pytest.mark.parametrize("flags", FLAGS)
def test_each_sampling_flag_reaches_its_parameter(flags):
    args = cli._parser().parse_args(["generate", "x", "--seed", "1", *flags.split()])
    base = SamplingParams(temperature=0, max_tokens=64, seed=1)
    expected = SamplingParams(**{**vars(base), **FLAGS[flags]})
    assert common.sampling_params(args) == expected
    assert expected != base


def test_a_seed_is_drawn_and_told_so_that_a_run_can_be_repeated(run, options):
    command = ("generate", "the", "--temperature", 1, "--max-tokens", 10, "--json", *options)
    first = json.loads(run(*command))
    again = json.loads(run(*command, "--seed", first["seed"]))
    assert again["token_ids"] == first["token_ids"]


def test_n_answers_and_log_probabilities(run, options, loaded):
    command = ["generate", "the", "--temperature", 1, "--max-tokens", 6, "--seed", 3, "--n", 3, "--logprobs", 2]
    values = json.loads(run(*command, "--json", *options))
    params = SamplingParams(temperature=1, max_tokens=6, seed=3, n=3, logprobs=2)
    expected = generate_n(*loaded, "the", params)
    assert [c["token_ids"] for c in values["completions"]] == [c.token_ids for c in expected]
    assert values["token_ids"] == expected[0].token_ids
    token = expected[1].tokens[0]
    assert values["completions"][1]["logprobs"][0] == {
        "token_id": token.id,
        "logprob": pytest.approx(token.logprob),
        "top": [[i, pytest.approx(p)] for i, p in token.top_logprobs],
    }


def test_n_answers_stream_one_after_another(run, options, loaded):
    shown = run("generate", "the", "--temperature", 1, "--max-tokens", 6, "--seed", 3, "--n", 2, *options)
    answers = generate_n(*loaded, "the", SamplingParams(temperature=1, max_tokens=6, seed=3, n=2))
    assert answers[0].text != answers[1].text
    assert shown == "".join(f"--- {i + 1} of 2\n{answer.text}\n" for i, answer in enumerate(answers))


def test_json_has_no_nan(run, capsys):
    """-inf, the log-probability of a masked token, has no word in JSON."""
    common.print_json({"a": float("-inf"), "b": [float("nan"), 1.5], "c": (1, None)})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": [1, None]}


@pytest.mark.parametrize("text", ["the cat sat", "½ 你好 \n\t", "", "<end> is text"])
def test_tokenize_json(run, folder, loaded, text):
    values = json.loads(run("tokenize", text, "--json", "--model", folder))
    ids = loaded[1].encode(text)
    assert values == {"ids": ids, "pieces": loaded[1].pieces(ids)}


def test_tokenize_special_tokens_only_when_asked(run, folder):
    plain, special = (
        json.loads(run("tokenize", "the<end>", "--json", "--model", folder, *flag))["ids"]
        for flag in ((), ("--allow-special",))
    )
    assert 1 not in plain
    assert special[-1] == 1


def test_tokenize_table_shows_ids_and_pieces(run, folder, loaded):
    shown = run("tokenize", "the cat\x1b[2J", "--model", folder)
    assert "\x1b" not in shown
    assert "\\x1b" in shown
    for token in loaded[1].encode("the cat"):
        assert f"{token:>8}  " in shown
    assert "11 characters" in shown


def test_tokenize_colours_only_a_terminal(monkeypatch, run, folder):
    assert "\x1b[" not in run("tokenize", "the cat", "--model", folder)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert "\x1b[30;48;5;" in run("tokenize", "the cat", "--model", folder)
