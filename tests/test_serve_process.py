"""Promise: the real process says where it listens, lets running requests finish when told to stop, and exits 0."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import pytest

from minillm.cli import main
from tests.serving_http import check_error, connect, exchange, make_chat_model, raw_request

LONG = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "seed": 1, "stream": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    make_chat_model(tmp_path_factory)
    return tmp_path_factory.getbasetemp() / "serving-chat"


STOPPING = "stopping: {} requests under way; a second signal ends at once\n"


@contextmanager
def started(folder, *options, files=None, **environment):
    """files: how many it may have open."""
    command = ["sh", "-c", f'ulimit -n {files} && exec "$@"', "sh"] if files else []
    command += [sys.executable, "-m", "minillm", "serve", "--model", str(folder), "--dtype", "float32", "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        line = process.stdout.readline()
        room = r"\(cache for \d+ tokens, 512 a request\)"
        url = re.fullmatch(rf"serving serving-chat at (http://127\.0\.0\.1:\d+)/v1 {room}\n", line)
        assert url, (line, process.stderr.read() if process.poll() is not None else "")
        yield SimpleNamespace(url=url.group(1), process=process)
    finally:
        process.kill()
        process.communicate()


def test_a_process_from_start_to_drain(folder):
    with started(folder, "--max-num-seqs", "4", MINILLM_API_KEY="secret") as server:
        check_error(httpx.get(server.url + "/v1/models"), 401)
        headers = {"authorization": "Bearer secret"}
        assert httpx.get(server.url + "/v1/models", headers=headers).json()["data"][0]["id"] == "serving-chat"
        with httpx.stream("POST", server.url + "/v1/completions", json=LONG, headers=headers, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            server.process.send_signal(signal.SIGTERM)
            seen = _until_draining(server.url, headers)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]", "a running request was cut short"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert seen
        assert server.process.wait(20) == 0
        assert server.process.stdout.read() == ""
        assert server.process.stderr.read() == STOPPING.format(1)


def _until_draining(url, headers) -> bool:
    """New requests are refused while a running one goes on."""
    for _ in range(200):
        answer = httpx.post(url + "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
        if answer.status_code == 503:
            check_error(answer, 503, "draining")
            check_error(httpx.get(url + "/health"), 503, "draining")
            return True
        time.sleep(0.005)
    return False


def test_the_drain_has_an_end_and_a_second_signal_is_one_too(folder):
    with started(folder, "--drain-timeout", "0.3") as server:
        with httpx.stream("POST", server.url + "/v1/completions", json=_endless(), timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGINT)
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
        assert server.process.wait(20) == 0
    with started(folder) as server:
        sockets = [raw_request(server, _endless()) for _ in range(3)]
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 128 + signal.SIGTERM
        assert time.monotonic() - began < 2
        for sock in sockets:
            sock.close()


def test_more_connections_than_file_descriptors(folder):
    """None of them ever asks for anything. A new one is told why it is not heard; the drain does not wait for them."""
    with started(folder, "--drain-timeout", "0.5", files=256) as server:
        held = [connect(server, b"GET /health HTTP/1.1\r\nHo") for _ in range(300)]
        refused = exchange(server, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", tries=100)
        check_error(refused, 503, "too_many_connections")
        for sock in held[:250]:
            sock.close()
        assert exchange(server, b"GET /health HTTP/1.0\r\n\r\n", tries=100, status=200).json() == {"status": "ok"}
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        assert time.monotonic() - began < 8
        assert server.process.stderr.read() == STOPPING.format(0), "the process ran out of file descriptors"
        for sock in held:
            sock.close()


def _endless() -> dict:
    """More work than a drain of 0.3 s finishes."""
    return {**LONG, "n": 100, "max_tokens": 500}


def test_a_taken_port_is_one_line_before_anything_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr("minillm.cli.common.load", lambda args: pytest.fail("the model was loaded first"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("minillm: error: cannot serve at 127.0.0.1 port")
    assert shown.count("\n") == 1
    assert "--port" in shown


@pytest.mark.parametrize(
    "options",
    [["--port", "70000"], ["--max-num-seqs", "0"], ["--policy", "random"], ["--request-timeout", "-1"],
     ["--api-key", ""], ["--host", "no.such.host.invalid"], ["--max-body-bytes", "0"]],
    ids=" ".join,
)  # fmt: skip
def test_bad_options_are_one_line(options, capsys, monkeypatch):
    monkeypatch.setattr("minillm.cli.common.load", lambda args: pytest.fail("the model was loaded first"))
    assert main(["serve", "--port", "0", *options]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_open_door_is_warned_of(capsys, monkeypatch):
    class LoadedError(Exception):
        pass

    def load(args):
        raise LoadedError

    monkeypatch.setattr("minillm.cli.common.load", load)
    monkeypatch.delenv("MINILLM_API_KEY", raising=False)
    for options, warns in (
        (["--host", "0.0.0.0"], True),
        (["--host", "0.0.0.0", "--api-key", "k"], False),
        ([], False),
    ):
        with pytest.raises(LoadedError):
            main(["serve", "--port", "0", *options])
        assert ("open to others" in capsys.readouterr().err) == warns


def test_options_reach_the_engine(folder, monkeypatch):
    """By name, into SchedulerConfig; what was not given keeps the engine's default."""
    seen = {}

    def serve(engine, settings, sock):
        seen.update(engine=engine.engine.config, server=settings)
        engine.shutdown()
        return 0

    monkeypatch.setattr("minillm.serving.lifecycle.serve_process", serve)
    options = "--max-num-seqs 3 --max-num-batched-tokens 40 --max-model-len 100 --num-blocks 50 --block-size 8"
    more = "--policy priority --prefix-cache radix --max-waiting 7 --max-prompt-tokens 9 --request-timeout 0"
    host = "--num-host-blocks 10 --host-reuse always --ttft-slo 5"
    words = f"serve --model {folder} --dtype float32 --port 0 {options} {more} {host} --served-model-name x".split()
    assert main(words) == 0
    config, server = seen["engine"], seen["server"]
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len) == (3, 40, 100)
    assert (config.num_blocks, config.block_size, config.policy) == (50, 8, "priority")
    assert (config.prefix_cache, config.max_waiting) == ("radix", 7)
    assert (config.num_host_blocks, config.host_reuse, config.ttft_slo_s) == (10, "always", 5.0)
    assert (server.max_prompt_tokens, server.request_timeout_s, server.model_name) == (9, None, "x")


def test_the_command_line_does_not_import_the_server():
    code = "import sys; from minillm.cli import main; main(['serve', '--help']); import minillm.serving; "
    code += "print({'fastapi', 'uvicorn', 'pydantic', 'torch', 'prometheus_client'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("set()")
