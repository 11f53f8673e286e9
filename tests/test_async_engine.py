"""Promise: coroutines may come, read slowly, leave and be cancelled; everyone is answered and no block is lost."""

from __future__ import annotations

import asyncio

import pytest

from minillm.async_engine import AsyncEngine
from minillm.errors import EngineError, RequestError
from minillm.sampling import SamplingParams
from tests.serving import answers, expected, make_engine, make_tiny

PARAMS = SamplingParams(temperature=1.1, seed=3, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return make_tiny("qwen3", tmp_path_factory)


@pytest.fixture
def engine(qwen3):
    engine = AsyncEngine(make_engine(qwen3))
    yield engine
    if engine.is_running:
        engine.shutdown()
    pool = engine.engine.scheduler.pool
    assert pool.available == pool.total
    assert not engine.engine.has_unfinished_requests()


async def last(stream):
    async for output in stream:
        final = output
    return final


def test_many_at_once_answer_as_alone(engine, qwen3):
    async def main():
        streams = [engine.generate([10 + i, 11, 12], PARAMS, str(i)) for i in range(12)]
        return await asyncio.gather(*map(last, streams))

    for i, output in enumerate(asyncio.run(main())):
        assert answers(output) == expected(qwen3, [10 + i, 11, 12], PARAMS)


def test_a_slow_reader_misses_nothing(engine, qwen3):
    async def main():
        text, seen, count = "", 0, 0
        async for output in engine.generate([10, 11], PARAMS, "slow"):
            await asyncio.sleep(0.02)
            (o,) = output.outputs
            text, seen, count = text + o.text_from(seen), o.count, count + 1
        return text, count

    text, count = asyncio.run(main())
    assert text == expected(qwen3, [10, 11], PARAMS)[0][1]
    assert count <= 20


def test_leaving_early_and_cancelling_abort(engine):
    async def main():
        async for _ in engine.generate([10, 11], SamplingParams(max_tokens=200, ignore_eos=True), "left"):
            break
        task = asyncio.create_task(
            last(engine.generate([10, 12], SamplingParams(max_tokens=200, ignore_eos=True), "cut"))
        )
        await asyncio.sleep(0.03)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(200):
            if not engine.engine.has_unfinished_requests():
                return
            await asyncio.sleep(0.01)

    asyncio.run(main())
    reasons = [e.data["reason"] for e in engine.engine.events.of("finished")]
    assert reasons == ["abort", "abort"]


def test_an_abort_from_outside_is_an_answer(engine):
    async def main():
        stream = engine.generate([10, 11], SamplingParams(max_tokens=240, ignore_eos=True), "a")
        first = await anext(stream)
        await engine.abort("a")
        await engine.abort("unknown")
        return first, await last(stream)

    first, final = asyncio.run(main())
    assert not first.finished
    assert final.outputs[0].finish_reason == "abort"


def test_what_cannot_be_served_raises_where_it_was_asked(engine):
    async def main():
        with pytest.raises(RequestError, match="empty"):
            await last(engine.generate([], PARAMS, "bad"))
        return await last(engine.generate([1], PARAMS, "bad"))

    assert asyncio.run(main()).finished


def test_an_id_in_use_does_not_disturb_its_owner(engine, qwen3):
    async def main():
        owner = engine.generate([10, 11], PARAMS, "a")
        await anext(owner)
        with pytest.raises(RequestError, match="in use"):
            await last(engine.generate([5], PARAMS, "a"))
        return await last(owner)

    assert answers(asyncio.run(main())) == expected(qwen3, [10, 11], PARAMS)


def test_shutdown_answers_everybody(engine):
    async def main():
        stream = engine.generate([10, 11], SamplingParams(max_tokens=240, ignore_eos=True), "a")
        await anext(stream)
        await asyncio.to_thread(engine.shutdown)
        final = await last(stream)
        with pytest.raises(EngineError, match="has stopped"):
            await last(engine.generate([1], PARAMS, "late"))
        return final

    assert asyncio.run(main()).outputs[0].finish_reason == "abort"


def test_a_fault_of_the_engine_reaches_every_reader(qwen3):
    engine = AsyncEngine(make_engine(qwen3))

    def broken():
        raise RuntimeError("planted")

    engine.engine.step = broken

    async def main():
        streams = [engine.generate([1, 2], PARAMS, str(i)) for i in range(3)]
        found = await asyncio.gather(*map(last, streams), return_exceptions=True)
        with pytest.raises(EngineError, match="has stopped"):
            await last(engine.generate([1, 2], PARAMS, "late"))
        return found

    for error in asyncio.run(main()):
        assert isinstance(error, EngineError)
        assert "planted" in str(error) or "has stopped" in str(error)
    assert not engine.is_running
