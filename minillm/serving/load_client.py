"""One streamed request to any OpenAI-compatible server, with the time of every chunk.

The clock of a request starts at its *intended* arrival. A client that is late, because it waited for an answer or
because its own process was busy, would else leave out exactly the time that its user waits: coordinated omission
(Tene, "How NOT to Measure Latency"). The time of the actual send is kept beside it.

Which chunks carry a token: those with text, and those without text that are neither the first of a chat (which names
the role) nor the last (which names the finish reason). Output tokens are the server's own count where it sends usage.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from ..errors import short
from .load_record import CUT, FAILED, OK, REFUSED, TIMEOUT, LoadError, RequestRecord, count_of
from .load_sse import EventStream

BODY_LIMIT = 2**20  # bytes read of an answer that is no stream


class Target(NamedTuple):
    """A server and how to speak to it.

    url: its root, with or without /v1. chat: /v1/chat/completions, which takes text alone. token_ids: prompts are
    lists of ids, so their lengths are exact; False sends words; None tries ids once. extra: further body fields.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    chat: bool = False
    token_ids: bool | None = None
    timeout_s: float = 600.0
    temperature: float = 0.0
    ignore_eos: bool = True
    extra: dict[str, Any] | None = None

    @property
    def root(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")


@dataclass
class _Answer:
    """What a stream has said so far. Times are of time.perf_counter."""

    status: str = CUT
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    last_at: float = 0.0
    finish_reason: str | None = None
    http_status: int | None = None
    error: str | None = None
    streamed: bool = True

    def fail(self, status: str, error: object) -> None:
        self.status, self.error = status, short(error, 300)


class LoadClient:
    """`async with LoadClient(target) as client: await client.send(...)`. No server makes `send` raise.

    Connections are kept and not limited in number: a limit would be a queue inside the client. Proxies of the
    environment are passed over, for they would be measured too.
    """

    def __init__(self, target: Target) -> None:
        _check(target)
        self.target = target
        headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        self._http = httpx.AsyncClient(
            base_url=target.root,
            headers=headers,
            timeout=None,  # one limit for the whole request instead, in `send`
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def __aenter__(self) -> LoadClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def settle(self, probe_ids: Sequence[int], probe_text: str) -> Target:
        """Finds out what the target leaves open: the model's name, whether the server takes ids and ignore_eos.

        Sends one to three short requests. Raises LoadError if nothing answers there.
        """
        if self.target.model is None:
            self.target = self.target._replace(model=await self._first_model())
        for way in _ways(self.target):
            self.target = way
            probe = list(probe_ids) if self.target.token_ids else probe_text
            record = await self.send(0, 0.0, self.body(probe, 1), time.perf_counter())
            if record.status in (OK, REFUSED):
                return self.target
            if record.http_status is None:
                break  # no server, no use in asking otherwise
        raise LoadError(f"{short(self.target.url, 200)} does not serve this load: {record.error or record.status}")

    async def _first_model(self) -> str:
        url = short(self.target.url, 200)
        try:
            async with asyncio.timeout(min(30.0, self.target.timeout_s)):
                async with self._http.stream("GET", "/v1/models") as answer:
                    body = await _start_of(answer)
            return _name(json.loads(body)["data"][0]["id"])
        except (httpx.HTTPError, OSError, TimeoutError) as error:
            raise LoadError(f"nothing answers at {url} ({_named(error)}); start a server, or correct --url") from None
        except (ValueError, LookupError, TypeError, RecursionError):
            said = f"HTTP {answer.status_code}"
            raise LoadError(f"{url}/v1/models names no model ({said}); give --model, and --api-key if needed") from None

    def body(self, prompt: Sequence[int] | str, max_tokens: int) -> bytes:
        """The request's body, made before its time comes."""
        target = self.target
        values: dict[str, Any] = {"model": target.model, "max_tokens": max_tokens, "temperature": target.temperature}
        values |= {"stream": True, "stream_options": {"include_usage": True}}
        if target.ignore_eos:
            values["ignore_eos"] = True  # vLLM's name; else answers end when the model likes, and runs differ
        values |= {"messages": [{"role": "user", "content": prompt}]} if target.chat else {"prompt": prompt}
        try:
            return json.dumps(values | (target.extra or {}), allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise LoadError(
                f"a field of the request is no JSON ({short(error, 100)}); correct temperature or extra"
            ) from None

    async def send(
        self, index: int, intended_s: float, body: bytes, started: float, max_tokens: int = 0, prompt_tokens: int = 0
    ) -> RequestRecord:
        """Sends one request and reads its stream to the end.

        intended_s: seconds after `started` (time.perf_counter) when it should have been sent. prompt_tokens: told if
        the server does not tell.
        """
        answer, sent = _Answer(), time.perf_counter()
        try:
            async with asyncio.timeout(self.target.timeout_s):
                await self._exchange(body, answer)
        except TimeoutError:
            answer.fail(TIMEOUT, f"no end within {self.target.timeout_s:g} s")
        except (httpx.RemoteProtocolError, httpx.ReadError) as error:
            if answer.status != OK:
                answer.fail(CUT if answer.http_status == 200 else FAILED, _named(error))
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
            answer.fail(FAILED, _named(error))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            answer.fail(FAILED, f"an answer that is no stream of completions ({_named(error)})")
        end = time.perf_counter()
        return _record(answer, index, intended_s, sent - started, end - started, started, max_tokens, prompt_tokens)

    async def _exchange(self, body: bytes, answer: _Answer) -> None:
        path = "/v1/chat/completions" if self.target.chat else "/v1/completions"
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        async with self._http.stream("POST", path, content=body, headers=headers) as response:
            answer.http_status = response.status_code
            if response.status_code != 200:
                said = await _start_of(response)
                answer.fail(REFUSED if response.status_code in (429, 503) else FAILED, _error_text(response, said))
            elif "event-stream" in response.headers.get("content-type", "event-stream"):
                await self._read_stream(response, answer)
            else:
                answer.streamed = False
                _take(answer, json.loads(await _start_of(response)), time.perf_counter())

    async def _read_stream(self, response: httpx.Response, answer: _Answer) -> None:
        events = EventStream()
        async for piece in response.aiter_bytes():
            now = time.perf_counter()
            for data in events.feed(piece):
                if _is_last(answer, data, now):
                    return
        for data in events.flush():
            if _is_last(answer, data, time.perf_counter()):
                return


def _ways(target: Target) -> list[Target]:
    """What to try, the most exact first: token ids, then words, then words without vLLM's ignore_eos."""
    kinds = [False] if target.chat else [True, False] if target.token_ids is None else [target.token_ids]
    ways = [target._replace(token_ids=kind) for kind in kinds]
    return [*ways, ways[-1]._replace(ignore_eos=False)] if target.ignore_eos else ways


def _is_last(answer: _Answer, data: bytes, now: float) -> bool:
    """Takes one event; True at the end of the stream."""
    if data.strip() == b"[DONE]":
        if answer.finish_reason is None and not answer.times:
            answer.fail(FAILED, "a stream without a token")
        else:
            answer.status = OK
        return True
    _take(answer, json.loads(data), now)
    return answer.status == FAILED


def _take(answer: _Answer, values: dict[str, Any], now: float) -> None:
    """One chunk, or one whole answer that is not streamed."""
    if error := values.get("error"):
        answer.fail(FAILED, error.get("message", error) if isinstance(error, dict) else error)
        return
    answer.last_at = now
    usage = values.get("usage")
    before = _count(answer.usage)
    if isinstance(usage, dict):
        answer.usage = usage
    for choice in (values.get("choices") or [])[:1]:
        part = choice.get("delta") or choice.get("message") or choice
        text = part.get("text") or part.get("content") or part.get("reasoning_content") or part.get("tool_calls")
        finish = choice.get("finish_reason")
        if text or (finish is None and "role" not in part):
            answer.times.append(now)
            if len(answer.times) == 1 or (isinstance(usage, dict) and before is not None):
                answer.counts.append((_count(usage) or 0) - (before or 0))
        if finish is not None:
            answer.finish_reason, answer.status = short(finish), OK


def _count(usage: Any) -> int | None:
    return count_of(usage.get("completion_tokens")) if isinstance(usage, dict) else None


def _name(value: object) -> str:
    """A model's name as a server may say it, printable and not empty. Raises ValueError."""
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError
    return value


def _record(answer, index, intended_s, sent_s, end_s, started, max_tokens, prompt_tokens) -> RequestRecord:
    if answer.status == OK and not answer.times:
        answer.times.append(answer.last_at)  # an answer without text: its end stands for its first token
    told = _count(answer.usage)
    tokens = told if told is not None else len(answer.times)
    prompt = count_of(answer.usage.get("prompt_tokens"))
    details = answer.usage.get("prompt_tokens_details")
    cached = count_of(details.get("cached_tokens")) if isinstance(details, dict) else None
    return RequestRecord(
        index=index,
        intended_s=intended_s,
        sent_s=sent_s,
        end_s=end_s,
        status=answer.status,
        prompt_tokens=prompt_tokens if prompt is None else prompt,
        output_tokens=tokens,
        chunk_times=tuple(moment - started for moment in answer.times),
        chunk_tokens=_chunk_tokens(answer.counts, len(answer.times), tokens),
        token_source="usage" if told is not None else "chunks",
        max_tokens=max_tokens,
        cached_tokens=cached or 0,
        http_status=answer.http_status,
        finish_reason=answer.finish_reason,
        error=None if answer.status == OK else answer.error or "the stream ended without finish_reason or [DONE]",
        streamed=answer.streamed,
    )


def _chunk_tokens(counts: Sequence[int], chunks: int, tokens: int) -> tuple[int, ...]:
    """Tokens of each chunk: as told with each, or one each if that adds up; else unknown."""
    if len(counts) == chunks and sum(counts) == tokens and min(counts, default=0) > 0:
        return tuple(counts)
    return (1,) * chunks if tokens == chunks else ()


async def _start_of(response: httpx.Response) -> bytes:
    body = b""
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > BODY_LIMIT:
            break
    return body


def _error_text(response: httpx.Response, body: bytes) -> str:
    try:
        said = json.loads(body)
        said = said.get("error", said)
        said = said.get("message", said) if isinstance(said, dict) else said
    except (ValueError, AttributeError, RecursionError):
        said = body[:200].decode("utf-8", "replace")
    return f"HTTP {response.status_code}: {said}"


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _check(target: Target) -> None:
    try:
        url = httpx.URL(target.root)
        good = url.scheme in ("http", "https") and bool(url.host) and (url.port or 80) < 1 << 16
    except httpx.InvalidURL:
        good = False
    if not good:
        raise LoadError(f"url {short(target.url, 200)!r} is no address; write http://127.0.0.1:8000")
    if target.api_key and not (target.api_key.isascii() and target.api_key.isprintable()):
        raise LoadError("the API key has characters that no HTTP header takes; give it in ASCII, without line ends")
    if not (0 < target.timeout_s < math.inf):
        raise LoadError(f"timeout is {target.timeout_s}; it must be a number of seconds above 0")
