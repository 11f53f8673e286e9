"""What stands before the routes: the key, the draining server, and a body of the right kind and size.

A refusal does not wait for the rest of the body: uvicorn reads that away, so that a client in the middle of writing
sees the answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Callable
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError, draining, invalid
from .state import ServerState
from .strict_json import JSONError, loads

_BODY_S = 60.0  # a body that trickles in holds a connection no longer than this


class Gate:
    """ASGI middleware. Answers 401 and 503 itself, and counts what is under way, for the drain to wait for."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self.app, self.state = app, state
        self._keys = [_digest(key.encode()) for key in state.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "HEAD":
            scope = {**scope, "method": "GET"}  # the same answer; uvicorn, whose scope is its own, leaves the body out
        if scope["type"] != "http" or not scope["path"].startswith("/v1"):
            await self.app(scope, receive, send)
            return
        scope["minillm.arrival"] = time.perf_counter()
        try:
            self._check(scope)
        except ApiError as error:
            self.state.metrics.refused(error.code)
            await error.response()(scope, receive, send)
            return
        self.state.active += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.state.active -= 1

    def _check(self, scope: Scope) -> None:
        if self._keys and not self._knows(_header(scope, b"authorization")):
            message = "a valid API key is needed; send it as 'Authorization: Bearer KEY'"
            raise ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if self.state.draining and scope["method"] == "POST":
            raise draining()

    def _knows(self, header: bytes) -> bool:
        """Compares with every key, in a time that tells nothing about any."""
        scheme, _, key = header.partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


class StrictRequest(Request):
    """A request whose body is JSON, not too large, and JSON by the standard."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            self._body = await self._read(self.app.state.server.settings.max_body_bytes)
            if not self._body:
                raise invalid("the body is empty; send one JSON object", "invalid_json")
        return self._body

    async def json(self) -> Any:
        try:
            return loads(await self.body())
        except JSONError as error:
            raise invalid(str(error), "invalid_json") from None

    async def _read(self, limit: int) -> bytes:
        try:
            _check_kind(self.headers)
            length = self.headers.get("content-length", "")
            if length.isdigit() and int(length[:20]) > limit:
                raise _too_large(limit)
            async with asyncio.timeout(_BODY_S):
                return await self._collect(limit)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {_BODY_S:g} seconds", "body_timeout") from None

    async def _collect(self, limit: int) -> bytes:
        data = bytearray()
        async for chunk in self.stream():
            data += chunk
            if len(data) > limit:
                raise _too_large(limit)
        return bytes(data)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes, which is this server's limit", "body_too_large")


def _check_kind(headers: Any) -> None:
    kind, *options = (part.strip().lower() for part in headers.get("content-type", "").split(";"))
    if kind != "application/json":
        message = f"the content type is {kind[:60] or 'missing'}; send application/json"
        raise ApiError(415, message, "unsupported_media_type")
    charsets = [option.partition("=")[2].strip('" ') for option in options if option.startswith("charset")]
    if any(charset not in ("utf-8", "utf8") for charset in charsets):
        raise ApiError(415, "JSON is sent as UTF-8; leave the charset out", "unsupported_media_type")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "compressed bodies are not taken; send it as it is", "unsupported_media_type")


class StrictRoute(APIRoute):
    """A route that reads its body through StrictRequest."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive, request._send))

        return strict
