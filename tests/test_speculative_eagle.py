"""Promise: an EAGLE head in the engine reads the hidden states of the right rows, and no answer is other for it."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import checkpoint, runner
from minillm.batching import SchedulerConfig
from minillm.engine import Engine
from minillm.errors import EngineError
from minillm.generate import generate
from minillm.kv_cache import NoCache
from minillm.llm import LLM
from minillm.quantization import quantize_
from minillm.sampling import SamplingParams, probabilities
from minillm.serving import serve_in_thread
from minillm.speculative import (
    EagleHead,
    EagleProposer,
    Proposal,
    Proposer,
    SpeculativeConfig,
    Speculator,
    batch,
    chains,
    eagle,
    first_layers,
    make_speculator,
    train_eagle,
)
from tests import tiny
from tests.planted import planted
from tests.serving import alone, answers, expected, make_engine, make_tiny, run
from tests.serving_http import MODEL, client_of, wait_idle
from tests.test_engine import engine_for, engines, requests
from tests.test_speculative_verification import chi_square

GREEDY = {"temperature": 0, "ignore_eos": True}
SAMPLED = {"temperature": 0.2, "top_k": 3, "max_tokens": 4, "ignore_eos": True}
PROMPT = list(range(60, 77))


def trained(model, tokenizer, prompt: list[int], steps: int = 120) -> EagleHead:
    """On the target's own answers to this prompt and to others, drawn ones among them."""
    params = SamplingParams(max_tokens=40, **GREEDY)
    asked = [(ids, params) for ids in (prompt, *(list(range(i, i + 6)) for i in (10, 30, 60, 100)))]
    asked += [(prompt, SamplingParams(seed=seed, **SAMPLED)) for seed in range(900, 910)]
    texts = [[*ids, *alone(model, tokenizer, tuple(ids), p)[0].token_ids] for ids, p in asked]
    head = EagleHead(model)
    train_eagle(head, texts, steps, learning_rate=3e-3)
    return head


@cache
def head_of(model, tokenizer) -> EagleHead:
    return trained(model, tokenizer, PROMPT)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return make_tiny("qwen3", tmp_path_factory)


@pytest.fixture(scope="module", params=["qwen3", "mistral-sinks"])
def pair(request, tmp_path_factory):
    return make_tiny(request.param, tmp_path_factory)


class Checked(EagleProposer):
    """Notes every greedy proposal that is not what the head says when it reads the whole sequence anew, without any
    cache, from features that the target computes anew."""

    def __init__(self, pair, **options) -> None:
        tokenizer = pair[1]
        super().__init__(head_of(*pair), tokenizer.vocab_size, tokenizer.eos_ids, **options)
        self.wrong, self.right, self.bases = [], 0, []

    def propose(self, contexts):
        proposals = super().propose(contexts)
        for context, proposal in zip(contexts, proposals, strict=True):
            if context.params.is_greedy and proposal.tokens:
                base = self._threads[context.key].base
                self.bases.append(base)
                ok = by_definition(self.head, context.token_ids, proposal.tokens, base, self.vocab_size)
                self.right += ok
                self.wrong += [] if ok else [(base, context.token_ids, proposal.tokens)]
        return proposals


@torch.inference_mode()
def by_definition(head: EagleHead, known: list[int], drafts: list[int], base: int, vocab_size: int) -> bool:
    """Is each draft the likeliest, but for rounding?"""
    hidden, tokens = eagle.features(head.target, known[:-1])[base:], known[base + 1 :]
    for draft in drafts:
        positions = torch.arange(base, base + len(tokens))
        guess = head(torch.tensor(tokens), hidden, positions, NoCache(head.config))[-1:]
        logits = head.target.logits(guess)[0, :vocab_size]
        if logits[draft] < logits.max() - 1e-3:
            return False
        hidden, tokens = torch.cat([hidden, guess]), [*tokens, draft]
    return True


def checked(pair, count: int = 4, **options) -> Engine:
    config = SpeculativeConfig("eagle", count, draft=head_of(*pair), adaptive=False)
    return make_engine(pair, speculative=Speculator(config, Checked(pair, sampled=False)), **options)


def proposer_of(engine: Engine) -> Checked:
    return engine.speculation.speculator.proposer


def nothing_is_left(engine: Engine) -> bool:
    return not (proposer_of(engine)._threads or engine.speculation._seen or engine.speculation._proposals)


# --- the gate: any schedule ---


