"""Promise: a head is made by one command, and taken by every other that speculates; what cannot be is one line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

import minillm.analysis
from minillm import cli
from minillm.cli import serve, speculation, train_eagle, workload
from minillm.cli.chat import Conversation
from minillm.generate import generate
from minillm.sampling_params import SamplingParams
from minillm.serving import serve_in_thread
from minillm.speculative import EagleHead, SpeculativeConfig, eagle, make_speculator, speculator
from tests import tiny
from tests.cli import models
from tests.cli.models import MACHINE, one_line
from tests.serving_http import client_of, wait_idle

LONG = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPT = "the cat sat on the mat and the dog"


@pytest.fixture(scope="module")
def head(folder, loaded, tmp_path_factory):
    """A head for the tiny model, trained on its answer to PROMPT, so that there its drafts are kept. Not to be
    changed."""
    model, tokenizer = loaded
    text = train_eagle.answers(model, tokenizer, [tokenizer.encode(PROMPT)], 40, _Greedy())
    trained = EagleHead(model)
    eagle.train_eagle(trained, text, steps=120, learning_rate=3e-3)
    path = tmp_path_factory.mktemp("heads") / "head"
    trained.save(path, "tiny")
    return path


class _Greedy:
    """Draws temperature 0."""

    def choice(self, values):
        return values[0]

    def getrandbits(self, count):
        return 0


# --- made ---


def made(capsys, *arguments, code=0) -> str:
    """What the command prints; a progress bar goes to stderr."""
    capsys.readouterr()
    assert cli.main(["train_eagle", *(str(a) for a in arguments)]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def test_the_command_makes_a_head(capsys, options, loaded, tmp_path):
    """The same one again, byte for byte; another of another seed."""
    small = ["--steps", 3, "--texts", 9, "--tokens", 6, *options]
    said = made(capsys, "--out", tmp_path / "a", *small)
    assert said.startswith(f"{tmp_path / 'a'}: ")
    assert "answers not trained on" in said
    made(capsys, "--out", tmp_path / "b", *small)
    made(capsys, "--out", tmp_path / "c", *small, "--seed", 1)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ac"]
    assert weights[0] != weights[1]
    assert EagleHead.load(tmp_path / "a", loaded[0])


def test_texts_of_ones_own(capsys, options, tmp_path):
    (tmp_path / "text").write_text("the cat sat on the mat and the dog sat on the log " * 20)
    made(
        capsys,
        "--out",
        tmp_path / "a",
        "--steps",
        1,
        "--texts",
        8,
        "--tokens",
        4,
        "--text",
        tmp_path / "text",
        *options,
    )
    assert (tmp_path / "a" / "config.json").exists()


def test_what_is_held_out_was_not_trained_on(loaded):
    """Passages of the text's end, and questions of other templates."""
    ids, generator = list(range(400)), train_eagle.random.Random(0)
    found = train_eagle.passages(ids, 160, generator)
    held, rest = found[:: train_eagle.EVERY], [p for i, p in enumerate(found) if i % train_eagle.EVERY]
    assert min(p[0] for p in held) >= 350 > max(p[-1] for p in rest)
    assert all(len(p) == train_eagle.PASSAGE and p == list(range(p[0], p[0] + len(p))) for p in found)
    tokenizer = loaded[1]
    questions = [tokenizer.decode(ids) for ids in train_eagle.from_templates(tokenizer, 80, generator)]
    assert not set(questions[:: train_eagle.EVERY]) & set(questions[1 :: train_eagle.EVERY])


def test_what_is_judged_was_not_trained_on(capsys, options, tmp_path, monkeypatch):
    seen = {}
    train, judge = train_eagle._train, train_eagle.first_guesses
    monkeypatch.setattr(train_eagle, "_train", lambda h, texts, *a: seen.update(trained=texts) or train(h, texts, *a))
    monkeypatch.setattr(train_eagle, "first_guesses", lambda h, t, s: seen.update(judged=t, starts=s) or judge(h, t, s))
    made(capsys, "--out", tmp_path / "a", "--steps", 1, "--texts", 17, "--tokens", 6, *options)
    assert (len(seen["trained"]), len(seen["judged"])) == (14, 3)
    assert not set(map(tuple, seen["trained"])) & set(map(tuple, seen["judged"]))
    assert all(0 < len(text) - start <= 6 for text, start in zip(seen["judged"], seen["starts"], strict=True))


