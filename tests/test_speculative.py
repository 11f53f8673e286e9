"""Promise: speculation changes how fast an answer comes, never what it is; and bad settings are one clear error."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import checkpoint, cli
from minillm.analysis.speculation import best_gamma, coupling, expected_tokens, speculative_speedup
from minillm.errors import EngineError, MinillmError, RequestError
from minillm.generate import generate, generate_n, stream
from minillm.kv_cache import ContiguousCache, NoCache, WindowCache
from minillm.sampling import SamplingParams, probabilities
from minillm.speculative import (
    DraftModel,
    EagleHead,
    NGram,
    SpeculationStats,
    SpeculativeConfig,
    Speculator,
    TokenTree,
    TreeView,
    decoding,
    draft_model,
    make_speculator,
    parse,
    train_eagle,
    tree_mask,
    verification,
)
from minillm.speculative.length import Price, Trust, choose
from minillm.speculative.proposal import Context
from tests import tiny
from tests.planted import planted
from tests.serving import alone, make_tiny
from tests.test_speculative_verification import chi_square

PROMPT = list(range(10, 27))
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2, repetition_penalty=1.2)
SAMPLED = SamplingParams(temperature=0.7, seed=3, max_tokens=30, ignore_eos=True, presence_penalty=0.5)
STOPPED = SamplingParams(temperature=0.9, seed=8, max_tokens=30, min_tokens=6, stop=["th", " c"], logit_bias={100: 3})


@pytest.fixture(scope="module", params=["qwen3", "mistral-window", "qwen2-sinks", "deepseek"])
def pair(request, tmp_path_factory):
    return make_tiny(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return make_tiny("qwen3", tmp_path_factory)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    """Another model of the same vocabulary: the target's shape with one layer less, and other weights."""
    folder = tmp_path_factory.mktemp("draft")
    tiny.save("qwen3", folder, num_hidden_layers=2)
    return checkpoint.load_model(folder)


CERTAIN = {  # guesses that are not drawn: the plain run token for token, sampled runs too
    "ngram": SpeculativeConfig("ngram", 4, ngram_min=1, adaptive=False),
    "adaptive": SpeculativeConfig("ngram", 6, ngram_min=1),
    "exit": SpeculativeConfig("early_exit", 3, layers=2, sampled=False, adaptive=False),
    "tree": SpeculativeConfig("early_exit", layers=2, tree=(3, 2, 2)),
}


def same(done, plain) -> bool:
    ours, theirs = ((d.token_ids, d.text, d.finish_reason, d.stop_reason) for d in (done, plain))
    return ours == theirs


@pytest.mark.parametrize("name", CERTAIN)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, STOPPED])
def test_the_answer_is_the_plain_one(pair, name, params):
    """Greedy and sampled, with penalties, bias, stop strings and min_tokens; in chunks and with log-probabilities."""
    (plain,) = alone(*pair, tuple(PROMPT), params)
    done = generate(*pair, PROMPT, params, chunk=5, speculative=CERTAIN[name])
    assert same(done, plain)
    for ours, theirs in zip(done.tokens, plain.tokens, strict=True):
        assert [i for i, _ in ours.top_logprobs] == [i for i, _ in theirs.top_logprobs]
        if params.logprobs:
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


def test_a_model_drafts_and_greedy_stays_the_plain_run(pair, draft):
    model, tokenizer = pair
    plain = alone(model, tokenizer, tuple(PROMPT), GREEDY)[0]
    for small in (draft, model):
        proposer = DraftModel(small, tokenizer.vocab_size, tokenizer.eos_ids)
        speculator = Speculator(SpeculativeConfig("draft", 3, draft=small, adaptive=False), proposer)
        assert same(generate(model, tokenizer, PROMPT, GREEDY, speculative=speculator), plain)
        assert not proposer._held  # what it kept for the sequence is gone with it


def test_the_target_as_its_own_draft_is_always_kept(qwen3):
    """p = q: every draft is accepted, sampled too, and 1 + k tokens come from a step."""
    model, tokenizer = qwen3
    for params in (SAMPLED, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)):
        speculator = make_speculator(SpeculativeConfig("draft", 4, draft=model, adaptive=False), model, tokenizer)
        assert len(generate(model, tokenizer, PROMPT, params, speculative=speculator).tokens) == 30
        assert speculator.stats.acceptance > 0.95  # sums in another order may tip a close call
        assert speculator.stats.tokens_per_step > 4.5


