"""Speculation where something goes wrong: a guess is never needed, so no request may pay for a bad one."""

from __future__ import annotations

import copy
import math

import pytest

from minillm import checkpoint, cli
from minillm.errors import EngineError, RequestError
from minillm.generate import generate
from minillm.kv_cache import ContiguousCache
from minillm.sampling_params import SamplingParams
from minillm.speculative import EagleHead, Proposer, SpeculativeConfig, Speculator, make_speculator, train_eagle
from minillm.speculative.proposal import NOTHING
from minillm.speculative.settings import parse
from tests import tiny
from tests.serving import answers, expected, make_engine, make_tiny, run
from tests.test_speculative_engine import speculate

PROMPT = [5, 6, 7, 8] * 4
PARAMS = SamplingParams(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_tiny("llama", tmp_path_factory)


class Failing(Proposer):
    def __init__(self, error: BaseException) -> None:
        self.errors = [error]

    def propose(self, contexts):
        if self.errors:
            raise self.errors.pop()
        return [NOTHING for _ in contexts]


def overflowing(pair):
    draft = copy.deepcopy(pair[0])
    projection = draft.blocks[0].attention.o_proj.weight
    projection.data = projection.data * math.nan
    return draft


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_a_draft_of_nan_costs_no_request_its_answer(pair, temperature):
    """Sampling from it fails; the engine says so once and goes on without."""
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=12, ignore_eos=True)
    config = SpeculativeConfig("draft", draft=overflowing(pair), adaptive=False)
    engine = make_engine(pair)
    engine = speculate(engine, make_speculator(config, *pair, engine=True).proposer)
    for name in "ab":
        engine.add_request(name, PROMPT, params)
    if temperature:
        with pytest.warns(UserWarning, match="drafting failed .*the draft cannot be sampled from: logits hold NaN"):
            done = run(engine)
        with pytest.raises(EngineError, match="the draft cannot be sampled from"):
            generate(*pair, PROMPT, params, speculative=config)
    else:
        done = run(engine)
    assert answers(done["a"]) == answers(done["b"]) == expected(pair, PROMPT, params)
    assert not engine.speculation.speculator.stats.accepted
    engine.add_request("c", PROMPT, params)
    assert answers(run(engine)["c"]) == expected(pair, PROMPT, params)


@pytest.mark.parametrize("error", [RuntimeError("no room"), MemoryError()])
def test_a_proposer_that_fails_is_given_up(pair, error):
    engine = speculate(make_engine(pair), Failing(error))
    engine.add_request("a", PROMPT, PARAMS)
    with pytest.warns(UserWarning, match="going on without speculation"):
        assert answers(run(engine)["a"]) == expected(pair, PROMPT, PARAMS)


def test_an_interrupt_while_drafting_loses_nothing(pair):
    """Most of a step's Python runs there, so that is where Ctrl-C tends to arrive."""
    failing = Failing(KeyboardInterrupt())
    engine, errors = speculate(make_engine(pair), failing), failing.errors
    failing.errors = []
    engine.add_request("a", PROMPT, PARAMS)
    engine.step()
    failing.errors = errors
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert answers(run(engine)["a"]) == expected(pair, PROMPT, PARAMS)


def test_a_speculator_made_before_is_checked_as_well(pair, tmp_path):
    model, tokenizer = pair
    head = EagleHead(model)
    config = SpeculativeConfig("early_exit", layers=1, tree=(2, 2))
    with pytest.raises(EngineError, match=r"trees go with generate: .* must not see each other; leave tree out"):
        make_speculator(make_speculator(config, model, tokenizer), model, tokenizer, engine=True)
    config = SpeculativeConfig("eagle", draft=head)
    assert make_speculator(make_speculator(config, model, tokenizer), model, tokenizer, engine=True)
    tiny.make("llama", vocab_size=200).save_pretrained(tmp_path)
    other = checkpoint.load_model(tmp_path)
    with pytest.raises(EngineError, match="another model"):
        make_speculator(make_speculator(config, model, tokenizer), other, tokenizer)
    exits = make_speculator(SpeculativeConfig("early_exit", layers=1), model, tokenizer)
    with pytest.raises(EngineError, match="the target has 200"):
        make_speculator(exits, other, tokenizer)
    assert isinstance(make_speculator(exits, model, tokenizer, engine=True), Speculator)


def test_more_drafts_than_int4_can_take_back(tmp_path):
    """Asked for 64 drafts, a cache that keeps 32 to 64 newest tokens whole once failed in the middle of an answer."""
    tiny.save("llama", tmp_path, head_dim=32)
    pair = checkpoint.load(tmp_path, "float32")
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    plain, guessed = (
        generate(*pair, PROMPT, params, cache=ContiguousCache(pair[0].config, 160, "int4"), speculative=way)
        for way in (None, SpeculativeConfig("early_exit", 64, layers=1, adaptive=False))
    )
    assert len(guessed.token_ids) == 90
    agreed = [a == b for a, b in zip(plain.token_ids, guessed.token_ids, strict=True)]
    assert all(agreed[:40])  # later, rows computed together may round to another code than rows computed one by one


def test_a_tree_needs_a_cache_of_numbers(pair):
    tree = SpeculativeConfig("early_exit", layers=1, tree=(2, 2))
    with pytest.raises(RequestError, match="a cache that is not quantized"):
        generate(*pair, PROMPT, PARAMS, cache=ContiguousCache(pair[0].config, 64, "int8"), speculative=tree)


def test_bad_settings_are_told(pair):
    with pytest.raises(EngineError, match="tree is 3"):
        SpeculativeConfig("early_exit", layers=1, tree=3)
    with pytest.raises(EngineError, match="write early_exit:LAYERS"):
        parse("early_exit")
    with pytest.raises(EngineError, match=r"eagle needs draft, .* after --draft on the command line; make it with"):
        parse("eagle")
    with pytest.raises(EngineError, match="token 999 is outside"):
        train_eagle(EagleHead(pair[0]), [[5, 6, 999]], steps=1)


def test_bench_speculates_on_the_cache_that_was_asked_for(pair, monkeypatch):
    from minillm.cli import speculation

    seen = []
    real = speculation.generate
    monkeypatch.setattr(speculation, "generate", lambda *a, **o: seen.append(o["cache"]) or real(*a, **o))
    engines, engine = [], speculation.Engine
    monkeypatch.setattr(speculation, "Engine", lambda *a, **o: engines.append(o["kv_cache_dtype"]) or engine(*a, **o))
    monkeypatch.setattr(speculation, "BATCHES", (1,))
    speculation.measure(*pair, SpeculativeConfig("ngram"), tokens=2, rounds=1, kv_cache_dtype="fp8")
    assert {cache.paged.name for cache in seen} == set(engines) == {"fp8"}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["quality", "--quantize", "int8", "--compile"], "leave --compile out"),
        (["quality", "--quantize", "int8", "--dtype", "bfloat16"], "leave --dtype bfloat16 out"),
        (["quantize", "--quantize", "int8", "--out", "nowhere", "--compile"], "leave --compile out"),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(capsys, words, reason):
    assert cli.main([*words, "--model", "unread"]) == 2
    assert reason in capsys.readouterr().err
