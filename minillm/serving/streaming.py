"""The engine's outputs → server-sent events, one JSON object each, `data: [DONE]` after the last.

The status is sent with the first token, so that whatever is refused before it has a status of its own. Later failures
are an event {"error": …} in the same shape, after which the stream ends without [DONE]: it was not the whole answer.
A reader that is slower than the engine gets fewer, longer events. Source: WHATWG HTML, section 9.2.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..outputs import CompletionOutput, RequestOutput
from ..tokenizer import Tokenizer
from .answers import Outputs, ending, usage
from .errors import ApiError
from .guard import ClientGone, Guard
from .logprobs import Offsets, chat_logprobs, completion_logprobs
from .strict_json import dumps
from .translate import Job

DONE = b"data: [DONE]\n\n"
_LAST_WORD_S = 1.0
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(value: Any) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


class _Choice:
    """How much of one choice was sent."""

    def __init__(self, job: Job, index: int, tokenizer: Tokenizer) -> None:
        self.job, self.index, self.tokenizer, self.sent = job, index, tokenizer, 0
        self.offsets = Offsets(tokenizer)

    def delta(self, output: CompletionOutput) -> dict[str, Any] | None:
        """The choice's part of the next event; None if nothing of it can be shown yet."""
        sent, first = self.sent, self.sent == 0
        text = output.text_from(sent)
        logprobs = self.job.params.logprobs is not None
        if not text and output.finish_reason is None and (not logprobs or output.count == sent):
            return None  # text that may be half a character or the beginning of a stop string; asked for again later
        tokens = output.tokens[sent:] if logprobs else []
        self.sent = output.count
        if self.job.is_chat:
            role = {"role": "assistant"} if first else {}
            listed = chat_logprobs(self.tokenizer, tokens) if tokens else None
            return {"index": self.index, "delta": {**role, "content": text}, "logprobs": listed, **ending(output)}
        listed = completion_logprobs(self.tokenizer, tokens, self.offsets) if tokens else None
        return {"index": self.index, "text": text, "logprobs": listed, **ending(output)}


class Events:
    """The events of one job, from outputs as they come."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self.job, self.tokenizer = job, tokenizer
        self._choices: dict[int, _Choice] = {}
        self._newest: dict[int, RequestOutput] = {}
        kind = "chat.completion.chunk" if job.is_chat else "text_completion"
        self._frame = {"id": job.id, "object": kind, "created": job.created, "model": job.model}

    def of(self, i: int, output: RequestOutput) -> bytes:
        self._newest[i] = output
        return b"".join(filter(None, (self._of_choice(i, choice) for choice in output.outputs)))

    def _of_choice(self, i: int, output: CompletionOutput) -> bytes | None:
        index = i * self.job.params.n + output.index
        choice = self._choices.setdefault(index, _Choice(self.job, index, self.tokenizer))
        if choice.sent and choice.sent == output.count:
            return None  # another of the request's choices grew
        delta = choice.delta(output)
        return delta and self._event([delta], None)

    def _event(self, choices: list[dict[str, Any]], counts: Any) -> bytes:
        extra = {"usage": counts} if self.job.include_usage else {}
        return event({**self._frame, "choices": choices, **extra})

    def end(self) -> bytes:
        return (self._event([], usage(self._newest)) if self.job.include_usage else b"") + DONE


class EventStream(Response):
    """`first` is the output that was waited for, `outputs` what follows."""

    media_type = "text/event-stream"

    def __init__(self, first: tuple[int, RequestOutput], outputs: Outputs, events: Events, guard: Guard) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._first, self._outputs, self._events, self._guard = first, outputs, events, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        last = b""
        async with aclosing(self._outputs):
            try:
                with suppress(ClientGone):
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                    await self._guard.run(self._send(send))
            except ApiError as error:
                last = event(error.body)
        with suppress(TimeoutError):  # a reader whose socket is still full hears no last word
            async with asyncio.timeout(_LAST_WORD_S):
                await send({"type": "http.response.body", "body": last})

    async def _send(self, send: Send) -> None:
        """`send` waits while the client's socket is full, and only this request with it."""
        async with aclosing(self._chunks()) as chunks:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _chunks(self) -> AsyncIterator[bytes]:
        yield self._events.of(*self._first)
        async for i, output in self._outputs:
            if chunk := self._events.of(i, output):
                yield chunk
        yield self._events.end()
