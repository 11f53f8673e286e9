"""Promise: whatever else runs, a request is answered as generate.py answers it alone, token for token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.errors import EngineError, RequestError
from minillm.llm import LLM
from minillm.sampling import SamplingParams
from tests.serving import alone, answers, expected, make_engine, make_tiny, run

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return make_tiny("qwen3", tmp_path_factory)


FAMILIES = [
    "qwen3",
    "mistral-window",
    "qwen2-sinks",
    "deepseek",
    "mistral-sinks",
    "qwen3-next",
    "mixtral",
    "deepseek-experts",
]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """No window, all layers with one, some; one latent for keys and values; a window and the first tokens; most
    layers with a state instead of a cache; experts, without and with a latent."""
    return make_tiny(request.param, tmp_path_factory)


# --- the gate: any schedule ---

HEADS = [tuple(range(10, 10 + n)) for n in (3, 8, 17)] + [tuple(range(40, 44))]  # prompts share these
PARAMS = [
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1.5, seed=5, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=6, max_tokens=1),
    SamplingParams(temperature=2.0, seed=7, max_tokens=14, ignore_eos=True, repetition_penalty=1.3, n=3),
    SamplingParams(temperature=0.8, seed=8, max_tokens=10, top_k=20, logprobs=2, presence_penalty=0.5),
]
requests = st.fixed_dictionaries(
    {
        "head": st.sampled_from(HEADS),
        "tail": st.lists(st.integers(100, 103), min_size=0, max_size=9).map(tuple),
        "params": st.sampled_from(PARAMS),
        "arrival": st.integers(0, 12),
        "abort": st.one_of(st.none(), st.none(), st.integers(1, 15)),
        "priority": st.integers(0, 2),
    }
)
engines = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 4, 7]),
        "spare": st.integers(0, 12),  # blocks beyond what the largest request needs alone
        "max_num_seqs": st.integers(3, 8),
        "max_num_batched_tokens": st.sampled_from([1, 5, 12, 40]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 3]),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "preemption": st.sampled_from(["recompute", "swap"]),
        "num_host_blocks": st.sampled_from([0, 3, 40]),
        "prefix_cache": st.sampled_from(["off", "hash", "radix"]),
        "eviction": st.sampled_from(["lru", "lfu"]),
    }
)


def engine_for(pair, options, drawn):
    options = dict(options)
    size = options["block_size"]
    longest = max(len(r["head"] + r["tail"]) + r["params"].max_tokens for r in drawn)
    options["num_blocks"] = 1 + -(-longest // size) + options.pop("spare")
    if options["preemption"] == "swap":
        options["num_host_blocks"] = max(2, options["num_host_blocks"])
    return make_engine(pair, **options)


def run_drawn(engine, drawn) -> dict:
    """Adds and aborts as drawn, to the end -> {name: output}; every request ends exactly once."""
    ended, step = {}, 0
    while step <= 15 or engine.has_unfinished_requests():
        for i, r in enumerate(drawn):
            if r["arrival"] == step:
                engine.add_request(str(i), list(r["head"] + r["tail"]), r["params"], r["priority"])
            if r["abort"] is not None and r["arrival"] + r["abort"] == step:
                for output in engine.abort_request(str(i)):
                    assert output.finished
                    assert output.request_id not in ended
                    ended[output.request_id] = output
        for output in engine.step():
            assert output.request_id not in ended
            if output.finished:
                ended[output.request_id] = output
        engine.scheduler.check()
        step += 1
        assert step < 3000
    assert len(ended) == len(drawn)
    return ended


@settings(max_examples=30, deadline=None)
@given(drawn=st.lists(requests, min_size=1, max_size=6), options=engines)
def test_any_schedule_gives_each_request_its_own_answer(pair, drawn, options):
    """Arrivals, lengths, aborts, pool sizes, budgets, block sizes, both preemptions, every prefix cache.

    Batched = alone, chunked = whole, hit = miss, preempted = never preempted; every request ends exactly once.
    """
    engine = engine_for(pair, options, drawn)
    ended = run_drawn(engine, drawn)
    for i, r in enumerate(drawn):
        own = expected(pair, r["head"] + r["tail"], r["params"])
        for got in answers(ended[str(i)]):
            if got[2] == "abort":
                assert any(got[0] == tokens[: len(got[0])] for tokens, *_ in own)
            else:
                assert got in own
        if r["abort"] is None:
            assert answers(ended[str(i)]) == own
    pool = engine.scheduler.pool
    assert pool.available == pool.total
    assert engine.scheduler.host.pool.available == engine.scheduler.host.pool.total


# --- blocks and prefix cache, with a model ---


def test_a_prompt_sent_twice_gives_the_same_answer(pair):
    """nano-vllm#144 and hit = miss: the second takes its prompt from the cache, where no layer keeps a state that the
    prefix would have to bring along."""
    engine = make_engine(pair)
    prompt, params = list(range(60, 77)), SamplingParams(temperature=1.2, seed=4, max_tokens=8, ignore_eos=True)
    outputs = []
    for name in ("first", "second"):
        engine.add_request(name, prompt, params)
        outputs.append(run(engine)[name])
    assert [o.num_cached_tokens for o in outputs] == [0, 0 if pair[0].config.linear_layers else 16]
    assert answers(outputs[0]) == answers(outputs[1]) == expected(pair, prompt, params)


def test_twins_side_by_side_answer_as_alone(pair):
    """vllm#29387, mini-sglang#142."""
    engine = make_engine(pair)
    prompt, params = list(range(60, 77)), SamplingParams(max_tokens=10, **GREEDY)
    for name in "abc":
        engine.add_request(name, prompt, params)
    done = run(engine)
    assert all(answers(done[name]) == expected(pair, prompt, params) for name in "abc")


