"""A server on a tiny random model over a real socket, and what its tests ask of it."""

from __future__ import annotations

import json
import socket
import time
from contextlib import contextmanager, suppress
from functools import cache

import httpx
import openai

from minillm import checkpoint
from minillm.serving import serve_in_thread
from tests import tiny
from tests.serving import make_engine

TEMPLATE = (
    "{% for m in messages %}<start>{{ m.role }}: {{ m.content }}<end>{% endfor %}{{ 'a' if add_generation_prompt }}"
)
MODEL = "tiny"


@cache
def _load(folder):
    return checkpoint.load(folder, "float32")


def make_chat_model(tmp_path_factory):
    """(model, tokenizer) with a chat template, made once a session."""
    folder = tmp_path_factory.getbasetemp() / "serving-chat"
    if not folder.exists():
        folder.mkdir()
        tiny.save("qwen3", folder)
        settings = {"eos_token": "<end>", "chat_template": TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return _load(folder)


@contextmanager
def serving(pair, settings=None, **options):
    """A running server; at the end nothing of any request is left in its engine."""
    engine = make_engine(pair, **{"num_blocks": 256, "max_num_seqs": 16, **options})
    with serve_in_thread(engine, model_name=MODEL, **(settings or {})) as server:
        yield server
        wait_idle(server)
    assert not server.server.open_connections, "a socket outlives its server"
    assert not engine.has_unfinished_requests()
    engine.scheduler.check()


def client_of(server, key: str = "unused", **options) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, **{"max_retries": 0, "timeout": 30, **options})


def scheduler_of(server):
    return server.engine.engine.scheduler


def slowed(server, seconds: float = 0.02):
    """Steps that take a while, as a larger model's do."""
    engine = server.engine.engine
    step = type(engine).step

    def slow():
        time.sleep(seconds)
        return step(engine)

    engine.step = slow
    return engine


def wait_until(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def wait_idle(server) -> None:
    """Every request has ended and every block is back."""
    scheduler = scheduler_of(server)
    wait_until(lambda: not scheduler.has_unfinished_requests() and scheduler.pool.available == scheduler.pool.total)


def post(server, path: str, body, **headers) -> httpx.Response:
    """A body as it is, bytes or a value."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **headers}
    return httpx.post(server.url + path, content=content, headers=headers, timeout=30)


def address_of(server) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def connect(server, data: bytes = b"") -> socket.socket:
    sock = socket.create_connection(address_of(server), timeout=10)
    sock.sendall(data)
    return sock


def read_all(sock: socket.socket) -> bytes:
    """Until the server closes, which it may do by a reset."""
    data = b""
    with suppress(ConnectionError):
        while piece := sock.recv(1 << 16):
            data += piece
    return data


def exchange(server, data: bytes, tries: int = 1, status: int | None = None) -> httpx.Response:
    """Sends bytes as they are, and reads to the end of the connection. tries: until one is answered, with `status`."""
    for _ in range(tries):
        with connect(server, data) as sock:
            head, _, body = read_all(sock).partition(b"\r\n\r\n")
        if head and status in (None, int(head.split()[1])):
            break
        time.sleep(0.05)
    first, *lines = head.decode("ascii").split("\r\n")
    return httpx.Response(int(first.split()[1]), headers=[tuple(line.split(": ", 1)) for line in lines], content=body)


def raw_request(server, body: dict, version: str = "1.1", narrow: bool = False) -> socket.socket:
    """A client without a library: the request is sent, nothing is read.

    narrow: the connection holds a few kilobytes. Left to itself a kernel takes megabytes for a reader that does not
    read, how many depends on the machine, and the server would see no difference.
    """
    sock = socket.socket()
    if narrow:
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # accepted connections have what it has
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(10)
    sock.connect(address_of(server))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return sock


def events(response: httpx.Response) -> list:
    """The values of a stream's events, "[DONE]" among them."""
    blocks = response.content.decode("utf-8").split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [b[6:] if b == "data: [DONE]" else json.loads(b[6:]) for b in blocks]


def check_error(response: httpx.Response, status: int, code: str | None = None) -> dict:
    """OpenAI's shape, and strict UTF-8 JSON. Returns the error."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = json.loads(response.content.decode("utf-8"))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert 0 < len(error["message"]) < 500
    if code is not None:
        assert error["code"] == code, error
    return error