def test_sampled_drafts_leave_the_distribution_alone(qwen3, draft):
    """The first token over 300 seeds, in 12 bins of like mass, against the exact distribution."""
    model, tokenizer = qwen3
    config = SpeculativeConfig("draft", 2, draft=draft, adaptive=False)
    speculator = make_speculator(config, model, tokenizer)
    plain = SamplingParams(temperature=0.5, seed=0, max_tokens=2, ignore_eos=True)
    firsts = []
    for seed in range(300):
        params = SamplingParams(temperature=0.5, seed=seed, max_tokens=2, ignore_eos=True)
        firsts.append(generate(model, tokenizer, PROMPT, params, speculative=speculator).token_ids[0])
    hidden = model(torch.tensor(PROMPT), torch.arange(len(PROMPT)), NoCache(model.config))
    p = probabilities(model.logits(hidden[-1:])[0, : tokenizer.vocab_size], plain, PROMPT)
    bins = torch.zeros(len(p), dtype=torch.long)
    order = p.argsort(descending=True)
    bins[order] = (p[order].cumsum(0) * 12).long().clamp(max=11)
    counts = torch.zeros(12).index_add_(0, bins[torch.tensor(firsts)], torch.ones(len(firsts)))
    mass = torch.zeros(12, dtype=torch.float64).index_add_(0, bins, p)
    assert chi_square(counts, mass) < 4
    assert 0 < speculator.stats.acceptance < 1


MISTAKES = {
    "a rejected draft stays visible": ("known + len(tokens) - 1)", "min(known + len(tokens), self.cache.length))"),
    "positions off by one": ("range(start, start + len(rows))", "range(start + 1, start + 1 + len(rows))"),
    "logits off by one": ("hidden[known - 1 - start :]", "hidden[max(0, known - 2 - start) :]"),
    "the path of another branch": ("view.keep(path)", "view.keep(range(len(path)))"),
    "siblings one after another": ("view.base + depth for depth", "view.base + 2 * depth for depth"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(qwen3, name, monkeypatch):
    model, tokenizer = qwen3
    bad = planted(decoding, *MISTAKES[name])
    params = [SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), SAMPLED]
    found = []
    for p in params:
        for config in (CERTAIN["ngram"], CERTAIN["tree"]):
            cache = ContiguousCache(model.config, 80)
            speculator = make_speculator(config, model, tokenizer)
            decoder = bad.SpeculativeDecoder(model, tokenizer, PROMPT, p, cache, speculator)
            try:
                ids = [chunk.token.id for chunk in bad.speculative_steps(decoder, tokenizer, 200)]
            except (IndexError, RuntimeError, MinillmError):
                ids = None
            found.append(ids == alone(model, tokenizer, tuple(PROMPT), p)[0].token_ids)
    assert not all(found)


def test_n_answers_and_a_context_that_ends(qwen3):
    model, tokenizer = qwen3
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=12, n=3, ignore_eos=True)
    ours = generate_n(model, tokenizer, PROMPT, params, CERTAIN["ngram"])
    assert [d.token_ids for d in ours] == [d.token_ids for d in alone(model, tokenizer, tuple(PROMPT), params)]
    full = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for room in (20, 30):
        for config in CERTAIN.values():
            caches = [ContiguousCache(model.config, room) for _ in range(2)]
            plain, done = (
                generate(model, tokenizer, PROMPT, full, cache, speculative=c)
                for cache, c in zip(caches, (None, config), strict=True)
            )
            assert same(done, plain)


# --- proposers ---


def context(tokens, count=4, key="a", params=GREEDY) -> Context:
    return Context(key, tokens, [], params, count)


def by_search(tokens, longest, shortest, count):
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 2, n - 2, -1):
            if tokens[end + 1 - n : end + 1] == tokens[-n:]:
                out = list(tokens)
                for at in range(end + 1, end + 1 + count):
                    out.append(out[at])
                return out[len(tokens) :]
    return []


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 3), st.integers(0, 3), st.integers(1, 6))
def test_prompt_lookup_finds_what_a_search_finds(tokens, shortest, more, count):
    """Token by token, as a sequence grows, so that the index is never built at once."""
    proposer = NGram(shortest + more, shortest)
    for end in range(1, len(tokens) + 1):
        (found,) = proposer.propose([context(tokens[:end], count)])
        assert found.tokens == by_search(tokens[:end], shortest + more, shortest, count)
    proposer.forget("a")
    assert not proposer._indices