def test_other_extra_keys_find_nothing(qwen3):
    engine = make_engine(qwen3)
    for name, keys in (("a", [("salt", "x")]), ("b", [("adapter", "x", 1)]), ("c", [("salt", "x")])):
        engine.add_request(name, list(range(20)), SamplingParams(max_tokens=1), extra_keys=keys)
        assert run(engine)[name].num_cached_tokens == (16 if name == "c" else 0)


# --- n answers of one request ---


def test_n_answers_differ_and_are_reproducible(qwen3):
    """vllm#11898."""
    params = SamplingParams(temperature=2.0, seed=11, n=4, max_tokens=12, ignore_eos=True)
    engine = make_engine(qwen3)
    engine.add_request("a", "the cat sat", params)
    output = run(engine)["a"]
    assert [o.index for o in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(o.token_ids) for o in output.outputs}) == 4
    prompt = qwen3[1].encode("the cat sat", add_special=True)
    assert answers(output) == expected(qwen3, prompt, params)
    assert engine.scheduler.pool.copies > 0


# --- one request's trouble is its own ---


def poison(engine, tokens):
    """Logits of requests whose prompt starts so become NaN, as an overflow in the model would leave them."""
    run_model = engine.runner.run

    def poisoned(output):
        logits = run_model(output).clone()
        rows = [p.request for p in output.scheduled if p.samples]
        for row, request in enumerate(rows):
            if request.prompt_token_ids[: len(tokens)] == tokens:
                logits[row] = math.nan
        return logits

    engine.runner.run = poisoned


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_that_cannot_be_sampled_ends_alone(qwen3, n):
    engine = make_engine(qwen3)
    poison(engine, [5, 5])
    params = SamplingParams(max_tokens=6, **GREEDY)
    engine.add_request("good", [7, 8, 9], params)
    engine.add_request("bad", [5, 5, 6], SamplingParams(max_tokens=6, temperature=1, seed=1, n=n))
    engine.add_request("fine", [17, 18], params)
    done = run(engine)
    assert "NaN" in done["bad"].error
    assert [o.finish_reason for o in done["bad"].outputs] == ["error"] * n
    assert answers(done["good"]) == expected(qwen3, [7, 8, 9], params)
    assert answers(done["fine"]) == expected(qwen3, [17, 18], params)
    assert engine.scheduler.pool.available == engine.scheduler.pool.total


