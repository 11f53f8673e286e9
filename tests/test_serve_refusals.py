"""Promise: whatever a client sends, it gets a 4xx that names the fault in OpenAI's shape, and the server lives."""

from __future__ import annotations

import json
import socket
import sys

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.errors import RequestError
from minillm.sampling_params import SamplingParams
from minillm.serving import strict_json
from minillm.serving.protocol import ChatCompletionRequest, CompletionRequest
from minillm.serving.settings import ServerSettings, ServingError
from tests.serving_http import check_error, client_of, connect, exchange, make_chat_model, post, read_all, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"messages": [{"role": "user", "content": "a"}]}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_chat_model(tmp_path_factory)


@pytest.fixture(scope="module")
def server(pair):
    with serving(pair, {"max_body_bytes": 20_000, "api_keys": ("right", "other"), "max_choices": 8}) as server:
        yield server
        assert post(server, TEXT, {"prompt": "a", "max_tokens": 2}, authorization="Bearer right").status_code == 200


def send(server, path, body, **headers):
    return post(server, path, body, **{"authorization": "Bearer right", **headers})


NOT_JSON = {
    "empty": b"",
    "spaces": b"   ",
    "cut": b'{"prompt": "a"',
    "python": b"{'prompt': 'a'}",
    "two": b'{"prompt": "a"}{}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "temperature": -Infinity}',
    "overflow": b'{"prompt": "a", "temperature": 1e999}',
    "5000 digits": b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    "twice": b'{"prompt": "a", "prompt": "b"}',
    "twice inside": b'{"prompt": "a", "logit_bias": {"1": 2, "1": 3}}',
    "half a pair": b'{"prompt": "\\ud800"}',
    "half a pair as key": b'{"\\udfff": 1}',
    "latin-1": '{"prompt": "é"}'.encode("latin-1"),
    "utf-16": '{"prompt": "a"}'.encode("utf-16"),
    "bom": b'\xef\xbb\xbf{"prompt": "a"}',
    "bytes": bytes(range(256)),
    "deep lists": b"[" * 9000 + b"]" * 9000,
    "65 lists": b'{"prompt": ' + b"[" * 64 + b"]" * 64 + b"}",
    "deep objects": b'{"prompt":' * 1500 + b"1" + b"}" * 1500,
    "null byte": b'{"prompt": "a\x00"}',
}


@pytest.mark.parametrize("body", NOT_JSON.values(), ids=NOT_JSON)
def test_what_is_not_json(server, body):
    for path in (TEXT, CHAT):
        check_error(send(server, path, body), 400, "invalid_json")