def test_drafting_together_is_drafting_alone(qwen3, draft):
    """Sequences of other lengths, some new and some continued, drawn and greedy."""
    tokenizer = qwen3[1]
    together, each = (DraftModel(draft, tokenizer.vocab_size, tokenizer.eos_ids) for _ in range(2))
    for extra in ([], [50, 51], [50, 51, 9, 9, 9]):
        asked = [
            context(PROMPT[:9] + extra, 3, "a", SAMPLED),
            context(PROMPT + extra, 5, "b"),
            context([30, *extra], 1, "c", SAMPLED),
        ]
        both = together.propose(asked)
        for c, ours in zip(asked, both, strict=True):
            (own,) = each.propose([c])
            assert ours.tokens == own.tokens
            assert len(ours.tokens) == c.count
            assert (ours.probs is None) == (c.key == "b")
            if own.probs is not None:
                assert torch.allclose(ours.probs, own.probs, atol=1e-6)


def test_a_draft_forgets_what_was_rejected(qwen3, draft):
    _, tokenizer = qwen3
    kept, fresh = (DraftModel(draft, tokenizer.vocab_size) for _ in range(2))
    (first,) = kept.propose([context(PROMPT, 5)])
    for tail in (first.tokens[:2], [first.tokens[0], (first.tokens[1] + 1) % 300], [*first.tokens[:3], 5]):
        asked = [context(PROMPT + tail, 4)]
        assert kept.propose(asked)[0].tokens == fresh.propose(asked)[0].tokens
        fresh.forget("a")
        kept.forget("a")
        kept.propose([context(PROMPT, 5)])


def test_first_layers_share_every_weight(qwen3):
    model = qwen3[0]
    short = draft_model.first_layers(model, 2)
    ours = {p.data_ptr() for p in model.parameters()}
    assert {p.data_ptr() for p in short.parameters()} <= ours
    for layers in (0, 3, True, 1.5):
        with pytest.raises(EngineError, match="needs 1 to 2"):
            draft_model.first_layers(model, layers)


def test_an_eagle_head_learns_and_is_verified(qwen3):
    model, tokenizer = qwen3
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    texts = [
        [*range(i, i + 6), *alone(model, tokenizer, tuple(range(i, i + 6)), params)[0].token_ids] for i in range(8, 14)
    ]
    head = EagleHead(model)
    frozen = [p.clone() for p in model.parameters()]
    losses = train_eagle(head, texts, steps=60, learning_rate=3e-3)
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert all(torch.equal(a, b) for a, b in zip(frozen, model.parameters(), strict=True))
    speculator = make_speculator(SpeculativeConfig("eagle", 3, draft=head, adaptive=False), model, tokenizer)
    for p, ids in ((params, texts[0][:6]), (SAMPLED, PROMPT)):
        done = generate(model, tokenizer, ids, p, speculative=speculator, chunk=4)
        assert len(done.tokens) == p.max_tokens
        assert p.temperature or same(done, alone(model, tokenizer, tuple(ids), p)[0])
    assert speculator.stats.accepted > 10


# --- trees ---


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 100)), max_size=8), st.integers(1, 4))
def test_each_node_of_a_tree_sees_its_own_sequence(pair, nodes, passes):
    """Logits of every node, in one pass or several, are those of its path alone; after keep, so is what follows."""
    model, _ = pair
    tree = TokenTree([PROMPT[-1]], [-1])
    for parent, token in nodes:
        tree.add(token, parent % len(tree.tokens))
    cache = ContiguousCache(model.config, 64)
    with torch.inference_mode():
        model(torch.tensor(PROMPT[:-1]), torch.arange(len(PROMPT) - 1), cache)
        view = TreeView(cache, tree)
        positions = [view.base + depth for depth in tree.depths()]
        rows = []
        for start in range(0, len(tree.tokens), passes):
            part = slice(start, start + passes)
            rows.append(model.logits(model(torch.tensor(tree.tokens[part]), torch.tensor(positions[part]), view)))
        logits = torch.cat(rows)
        for node in range(len(tree.tokens)):
            ids = PROMPT[:-1] + [tree.tokens[i] for i in tree.path(node)]
            own = model.logits(model(torch.tensor(ids), torch.arange(len(ids)), NoCache(model.config))[-1:])[0]
            assert torch.allclose(logits[node], own, atol=1e-4)
        path = tree.path(len(tree.tokens) - 1)
        view.keep(path)
        ids = PROMPT[:-1] + [tree.tokens[i] for i in path] + [42]
        after = model.logits(model(torch.tensor([42]), torch.tensor([cache.length]), cache))[0]
        own = model.logits(model(torch.tensor(ids), torch.arange(len(ids)), NoCache(model.config))[-1:])[0]
        assert torch.allclose(after, own, atol=1e-4)