def test_a_model_that_fails_answers_and_the_engine_lives_on(qwen3):
    engine = make_engine(qwen3)
    run_model = engine.runner.run
    engine.add_request("a", [7, 8, 9], SamplingParams(max_tokens=3, **GREEDY))

    def failing(output):
        engine.runner.run = run_model
        raise RuntimeError("no memory")

    engine.runner.run = failing
    (output,) = engine.step()
    assert output.finished
    assert "no memory" in output.error
    params = SamplingParams(max_tokens=3, **GREEDY)
    engine.add_request("a", [7, 8, 9], params)
    assert answers(run(engine)["a"]) == expected(qwen3, [7, 8, 9], params)


def test_stale_nan_in_a_block_reaches_nobody(qwen3):
    """What a broken request leaves in its blocks is not read by the next one, padded decode included."""
    engine = make_engine(qwen3, num_blocks=16)
    engine.runner.cache.storage[:, :, 1:] = math.nan
    params = SamplingParams(max_tokens=9, **GREEDY)
    prompts = {"a": [7, 8, 9], "b": list(range(30, 43)), "c": [3]}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    done = run(engine)
    assert all(answers(done[name]) == expected(qwen3, prompt, params) for name, prompt in prompts.items())


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [([], "empty"), ("", "empty"), ([1, 999], "not an id"), ([5] * 300, "whole cache holds 252"), (3.5, "float")],
)
def test_what_cannot_be_served_is_refused_and_leaves_nothing(qwen3, prompt, reason):
    """vllm#7632, #39734: refused at the door, with the reason; the others never notice."""
    engine = make_engine(qwen3)
    with pytest.raises(RequestError, match=reason):
        engine.add_request("bad", prompt)
    assert not engine.has_unfinished_requests()
    engine.add_request("bad", [4, 5], SamplingParams(max_tokens=2, **GREEDY))
    assert run(engine)["bad"].finished
    with pytest.raises(RequestError, match="max_tokens is 0"):
        SamplingParams(max_tokens=0)


def test_an_id_in_use_is_refused(qwen3):
    engine = make_engine(qwen3)
    engine.add_request("a", [4, 5])
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("a", [4, 5])


def test_an_output_that_outgrows_the_pool_ends_with_length(qwen3):
    """15 blocks of 4: 60 tokens in the cache, and one more that nobody has to read."""
    engine = make_engine(qwen3, num_blocks=16)
    engine.add_request("a", list(range(10)), SamplingParams(max_tokens=400, **GREEDY))
    engine.add_request("b", [5, 6], SamplingParams(max_tokens=3, **GREEDY))
    done = run(engine)
    (output,) = done["a"].outputs
    assert (output.finish_reason, output.count) == ("length", 51)
    assert done["b"].finished


def test_min_tokens_that_cannot_be_reached_end_with_length(qwen3):
    """vllm#51299."""
    engine = make_engine(qwen3, max_model_len=16)
    engine.add_request("a", [5, 6, 7], SamplingParams(temperature=0, min_tokens=100, max_tokens=100))
    (output,) = run(engine)["a"].outputs
    assert (output.finish_reason, output.count) == ("length", 13)


# --- stopping, text, log-probabilities ---


def test_text_streams_as_it_becomes_certain_and_never_by_half(qwen3):
    """The pieces joined are the text; nothing of a stop string is shown."""
    _, tokenizer = qwen3
    free = SamplingParams(temperature=1.4, seed=2, max_tokens=40, ignore_eos=True)
    prompt = tokenizer.encode("the cat", add_special=True)
    text = expected(qwen3, prompt, free)[0][1]
    stop = text[20:24]
    params = SamplingParams(temperature=1.4, seed=2, max_tokens=40, ignore_eos=True, stop=[stop])
    engine = make_engine(qwen3)
    engine.add_request("a", prompt, params)
    shown, seen = "", 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            (o,) = output.outputs
            shown += o.text_from(seen)
            seen = o.count
            assert stop not in shown
            assert shown == o.text
    assert (shown, o.finish_reason, o.stop_reason) == (text[: text.index(stop)], "stop", stop)


