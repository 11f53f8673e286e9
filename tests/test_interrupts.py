"""Promise: whatever ends a step half way (Ctrl-C, a broken model), later answers are right and nothing leaks."""

from __future__ import annotations

import asyncio

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.async_engine import AsyncEngine
from minillm.batching import SchedulerConfig
from minillm.engine import Engine
from minillm.errors import EngineError, RequestError
from minillm.llm import scheduler_config
from tests.serving import answers, expected, make_engine, make_tiny, run

A, B, C = tuple(range(3, 20)), tuple(range(20, 41)), tuple(range(50, 60))
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
FORKED = SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_tiny("llama", tmp_path_factory)


@pytest.fixture(scope="module", params=["llama", "qwen3-next"])
def either(request, tmp_path_factory):
    """Keys and values alone, and a state beside them."""
    return make_tiny(request.param, tmp_path_factory)


def interrupt(engine, monkeypatch, where: str, after: int, error=KeyboardInterrupt) -> None:
    """Raises once, in the n-th call of one of the step's parts, before or after its work."""
    part, when = where.split()
    owner = {"run": engine.runner, "update": engine.scheduler}.get(part, engine)
    work, calls = getattr(owner, part), [0]

    def broken(*arguments):
        calls[0] += 1
        done = work(*arguments) if when == "after" or calls[0] != after else None
        if calls[0] == after:
            raise error("stop")
        return done

    monkeypatch.setattr(owner, part, broken)


PLACES = ["run before", "run after", "update after", "_sample before", "_append after", "_emit before"]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("after", [1, 2, 4, 7])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_step_that_ends_half_way(either, monkeypatch, where, after, error):
    """Small pool, host tier, swapping, forks. Its requests end with an error; all others are right, and later ones."""
    engine = make_engine(
        either, num_blocks=18, watermark=0, num_host_blocks=30, host_reuse="always", preemption="swap",
        max_num_batched_tokens=16,
    )  # fmt: skip
    wanted = {"a": (A, PARAMS), "b": (B, FORKED), "c": (C, PARAMS)}
    for name, (prompt, params) in wanted.items():
        engine.add_request(name, prompt, params)
    interrupt(engine, monkeypatch, where, after, error)
    done = {}
    for _ in range(400):
        try:
            outputs = engine.step()
        except KeyboardInterrupt:
            continue
        done |= {o.request_id: o for o in outputs if o.finished}
        engine.scheduler.check()
        if not engine.has_unfinished_requests():
            break
    assert set(done) == set(wanted)
    assert not engine.has_unfinished_requests()
    assert engine.scheduler.pool.available == engine.scheduler.pool.total
    broken = [name for name, o in done.items() if o.error is not None]
    assert broken
    for name, o in done.items():
        if name not in broken:
            assert answers(o) == expected(either, *wanted[name])
    for name, (prompt, params) in wanted.items():  # with whatever the caches now hold
        engine.add_request(name, prompt, params)
        assert answers(run(engine)[name]) == expected(either, prompt, params)


def test_interrupted_while_planning_the_engine_says_so(pair, monkeypatch):
    engine = make_engine(pair)
    engine.add_request("a", A, PARAMS)
    engine.step()
    monkeypatch.setattr(engine.scheduler, "_chunk", lambda *_: 1 / 0)
    engine.add_request("b", B, PARAMS)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    with pytest.raises(EngineError, match="a step was interrupted while it was planned or undone; make a new engine"):
        engine.step()


# --- several callers of one LLM ---


def test_two_streams_of_one_llm_do_not_take_each_others_outputs(pair):
    llm = LLM(*pair, num_blocks=64, block_size=4)
    stream = llm.stream([A], PARAMS)
    first = next(stream)
    inner = llm.generate([B], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    rest = list(stream)
    assert answers(rest[-1]) == expected(pair, A, PARAMS)
    assert len(inner[0].outputs[0].token_ids) == 30
    assert not first.finished
    assert not llm.engine.has_unfinished_requests()
    assert not llm._newest


def test_a_request_aborted_by_somebody_else_ends_the_wait(pair):
    llm = LLM(*pair, num_blocks=64, block_size=4)
    stream = llm.stream([A], PARAMS)
    name = next(stream).request_id
    llm.engine.abort_request(name)
    assert list(stream) == []
    llm.engine.add_request("mine", A, PARAMS)  # an id that no call of the LLM waits for
    assert answers(llm.generate([B], PARAMS)[0]) == expected(pair, B, PARAMS)


def test_ctrl_c_leaves_the_llm_usable(pair, monkeypatch):
    """Found by a breaker: copies to host memory that were planned and not made came back as somebody's prefix."""
    llm = LLM(*pair, num_blocks=9, block_size=4, num_host_blocks=20, host_reuse="always", watermark=0)
    llm.generate([A], PARAMS)
    with monkeypatch.context() as patch:
        interrupt(llm.engine, patch, "run before", 1)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([B], PARAMS)
    llm.generate([C], PARAMS)
    assert answers(llm.generate([A], PARAMS)[0]) == expected(pair, A, PARAMS)


# --- one bad caller beside many ---


def asynchronous(pair, check):
    engine = AsyncEngine(make_engine(pair))
    try:
        return asyncio.run(check(engine))
    finally:
        engine.shutdown()


async def last(stream):
    async for output in stream:
        final = output
    return final


def test_an_id_that_is_no_str_harms_nobody(pair):
    async def check(engine):
        for bad in (["a"], 3, None):
            with pytest.raises(RequestError, match="the request id is a"):
                await last(engine.generate(A, PARAMS, bad))
            with pytest.raises(RequestError, match="the request id is a"):
                await engine.abort(bad)
        return await last(engine.generate(A, PARAMS, "a"))

    assert answers(asynchronous(pair, check)) == expected(pair, A, PARAMS)


def test_a_listener_that_raises_is_taken_off(pair):
    engine = make_engine(pair)
    heard = []

    def bad(event):
        raise ValueError("no")

    engine.events.listeners += [bad, heard.append]
    with pytest.warns(UserWarning, match="a listener of the event log failed and was taken off: ValueError"):
        engine.add_request("a", A, PARAMS)
    assert answers(run(engine)["a"]) == expected(pair, A, PARAMS)
    assert [e.kind for e in heard][:1] == ["added"]
    assert bad not in engine.events.listeners


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_thread_that_dies_tells_its_readers(pair, monkeypatch, error):
    async def check(engine):
        monkeypatch.setattr(engine.engine, "_fail", lambda *_: 1 / 0)
        interrupt(engine.engine, monkeypatch, "run before", 1, error)
        with pytest.raises(EngineError, match="make a new one"):
            await asyncio.wait_for(last(engine.generate(A, PARAMS, "a")), 10)
        while engine.is_running:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineError):
            await asyncio.wait_for(last(engine.generate(A, PARAMS, "b")), 10)

    asynchronous(pair, check)