# fields beside a right prompt, and the parameter and code of the refusal
VALUES = [
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"temperature": "1"}, "temperature", "invalid_type"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"temperature": [1]}, "temperature", "invalid_type"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"top_p": 1.01}, "top_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"top_k": 1.5}, "top_k", "invalid_type"),
    ({"top_k": 10**30}, "top_k", "invalid_value"),
    ({"min_p": 2}, "min_p", "invalid_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"presence_penalty": 2.1}, "presence_penalty", "invalid_value"),
    ({"frequency_penalty": -3}, "frequency_penalty", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 9}, "n", "invalid_value"),
    ({"n": 10**20}, "n", "invalid_value"),
    ({"n": True}, "n", "invalid_type"),
    ({"n": 1.0}, "n", "invalid_type"),
    ({"n": "2"}, "n", "invalid_type"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    ({"max_tokens": {}}, "max_tokens", "invalid_type"),
    ({"min_tokens": -1}, "min_tokens", "invalid_value"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "invalid_value"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"seed": 0.5}, "seed", "invalid_type"),
    ({"stop": ""}, "stop", "invalid_type"),
    ({"stop": ["a", ""]}, "stop", "invalid_type"),
    ({"stop": [1]}, "stop", "invalid_type"),
    ({"stop": ["a"] * 17}, "stop", "invalid_type"),
    ({"stop": {"a": 1}}, "stop", "invalid_type"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value"),
    ({"stop_token_ids": [9999]}, "stop_token_ids", "invalid_value"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"01": 1}}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"5\n": 1}}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"٣": 1}}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"9999": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5": None}}, "logit_bias", "invalid_type"),
    ({"logit_bias": []}, "logit_bias", "invalid_type"),
    ({"stream": 1}, "stream", "invalid_type"),
    ({"stream": "true"}, "stream", "invalid_type"),
    ({"stream_options": {}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown_parameter"),
    ({"priority": 1}, "priority", "invalid_value"),
    ({"priority": "high"}, "priority", "invalid_type"),
    ({"cache_salt": ""}, "cache_salt", "invalid_value"),
    ({"cache_salt": 5}, "cache_salt", "invalid_type"),
    ({"user": 5}, "user", "invalid_type"),
    ({"ignore_eos": 1}, "ignore_eos", "invalid_type"),
    ({"temprature": 1}, "temprature", "unknown_parameter"),
    ({"": 1}, "", "unknown_parameter"),
    ({"{x}%s": 1}, "{x}%s", "unknown_parameter"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    ({"guided_json": {}}, "guided_json", "unsupported_parameter"),
    ({"metadata": {"a": "b"}}, "metadata", "unsupported_parameter"),
]


@pytest.mark.parametrize(("fields", "param", "code"), VALUES, ids=[str(v[0])[:40] for v in VALUES])
def test_bad_fields_are_named(server, fields, param, code):
    for path, right in ((TEXT, {"prompt": "a"}), (CHAT, USER)):
        error = check_error(send(server, path, {**right, **fields}), 400, code)
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"


def test_a_misspelt_name_is_answered_with_the_near_one(server):
    error = check_error(send(server, TEXT, {"prompt": "a", "temprature": 1}), 400)
    assert "did you mean 'temperature'?" in error["message"]


PROMPTS = [
    {}, {"prompt": None}, {"prompt": ""}, {"prompt": []}, {"prompt": [[]]}, {"prompt": ["a", ""]}, {"prompt": ["a", 1]},
    {"prompt": [1, "a"]}, {"prompt": [[1], "a"]}, {"prompt": [True]}, {"prompt": [1.5]}, {"prompt": [-1]},
    {"prompt": [99999]}, {"prompt": [10**30]}, {"prompt": {"a": 1}}, {"prompt": [[[1]]]}, {"prompt": ["a"] * 9},
    {"prompt": ["a"] * 200}, {"prompt": "a", "echo": True}, {"prompt": "a", "suffix": "b"},
    {"prompt": "a", "logprobs": 21}, {"prompt": "a", "logprobs": True}, {"prompt": "a", "logprobs": -1},
    {"prompt": "a", "max_completion_tokens": 5}, {"prompt": "a", "messages": []}, [], "a", 1, None, True,
]  # fmt: skip


@pytest.mark.parametrize("body", PROMPTS, ids=lambda b: str(b)[:40])
def test_bad_completion_requests(server, body):
    check_error(send(server, TEXT, body), 400)


CHATS = [
    {}, {"messages": None}, {"messages": []}, {"messages": {}}, {"messages": "a"}, {"messages": [1]},
    {"messages": [{}]}, {"messages": [{"role": "user"}]}, {"messages": [{"content": "a"}]},
    {"messages": [{"role": "user", "content": None}]}, {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": []}]}, {"messages": [{"role": "user", "content": ["a"]}]},
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
    {"messages": [{"role": "tool", "content": "a", "tool_call_id": "x"}]}, {"messages": [{"role": "", "content": "a"}]},
    {"messages": [{"role": "user", "content": "a", "name": "me"}]},
    {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "x"}]}]},
    {**USER, "tools": [{"type": "function"}]}, {**USER, "tool_choice": "required"}, {**USER, "functions": [{}]},
    {**USER, "modalities": ["text", "audio"]}, {**USER, "audio": {}}, {**USER, "reasoning_effort": "high"},
    {**USER, "logprobs": 2}, {**USER, "top_logprobs": 2}, {**USER, "logprobs": True, "top_logprobs": 21},
    {**USER, "max_tokens": 5, "max_completion_tokens": 6}, {**USER, "max_completion_tokens": 0},
    {**USER, "prompt": "a"}, {**USER, "continue_final_message": True}, {**USER, "chat_template": "x"},
]  # fmt: skip