def test_an_abort_releases_the_text_held_back(qwen3):
    free = SamplingParams(temperature=1.4, seed=2, max_tokens=12, ignore_eos=True)
    text = expected(qwen3, [10, 11], free)[0][1]
    engine = make_engine(qwen3)
    engine.add_request(
        "a", [10, 11], SamplingParams(temperature=1.4, seed=2, max_tokens=40, ignore_eos=True, stop=[text + "never"])
    )
    for _ in range(12):
        (output,) = engine.step()
    assert output.outputs[0].text == ""  # all of it may still be the stop string
    (last,) = engine.abort_request("a")
    assert last.outputs[0].text == text
    assert engine.abort_request("a") == []


def test_log_probabilities_are_those_of_the_raw_logits(qwen3):
    """vllm#9453: before temperature and cuts, for each token drawn and the likeliest."""
    params = SamplingParams(temperature=0.5, top_k=3, seed=3, max_tokens=6, logprobs=2, ignore_eos=True)
    engine = make_engine(qwen3)
    engine.add_request("a", [9, 8, 7], params)
    (output,) = run(engine)["a"].outputs
    own = alone(*qwen3, (9, 8, 7), params)[0].tokens
    for token, listed in zip(own, output.logprobs, strict=True):
        assert listed[token.id].logprob == pytest.approx(token.logprob, abs=1e-4)
        assert {i for i, _ in token.top_logprobs} <= set(listed)
        assert listed[token.top_logprobs[0][0]].rank == 1
    assert output.cumulative_logprob == pytest.approx(sum(t.logprob for t in own), abs=1e-3)


# --- what is remembered ---


def test_metrics_and_events_tell_one_story(qwen3):
    engine = make_engine(qwen3, num_blocks=9, watermark=0)
    for name, prompt in (("a", range(9)), ("b", range(40, 49))):
        engine.add_request(name, list(prompt), SamplingParams(max_tokens=16, **GREEDY))
    done = run(engine)
    for name in "ab":
        m, o = done[name].metrics, done[name].outputs[0]
        assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time == o.token_times[0]
        assert o.token_times == sorted(o.token_times)
        assert o.token_times[-1] <= m.finished_time
        kinds = [e.kind for e in engine.events.of("added", "admitted", "preempted", "finished", request=name)]
        assert kinds == ["added", "admitted"] + ["preempted"] * m.num_preemptions + ["finished"]
    assert done["b"].metrics.num_preemptions > 0
    steps = [dict(zip(e.data["requests"], e.data["tokens"], strict=True)) for e in engine.events.of("sampled")]
    drawn = [step["b"] for step in steps if "b" in step]
    assert drawn == done["b"].outputs[0].token_ids


# --- exact mode ---


@torch.inference_mode()
def test_batch_invariant_logits_are_the_same_bits(pair):
    """Alone, beside others, in chunks of any size, after a hit: bitwise the same logits, every step."""
    prompt = list(range(60, 97))

    def bits(others: int, budget: int, again: bool = False):
        engine = make_engine(pair, max_num_batched_tokens=budget, batch_invariant=True)
        seen, run_model = [], engine.runner.run

        def recording(output):
            logits = run_model(output)
            names = [p.request.request_id for p in output.scheduled if p.samples]
            seen.extend(logits[i].clone() for i, name in enumerate(names) if name == "x")
            return logits

        engine.runner.run = recording
        params = SamplingParams(max_tokens=6, **GREEDY)
        if again:
            engine.add_request("before", prompt, params)
            run(engine)
        for i in range(others):
            engine.add_request(str(i), list(range(100 + i, 105 + 3 * i)), params)
        engine.add_request("x", prompt, params)
        run(engine)
        return torch.stack(seen)

    reference = bits(0, 64)
    for others, budget, again in ((3, 64, False), (0, 7, False), (2, 5, False), (1, 9, True)):
        assert torch.equal(bits(others, budget, again), reference), (others, budget, again)