def test_first_guesses_are_counted(loaded, head, capsys):
    """A head that knows the text guesses it; one that keeps the hidden state as it is does not."""
    model, tokenizer = loaded
    text = train_eagle.answers(model, tokenizer, [tokenizer.encode(PROMPT)], 40, _Greedy())
    start = len(tokenizer.encode(PROMPT))
    good, places = train_eagle.first_guesses(EagleHead.load(head, model), text, [start])
    poor, _ = train_eagle.first_guesses(EagleHead(model), text, [start])
    assert places == len(text[0]) - start == 40
    assert poor < 0.5 < 0.8 < good


def test_ctrl_c_leaves_nothing(capsys, options, tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(eagle, "_loss", interrupted)
    made(capsys, "--out", tmp_path / "a", "--steps", 3, "--texts", 8, "--tokens", 4, *options, code=130)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_made_is_one_line(refused, options, head, tmp_path):
    out = ["train_eagle", "--out", tmp_path / "a", *options]
    assert "not an empty folder; name a new one" in refused("train_eagle", "--out", head, *options)
    assert "--steps is 0; it must be a whole number from 1" in refused(*out, "--steps", 0)
    assert "--texts is 7; it must be a whole number from 8" in refused(*out, "--texts", 7)
    assert "leave --compile out" in refused(*out, "--compile")
    assert "No such file" in refused(*out, "--text", tmp_path / "nowhere")
    (tmp_path / "text").write_bytes(b"\xff\xfe\xfa")
    assert "is not UTF-8" in refused(*out, "--text", tmp_path / "text")
    (tmp_path / "text").write_text("short")
    assert "give at least 128, or leave it out" in refused(*out, "--text", tmp_path / "text")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("family", ["deepseek", "qwen3-next", "mixtral"])
def test_a_target_that_can_have_none(refused, head, tmp_path, family):
    """Told before it writes anything, and whoever brings a head made for another is told the same."""
    models.save(tmp_path, family)
    options = ["--model", tmp_path, "--dtype", "float32", "--device", "cpu"]
    for command in (
        ["train_eagle", "--out", tmp_path / "a"],
        ["generate", "the", "--speculate", "eagle", "--draft", head],
    ):
        said = refused(*command, *options)
        assert "plain block" in said or "run it without speculation" in said


# --- used ---


@pytest.fixture
def eager(monkeypatch):
    """As many drafts as are allowed. On a tiny model hardly any pays, and which do is a matter of measured times."""
    monkeypatch.setattr(speculator, "choose", lambda trust, price, most, sequences: most)


def test_generate_says_the_same_and_keeps_drafts(run, options, head, eager):
    base = ["generate", PROMPT, "--max-tokens", 30, "--ignore-eos", "--json", *options]
    plain, ours = (json.loads(run(*base, *more)) for more in ([], ["--speculate", "eagle:4", "--draft", head]))
    assert ours["token_ids"] == plain["token_ids"]
    assert ours["speculation"]["accepted"] > 5
    drawn = [*base, "--temperature", 0.8, "--seed", 3, "--n", 2]
    assert len(json.loads(run(*drawn, "--speculate", "eagle", "--draft", head))["completions"]) == 2


def test_chat_says_the_same_turn_after_turn(run, options, loaded, head, eager):
    """With the cache of earlier turns, of which a head has not seen the hidden states; stopped within drafts, too."""
    once = ["chat", "--message", "the cat", "--temperature", 0, "--max-tokens", 20, "--json", *options]
    plain, ours = (json.loads(run(*once, *more)) for more in ([], ["--speculate", "eagle:4", "--draft", head]))
    assert ours["token_ids"] == plain["token_ids"]
    assert ours["speculation"]["drafted"] > 0
    for config in (SpeculativeConfig("eagle", 4, draft=head, adaptive=False), SpeculativeConfig("ngram", ngram_min=1)):
        made = make_speculator(config, *loaded)
        plain, ours = Conversation(*loaded), Conversation(*loaded, speculator=made)
        for text in ("the cat sat", "on the mat", "and the dog?", "the log"):
            asked = [*plain.messages, {"role": "user", "content": text}]
            whole = generate(*loaded, loaded[1].encode_chat(asked), LONG).token_ids
            for params in (LONG, replace(LONG, stop_token_ids=(whole[9],))):  # the second ends within drafts
                said = ["".join(c.ask(text, params)) for c in (plain, ours)]
                assert said[0] == said[1]
                assert ours.last.token_ids == plain.last.token_ids
        assert ours.reused > 0
        assert made.stats.drafted > 0


def test_serve_takes_it(options, head, run, eager):
    plain = json.loads(run("generate", PROMPT, "--max-tokens", 30, "--ignore-eos", "--json", *options))
    words = ["serve", *options, "--speculate", "eagle:4", "--draft", str(head)]
    engine = serve._engine(cli._parser().parse_args(words)).engine
    with serve_in_thread(engine, model_name="tiny") as server:
        done = client_of(server).completions.create(
            model="tiny", prompt=PROMPT, max_tokens=30, temperature=0, extra_body={"ignore_eos": True}
        )
        wait_idle(server)
    assert done.choices[0].text == plain["text"]
    assert engine.speculation.stats.accepted > 5


def test_bench_takes_it(run, options, head, monkeypatch):
    monkeypatch.setattr(minillm.analysis, "measure", lambda device: MACHINE)
    monkeypatch.setattr(workload, "REQUESTS", 2)
    monkeypatch.setattr(speculation, "BATCHES", (1,))
    sizes = ["--prompt-tokens", 8, "--output-tokens", 6, "--prefill-tokens", 40, "--rounds", 1]
    values = json.loads(run("bench", *options, *sizes, "--speculate", "eagle:2", "--draft", head, "--json"))
    assert values["speculation"]["method"] == "eagle"
    assert {task["same_tokens"] for task in (values["speculation"]["copy"], values["speculation"]["text"])} == {7}


COMMANDS = (["generate", "the"], ["chat", "--message", "the"], ["serve", "--port", "0"], ["bench"])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c[0])
def test_no_head_is_one_line_before_a_model_is_loaded(refused, tmp_path, command):
    """--model names what is not there, and is not asked for."""
    words = [*command, "--model", "unread/model", "--device", "cpu", "--speculate"]
    assert "eagle needs draft, an EagleHead trained" in refused(*words, "eagle:3")
    assert "no such folder; give the folder of an EAGLE head" in refused(*words, "eagle", "--draft", tmp_path / "no")
    assert "is not METHOD or METHOD:K" in refused(*words, "eagle:x", "--draft", tmp_path)
    assert "num_tokens is 65" in refused(*words, "eagle:65", "--draft", tmp_path)
    tiny.make("llama").save_pretrained(tmp_path / "model")
    said = refused(*words, "eagle", "--draft", tmp_path / "model")
    assert "model_type 'llama', which is no EAGLE head of minillm" in said
    assert "is no folder" in refused(*words, "eagle", "--draft", tmp_path / "model" / "config.json")


def test_a_head_of_another_model_and_a_damaged_one(refused, folder, head, tmp_path):
    models.save(tmp_path / "other", "qwen3")
    use = ["generate", "the", "--device", "cpu", "--speculate", "eagle", "--draft"]
    said = refused(*use, head, "--model", tmp_path / "other")
    assert "a head for tiny, a llama of 3 layers" in said
    assert "the target is a qwen3 of 3 layers" in said
    broken = shutil.copytree(head, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"nonsense")
    assert "not a whole safetensors file" in refused(*use, broken, "--model", folder)


def test_a_head_is_no_model(refused, options, folder, head):
    remedy = "an EAGLE head, which drafts for a model; give it as --speculate eagle --draft FOLDER"
    assert remedy in refused("generate", "the", "--model", head, "--device", "cpu")
    said = refused("generate", "the", *options, "--speculate", "draft", "--draft", head)
    assert remedy in said
    assert one_line(said)