@settings(max_examples=12, deadline=None)
@given(drawn=st.lists(requests, min_size=1, max_size=6), options=engines, count=st.integers(1, 6), exact=st.booleans())
def test_any_schedule_gives_each_request_its_own_answer(pair, drawn, options, count, exact):
    """Chunks, both preemptions, prefix caches, n > 1, aborts, exact mode: answers are those of generate without
    speculation, token for token, and every proposal is what the head says of that sequence."""
    config = SpeculativeConfig("eagle", count, draft=head_of(*pair), adaptive=False)
    speculator = Speculator(config, Checked(pair, sampled=False))  # certain guesses: sampled answers stay too
    engine = engine_for(pair, {**options, "batch_invariant": exact, "speculative": speculator}, drawn)
    ended, step = {}, 0
    while step <= 15 or engine.has_unfinished_requests():
        for i, r in enumerate(drawn):
            if r["arrival"] == step:
                engine.add_request(str(i), list(r["head"] + r["tail"]), r["params"], r["priority"])
            if r["abort"] is not None and r["arrival"] + r["abort"] == step:
                ended |= {o.request_id: o for o in engine.abort_request(str(i))}
        ended |= {o.request_id: o for o in engine.step() if o.finished}
        engine.scheduler.check()
        step += 1
        assert step < 3000
    for i, r in enumerate(drawn):
        if r["abort"] is None:
            assert answers(ended[str(i)]) == expected(pair, r["head"] + r["tail"], r["params"])
    assert engine.speculation.failed is None
    assert not proposer_of(engine).wrong
    assert nothing_is_left(engine)


def serve(engine, jobs) -> dict:
    for i, (prompt, params) in enumerate(jobs):
        engine.add_request(str(i), prompt, params)
    return run(engine)


JOBS = [
    (PROMPT, SamplingParams(max_tokens=30, **GREEDY)),
    (list(range(60, 72)), SamplingParams(max_tokens=25, logprobs=2, temperature=0.9, seed=3, ignore_eos=True)),
    (list(range(10, 15)) * 30, SamplingParams(max_tokens=28, frequency_penalty=1.0, **GREEDY)),
    (list(range(40, 57)), SamplingParams(max_tokens=12, n=3, **GREEDY)),
    (list(range(100, 106)), SamplingParams(max_tokens=40, **GREEDY)),
]


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


# --- sampled drafts ---


def triples(pair, samples: int) -> tuple[torch.Tensor, torch.Tensor, Speculator]:
    """Counts of the first three tokens over seeds, and their probabilities. The first comes with the prompt; the others
    are drafted and judged."""
    config = SpeculativeConfig("eagle", 2, draft=head_of(*pair), adaptive=False)
    engine = make_engine(pair, False, config, num_blocks=256, max_num_seqs=32, max_num_batched_tokens=128)
    jobs = [(PROMPT, SamplingParams(seed=seed, **SAMPLED)) for seed in range(samples)]
    cells = cells_of(pair)
    counts = torch.zeros(len(cells))
    places = {tokens: i for i, tokens in enumerate(cells)}
    for output in serve(engine, jobs).values():
        counts[places[tuple(output.outputs[0].token_ids[:3])]] += 1
    return counts, torch.tensor(list(cells.values())), engine.speculation.speculator


@cache
def cells_of(pair) -> dict[tuple[int, ...], float]:
    """Three tokens -> their probability, from the target without any cache."""
    model, tokenizer = pair
    params, cells = SamplingParams(seed=0, **SAMPLED), {(): 1.0}
    for _ in range(3):
        longer = {}
        for tokens, mass in cells.items():
            ids = [*PROMPT, *tokens]
            hidden = model(torch.tensor(ids), torch.arange(len(ids)), NoCache(model.config))
            p = probabilities(model.logits(hidden[-1:])[0, : tokenizer.vocab_size], params, PROMPT, tokens)
            longer |= {(*tokens, i): mass * float(p[i]) for i in p.nonzero()[:, 0].tolist()}
        cells = longer
    return cells


def test_sampled_drafts_leave_the_distribution_alone(qwen3):
    counts, probs, speculator = triples(qwen3, 1500)
    assert chi_square(counts, probs) < 4
    assert 0.05 < speculator.stats.acceptance < 0.95


def test_a_head_that_misstates_its_distribution_is_caught(qwen3, monkeypatch):
    bad = planted(chains, "chain.probs.append(q)", "chain.probs.append((q > 0) / (q > 0).sum())")
    monkeypatch.setattr(chains.ChainProposer, "_draw", bad.ChainProposer._draw)
    counts, probs, _ = triples(qwen3, 600)
    assert chi_square(counts, probs) > 7


# --- with everything else ---


