"""A scripted server on a real socket: answers with exactly the bytes and delays that a test names."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Reply(NamedTuple):
    """pieces: (seconds to wait, bytes to send). whole: end the chunked body as HTTP says; else just hang up."""

    pieces: Sequence[tuple[float, bytes]]
    status: str = "200 OK"
    headers: tuple[str, ...] = ("content-type: text/event-stream",)
    whole: bool = True


def event(values) -> bytes:
    return b"data: " + (values if isinstance(values, bytes) else json.dumps(values).encode()) + b"\n\n"


def token(text=" x", finish=None, **more) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}], **more})


def usage(completion: int, prompt: int = 8, cached: int = 0) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return event({"choices": [], "usage": counts | {"prompt_tokens_details": {"cached_tokens": cached}}})


DONE = event(b"[DONE]")


def stream(delays: Sequence[float], counted: bool = True) -> list[tuple[float, bytes]]:
    """A token after each delay, then the end."""
    pieces = [(delay, token()) for delay in delays]
    end = token("", "length") + (usage(len(delays)) if counted else b"") + DONE
    return [*pieces, (0.0, end)]


class FakeServer:
    """`with FakeServer(answer) as server: server.url`. answer(body) is called for each request, in the server's
    event loop, and may be a coroutine function; it returns a Reply. Probes (max_tokens 1) get one token at once."""

    def __init__(self, answer: Callable, models: bytes | None = b'{"data": [{"id": "fake"}]}', probe: bool = True):
        self.answer, self.models, self.probe = answer, models, probe
        self.bodies: list[dict] = []
        self.heads: list[str] = []

    def __enter__(self) -> FakeServer:
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()

        async def begin():
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
            ready.set()

        def run():
            self._loop.create_task(begin())
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert ready.wait(10)
        return self

    def __exit__(self, *_):
        async def end():
            self._server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0)
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(end(), self._loop)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self, reader, writer):
        gone = (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError)
        with contextlib.closing(writer), contextlib.suppress(*gone):
            while await self._one(reader, writer):
                continue

    async def _one(self, reader, writer) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        lines = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        body = await reader.readexactly(int(lines.get("content-length", 0)))
        if head.startswith("GET"):
            status = "200 OK" if self.models is not None else "404 Not Found"
            reply = Reply([(0, self.models or b"{}")], status, ("content-type: application/json",))
        else:
            values = json.loads(body)
            if self.probe and values["max_tokens"] == 1:
                reply = Reply(stream([0.0]))
            else:
                self.bodies.append(values)
                reply = self.answer(values)
                reply = await reply if asyncio.iscoroutine(reply) else reply
        return await self._send(reply, writer)

    async def _send(self, reply: Reply, writer) -> bool:
        headers = "".join(f"{line}\r\n" for line in (*reply.headers, "transfer-encoding: chunked"))
        writer.write(f"HTTP/1.1 {reply.status}\r\n{headers}\r\n".encode())
        await writer.drain()
        for delay, piece in reply.pieces:
            if delay:
                await asyncio.sleep(delay)
            if piece:
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()
        if reply.whole:
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        return reply.whole
