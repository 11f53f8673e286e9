"""The engine beside an event loop: one thread steps it, coroutines add, read and abort.

Only the stepping thread touches the engine, so it needs no locks: what coroutines want is left as commands, which the
thread carries out between two steps. A reader that is slower than the engine misses nothing, because an output says
everything so far; outputs that it had no time for are replaced by the newest, so a slow reader costs no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from .engine import Engine, Prompt
from .errors import EngineError, RequestError
from .outputs import RequestOutput
from .sampling import SamplingParams


class _Mailbox:
    """The newest output of one request, or the error that ended it, handed from the thread to a coroutine."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.event = loop, asyncio.Event()
        self.newest: RequestOutput | Exception | None = None

    def put(self, item: RequestOutput | Exception) -> None:
        self.newest = item
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self.loop.call_soon_threadsafe(self.event.set)

    async def get(self) -> RequestOutput:
        await self.event.wait()
        self.event.clear()
        if isinstance(self.newest, Exception):
            raise self.newest
        return self.newest


class AsyncEngine:
    """`async for output in engine.generate(prompt, params, request_id)`. Outputs are cumulative, as vLLM's are.

    Leaving the loop early, or cancelling the task, aborts the request and frees its blocks.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._commands: deque[Callable[[], None]] = deque()
        self._mailboxes: dict[str, _Mailbox] = {}
        self._wake, self._stopping = threading.Event(), False
        self._closing, self._closed = threading.Lock(), False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        priority: int = 0,
        extra_keys: Sequence[tuple] = (),
        arrival_time: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields the request as it grows, the finished one last. Raises RequestError if it cannot be served."""
        if not isinstance(request_id, str):
            raise RequestError(f"the request id is a {type(request_id).__name__}; give a str")
        mailbox = _Mailbox(asyncio.get_running_loop())
        arguments = (request_id, prompt, sampling_params, priority, extra_keys, arrival_time)
        self._do(lambda: self._add(mailbox, arguments))
        done = False
        try:
            while not done:
                output = await mailbox.get()
                done = output.finished
                yield output
        finally:
            if not done:
                with contextlib.suppress(EngineError):  # stopped, and all its requests with it
                    self._do(lambda: self._abort(request_id, mailbox))

    async def abort(self, request_id: str) -> None:
        """Ends a request; its reader gets a last output with finish_reason "abort". An unknown id is passed over."""
        if not isinstance(request_id, str):
            raise RequestError(f"the request id is a {type(request_id).__name__}; give a str")
        self._do(lambda: self._abort(request_id, self._mailboxes.get(request_id)))

    def shutdown(self) -> None:
        """Ends all requests with "abort" and the thread. Call it once, from outside the thread."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    @property
    def is_running(self) -> bool:
        """Does it still take requests?"""
        return self._thread.is_alive() and not self._closed

    def _do(self, command: Callable[[], None]) -> None:
        with self._closing:
            if self._closed:
                raise EngineError("the engine has stopped; make a new one") from self.failure
            self._commands.append(command)
        self._wake.set()

    # --- in the stepping thread ---

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                self._obey()
                if self.engine.has_unfinished_requests():
                    self._deliver(self.engine.step())
                elif not self._stopping:
                    self._wake.wait()
        except BaseException as error:  # a fault of the engine's own: nobody may wait for ever
            self.failure = error
        with self._closing:  # from here on nobody can leave a command
            self._closed = True
        self._obey()
        if self.failure is None:
            self._deliver(self.engine.abort_request(list(self._mailboxes)))
        for mailbox in self._mailboxes.values():
            mailbox.put(self._stopped())

    def _obey(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _stopped(self) -> EngineError:
        return EngineError(f"the engine failed: {type(self.failure).__name__}: {self.failure}; make a new one")

    def _add(self, mailbox: _Mailbox, arguments: tuple) -> None:
        if self.failure is not None:
            mailbox.put(self._stopped())
            return
        try:
            self.engine.add_request(*arguments)
        except Exception as error:
            mailbox.put(error)
            return
        self._mailboxes[arguments[0]] = mailbox

    def _abort(self, request_id: str, mailbox: _Mailbox) -> None:
        if (
            self.failure is None and self._mailboxes.get(request_id) is mailbox
        ):  # not another's request that took the same id later
            self._deliver(self.engine.abort_request(request_id))

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is not None:
                mailbox.put(output)
                if output.finished:
                    del self._mailboxes[output.request_id]
