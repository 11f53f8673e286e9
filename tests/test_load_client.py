"""Promise: times are from the intended arrival, and no server, however strange, makes the load generator raise."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.serving.load_arrivals import arrival_times
from minillm.serving.load_client import Target
from minillm.serving.load_definitions import ttft_from_send
from minillm.serving.load_metrics import SLO
from minillm.serving.load_record import LoadError, TraceRequest
from minillm.serving.load_run import LoadResult, run_load, run_load_async
from minillm.serving.load_sse import STREAM_LIMIT, EventStream
from minillm.serving.load_workload import Prompts, make_requests
from tests.load_server import DONE, FakeServer, Reply, event, stream, token, usage
from tests.noise import calmly

SLACK = 0.3  # seconds that a busy machine may add


def several(count, at=0.0, output=3):
    return [TraceRequest(at, 8, output)] * count


def one(reply, target=None, **options):
    """The record of one request answered so."""
    with FakeServer(lambda body: reply) as server:
        url = Target(server.url, timeout_s=5)._replace(**(target or {}))
        (record,) = run_load(url, several(1), progress=False, **options).records
    return record


@calmly
def test_times_of_a_known_stream():
    record = one(Reply(stream([0.3, 0.02, 0.4])))
    assert record.ok
    assert record.output_tokens == 3
    assert record.token_source == "usage"
    assert 0.3 <= record.ttft_s < 0.3 + SLACK
    assert 0.72 <= record.e2el_s < 0.72 + SLACK
    assert record.tpot_s == pytest.approx((record.e2el_s - record.ttft_s) / 2)
    assert record.itl_s[0] + 0.2 < record.itl_s[1]
    assert record.end_s >= record.chunk_times[-1]


def test_what_is_sent():
    with FakeServer(lambda body: Reply(stream([0, 0, 0]))) as server:
        target = Target(server.url + "/v1/", api_key="secret", extra={"top_k": 1})
        result = run_load(target, several(1), prompts=Prompts(salt="s"), progress=False)
        (body,) = server.bodies
        assert all("authorization: bearer secret" in head.lower() for head in server.heads)
    assert body["model"] == "fake"
    assert body["prompt"] == Prompts(salt="s").ids(0, several(1)[0])
    assert (body["max_tokens"], body["stream"], body["ignore_eos"], body["top_k"]) == (3, True, True, 1)
    assert body["stream_options"] == {"include_usage": True}
    assert result.settings["salt"] == "s"


def test_a_server_that_takes_no_ids_and_no_ignore_eos_gets_plain_words():
    def answer(body):
        if isinstance(body["prompt"], list) or "ignore_eos" in body:
            return Reply([(0, b'{"error": {"message": "no"}}')], "400 Bad Request", ("content-type: application/json",))
        return Reply(stream([0] * body["max_tokens"]))

    with FakeServer(answer, probe=False) as server:
        result = run_load(server.url, several(2), progress=False)
    assert [len(body["prompt"].split()) for body in server.bodies[-2:]] == [8, 8]
    assert result.summary.statuses["ok"] == 2
    assert (result.settings["prompts"], result.settings["ignore_eos"]) == ("words", False)


@calmly
def test_chat():
    pieces = [
        (0.0, event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})),
        (0.2, event({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]})),
        (0.1, event({"choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": None}]})),
        (0.1, event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}) + usage(2) + DONE),
    ]
    with FakeServer(lambda body: Reply(pieces)) as server:
        (record,) = run_load(Target(server.url, chat=True), several(1), progress=False).records
        (body,) = server.bodies
    assert 0.2 <= record.ttft_s < 0.2 + SLACK  # the chunk that names the role is no token
    assert len(record.itl_s) == 1  # nor is the one that names the reason
    assert record.tpot_s == record.itl_s[0]
    assert record.finish_reason == "stop"
    assert [message["role"] for message in body["messages"]] == ["user"]


def test_chunks_of_several_tokens():
    counted = [
        (0.0, token("a", usage={"completion_tokens": 1, "prompt_tokens": 8})),
        (0.1, token("bcd", usage={"completion_tokens": 4, "prompt_tokens": 8})),
        (0.1, token("", "length", usage={"completion_tokens": 4, "prompt_tokens": 8}) + DONE),
    ]
    record = one(Reply(counted))
    assert (record.chunk_tokens, record.output_tokens) == ((1, 3), 4)
    record = one(Reply([(0, token("abcd")), (0, token("e")), (0, token("", "length") + usage(5, cached=4) + DONE)]))
    assert (record.chunk_tokens, record.output_tokens, record.cached_tokens) == ((), 5, 4)


def test_no_usage_counts_chunks():
    record = one(Reply(stream([0, 0, 0], counted=False)))
    assert (record.token_source, record.output_tokens, record.chunk_tokens) == ("chunks", 3, (1, 1, 1))
    assert record.prompt_tokens == 8


def test_an_answer_without_text_has_a_first_token_all_the_same():
    record = one(Reply([(0.1, token("", "stop") + usage(1) + DONE)]))
    assert (record.status, record.output_tokens, len(record.chunk_times)) == ("ok", 1, 1)
    assert record.ttft_s > 0.1


JSON = ("content-type: application/json",)
whole_answer = {"choices": [{"text": "x", "finish_reason": "length"}], "usage": {"completion_tokens": 3}}
HUGE = 10**400
STRANGE = {
    "error 500": (Reply([(0, b"oops")], "500 Internal Server Error", ()), "failed"),
    "an error in OpenAI's shape": (Reply([(0, b'{"error": {"message": "bad"}}')], "400 Bad Request", JSON), "failed"),
    "JSON null with an error": (Reply([(0, b"null")], "404 Not Found", JSON), "failed"),
    "full": (Reply([(0, b'{"error": {"message": "full"}}')], "429 Too Many Requests", JSON), "refused"),
    "overloaded": (Reply([], "503 Service Unavailable"), "refused"),
    "a redirect": (Reply([], "302 Found", ("location: http://127.0.0.1:1/",)), "failed"),
    "HTML": (Reply([(0, b"<html>hello</html>")], headers=("content-type: text/html",)), "failed"),
    "nothing": (Reply([]), "cut"),
    "hangs up at once": (Reply([], whole=False), "cut"),
    "cut in the middle": (Reply([(0, token()), (0.01, token())], whole=False), "cut"),
    "ends without an end": (Reply([(0, token()), (0, token())]), "cut"),
    "cut inside an event": (Reply([(0, token()), (0, b'data: {"choi')], whole=False), "cut"),
    "DONE alone": (Reply([(0, DONE)]), "failed"),
    "garbage": (Reply([(0, b"\xff\xfe\x00garbage\n\ndata: {\n\n")]), "failed"),
    "a number": (Reply([(0, event(b"3"))]), "failed"),
    "choices of the wrong type": (Reply([(0, event({"choices": 3}))]), "failed"),
    "a choice of null": (Reply([(0, event({"choices": [None]}))]), "failed"),
    "a choice that is text": (Reply([(0, event({"choices": ["x"]}))]), "failed"),
    "deep nonsense": (Reply([(0, event(b"[" * 50_000))]), "failed"),
    "an endless event": (Reply([(0, b"data: xxxxxxxxx\n" * 2**16)] * 6), "failed"),
    "an endless line": (Reply([(0, b"data: " + b"x" * 2**20)] * 6), "failed"),
    "an error in the stream": (Reply([(0, token()), (0, event({"error": {"message": "broke"}}))]), "failed"),
    "never ends": (Reply([(0, token()), (30, b"")]), "timeout"),
    "never begins": (Reply([(30, b"")]), "timeout"),
    "wrong usage": (Reply([(0, token("x", "length", usage={"completion_tokens": "many"}) + DONE)]), "ok"),
    "usage beyond all numbers": (Reply([(0, token("x", "length", usage={"completion_tokens": HUGE}) + DONE)]), "ok"),
    "a prompt beyond all numbers": (Reply([(0, token("x", "length") + usage(1, HUGE, HUGE) + DONE)]), "ok"),
    "a deep whole answer": (Reply([(0, b"[" * 50_000)], headers=JSON), "failed"),
    "usage of another kind": (Reply([(0, token("x", "length", usage=[1]) + DONE)]), "ok"),
    "no stream": (Reply([(0, json.dumps(whole_answer).encode())], headers=JSON), "ok"),
    "no DONE": (Reply([(0, token("x", "stop"))], whole=False), "ok"),
    "comments and other lines": (Reply([(0, b": ping\n\nevent: m\nid: 3\r\n" + token("x", "stop") + DONE)]), "ok"),
    "no type named": (Reply(stream([0, 0, 0]), headers=()), "ok"),
}


@pytest.mark.parametrize("case", STRANGE)
def test_strange_servers_are_records(case):
    reply, status = STRANGE[case]
    record = one(reply, {"timeout_s": 0.3 if status == "timeout" else 4})  # a busy machine is slow, not strange
    assert record.status == status, record
    assert (record.error is None) == (status == "ok")
    assert record.end_s < 5


@pytest.mark.parametrize("claim", [HUGE, 2**31, -5, True, 1.5, "3", None, [3]], ids=str)
def test_a_number_of_tokens_that_cannot_be_is_as_good_as_none(claim):
    """The run has its numbers, by chunks instead, and can be kept."""
    claims = {"prompt_tokens": claim, "completion_tokens": claim, "prompt_tokens_details": {"cached_tokens": claim}}
    pieces = [(0.0, token()), (0.0, token("", "length") + event({"choices": [], "usage": claims}) + DONE)]
    with FakeServer(lambda body: Reply(pieces)) as server:
        result = run_load(server.url, several(2), progress=False)
    assert [record.token_source for record in result.records] == ["chunks"] * 2
    assert (result.summary.output_tokens, result.summary.prompt_tokens, result.summary.cached_tokens) == (2, 16, 0)
    assert LoadResult.from_json(result.to_json()).summary == result.summary


def test_a_stream_without_end_is_given_up():
    """Of right events, so that nothing but their number is wrong."""
    parser, pieces = EventStream(), token() * 10_000
    for _ in range(STREAM_LIMIT // len(pieces)):
        assert len(parser.feed(pieces)) == 10_000
    with pytest.raises(ValueError, match="64 MiB"):
        parser.feed(pieces)


@pytest.mark.parametrize("key", ["ключ", "a\nb", "a\x00", "é"])
def test_a_key_that_no_header_takes(key):
    with pytest.raises(LoadError, match="API key") as error:
        run_load(Target("http://127.0.0.1:9", api_key=key), several(1), progress=False)
    assert key not in str(error.value)


@pytest.mark.parametrize(
    "fields", [{"temperature": float("nan")}, {"extra": {"a": {1}}}, {"extra": {"a": 1e999}}], ids=str
)
def test_a_field_that_is_no_json(fields):
    with FakeServer(lambda body: Reply(stream([0]))) as server, pytest.raises(LoadError, match="no JSON"):
        run_load(Target(server.url, **fields), several(1), progress=False)


@pytest.mark.parametrize("row", [(float("inf"), 8, 1), (float("nan"), 8, 1), (0.0, 10**8, 1), (0.0, 8, HUGE)], ids=str)
def test_a_request_beyond_all_limits(row):
    with pytest.raises(LoadError, match="request 1 is beyond"):
        run_load("http://127.0.0.1:9", [*several(1), TraceRequest(*row)], progress=False)


def test_what_the_server_said_is_kept():
    reply, _ = STRANGE["an error in OpenAI's shape"]
    assert one(reply).error == "HTTP 400: bad"


def test_an_unstreamed_answer_is_said_to_be_one():
    with FakeServer(lambda body: STRANGE["no stream"][0]) as server:
        summary = run_load(server.url, several(1), progress=False).summary
    assert any("not streamed" in line for line in summary.warnings)
    assert summary.output_tokens == 3


@pytest.mark.parametrize("url", ["", "nonsense", "ftp://x", "http://", "http://127.0.0.1:99999"])
def test_an_address_that_is_none(url):
    with pytest.raises(LoadError, match="write http://127"):
        run_load(url, several(1), progress=False)


def test_no_server():
    with pytest.raises(LoadError, match=r"nothing answers at http://127\.0\.0\.1:9 .*--url"):
        run_load("http://127.0.0.1:9", several(1), progress=False)
    with pytest.raises(LoadError, match="does not serve"):
        run_load(Target("http://127.0.0.1:9", model="m"), several(1), progress=False)


@pytest.mark.parametrize(
    "models",
    [
        None,
        b"",
        b"3",
        b'{"data": []}',
        b"<html>",
        b"[" * 50_000,
        b'{"data": [{"id": 3}]}',
        b'{"data": [{"id": "\\ud800"}]}',
        b"[" + b" " * 2**21,
    ],
)
def test_a_server_that_names_no_model(models):
    with FakeServer(lambda body: Reply(stream([0])), models=models) as server:
        with pytest.raises(LoadError, match="--model"):
            run_load(server.url, several(1), progress=False)
        assert run_load(Target(server.url, "m"), several(1), progress=False).summary.statuses["ok"] == 1


def test_a_key_that_is_refused_is_said_at_once():
    refused = Reply([(0, b'{"error": {"message": "no key"}}')], "401 Unauthorized", JSON)
    with FakeServer(lambda body: refused, probe=False) as server, pytest.raises(LoadError, match="no key"):
        run_load(server.url, several(1), progress=False)


# --- loops ---


class Stalling:
    """Answers one request at a time, each in 5 ms; number `at` takes a second."""

    def __init__(self, at):
        self.at, self.seen, self.lock = at, 0, asyncio.Lock()

    async def __call__(self, body):
        async with self.lock:
            self.seen += 1
            await asyncio.sleep(1.0 if self.seen == self.at else 0.005)
        return Reply(stream([0.0]))


@calmly
def test_coordinated_omission():
    """A server stalls for a second while ten requests a second come. Open loop: the ten that came meanwhile waited,
    and show it. Closed loop: one request shows it, because the client asked nothing meanwhile."""
    requests = make_requests(arrival_times("constant", rate=10, count=20), 8, 2)
    with FakeServer(Stalling(5)) as server:
        open_loop = run_load(server.url, requests, progress=False)
    with FakeServer(Stalling(5)) as server:
        closed_loop = run_load(server.url, requests, concurrency=1, progress=False)
    with FakeServer(Stalling(5)) as server:
        capped = run_load(server.url, requests, max_in_flight=1, progress=False)
    meanwhile = slice(4, 9)  # what came in the first 0.4 s of the stall
    assert all(r.ttft_s > 0.5 for r in open_loop.records[meanwhile])
    assert all(r.ttft_s > 0.5 for r in capped.records[meanwhile])  # who waits for a connection hides nothing here
    assert sum(t > 0.5 for t in ttft_from_send(capped.records)) == 1  # but would, timed from the send
    assert sum(r.ttft_s > 0.5 for r in closed_loop.records) == 1
    assert closed_loop.summary.ttft_ms.p95 < 500 < open_loop.summary.ttft_ms.p95


@calmly
def test_open_loop_sends_on_time_and_closed_loop_keeps_its_number():
    running = most = 0

    async def answer(body):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.03)
        running -= 1
        return Reply(stream([0, 0, 0]))

    requests = make_requests(arrival_times("poisson", rate=50, count=20, seed=1), 8, 3)
    with FakeServer(answer) as server:
        opened = run_load(server.url, requests, progress=False)
        assert [r.intended_s for r in opened.records] == [r.arrival_s for r in requests]
        assert all(0 <= r.sent_s - r.intended_s < SLACK for r in opened.records)
        most = 0
        closed = run_load(server.url, requests, concurrency=3, think_time_s=0.01, progress=False)
    assert most == 3
    assert closed.summary.requests == 20
    assert closed.summary.max_in_flight == 3
    assert not closed.summary.backlogged


@calmly
def test_a_slow_server_is_called_backlogged_in_an_open_loop_alone():
    lock = asyncio.Lock()

    async def answer(body):
        async with lock:
            await asyncio.sleep(0.02)
        return Reply(stream([0, 0, 0]))

    requests = make_requests(arrival_times("constant", rate=100, count=40), 8, 3)
    with FakeServer(answer) as server:
        assert run_load(server.url, requests, progress=False).summary.backlogged
        assert not run_load(server.url, requests, concurrency=8, progress=False).summary.backlogged


@calmly
def test_duration_warm_up_and_goodput():
    with FakeServer(lambda body: Reply(stream([0.05, 0.0, 0.0]))) as server:
        requests = make_requests(arrival_times("constant", rate=20, count=100), 8, 3)
        result = run_load(server.url, requests, duration_s=0.4, warmup=3, slo=SLO(ttft_ms=1), progress=False)
        closed = run_load(server.url, requests, duration_s=0.4, concurrency=1, progress=False)
    assert [r.warmup for r in result.records] == [True] * 3 + [False] * 5
    assert result.summary.requests == 5
    assert result.summary.goodput == 0
    assert result.with_slo(SLO(ttft_ms=1e4)).summary.good == 5
    assert 2 <= closed.summary.requests <= 8


def test_result_goes_to_json_and_back(tmp_path):
    with FakeServer(lambda body: Reply(stream([0.0, 0.0, 0.0]))) as server:
        result = run_load(server.url, several(3), warmup=1, slo=SLO(500), progress=False, settings={"note": "x"})
    result.save(tmp_path / "r.json")
    again = LoadResult.load(tmp_path / "r.json")
    assert again.records == result.records
    assert (again.slo, again.settings, again.summary) == (result.slo, result.settings, result.summary)
    assert json.loads(result.to_json())["summary"]["requests"] == 2
    values = json.loads(result.to_json())
    for change in ({"schema": "other/1"}, {"records": 3}, {"records": [{"index": 1}]}, {"slo": None}, {"settings": 3}):
        with pytest.raises(LoadError):
            LoadResult.from_json(json.dumps(values | change))
    record = values["records"][0]
    wrong = (
        {"end_s": None},
        {"end_s": HUGE},
        {"sent_s": float("nan")},
        {"output_tokens": HUGE},
        {"chunk_tokens": ["x"]},
    )
    broken = [json.dumps(values | {"records": [record | change]}) for change in wrong]
    for text in ("", "[]", "null", "{}", "[" * 50_000, *broken):
        with pytest.raises(LoadError):
            LoadResult.from_json(text)
    (tmp_path / "r.json").write_bytes(b"\x1f\x8b\xff")
    with pytest.raises(LoadError, match=r"r\.json"):
        LoadResult.load(tmp_path / "r.json")


@pytest.mark.parametrize(
    "options",
    [{"concurrency": 0}, {"max_in_flight": 0}, {"concurrency": 1, "max_in_flight": 1}, {"warmup": 1}, {"warmup": -1},
     {"think_time_s": -1}, {"duration_s": 0.0}],
)  # fmt: skip
def test_runs_that_cannot_be(options):
    with pytest.raises(LoadError):
        run_load("http://127.0.0.1:9", several(1), progress=False, **options)


def test_it_runs_inside_an_event_loop_too():
    async def main():
        with FakeServer(lambda body: Reply(stream([0.0]))) as server:
            return run_load(server.url, several(1), progress=False), await run_load_async(
                server.url, several(1), progress=False
            )

    assert all(result.summary.statuses["ok"] == 1 for result in asyncio.run(main()))


@given(st.lists(st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), min_size=1), max_size=6), st.data())
def test_events_do_not_depend_on_how_bytes_are_cut(texts, data):
    raw = b"".join(event(text.encode()) for text in texts)
    if data.draw(st.booleans()):
        raw = raw.replace(b"\n", b"\r\n")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    parser, got = EventStream(), []
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        got += parser.feed(raw[start:end])
    assert [piece.decode() for piece in got + parser.flush()] == texts


def test_an_event_of_several_lines_and_one_left_open():
    parser = EventStream()
    assert parser.feed(b"data: a\ndata:b\n\ndata: c") == [b"a\nb"]
    assert parser.flush() == [b"c"]