def test_batch_invariant_answers_are_the_same_answers(pair):
    engine = make_engine(pair, batch_invariant=True)
    params = SamplingParams(temperature=1.3, seed=9, max_tokens=12, ignore_eos=True)
    for name, prompt in (("a", range(9)), ("b", range(40, 61))):
        engine.add_request(name, list(prompt), params)
    done = run(engine)
    assert answers(done["a"]) == expected(pair, list(range(9)), params)
    assert answers(done["b"]) == expected(pair, list(range(40, 61)), params)


# --- the front door ---


def make_llm(pair, **options) -> LLM:
    return LLM(*pair, **{"num_blocks": 64, "block_size": 4, **options})


def test_llm_answers_in_the_order_of_the_prompts(qwen3):
    llm = make_llm(qwen3, max_num_seqs=2)
    prompts = ["the cat", [9, 8, 7], {"prompt": "the dog sat"}, {"prompt_token_ids": [5, 6]}]
    params = [SamplingParams(temperature=1, seed=i, max_tokens=3 * i + 2, ignore_eos=True) for i in range(4)]
    outputs = llm.generate(prompts, params)
    encode = lambda text: qwen3[1].encode(text, add_special=True)  # noqa: E731
    for output, ids, p in zip(
        outputs, [encode("the cat"), [9, 8, 7], encode("the dog sat"), [5, 6]], params, strict=True
    ):
        assert output.prompt_token_ids == ids
        assert answers(output) == expected(qwen3, ids, p)
    assert [o.prompt for o in outputs] == ["the cat", None, "the dog sat", None]


def test_one_prompt_is_a_list_of_one(qwen3):
    llm = make_llm(qwen3)
    params = SamplingParams(max_tokens=2, **GREEDY)
    assert [o.prompt_token_ids for o in llm.generate([5, 6], params)] == [[5, 6]]
    assert len(llm.generate("the cat", params)) == 1


def test_a_bad_prompt_among_good_ones_leaves_nothing_behind(qwen3):
    llm = make_llm(qwen3)
    with pytest.raises(RequestError, match="empty"):
        llm.generate(["the cat", ""])
    assert not llm.engine.has_unfinished_requests()
    with pytest.raises(RequestError, match="give one each"):
        llm.generate(["a", "b"], [SamplingParams()])


def test_leaving_a_stream_early_aborts(qwen3):
    llm = make_llm(qwen3)
    for _ in llm.stream("the cat", SamplingParams(max_tokens=30, **GREEDY)):
        break
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.scheduler.pool.available == llm.engine.scheduler.pool.total


def test_settings_that_do_not_exist_are_named(qwen3):
    with pytest.raises(EngineError, match="num_bloks"):
        LLM(*qwen3, num_bloks=3)
    with pytest.raises(EngineError, match="without its tokenizer"):
        LLM(qwen3[0])


def test_memory_decides_the_number_of_blocks(qwen3):
    model, _ = qwen3
    llm = LLM(*qwen3, kv_cache_bytes=1 << 20, max_num_seqs=50)
    cache = llm.engine.runner.cache
    assert 0.95 * (1 << 20) < cache.allocated_bytes <= (1 << 20) + cache.block_bytes
    small = LLM(*qwen3, max_num_seqs=1, block_size=16)
    assert small.engine.config.num_blocks == 1 + model.config.max_position_embeddings // 16


def test_chat_is_generate_on_the_templates_tokens(smollm2):
    llm = LLM(*smollm2, num_blocks=64)
    params = SamplingParams(temperature=0, max_tokens=6)
    talks = [[{"role": "user", "content": text}] for text in ("Hi", "Name a colour.")]
    outputs = llm.chat(talks, params)
    for talk, output in zip(talks, outputs, strict=True):
        assert output.prompt_token_ids == smollm2[1].encode_chat(talk)
        assert answers(output) == expected(smollm2, output.prompt_token_ids, params)
    assert answers(llm.chat(talks[0], params)[0]) == answers(outputs[0])
