"""Promise: clients may leave, die, dawdle or come all at once; no block is lost and nobody waits for ever."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys

import httpx
import openai
import pytest

from minillm.errors import OverloadedError
from minillm.sampling_params import SamplingParams
from minillm.serving.settings import ServingError
from tests.serving import alone
from tests.serving_http import (
    MODEL,
    check_error,
    client_of,
    events,
    make_chat_model,
    post,
    raw_request,
    scheduler_of,
    serving,
    slowed,
    wait_idle,
    wait_until,
)

TEXT = "/v1/completions"
LONG = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 480, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_chat_model(tmp_path_factory)


@pytest.fixture
def server(pair):
    with serving(pair) as server:
        slowed(server)
        yield server


def ended(server) -> list[str]:
    return [event.data["reason"] for event in server.engine.engine.events.of("finished")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("extra", [{}, {"n": 3}, {"prompt": ["a", "b", "c"]}], ids=str)
def test_a_client_that_leaves_ends_its_request(server, stream, extra):
    sock = raw_request(server, {**LONG, **extra, "stream": stream})
    wait_until(lambda: len(scheduler_of(server).running) == (3 if extra else 1))
    sock.close()
    wait_idle(server)
    assert set(ended(server)) == {"abort"}


def test_a_client_that_leaves_the_queue_is_taken_out_of_it(pair):
    with serving(pair, max_num_seqs=1) as server:
        slowed(server)
        first = raw_request(server, LONG)
        wait_until(lambda: scheduler_of(server).running)
        for stream in (False, True):
            sock = raw_request(server, {**LONG, "stream": stream})
            wait_until(lambda: scheduler_of(server).waiting)
            sock.close()
            wait_until(lambda: not scheduler_of(server).waiting)
        assert len(scheduler_of(server).running) == 1
        first.close()


def test_leaving_a_stream_of_the_client_library_ends_it(server):
    stream = client_of(server).completions.create(
        model=MODEL, prompt="the", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_idle(server)
    assert ended(server) == ["abort"]


def test_kill_minus_nine_mid_stream(server):
    code = (
        "import httpx, sys\n"
        f"with httpx.stream('POST', {server.url + TEXT!r}, json={ {**LONG, 'stream': True}!r}, timeout=60) as r:\n"
        "    for line in r.iter_lines():\n"
        "        print(line, flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout.readline().startswith(b"data: ")
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    wait_idle(server)
    assert ended(server) == ["abort"]


def test_a_reader_that_stops_reading_holds_up_nobody(pair):
    """Its socket fills, its handler waits, the engine goes on; what it then reads is all there."""
    wide = {**LONG, "n": 8, "logprobs": 20, "max_tokens": 250, "stream": True}  # megabytes of events
    with serving(pair, num_blocks=1200) as server:
        sock = raw_request(server, wide, version="1.0", narrow=True)
        assert post(server, TEXT, {"prompt": "a", "max_tokens": 5}).status_code == 200
        wait_until(lambda: not scheduler_of(server).has_unfinished_requests(), 30)  # the engine is through with it
        received = b""
        sock.settimeout(30)
        while part := sock.recv(1 << 20):
            received += part
        sock.close()
    chunks = received.partition(b"\r\n\r\n")[2].decode().split("\n\n")
    assert chunks[-2] == "data: [DONE]"
    texts, count = [""] * 8, [0] * 8
    for chunk in chunks[:-2]:
        (choice,) = json.loads(chunk.removeprefix("data: "))["choices"]
        texts[choice["index"]] += choice["text"]
        count[choice["index"]] += len(choice["logprobs"]["tokens"])
    done = alone(*pair, (5, 6, 7), SamplingParams(n=8, max_tokens=250, ignore_eos=True, seed=1))
    assert texts == [d.text for d in done]
    assert count == [250] * 8
    assert len(chunks) < 8 * 250 / 4, "outputs were queued for a reader that did not read"


def test_a_reader_that_never_reads_is_given_up(pair):
    """When its time is over its handler ends too, and the server can stop."""
    body = {**LONG, "n": 12, "logprobs": 20, "stream": True}
    with serving(pair, {"request_timeout_s": 2.5, "drain_timeout_s": 60.0}, num_blocks=2000) as server:
        sock = raw_request(server, body, narrow=True)
        wait_until(lambda: server.server.state.active == 1)
        wait_until(lambda: server.server.state.active == 0, 20)
    sock.close()


def test_two_hundred_streams_at_once(pair):
    wanted = {}
    for i in range(200):
        (wanted[i],) = alone(*pair, (5 + i, 9), SamplingParams(max_tokens=6, seed=i, ignore_eos=True))

    async def one(client, i):
        text, body = "", {"ignore_eos": True}
        stream = await client.completions.create(
            model=MODEL, prompt=[5 + i, 9], max_tokens=6, seed=i, stream=True, extra_body=body
        )
        async for chunk in stream:
            text += chunk.choices[0].text
        return text

    async def everyone(url):
        limits = httpx.Limits(max_connections=250)
        async with httpx.AsyncClient(limits=limits, timeout=60) as http:
            client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="x", http_client=http, max_retries=0)
            return await asyncio.gather(*(one(client, i) for i in range(200)))

    with serving(pair, max_num_seqs=64, max_num_batched_tokens=128) as server:
        texts = asyncio.run(everyone(server.url))
    assert texts == [wanted[i].text for i in range(200)]


def test_a_full_queue_is_429_and_says_when_to_come_again(pair):
    with serving(pair, max_num_seqs=1, max_waiting=1) as server:
        slowed(server)
        first = raw_request(server, LONG)
        wait_until(lambda: scheduler_of(server).running)
        second = raw_request(server, LONG)
        wait_until(lambda: scheduler_of(server).waiting)
        for stream in (False, True):
            answer = post(server, TEXT, {"prompt": "a", "stream": stream})
            assert check_error(answer, 429, "queue_full")["type"] == "rate_limit_error"
            assert int(answer.headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            client_of(server).completions.create(model=MODEL, prompt="a")
        first.close()
        second.close()


def test_of_several_prompts_all_are_taken_or_none(pair):
    with serving(pair, max_num_seqs=1, max_waiting=2) as server:
        slowed(server)
        first = raw_request(server, LONG)
        wait_until(lambda: scheduler_of(server).running)
        check_error(post(server, TEXT, {"prompt": ["a", "b", "c", "d"]}), 429, "queue_full")
        wait_until(lambda: not scheduler_of(server).waiting)
        first.close()


def test_an_overloaded_engine_says_how_long(pair):
    with serving(pair) as server:

        def add_request(*_):
            raise OverloadedError("the first token would come too late", 7.2)

        server.engine.engine.add_request = add_request
        answer = post(server, TEXT, {"prompt": "a"})
        check_error(answer, 429, "overloaded")
        assert answer.headers["retry-after"] == "8"


def test_a_request_over_its_time_is_504_and_frees_its_blocks(pair):
    with serving(pair, {"request_timeout_s": 0.8}, max_num_seqs=1) as server:
        slowed(server)
        error = check_error(post(server, TEXT, LONG), 504, "request_timeout")
        assert error["type"] == "timeout_error"
        wait_idle(server)
        *chunks, last = events(post(server, TEXT, {**LONG, "stream": True}))
        assert len(chunks) >= 1
        assert all("choices" in chunk for chunk in chunks)
        assert last["error"]["code"] == "request_timeout"
        wait_idle(server)
        queued_time_out(server)
        with pytest.raises(openai.APIError, match="took more than"):
            list(
                client_of(server).completions.create(
                    model=MODEL, prompt=[5], max_tokens=480, stream=True, extra_body={"ignore_eos": True}
                )
            )


def queued_time_out(server):
    """Its time is over before it had a turn."""
    params = SamplingParams(max_tokens=480, ignore_eos=True)
    server.engine._do(lambda: server.engine.engine.add_request("in front", [5], params))
    wait_until(lambda: scheduler_of(server).running)
    for stream in (False, True):
        check_error(post(server, TEXT, {**LONG, "stream": stream}), 504, "request_timeout")
    server.engine._do(lambda: server.engine.engine.abort_request("in front"))


def test_a_failing_model_is_500_for_its_request_alone(server):
    engine = server.engine.engine
    run = engine.runner.run

    def broken(output):
        if any(part.request.prompt_token_ids[0] == 66 for part in output.scheduled):
            raise RuntimeError("planted")
        return run(output)

    engine.runner.run = broken
    for stream in (False, True):
        error = check_error(post(server, TEXT, {"prompt": [66], "stream": stream}), 500, "generation_failed")
        assert "planted" in error["message"]
    assert post(server, TEXT, {"prompt": [65], "max_tokens": 2}).status_code == 200


def test_a_failure_in_the_middle_of_a_stream_is_an_event(server):
    engine = server.engine.engine
    run, steps = engine.runner.run, []

    def broken(output):
        steps.append(output)
        if len(steps) == 4:
            raise RuntimeError("planted")
        return run(output)

    engine.runner.run = broken
    answer = post(server, TEXT, {**LONG, "stream": True})
    assert answer.status_code == 200
    *chunks, last = events(answer)
    assert chunks
    assert last["error"]["code"] == "generation_failed"


def test_a_dead_engine_is_503_and_unhealthy(pair):
    with serving(pair) as server:
        assert httpx.get(server.url + "/health").json() == {"status": "ok"}

        def broken():
            raise RuntimeError("planted")

        server.engine.engine.step = broken
        check_error(post(server, TEXT, {"prompt": "a"}), 503, "engine_stopped")
        check_error(post(server, TEXT, {"prompt": "a", "stream": True}), 503, "engine_stopped")
        error = check_error(httpx.get(server.url + "/health"), 503)
        assert "planted" in error["message"]
        server.engine.engine.abort_request(list(server.engine.engine._groups))


def test_the_end_of_the_block_cuts_running_requests_short(pair):
    with serving(pair) as server:
        slowed(server)
        with httpx.stream("POST", server.url + TEXT, json={**LONG, "stream": True}, timeout=30) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            server.stop()
            rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "draining"


def test_draining_refuses_new_requests_and_finishes_running_ones(pair):
    with serving(pair, {"drain_timeout_s": 20}) as server:
        slowed(server, 0.05)
        short = {**LONG, "max_tokens": 40, "stream": True}
        with httpx.stream("POST", server.url + TEXT, json=short, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            server._loop.call_soon_threadsafe(server.server.begin_drain, 20.0)
            wait_until(lambda: server.server.state.draining)
            refused = post(server, TEXT, {"prompt": "a"})
            assert check_error(refused, 503, "draining")["type"] == "server_error"
            assert "retry-after" in refused.headers
            check_error(httpx.get(server.url + "/health"), 503, "draining")
            assert [line for line in lines if line][-1] == "data: [DONE]"
        server._thread.join(10)
        assert not server._thread.is_alive()


def test_a_taken_port_is_told(pair):
    with serving(pair) as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(ServingError, match=f"port {port}"), serving(pair, {"port": port}):
            pass
    with pytest.raises(ServingError, match="not known"), serving(pair, {"host": "no such host"}):
        pass
