"""Promise: an EAGLE head in the engine reads the hidden states of the right rows, and no answer is other for it."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import runner
from minillm.generate import generate
from minillm.sampling import SamplingParams
from minillm.speculative import EagleProposer, SpeculativeConfig, Speculator, batch, eagle
from tests.eagle_heads import (
    GREEDY,
    JOBS,
    PROMPT,
    Checked,
    by_definition,
    checked,
    head_of,
    nothing_is_left,
    proposer_of,
    serve,
)
from tests.planted import planted
from tests.serving import alone, answers, expected, make_engine, make_tiny, run
from tests.test_engine import engine_for, engines, requests, run_drawn


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return make_tiny("qwen3", tmp_path_factory)


@pytest.fixture(scope="module", params=["qwen3", "mistral-sinks"])
def pair(request, tmp_path_factory):
    return make_tiny(request.param, tmp_path_factory)


# --- the gate: any schedule ---


@settings(max_examples=12, deadline=None)
@given(drawn=st.lists(requests, min_size=1, max_size=6), options=engines, count=st.integers(1, 6), exact=st.booleans())
def test_any_schedule_gives_each_request_its_own_answer(pair, drawn, options, count, exact):
    """Chunks, both preemptions, prefix caches, n > 1, aborts, exact mode: answers are those of generate without
    speculation, token for token, and every proposal is what the head says of that sequence."""
    config = SpeculativeConfig("eagle", count, draft=head_of(*pair), adaptive=False)
    speculator = Speculator(config, Checked(pair, sampled=False))  # certain guesses: sampled answers stay too
    engine = engine_for(pair, {**options, "batch_invariant": exact, "speculative": speculator}, drawn)
    ended = run_drawn(engine, drawn)
    for i, r in enumerate(drawn):
        if r["abort"] is None:
            assert answers(ended[str(i)]) == expected(pair, r["head"] + r["tail"], r["params"])
    assert engine.speculation.failed is None
    assert not proposer_of(engine).wrong
    assert nothing_is_left(engine)


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 128},
        {"num_blocks": 128, "batch_invariant": True},
        {"num_blocks": 128, "max_num_batched_tokens": 3},  # drafts for steps that a sequence does not get
        {"num_blocks": 50, "watermark": 0.0},
        {"num_blocks": 50, "watermark": 0.0, "preemption": "swap", "num_host_blocks": 60},
    ],
    ids=["plain", "exact", "chunks", "recompute", "swap"],
)
def test_every_draft_is_the_heads_own(qwen3, options):
    """A long prompt, several sequences of one request, several requests; and the run is what it says it is."""
    engine = checked(qwen3, **options)
    done = serve(engine, JOBS)
    for i, job in enumerate(JOBS):
        assert answers(done[str(i)]) == expected(qwen3, *job)
    proposer, stats = proposer_of(engine), engine.speculation.stats
    assert not proposer.wrong
    assert proposer.right > 20
    assert 0 < stats.accepted < stats.drafted
    how = {event.data["how"] for event in engine.events.of("preempted")}
    assert how == ({options.get("preemption", "recompute")} if options["num_blocks"] == 50 else set())
    assert nothing_is_left(engine)


@pytest.mark.parametrize("exact", [False, True])
def test_the_engine_drafts_what_generate_drafts(qwen3, exact):
    """The same proposals at the same places of one sequence, none of whose prompt was cached."""
    found = []
    for engine in (True, False):
        proposer, seen = Checked(qwen3), {}
        config = SpeculativeConfig("eagle", 4, draft=proposer.head, adaptive=False)
        _note(proposer, seen)
        if engine:
            serve(make_engine(qwen3, exact, Speculator(config, proposer)), JOBS[:1])
        else:
            generate(*qwen3, *JOBS[0], chunk=5, speculative=Speculator(config, proposer))
        assert not proposer.wrong
        found.append(seen)
    assert found[0] == found[1]
    assert len(found[0]) > 5


def _note(proposer, seen: dict) -> None:
    propose = proposer.propose

    def noting(contexts):
        proposals = propose(contexts)
        seen.update({len(c.token_ids): p.tokens for c, p in zip(contexts, proposals, strict=True) if p.tokens})
        return proposals

    proposer.propose = noting


# --- where observation begins late ---


def test_a_prefix_from_the_cache_is_done_without(pair):
    """The head's context begins behind it, at its own positions, and drafts are accepted from there."""
    engine = checked(pair)
    accepted = []
    for name in "ab":
        engine.add_request(name, *JOBS[0])
        assert answers(run(engine)[name]) == expected(pair, *JOBS[0])
        accepted.append(engine.speculation.stats.accepted)
    proposer = proposer_of(engine)
    assert set(proposer.bases) == {0, 16}
    assert accepted[1] - accepted[0] > 5
    assert not proposer.wrong


