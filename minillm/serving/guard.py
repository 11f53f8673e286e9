"""Work for a client, as long as there is a reason to do it.

Four things can end it: it is done, the client has gone, its time is over, or the server stops. In the last three the
work is cancelled, which aborts its requests in the engine and frees their blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from .errors import draining, timed_out

Result = TypeVar("Result")
Receive = Callable[[], Awaitable[dict[str, Any]]]


class ClientGone(Exception):
    """Nobody is there to read an answer."""


class Guard:
    """Of one HTTP request. `stopping` is the server's: set when running requests may not go on."""

    def __init__(self, receive: Receive, stopping: asyncio.Event, timeout_s: float | None, arrival: float) -> None:
        self._receive, self._stopping, self._timeout_s = receive, stopping, timeout_s
        self._arrival = arrival

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The work's result. Raises ClientGone, or ApiError 504 or 503; the work has ended by then."""
        task = asyncio.create_task(work)
        gone, stopping = asyncio.create_task(self._gone()), asyncio.create_task(self._stopping.wait())
        tasks = (task, gone, stopping)
        try:
            done, _ = await asyncio.wait(tasks, timeout=self._left(), return_when=asyncio.FIRST_COMPLETED)
            if task in done:
                return task.result()
            if gone in done:
                raise ClientGone
            raise draining() if done else timed_out(self._timeout_s)
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _left(self) -> float | None:
        return None if self._timeout_s is None else max(0.0, self._arrival + self._timeout_s - time.perf_counter())

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass  # the body has been read; nothing else can come
