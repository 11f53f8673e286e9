"""One connection: how long it may hold a file descriptor without a request, and what it hears if it speaks no HTTP.

A process has few file descriptors, and a client that begins a request and never ends it holds one for nothing. So the
head of a request has a deadline, on a new connection as on a kept one; so has the rest of a body that nobody reads any
more; and the number of connections ends below the number of descriptors, so that the server can still say no.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import short
from .errors import ApiError
from .strict_json import dumps

ACCEPTS = 16  # connections taken in one turn of the event loop, before they are counted
SPARE = 16  # connections above the limit that may take their time to read so; further ones are closed at once
_FILES = 64  # descriptors for all else: three turns of ACCEPTS, and files that the process opens
_LINGER_S = 2.0  # what a refused client gets to read its answer in
_UNREAD_S = 60.0  # and one whose answer is complete, but still not read


def most_connections(wanted: int) -> int:
    """How many connections this process can hold beside what it has open now; `wanted` at most, 1 at least."""
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        left = sys.maxsize if soft == resource.RLIM_INFINITY else soft - len(os.listdir("/dev/fd"))
    except (ImportError, OSError):  # a system that does not say
        return wanted
    return max(1, min(wanted, left - SPARE - _FILES))


class Connection(H11Protocol):
    """uvicorn's, with a deadline, a limit, and OpenAI's shape for its errors. `count` is told their codes."""

    def __init__(self, *args, limit: int, head_timeout_s: float, count: Callable[[str], None], **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._limit, self._head_timeout_s, self._count = limit, head_timeout_s, count
        self._deadline: asyncio.TimerHandle | None = None
        self._closing = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        over = len(self.connections) - self._limit
        if over > 0:
            message = f"this server holds {self._limit} connections, its limit; close some, or come later"
            self._refuse(ApiError(503, message, "too_many_connections", headers={"Retry-After": "1"}))
            if over > SPARE:
                transport.close()
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._watch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return  # a close with unread bytes would take the answer back
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self.loop.call_later(_UNREAD_S, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(_LINGER_S, self.transport.abort)

    def shutdown(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()

    def _watch(self) -> None:
        """A deadline runs from the first moment without a request under way to the next request's head."""
        waits = not self._closing and (self.cycle is None or self.cycle.response_complete)
        if waits and self._deadline is None:
            self._deadline = self.loop.call_later(self._head_timeout_s, self._late)
        elif not waits and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        message = f"no whole request arrived within {self._head_timeout_s:g} seconds; send it in one go"
        self._refuse(ApiError(408, message, "request_timeout"))

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this where h11 has raised; `msg` is always the same."""
        error = sys.exception()
        status = getattr(error, "error_status_hint", 400)
        what = "its head is too long" if status == 431 else short(error or msg, 120)
        self._refuse(ApiError(status, f"the request is not valid HTTP: {what}", "invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """Answers if nothing was answered yet, and closes when the client has read it, or has had time to."""
        self._closing = True
        self._watch()
        self._unset_keepalive_if_required()
        self._count(error.code)
        if self.cycle is not None:  # the application would answer into a closed connection
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.is_closing() or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        self.transport.write(self._answer(error))
        self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.abort)

    def _answer(self, error: ApiError) -> bytes:
        body = dumps(error.body)
        headers = {**error.headers, "Content-Type": "application/json", "Content-Length": str(len(body))}
        headers["Connection"] = "close"
        reason = HTTPStatus(error.status_code).phrase.encode()
        head = h11.Response(status_code=error.status_code, headers=[*headers.items()], reason=reason)
        events = (head, h11.Data(data=body), h11.EndOfMessage())
        return b"".join(self.conn.send(event) or b"" for event in events)