@pytest.mark.parametrize("body", CHATS, ids=lambda b: str(b)[-60:])
def test_bad_chat_requests(server, body):
    check_error(send(server, CHAT, body), 400)


def test_what_asks_for_nothing_is_taken(server):
    """Clients send defaults; only a real wish that cannot be met is refused."""
    body = {
        **USER, "tools": None, "tool_choice": "none", "response_format": {"type": "text"}, "best_of": 1, "store": False,
        "modalities": ["text"], "n": None, "stop": None, "logit_bias": None, "temperature": None, "max_tokens": 2,
        "max_completion_tokens": 2, "service_tier": "auto", "metadata": None, "logprobs": False, "top_logprobs": 0,
    }  # fmt: skip
    assert send(server, CHAT, body).status_code == 200
    assert send(server, TEXT, {"prompt": "a", "echo": False, "suffix": None, "max_tokens": 1}).status_code == 200


def test_an_over_long_prompt_is_told_how_long(server):
    for path, body, param in (
        (TEXT, {"prompt": "the cat " * 600}, "prompt"),
        (TEXT, {"prompt": [7] * 512}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "the cat " * 600}]}, "messages"),
    ):
        error = check_error(send(server, path, body), 400, "context_length_exceeded")
        assert error["param"] == param
        assert "at most 511" in error["message"]
    assert send(server, TEXT, {"prompt": [7] * 511, "max_tokens": 1}).json()["usage"]["completion_tokens"] == 1
    assert send(server, TEXT, {"prompt": [7] * 511}).json()["usage"]["completion_tokens"] == 1  # the default is a wish
    for path, body in ((TEXT, {"prompt": [7] * 508}), (CHAT, {**USER, "max_completion_tokens": 512})):
        error = check_error(send(server, path, {"max_tokens": 5, **body} if path == TEXT else body), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
        assert "are more than the 512 that this server holds" in error["message"]


def test_the_servers_own_limit_on_prompts(pair):
    with serving(pair, {"max_prompt_tokens": 10}) as server:
        check_error(post(server, TEXT, {"prompt": [5] * 11}), 400, "context_length_exceeded")
        assert post(server, TEXT, {"prompt": [5] * 10, "max_tokens": 1}).status_code == 200


def test_the_model_must_be_the_one_served(server):
    for path, body in ((TEXT, {"prompt": "a"}), (CHAT, USER)):
        assert check_error(send(server, path, {**body, "model": "gpt-4"}), 404, "model_not_found")["param"] == "model"
        check_error(send(server, path, {**body, "model": 4}), 400, "invalid_type")


@pytest.mark.parametrize("key", [None, "", "Bearer", "Bearer wrong", "Basic right", "right", "Bearer rightx",
                                 "Bearer righ", b"Bearer \xff\xfe"])  # fmt: skip
def test_a_wrong_key_opens_nothing(server, key):
    headers = {} if key is None else {"authorization": key}
    for method, path in (("POST", TEXT), ("GET", "/v1/models"), ("GET", "/v1/none"), ("DELETE", TEXT)):
        answer = httpx.request(method, server.url + path, headers=headers, content=b"{}" if method == "POST" else None)
        check_error(answer, 401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"


def test_the_clients_own_errors(server):
    with pytest.raises(openai.AuthenticationError):
        client_of(server, "wrong").models.list()
    client = client_of(server, "other")
    assert client.models.list().data
    with pytest.raises(openai.BadRequestError, match="temperature is -1"):
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="none", prompt="a")


def test_health_and_metrics_need_no_key(server):
    for path in ("/health", "/metrics"):
        assert httpx.get(server.url + path).status_code == 200


def test_paths_and_methods(server):
    headers = {"authorization": "Bearer right"}
    for path in ("/", "/v1", "/v1/embeddings", "/v2/models", "/%ff%fe", "/v1/models/../x", "/v1/models/" + "x" * 5000):
        check_error(httpx.get(server.url + path, headers=headers), 404)
    for method, path, allowed in (("GET", TEXT, "POST"), ("PUT", CHAT, "POST"), ("POST", "/v1/models", "GET")):
        answer = httpx.request(method, server.url + path, headers=headers)
        check_error(answer, 405, "method_not_allowed")
        assert answer.headers["allow"] == allowed


@pytest.mark.parametrize("kind", [None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data",
                                  "application/json; charset=latin-1", "application/jsonx"])  # fmt: skip
def test_only_json_is_taken(server, kind):
    headers = {"authorization": "Bearer right"} | ({} if kind is None else {"content-type": kind})
    answer = httpx.post(server.url + TEXT, content=b'{"prompt": "a"}', headers=headers)
    check_error(answer, 415, "unsupported_media_type")


def test_json_with_a_charset_is_json(server):
    for kind in ("application/json; charset=UTF-8", 'Application/JSON;charset="utf-8"'):
        assert send(server, TEXT, {"prompt": "a", "max_tokens": 1}, **{"content-type": kind}).status_code == 200
    check_error(send(server, TEXT, b"{}", **{"content-encoding": "gzip"}), 415)


def test_a_body_over_the_limit_is_refused_whatever_it_claims(server):
    exact = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    assert send(server, TEXT, exact + b" " * (20_000 - len(exact))).status_code == 200
    check_error(send(server, TEXT, exact + b" " * (20_001 - len(exact))), 413, "body_too_large")
    check_error(send(server, TEXT, b"[" + b"1," * 5_000_000 + b"1]"), 413, "body_too_large")  # 10 MB, read away
    check_error(post(server, TEXT, b"x" * 5_000_000, authorization="Bearer wrong"), 401)

    def chunks():
        for _ in range(300):
            yield b" " * 1000

    headers = {"authorization": "Bearer right", "content-type": "application/json"}
    check_error(httpx.post(server.url + TEXT, content=chunks(), headers=headers), 413, "body_too_large")


def test_a_refusal_reaches_a_client_that_reads_only_after_writing(server):
    host, port = server.url.removeprefix("http://").split(":")
    for key, status in (("right", b"413"), ("wrong", b"401")):
        with socket.create_connection((host, int(port)), timeout=20) as sock:
            head = (
                f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
            )
            sock.sendall(f"{head}Content-Length: {1 << 24}\r\n\r\n".encode())
            for _ in range(1 << 8):
                sock.sendall(b" " * (1 << 16))
            assert sock.recv(4096).startswith(b"HTTP/1.1 " + status)
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")  # the connection is as good as new
            assert b"200 OK" in sock.recv(4096)


RAW = {
    "no http": b"hello\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "long head": b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000,
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "bad header": b"GET /health HTTP/1.1\r\nHost: x\r\n\xff\xfe: \x00\r\n\r\n",
    "length of words": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5 5\r\n\r\n{}",
    "unknown coding": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: zip\r\n\r\n{}",
    "bad length": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n12345",
    "bad chunk": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
}


@pytest.mark.parametrize("data", RAW.values(), ids=RAW)
def test_what_is_not_http(server, data):
    answer = exchange(server, data)
    assert answer.headers["connection"] == "close"
    error = check_error(answer, answer.status_code, "invalid_http")
    assert answer.status_code in (400, 431, 501)
    assert "not valid HTTP" in error["message"]
    assert httpx.get(server.url + "/health").status_code == 200


def test_a_bad_chunk_in_an_answer_ends_it_alone(server):
    """The answer has begun, so no other can be sent."""
    body = json.dumps({"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer right\r\nContent-Type: application/json\r\n"
    with connect(server) as sock:
        sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
        sock.sendall(b"no http at all\r\n\r\n")
        read_all(sock)
    assert httpx.get(server.url + "/health").status_code == 200


@pytest.mark.parametrize(
    "path", ["/health", "/metrics", "/v1/models", "/v1/models/tiny", "/v1/models/x", "/openapi.json", TEXT]
)
def test_head_is_get_without_the_body(server, path):
    headers = {"authorization": "Bearer right"}
    whole, head = (httpx.request(method, server.url + path, headers=headers) for method in ("GET", "HEAD"))
    assert head.status_code == whole.status_code
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert head.content == b""
    assert exchange(server, f"HEAD {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()).content == b""


def test_half_a_request_and_goodbye(server):
    host, port = server.url.removeprefix("http://").split(":")
    for data in (b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{"):
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            sock.sendall(data)
    assert httpx.get(server.url + "/health").status_code == 200


# --- the parts, without a socket ---

_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(value=_json, escaped=st.booleans())
def test_json_goes_through_unchanged(value, escaped):
    data = json.dumps(value).encode() if escaped else strict_json.dumps(value)
    assert strict_json.loads(data) == value


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40) | st.text('[]{}",:\\ud8NaInfity0123456789.eE+-ltrs ', max_size=40).map(str.encode))
def test_any_bytes_are_json_or_a_json_error(data):
    try:
        value = strict_json.loads(data)
    except strict_json.JSONError:
        return
    assert json.loads(data) == value
    strict_json.dumps(value)


@pytest.mark.parametrize("limit", [1000, 4000])
def test_depth_does_not_hang_on_pythons_limit(limit):
    """A library may have raised it: torch's compiler sets 2,000 and leaves it so."""
    usual = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(limit)
        for left, right in ((b"[", b"]"), (b'{"a":', b"}")):
            strict_json.loads(left * 64 + b"1" + right * 64)
            for depth in (65, 500, 2000, 9000):
                with pytest.raises(strict_json.JSONError, match="nested more than 64 levels"):
                    strict_json.loads(left * depth + b"1" + right * depth)
    finally:
        sys.setrecursionlimit(usual)


INTEGERS = ("top_k", "min_tokens", "max_tokens", "seed", "logprobs")
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
EDGES = [-2.1, -2, -1, -0.01, 0, 1e-9, 0.5, 1, 1.01, 2, 2.5, 1e300]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_schemas_ranges_are_those_of_sampling_params(data):
    """What the protocol takes SamplingParams takes too, and the other way round for numbers of 32 bits."""
    name = data.draw(st.sampled_from([*INTEGERS, *NUMBERS]))
    value = data.draw(st.integers(-3, 25) if name in INTEGERS else st.sampled_from(EDGES))
    assert _takes(CompletionRequest, {"prompt": "a", name: value}) == _takes(
        SamplingParams, {"max_tokens": None, name: value}
    )


def _takes(kind, fields) -> bool:
    try:
        kind(**fields)
    except (RequestError, ValueError):
        return False
    return True


def test_every_sampling_parameter_can_be_asked_for():
    for kind in (CompletionRequest, ChatCompletionRequest):
        assert set(SamplingParams.__dataclass_fields__) <= set(kind.model_fields)


@pytest.mark.parametrize(
    "options",
    [{"port": -1}, {"port": 65536}, {"max_body_bytes": 0}, {"max_prompt_tokens": 0}, {"request_timeout_s": 0},
     {"request_timeout_s": float("nan")}, {"max_connections": 0}, {"head_timeout_s": 0}, {"drain_timeout_s": -1},
     {"api_keys": ("",)}, {"api_keys": (" a",)},
     {"model_name": ""}],
    ids=str,
)  # fmt: skip
def test_settings_are_checked(options):
    with pytest.raises(ServingError):
        ServerSettings(**options)