def test_tree_mask_is_ancestry():
    mask = tree_mask([-1, 0, 0, 1, 2, 2])
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 0, 1, 0, 0, 1],
    ]


# --- the formula, and lengths ---


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_expected_tokens_is_the_mean_over_many_chains(alpha, gamma):
    generator = torch.Generator().manual_seed(0)
    kept = (torch.rand(40_000, max(gamma, 1), generator=generator) < alpha)[:, :gamma].long().cumprod(-1).sum(-1)
    assert expected_tokens(alpha, gamma) == pytest.approx((kept + 1).float().mean().item(), rel=0.02)


def test_the_formula_of_the_paper():
    """Leviathan et al., table 1: (alpha, gamma) -> operations and speed-up at c = 0.02 or so are worked from these."""
    assert expected_tokens(0.8, 5) == pytest.approx(3.6893, abs=1e-4)
    assert speculative_speedup(0.8, 5, 0.02) == pytest.approx(3.3539, abs=1e-4)
    assert best_gamma(0.8, 0.02)[0] == max(range(17), key=lambda g: speculative_speedup(0.8, g, 0.02))
    assert best_gamma(0.2, 0.5) == (0, 1.0)  # a draft that is weak and dear
    assert best_gamma(0.9, 0.0, row=1.0)[0] == 0  # rows that cost a whole step: nothing is gained by having many
    assert coupling([0.5, 0.5], [0.9, 0.1]) == pytest.approx(0.6)


def priced(fixed: float, row: float, draft: float = 0.0) -> Price:
    price = Price()
    for rows in (1, 100, 3000) * 40:
        price.observe(fixed + row * rows, rows)
    price.observe_drafts(draft * 100, 100)
    return price


def test_lengths_follow_acceptance_cost_and_the_batch():
    cheap = priced(0.010, 0.0002)
    assert cheap.best(0.95, 8) == 8
    assert cheap.best(0.0, 8) == 0
    assert 0 < cheap.best(0.5, 8) < 8
    lengths = [cheap.best(0.7, 8, sequences) for sequences in (1, 8, 64, 512)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 0 < lengths[0]
    assert priced(0.010, 0.0002, draft=0.008).best(0.5, 8) == 0
    assert Price().best(0.5, 8) == 1  # nothing is known yet


def test_rows_are_doubled_at_most():
    price, rows = Price(), []
    for _ in range(6):
        rows.append(1 + price.best(0.95, 20))
        price.observe(0.010, rows[-1])
    assert rows == [2, 4, 8, 16, 21, 21]


def test_a_kernel_that_ends_at_four_rows_is_seen():
    """Steps of up to 4 rows take 10 ms and larger ones 30: drafts beyond the third cost more than they bring."""
    price = Price()
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9) * 10:
        price.observe(0.010 if rows <= 4 else 0.030, rows)
    assert price.best(0.8, 8) == 3
    assert price.best(1.0, 8) == 3  # 4 tokens in 10 ms, 9 in 30


def test_trust_falls_and_comes_back():
    trust, price = Trust(), priced(0.010, 0.003)
    for _ in range(20):
        trust.observe(4, 0)
    asked = [choose(trust, price, 8) for _ in range(40)]
    assert set(asked) == {0, 1}  # a probe now and then
    assert 1 < asked.count(1) < 5
    for _ in range(20):
        trust.observe(1, 1)
    assert choose(trust, price, 8) == 8


def test_stats_count_what_was_judged():
    stats = SpeculationStats()
    for drafted, accepted in ((3, 3), (3, 0), (2, 1), (0, 0)):
        stats.record(drafted, accepted)
    assert (stats.steps, stats.plain_steps, stats.drafted, stats.accepted) == (3, 1, 8, 4)
    assert (stats.offered, stats.kept) == ([3, 2, 1], [2, 1, 1])
    assert stats.acceptance == 4 / 6
    assert stats.tokens_per_step == 7 / 3