def test_n_sequences_begin_as_the_first(qwen3):
    """Each with a copy of what the head has read of the prompt, which was observed once."""
    engine = checked(qwen3)
    params = SamplingParams(max_tokens=20, n=3, **GREEDY)
    assert answers(serve(engine, [(PROMPT, params)])["0"]) == expected(qwen3, PROMPT, params)
    proposer = proposer_of(engine)
    assert set(proposer.bases) == {0}
    assert engine.speculation.stats.accepted > 15
    assert not proposer.wrong


def test_rows_seen_twice_are_read_once_and_a_gap_begins_anew(qwen3):
    model, tokenizer = qwen3
    ids = [*PROMPT, *alone(*qwen3, tuple(PROMPT), JOBS[0][1])[0].token_ids]
    hidden = eagle.features(model, ids)
    once, twice, late = (EagleProposer(head_of(*qwen3), tokenizer.vocab_size) for _ in range(3))
    once.observe("a", 0, ids[:30], hidden[:30])
    for start, end in ((0, 12), (0, 7), (4, 20), (20, 30), (16, 30)):
        twice.observe("a", start, ids[start:end], hidden[start:end])
    for start, end in ((0, 5), (16, 20), (20, 30), (3, 30)):
        late.observe("a", start, ids[start:end], hidden[start:end])
    (context,) = [eagle.Context("a", ids[:17], ids[17:31], JOBS[0][1], 4)]
    first, again = once.propose([context]), twice.propose([context])
    assert first[0].tokens == again[0].tokens == once.propose([context])[0].tokens  # asked twice, told twice
    assert (once._threads["a"].base, twice._threads["a"].base, late._threads["a"].base) == (0, 0, 16)
    assert by_definition(late.head, ids[:31], late.propose([context])[0].tokens, 16, tokenizer.vocab_size)
    once.observe("a", 31, ids[31:33], hidden[31:33])  # row 30 was never shown
    assert once._threads["a"].base == 31


def test_what_is_kept_is_small(qwen3):
    """Of a prompt of 150 tokens the features of a few, each no view of a step; and a cache no longer than twice."""
    engine = checked(qwen3, num_blocks=128)
    engine.add_request("a", *JOBS[2])
    while not engine.speculation.stats.steps:
        engine.step()
        for thread in proposer_of(engine)._threads.values():
            rows = [x.untyped_storage().nbytes() // (4 * x.shape[1]) for x in thread.features]
            assert sum(rows) == sum(map(len, thread.features)) == len(thread.tokens) - thread.read <= eagle._HELD
    (thread,) = proposer_of(engine)._threads.values()
    assert thread.read > 100
    assert thread.cache.max_tokens <= 2 * thread.end
    engine.abort_request("a")
    assert nothing_is_left(engine)


# --- mistakes ---

MISTAKES = {
    "rows of another sequence": (runner, "hidden[end - part.count : end]", "hidden[: part.count]"),
    "the row before": (
        runner, "hidden[end - part.count : end]", "hidden[max(0, end - part.count - 1) :][: part.count]",
    ),
    "a tile's first rows": (runner, "hidden[row : row + count])", "hidden[:count])"),
    "a rejected draft is certain": (batch, "request.num_computed - start)", "request.num_computed - start + 1)"),
    "drafts are never certain": (batch, "hidden[:certain])", "hidden[: min(certain, max(1, len(tokens) - 4))])"),
    "the token before": (eagle, "self.tokens[self.read + 1 :], *following]", "self.tokens[self.read :]]"),
    "guesses stay": (eagle, "self.cache.truncate(self.read)", "self.cache.length"),
    "guessed features are taken for certain": (eagle, "self.features[-1][-1:].clone()", "self.guess.clone()"),
    "rows seen twice": (eagle, "seen = thread.end - start", "seen = 0"),
    "sequences share a cache": (eagle, "cache=own", "cache=thread.cache"),
}  # fmt: skip


@cache
def healthy(pair) -> int:
    """Proposals of the run below, with nothing planted."""
    engine = checked(pair, num_blocks=50, watermark=0.0)
    serve(engine, JOBS)
    assert not proposer_of(engine).wrong
    return proposer_of(engine).right


@pytest.mark.filterwarnings("ignore:drafting failed")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(qwen3, name, monkeypatch):
    """By the drafts alone: answers stay right whatever the head reads."""
    healthy(qwen3)
    module, *change = MISTAKES[name]
    bad = planted(module, *change)
    for kind in ("ModelRunner", "BatchSpeculation", "_Thread", "EagleProposer"):
        for method in ("_packed", "_exact_part", "_show", "unread", "settle", "observe", "fork"):
            if method in vars(vars(bad).get(kind, object)):
                monkeypatch.setattr(getattr(module, kind), method, vars(vars(bad)[kind])[method])
    engine = checked(qwen3, num_blocks=50, watermark=0.0, batch_invariant=name == "a tile's first rows")
    done = serve(engine, JOBS)
    assert engine.speculation.failed or proposer_of(engine).wrong or proposer_of(engine).right < healthy(qwen3)
    assert all(answers(done[str(i)]) == expected(qwen3, *job) for i, job in enumerate(JOBS))