# --- what is refused before it can do harm ---


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens",
                                     "max_model_len", "priority_places", "max_waiting", "sliding_window",
                                     "num_state_slots")
          for value in (0, -1, 1.5, float("nan"), "7", True, 1 << 31)),
        *((name, value) for name in ("num_host_blocks", "long_prefill_token_threshold", "attention_sinks")
          for value in (-1, 1.5, float("nan"), "7", True, 1 << 31)),
        *(("watermark", value) for value in (-0.1, 1.1, float("nan"), float("inf"), "0.1", True)),
        *(("ttft_slo_s", value) for value in (0, -1, float("nan"), float("inf"), "1", True)),
        *((name, "best") for name in ("policy", "preemption", "prefix_cache", "eviction", "host_reuse")),
        *((name, 1) for name in ("enable_chunked_prefill", "continuous_batching")),
    ],
)  # fmt: skip
def test_every_setting_has_a_kind_and_a_range(name, value):
    with pytest.raises(EngineError, match=f"^{name} is "):
        SchedulerConfig(**{name: value})


def test_a_cache_larger_than_memory_is_one_clear_error(pair):
    with pytest.raises(EngineError, match="do not fit into memory; lower num_blocks, num_host_blocks or kv_cache_byt"):
        Engine(*pair, SchedulerConfig(num_blocks=(1 << 31) - 1, block_size=1 << 20))


def test_wrong_kinds_of_arguments_are_request_errors(pair):
    llm = LLM(*pair, num_blocks=64, block_size=4)
    with pytest.raises(RequestError, match="there are no messages"):
        llm.chat([])
    with pytest.raises(RequestError, match="the parameters are a dict; give SamplingParams"):
        llm.generate([A], [{"temperature": 0}])
    with pytest.raises(RequestError, match="the prompt is a Tensor"):
        llm.generate([{"prompt_token_ids": torch.tensor(A)}], PARAMS)
    with pytest.raises(RequestError, match="priority is nan; it must be a whole number"):
        llm.generate([A], PARAMS, priority=[float("nan")])
    endless = SamplingParams(min_tokens=2, stop_token_ids=list(range(llm.engine.vocab_size)))
    with pytest.raises(RequestError, match="min_tokens is 2; it must be 0 where every token"):
        llm.generate([A], endless)
    for name, hint in (
        ("max_seqs", "use max_num_seqs"), ("scheduling_policy", "use policy"), ("zz", "the options are num_blocks, bl"),
        ("gpu_memory_utilization", "use kv_cache_bytes"),
    ):  # fmt: skip
        with pytest.raises(EngineError, match=f"{name} is no option of this engine; {hint}"):
            scheduler_config(pair[0], 1 << 20, {name: 3})
    assert not llm.engine.has_unfinished_requests()


def test_forgetting_prefixes_forgets_both_tiers(pair):
    llm = LLM(*pair, num_blocks=9, block_size=4, num_host_blocks=20, host_reuse="always", watermark=0)
    llm.generate([A], PARAMS)
    llm.generate([B], PARAMS)
    assert llm.engine.scheduler.events.of("offloaded")
    llm.reset_prefix_cache()
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.pool.counts["cached"] == llm.engine.scheduler.host.pool.counts["cached"] == 0
    again = llm.generate([A], PARAMS)[0]
    assert again.num_cached_tokens == 0
    stream = llm.stream([A], PARAMS)
    next(stream)
    with pytest.raises(EngineError, match="1 requests are under way"):
        llm.reset_prefix_cache()