def test_few_bits_prefixes_and_a_head_in_one_server(tmp_path):
    """int8 weights and int8 keys and values, the head trained before they were rounded; through a socket, twice."""
    tiny.save("qwen3", tmp_path, head_dim=32)
    pair = checkpoint.load(tmp_path, "float32")
    text = "the cat sat on the mat and the dog sat on the log and the cat "
    head = trained(*pair, pair[1].encode(text, add_special=True))
    quantize_(pair[0], "int8")
    params = SamplingParams(max_tokens=24, **GREEDY)
    engines = [
        Engine(*pair, SchedulerConfig(num_blocks=48, block_size=8), True, kv_cache_dtype="int8", speculative=way)
        for way in (None, SpeculativeConfig("eagle", 4, draft=head, adaptive=False))
    ]
    engines[0].add_request("a", text, params)
    plain = run(engines[0])["a"].outputs[0].text
    with serve_in_thread(engines[1], model_name=MODEL) as server:
        client = client_of(server)
        for _ in range(2):
            done = client.completions.create(
                model=MODEL, prompt=text, max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
            )
            assert done.choices[0].text == plain
        wait_idle(server)
    assert engines[1].speculation.stats.accepted > 5
    assert engines[1].events.of("admitted")[-1].data["cached"] >= 8


def test_a_target_in_bfloat16_has_a_head_in_float32(tmp_path):
    """As models on a GPU are kept: features come in its precision, and guesses go back to it."""
    tiny.save("qwen3", tmp_path)
    model, tokenizer = checkpoint.load(tmp_path, "float32")
    model.place("cpu", torch.bfloat16)
    head = trained(model, tokenizer, PROMPT)
    config = SpeculativeConfig("eagle", 4, draft=head, adaptive=False)
    plain, ours = (make_engine((model, tokenizer), speculative=way) for way in (None, config))
    assert answers(serve(ours, JOBS[:1])["0"]) == answers(serve(plain, JOBS[:1])["0"])
    assert ours.speculation.stats.accepted > 5


def test_llm_takes_a_head_as_any_other_method(qwen3):
    """Adaptive, sampled, with log-probabilities; under the names that a user writes."""
    llm = LLM(*qwen3, speculative=SpeculativeConfig("eagle", 3, draft=head_of(*qwen3)), num_blocks=64, block_size=4)
    done = llm.generate([PROMPT, PROMPT[:9]], SamplingParams(max_tokens=20, logprobs=2, **GREEDY))
    for output, ids in zip(done, (PROMPT, PROMPT[:9]), strict=True):
        (plain,) = alone(*qwen3, tuple(ids), SamplingParams(max_tokens=20, logprobs=2, **GREEDY))
        assert output.outputs[0].token_ids == plain.token_ids
        for ours, theirs in zip(output.outputs[0].tokens, plain.tokens, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


def test_the_same_weights_in_another_object_are_the_same_target(qwen3):
    model, tokenizer = qwen3
    config = SpeculativeConfig("eagle", draft=head_of(*qwen3))
    assert make_speculator(config, copy.copy(model), tokenizer, engine=True)
    with pytest.raises(EngineError, match="hidden states of another model"):
        make_speculator(config, first_layers(model, 2), tokenizer, engine=True)


# --- faults ---


class Failing(Proposer):
    """Fails where it is shown what the target computed, once."""

    needs_hidden = True

    def __init__(self, error: BaseException) -> None:
        self.errors = [error]

    def observe(self, key, start, tokens, hidden):
        if self.errors:
            raise self.errors.pop()

    def propose(self, contexts):
        return [Proposal([7] * context.count) for context in contexts]


def test_a_proposer_that_fails_to_observe_is_given_up(qwen3):
    engine = make_engine(qwen3, False, Speculator(SpeculativeConfig(), Failing(MemoryError("no room"))))
    with pytest.warns(UserWarning, match="drafting failed .*no room.*; going on without speculation"):
        done = serve(engine, JOBS)
    assert all(answers(done[str(i)]) == expected(qwen3, *job) for i, job in enumerate(JOBS))
    assert engine.speculation.failed
    assert not engine.speculation._seen  # no step's hidden states are kept for nobody


def test_an_interrupt_while_it_observes_loses_nothing(qwen3):
    engine = checked(qwen3)
    observe = proposer_of(engine).observe
    left = [3]

    def interrupted(*arguments):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        observe(*arguments)

    proposer_of(engine).observe = interrupted
    engine.add_request("a", *JOBS[0])
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    assert answers(run(engine)["a"]) == expected(qwen3, *JOBS[0])
    assert not proposer_of(engine).wrong
    assert proposer_of(engine).bases[-1] > len(PROMPT)  # what came before was forgotten


def test_who_reads_no_hidden_state_is_shown_none(qwen3):
    assert make_engine(qwen3, speculative=SpeculativeConfig("ngram")).runner.watch is None
