"""Promise: with speculation every request of the engine is answered as without it, whatever else runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import batching, checkpoint, step_plan
from minillm import engine as engine_module
from minillm.batching import SchedulerConfig
from minillm.block_pool import BlockError
from minillm.engine import Engine
from minillm.errors import EngineError, MinillmError
from minillm.llm import LLM
from minillm.sampling import SamplingParams
from minillm.serving.metrics import Metrics
from minillm.speculative import Proposal, Proposer, SpeculativeConfig, Speculator
from minillm.speculative.batch import BatchSpeculation
from tests import tiny
from tests.planted import planted
from tests.serving import alone, answers, expected, make_engine, make_tiny, run
from tests.test_engine import engine_for, engines, requests, run_drawn

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return make_tiny("qwen3", tmp_path_factory)


@pytest.fixture(scope="module", params=["qwen3", "mistral-sinks", "deepseek"])
def pair(request, tmp_path_factory):
    return make_tiny(request.param, tmp_path_factory)


class Oracle(Proposer):
    """Knows the answers, and lies at every `lie`-th place: long runs are accepted and chains end anywhere."""

    def __init__(self, pair, lie: int) -> None:
        self.pair, self.lie = pair, lie

    def propose(self, contexts):
        return [Proposal(self._guess(c)) for c in contexts]

    def _guess(self, c):
        done = alone(*self.pair, tuple(c.prompt_ids), c.params)
        known = len(c.output_ids)
        ids = done[c.sequence].token_ids[known : known + c.count]
        ids += [7] * (c.count - len(ids))  # beyond the end
        return [(token + 1) % 300 if (known + i) % self.lie == 0 else token for i, token in enumerate(ids)]


def speculate(engine, proposer, count: int = 4, **options):
    config = SpeculativeConfig(num_tokens=count, adaptive=False, **options)
    limits = engine.scheduler.max_sequence, engine.vocab_size, engine.tokenizer.eos_ids
    engine.speculation = BatchSpeculation(Speculator(config, proposer), *limits)
    return engine


@settings(max_examples=10, deadline=None)
@given(
    drawn=st.lists(requests, min_size=1, max_size=6), options=engines, lie=st.integers(2, 7), count=st.integers(1, 6)
)
def test_any_schedule_gives_each_request_its_own_answer(pair, drawn, options, lie, count):
    """As test_engine's gate: batching, paging, prefix caches, preemption, swapping and chunks, now with drafts. Guesses
    that were not drawn leave even sampled answers as they are, token for token."""
    engine = speculate(engine_for(pair, options, drawn), Oracle(pair, lie), count)
    ended = run_drawn(engine, drawn)
    for i, r in enumerate(drawn):
        own = expected(pair, r["head"] + r["tail"], r["params"])
        if r["abort"] is None:
            assert answers(ended[str(i)]) == own
    pool = engine.scheduler.pool
    assert pool.available == pool.total
    assert not engine.speculation._proposals


def serve(engine, jobs) -> dict:
    for i, (prompt, params) in enumerate(jobs):
        engine.add_request(str(i), prompt, params)
    return run(engine)


JOBS = [
    (list(range(60, 77)), SamplingParams(max_tokens=30, **GREEDY)),
    (list(range(60, 72)), SamplingParams(max_tokens=25, logprobs=2, temperature=0.9, seed=3, ignore_eos=True)),
    (list(range(10, 15)) * 3, SamplingParams(max_tokens=28, frequency_penalty=1.0, **GREEDY)),
    (list(range(60, 77)), SamplingParams(max_tokens=12, min_tokens=5, stop=["th", "a"], temperature=0, n=2)),
]


@pytest.mark.parametrize(
    "config",
    [
        SpeculativeConfig("ngram", 4, ngram_min=1, adaptive=False),
        SpeculativeConfig("ngram", 4, ngram_min=1),
        SpeculativeConfig("early_exit", 3, layers=2, sampled=False),
    ],
)
@pytest.mark.parametrize("exact", [False, True])
def test_every_method_leaves_answers_and_log_probabilities_alone(qwen3, config, exact):
    """llama.cpp#27972, vllm#53488: log-probabilities as without speculation; in exact mode bit for bit."""
    llm = LLM(*qwen3, batch_invariant=exact, speculative=config, num_blocks=64, block_size=4, max_num_batched_tokens=32)
    done = serve(llm.engine, JOBS)
    plain = serve(make_engine(qwen3, batch_invariant=exact), JOBS)
    for i, (prompt, params) in enumerate(JOBS):
        assert answers(done[str(i)]) == answers(plain[str(i)]) == expected(qwen3, prompt, params)
    for ours, theirs in zip(done["1"].outputs[0].tokens, plain["1"].outputs[0].tokens, strict=True):
        assert [i for i, _ in ours.top_logprobs] == [i for i, _ in theirs.top_logprobs]
        assert ours.logprob == (theirs.logprob if exact else pytest.approx(theirs.logprob, abs=1e-5))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_caches_of_fewer_bits_forget_drafts_too(tmp_path, dtype):
    """int4 rounds a block when it is full, perhaps with drafts that are rejected then; its own numbers must remain."""
    tiny.save("qwen3", tmp_path, head_dim=32)
    pair = checkpoint.load(tmp_path, "float32")
    jobs = [([*prompt, *range(100, 112)], replace(params, max_tokens=60)) for prompt, params in JOBS[:3]]
    engines = [
        Engine(*pair, SchedulerConfig(num_blocks=24, block_size=32), kv_cache_dtype=dtype, speculative=speculative)
        for speculative in (None, SpeculativeConfig("ngram", 6, ngram_min=1, adaptive=False))
    ]
    plain, done = (serve(engine, jobs) for engine in engines)
    assert all(answers(done[i]) == answers(plain[i]) for i in plain)
    stats = engines[1].speculation.stats
    assert 0 < stats.accepted < stats.drafted


