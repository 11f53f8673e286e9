"""A server's life: bind, serve, drain, stop. In a process of its own, or in a thread beside a notebook.

Told to stop, it takes no new requests (503) and lets the running ones finish; when drain_timeout_s is over, those that
are left end with an error. Told a second time, the process ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn

from ..async_engine import AsyncEngine
from ..engine import Engine
from ..llm import LLM
from .app import create_app
from .connection import ACCEPTS, Connection, most_connections
from .settings import ServerSettings, ServingError
from .state import ServerState

_LINGER_S = 2.0  # for the last bytes to leave
_BACKLOG = 1024  # connections that wait to be accepted


class _Uvicorn(uvicorn.Server):
    """Signals are this file's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, so that a taken port is told before a model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ServingError(f"the host {host!r} is not known ({error}); use an address of this machine") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ServingError(
            f"cannot serve at {host} port {port}: {error.strerror or error}; choose another --port, or 0 for a free one"
        ) from None
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server:
    """One app on one socket, in the running event loop."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings) -> None:
        self.settings, app = settings, create_app(engine, settings)
        self.state: ServerState = app.state.server
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                http=partial(
                    Connection,
                    limit=most_connections(settings.max_connections),
                    head_timeout_s=settings.head_timeout_s,
                    count=self.state.metrics.refused,
                ),
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                backlog=ACCEPTS,
                timeout_graceful_shutdown=int(_LINGER_S),
            )
        )
        self._drain: asyncio.Task | None = None

    async def serve(self, sock: socket.socket, on_started: Callable[[], None]) -> None:
        """Until `begin_drain` was called and has come to its end. Raises ServingError if the port cannot be had."""
        try:
            sock.listen(_BACKLOG)
        except OSError as error:
            raise ServingError(f"cannot listen at {url_of(sock)}: {error.strerror}; choose another port") from None
        running = asyncio.create_task(self._uvicorn.serve([sock]))
        try:
            while not self._uvicorn.started and not running.done():
                await asyncio.sleep(0.005)
            with contextlib.suppress(OSError):  # it may have stopped already
                sock.listen(_BACKLOG)  # asyncio has set it to what it accepts in one turn
            on_started()
            await running
        finally:
            self.state.close()
            await self._hang_up()

    async def _hang_up(self) -> None:
        """uvicorn leaves a connection whose client has not read its answer open, and the loop would end under it."""
        for connection in list(self._uvicorn.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # the turn in which the sockets close

    @property
    def open_connections(self) -> int:
        return len(self._uvicorn.server_state.connections)

    def begin_drain(self, timeout_s: float) -> None:
        if self._drain is None:
            self.state.draining = True
            self._drain = asyncio.create_task(self._end(timeout_s))

    async def _end(self, timeout_s: float) -> None:
        await self._idle(timeout_s)
        self.state.stopping.set()
        await self._idle(_LINGER_S)
        self._uvicorn.should_exit = True

    async def _idle(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while self.state.active and time.monotonic() < until:
            await asyncio.sleep(0.01)


def serve_process(engine: AsyncEngine, settings: ServerSettings, sock: socket.socket) -> int:
    """Serves until SIGTERM or SIGINT and returns the exit code, 0. Prints one line with the URL when it listens."""

    async def main() -> None:
        server, loop, told = Server(engine, settings), asyncio.get_running_loop(), []

        def stop(number: int) -> None:
            if told:
                os._exit(128 + number)
            told.append(number)
            running = server.state.active
            print(f"stopping: {running} requests under way; a second signal ends at once", file=sys.stderr, flush=True)
            server.begin_drain(settings.drain_timeout_s)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        scheduler = engine.engine.scheduler
        room = (
            f"cache for {scheduler.pool.total * scheduler.pool.block_size} tokens, {scheduler.max_sequence} a request"
        )
        line = f"serving {settings.model_name} at {url_of(sock)}/v1 ({room})"
        await server.serve(sock, lambda: print(line, flush=True))

    asyncio.run(main())
    engine.shutdown()
    sys.stdout.flush()
    return 0


class ThreadServer:
    """A server in a thread of its own. `url` is its root; clients of OpenAI's take `url + "/v1"`."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings) -> None:
        self.engine, self.settings = engine, settings
        self._socket = bind(settings.host, settings.port)
        self.url = url_of(self._socket)
        self._started, self._failure = threading.Event(), None
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception as error:
            self._failure = error
        finally:
            self._socket.close()
            self._started.set()

    async def _main(self) -> None:
        self._loop, self.server = asyncio.get_running_loop(), Server(self.engine, self.settings)
        await self.server.serve(self._socket, self._started.set)

    def stop(self, drain_timeout_s: float | None = None) -> None:
        """Drains and waits for the end. A second call does nothing."""
        timeout = self.settings.drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.server.begin_drain, timeout)
        self._thread.join()


@contextlib.contextmanager
def serve_in_thread(engine: AsyncEngine | Engine | LLM, **settings) -> Iterator[ThreadServer]:
    """`with serve_in_thread(engine) as server:` and a client of OpenAI's finds it at `server.url + "/v1"`.

    A real socket, on a free port unless `port` says otherwise; further keywords are those of ServerSettings. At the
    end of the block running requests are cut short, unless drain_timeout_s gives them time. An AsyncEngine that was
    passed in goes on; one that was made here is shut down.
    """
    engine = engine.engine if isinstance(engine, LLM) else engine
    own = not isinstance(engine, AsyncEngine)
    chosen = ServerSettings(**{"port": 0, "drain_timeout_s": 0.0, **settings})
    running = AsyncEngine(engine) if own else engine
    try:
        server = ThreadServer(running, chosen)
        try:
            yield server
        finally:
            server.stop()
    finally:
        if own:
            running.shutdown()
