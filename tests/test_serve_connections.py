"""Promise: whoever holds connections without asking for anything cannot keep the server from answering others."""

from __future__ import annotations

import asyncio
import resource
import time
from contextlib import ExitStack, suppress

import httpx
import pytest

from minillm.serving.connection import SPARE, most_connections
from tests.serving_http import check_error, connect, events, exchange, make_chat_model, read_all, serving, wait_until

TEXT = "/v1/completions"
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
UNREAD = b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n"
HOLDING = {"nothing": b"", "half a head": GET + b"X-Mo", "a second head": GET + b"\r\n" + GET}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_chat_model(tmp_path_factory)


@pytest.fixture(scope="module")
def hasty(pair):
    with serving(pair, {"head_timeout_s": 0.3}) as server:
        yield server


def connections(server) -> int:
    return len(server.server._uvicorn.server_state.connections)


@pytest.mark.parametrize("data", HOLDING.values(), ids=HOLDING)
def test_a_head_that_does_not_end(hasty, data):
    with connect(hasty, data) as sock:
        began, said = time.monotonic(), read_all(sock)
    assert 0.25 < time.monotonic() - began < 8
    if not data.endswith(GET):  # the first answer of that one is no refusal
        assert said.startswith(b"HTTP/1.1 408")
        assert b'"code":"request_timeout"' in said
    wait_until(lambda: connections(hasty) == 0)


def trickle(sock, seconds: float) -> None:
    """Sends a byte at a time until the server has closed."""
    until = time.monotonic() + seconds
    with suppress(ConnectionError):
        while time.monotonic() < until:
            sock.sendall(b"X")
            time.sleep(0.05)
        pytest.fail("the connection is still open")


@pytest.mark.parametrize("first", [b"", GET + b"\r\n", UNREAD], ids=["head", "second head", "unread body"])
def test_a_byte_now_and_then_buys_no_time(hasty, first):
    with connect(hasty, first) as sock:
        trickle(sock, 8.0)
    wait_until(lambda: connections(hasty) == 0)


def test_an_answer_may_take_longer_than_a_head(hasty):
    """The deadline is not one of the request."""
    body = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 8, "seed": 1}
    answer = httpx.post(hasty.url + TEXT, json=body, timeout=60)
    assert events(answer)[-1] == "[DONE]"


def test_connections_above_the_limit_are_told(pair):
    with serving(pair, {"max_connections": 3}) as server, ExitStack() as held:
        kept = held.enter_context(httpx.Client(base_url=server.url))
        assert kept.get("/health").status_code == 200
        for _ in range(2):
            held.enter_context(connect(server, GET))
        wait_until(lambda: connections(server) == 3)
        answer = exchange(server, b"")
        check_error(answer, 503, "too_many_connections")
        assert answer.headers["retry-after"] == "1"
        more = [held.enter_context(connect(server)) for _ in range(3 * SPARE)]
        assert all(read_all(sock).startswith(b"HTTP/1.1 503") for sock in more)
        wait_until(lambda: connections(server) <= 3 + SPARE, 1.0)  # sooner than those that take their time to read
        held.close()
        wait_until(lambda: connections(server) == 0)
        text = httpx.get(server.url + "/metrics").text
        assert 'request_refused_total{cause="too_many_connections"' in text


def test_two_hundred_streams_at_once(pair):
    async def one(client, i):
        body = {"prompt": [5, 6, i], "max_tokens": 3, "ignore_eos": True, "stream": True}
        return await client.post(TEXT, json=body)

    async def all_of(url):
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            return await asyncio.gather(*(one(client, i) for i in range(200)))

    with serving(pair, max_num_seqs=64) as server:
        answers = asyncio.run(all_of(server.url))
        assert all(events(answer)[-1] == "[DONE]" for answer in answers)


def test_the_limit_is_below_the_number_of_file_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert most_connections(7) == 7
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        assert 200 < most_connections(10**6) < 512 - SPARE
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