def test_drafts_cut_the_steps(qwen3):
    """A guess that is always right: 1 + k tokens a step."""
    prompt, params = JOBS[0]
    engine = speculate(make_engine(qwen3), Oracle(qwen3, 1000), 4)
    engine.add_request("a", prompt, params)
    steps = 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    assert steps == 1 + -(-29 // 5)
    stats = engine.speculation.stats
    assert stats.accepted == 29 - stats.steps
    assert stats.plain_steps == 1, "the first token comes with the prompt"
    assert stats.acceptance == 1
    verified = engine.events.of("verified")
    assert sum(sum(e.data["kept"]) for e in verified) == stats.accepted
    assert sum(len(e.data["tokens"]) for e in engine.events.of("sampled")) == 30


def test_every_token_is_counted_once(qwen3):
    """Accepted, the one beside them, or drawn without drafts."""
    engine = speculate(make_engine(qwen3, num_blocks=64), Oracle(qwen3, 3), 4)
    jobs = [(prompt, replace(params, n=1, stop=(), min_tokens=0, ignore_eos=True)) for prompt, params in JOBS]
    done = serve(engine, jobs)
    stats = engine.speculation.stats
    assert stats.accepted + stats.steps + stats.plain_steps == sum(len(d.outputs[0].token_ids) for d in done.values())
    assert stats.steps > 0 < stats.plain_steps


def test_only_accepted_blocks_are_published(qwen3):
    """Blocks of rejected drafts never reach the prefix cache: whoever continues the true text finds the true keys."""
    engine = speculate(make_engine(qwen3), Oracle(qwen3, 2), 6)
    prompt, params = JOBS[0]
    serve(engine, [(prompt, params)])
    longer = prompt + alone(*qwen3, tuple(prompt), params)[0].token_ids
    after = SamplingParams(max_tokens=8, **GREEDY)
    engine.add_request("b", longer, after)
    done = run(engine)["b"]
    assert done.num_cached_tokens == (len(longer) - 1) // 4 * 4
    assert answers(done) == expected(qwen3, longer, after)


def test_nobody_is_preempted_for_a_guess(qwen3):
    """Drafts get blocks that are free, and what rejected ones held is free again."""
    options = {"num_blocks": 1 + 12, "block_size": 4, "prefix_cache": "off", "watermark": 0.0}
    params = SamplingParams(max_tokens=12, **GREEDY)
    prompts = [list(range(60, 72)), list(range(30, 42))]  # 24 tokens each: exactly what the pool holds
    engine = speculate(make_engine(qwen3, **options), Oracle(qwen3, 3), 6)
    done = serve(engine, [(p, params) for p in prompts])
    assert all(answers(done[str(i)]) == expected(qwen3, p, params) for i, p in enumerate(prompts))
    assert not engine.events.of("preempted")


def test_drafts_leave_the_budget_to_decodes_and_prompts(qwen3):
    engine = speculate(make_engine(qwen3, max_num_batched_tokens=6), Oracle(qwen3, 100), 6)
    done = serve(engine, JOBS)
    for event in engine.events.of("scheduled"):
        assert sum(event.data["tokens"]) <= 6
    assert all(answers(done[str(i)]) == expected(qwen3, *job) for i, job in enumerate(JOBS))


MISTAKES = {
    "a rejected draft counts as computed": (
        batching, "request.num_computed += kept", "request.num_computed += kept + (kept == 2)",
    ),
    "drafts read from a token too late": (
        step_plan, "self.drafts[max(0, start - until) :", "self.drafts[1 + max(0, start - until) :",
    ),
    "published before it is accepted": (
        batching, "done = part.start + part.known", "done = part.start + part.count",
    ),
    "logits of another row": (engine_module, "logits[row : row + count + 1]", "logits[row - 1 : row + count]"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(qwen3, name, monkeypatch):
    module, right, wrong = MISTAKES[name]
    bad = planted(module, right, wrong)
    kind = {batching: "Scheduler", engine_module: "Engine", step_plan: "Scheduled"}[module]
    for method in ("update", "advance", "_draw", "tokens"):
        if hasattr(getattr(bad, kind), method):
            monkeypatch.setattr(getattr(module, kind), method, getattr(getattr(bad, kind), method))
    try:  # a wrong answer, an invariant that breaks before, or no end
        engine = speculate(make_engine(qwen3), Oracle(qwen3, 3), 4)
        for i, (prompt, params) in enumerate(JOBS):
            engine.add_request(str(i), prompt, params)
        done = {}
        for _ in range(60):
            done |= {o.request_id: o for o in engine.step()}
            engine.scheduler.check()
        right = not engine.has_unfinished_requests() and all(
            answers(done[str(i)]) == expected(qwen3, *job) for i, job in enumerate(JOBS)
        )
    except (AssertionError, BlockError, MinillmError, RuntimeError):
        right = False
    assert not right


def test_what_cannot_be_served_is_one_clear_error(qwen3, tmp_path_factory):
    model, tokenizer = qwen3
    with pytest.raises(EngineError, match="trees go with generate"):
        LLM(model, tokenizer, speculative=SpeculativeConfig("early_exit", layers=2, tree=(2, 2)))
    with pytest.raises(EngineError, match="linear layers, whose state cannot forget"):
        LLM(*make_tiny("qwen3-next", tmp_path_factory), speculative=SpeculativeConfig())


def test_the_servers_counts_are_the_engines(qwen3):
    engine = speculate(make_engine(qwen3), Oracle(qwen3, 3), 4)
    metrics = Metrics(engine, "m")
    serve(engine, JOBS)
    stats, text = engine.speculation.stats, metrics.text().decode()
    for name, value in (
        ("drafts_total", stats.steps),
        ("draft_tokens_total", stats.drafted),
        ("accepted_tokens_total", stats.accepted),
        *(
            (f'accepted_tokens_per_pos_total{{model_name="m",position="{i}"}}', n)
            for i, n in enumerate(stats.kept)
            if n
        ),
    ):
        label = "" if "{" in name else '{model_name="m"}'
        assert f"minillm:spec_decode_num_{name}{label} {float(value)}" in text
    assert stats.accepted > 20