# --- bad input ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "magic"}, "'magic' is not known"),
        ({"num_tokens": 0}, "num_tokens is 0"),
        ({"num_tokens": True}, "num_tokens is True"),
        ({"ngram_min": 5, "ngram_max": 4}, "ngram_max is 4"),
        ({"adaptive": 1}, "adaptive is 1"),
        ({"method": "early_exit"}, "needs them"),
        ({"layers": 2}, "go with method early_exit"),
        ({"tree": (2,)}, "drafts chains"),
        ({"draft": "x"}, "takes no draft"),
        ({"method": "eagle"}, "needs draft, an EagleHead"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(EngineError, match=message):
        SpeculativeConfig(**options)


def test_the_command_lines_spelling():
    assert parse("ngram:7") == SpeculativeConfig("ngram", 7)
    assert parse("early_exit:8:3") == SpeculativeConfig("early_exit", 3, layers=8)
    assert parse("draft:2", "x") == SpeculativeConfig("draft", 2, draft="x")
    for text in ("ngram:", "ngram:x", "ngram:1:2", "ngram:-1", "", "early_exit:1:2:3"):
        with pytest.raises(EngineError):
            parse(text)


def test_a_vocabulary_mismatch_is_one_clear_error(qwen3, tmp_path):
    model, tokenizer = qwen3
    tiny.save("qwen3", tmp_path / "wide", vocab_size=330)
    with pytest.raises(EngineError, match="vocabulary of 330 tokens and the target one of 320"):
        make_speculator(SpeculativeConfig("draft", draft=checkpoint.load_model(tmp_path / "wide")), model, tokenizer)
    tiny.save("qwen3", tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(EngineError, match="must have the target's vocabulary"):
        make_speculator(SpeculativeConfig("draft", draft=str(tmp_path / "other")), model, tokenizer)


def test_what_cannot_forget_is_refused(qwen3, tmp_path_factory):
    model, tokenizer = qwen3
    for cache in (NoCache(model.config), WindowCache(model.config, 64)):
        with pytest.raises(RequestError, match="cannot forget rejected drafts"):
            stream(model, tokenizer, PROMPT, GREEDY, cache, speculative=SpeculativeConfig())
    hybrid = make_tiny("qwen3-next", tmp_path_factory)
    with pytest.raises(EngineError, match="linear layers, whose state cannot forget"):
        generate(*hybrid, PROMPT, GREEDY, speculative=SpeculativeConfig())
    with pytest.raises(EngineError, match=r"the draft has \d linear layers"):
        make_speculator(SpeculativeConfig("draft", draft=hybrid[0]), model, tokenizer)
    other = make_tiny("llama", tmp_path_factory)[0]
    with pytest.raises(EngineError, match="hidden states of another model"):
        make_speculator(SpeculativeConfig("eagle", draft=EagleHead(other)), model, tokenizer)
    for wrong in (3, "ngram"):
        with pytest.raises(EngineError, match="give a SpeculativeConfig"):
            make_speculator(wrong, model, tokenizer)


def test_generate_on_the_command_line(capsys, tmp_path):
    tiny.save("qwen3", tmp_path)
    base = [
        "generate",
        "the cat the cat",
        "--model",
        str(tmp_path),
        "--dtype",
        "float32",
        "--max-tokens",
        "20",
        "--json",
    ]
    answers = []
    for extra in ([], ["--speculate", "ngram:4"], ["--speculate", "early_exit:2:2"]):
        assert cli.main([*base, *extra]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert all(a["token_ids"] == answers[0]["token_ids"] for a in answers)
    assert "speculation" not in answers[0]
    assert answers[1]["speculation"]["steps"] + answers[1]["speculation"]["plain_steps"] > 0
    assert cli.main([*base, "--draft", "x"]) == 2
    assert "--draft goes with --speculate draft" in capsys.readouterr().err
    assert cli.main([*base, "--speculate", "nothing:3"]) == 2
    assert "choose ngram, draft, early_exit, eagle" in capsys.readouterr().err


def test_constants_of_the_draws_differ():
    assert len({verification.PLAIN, verification.DRAFT, verification.ACCEPT}) == 3
    assert math.isclose(coupling([1.0], [1.0]), 1.0)
