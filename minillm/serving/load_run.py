"""A whole run: sends a workload in an open or a closed loop and keeps what happened.

    result = run_load("http://127.0.0.1:8000", make_requests(arrival_times("poisson", 4, 100), 128, 64))
    result.summary.ttft_ms.p99

`run_load` works in a notebook too, because it has an event loop of its own in a thread of its own;
`run_load_async` is for a program that has one. The result goes to JSON and back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import short
from .load_client import LoadClient, Target
from .load_metrics import SLO, Summary, summarize
from .load_record import LONGEST_S, MOST_TOKENS, STATUSES, LoadError, RequestRecord, TraceRequest, count_of
from .load_workload import Prompts

SCHEMA = "minillm.load/1"


class LoadResult:
    """records: by index, warm-up ones marked. settings: plain values that say what ran. slo: limits for goodput."""

    def __init__(
        self, records: Sequence[RequestRecord], settings: dict[str, Any] | None = None, slo: SLO | None = None
    ) -> None:
        self.records, self.settings, self.slo = tuple(records), dict(settings or {}), slo or SLO()

    @cached_property
    def summary(self) -> Summary:
        return summarize(self.records, self.slo, closed=self.settings.get("loop") == "closed")

    def with_slo(self, slo: SLO) -> LoadResult:
        """The same run judged by other limits."""
        return LoadResult(self.records, self.settings, slo)

    def to_json(self) -> str:
        values = {"schema": SCHEMA, "settings": self.settings, "slo": self.slo._asdict()}
        values |= {"summary": self.summary.as_dict(), "records": [record._asdict() for record in self.records]}
        return json.dumps(values, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> LoadResult:
        """Raises LoadError for anything that to_json did not write. The summary is computed again."""
        try:
            values = json.loads(text)
            schema = values.get("schema")
            if schema != SCHEMA:
                raise LoadError(f"a load result of schema {short(schema)!r}; this minillm reads {SCHEMA}: run it again")
            records = [_record(row) for row in values["records"]]
            return cls(records, dict(values["settings"]), SLO(**values["slo"]))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, LoadError):
                raise
            raise LoadError(f"no load result ({short(error, 200)}); write one with to_json or --output") from None

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> LoadResult:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise LoadError(f"{short(path, 200)}: no load result, for it is no text; write one with --output") from None
        return cls.from_json(text)


def _record(values: dict[str, Any]) -> RequestRecord:
    record = RequestRecord(**values)
    record = record._replace(chunk_times=tuple(record.chunk_times), chunk_tokens=tuple(record.chunk_tokens))
    times = (record.intended_s, record.sent_s, record.end_s, *record.chunk_times)
    counts = (record.prompt_tokens, record.output_tokens, record.cached_tokens, record.max_tokens, *record.chunk_tokens)
    good = all(isinstance(t, int | float) and abs(t) < LONGEST_S for t in times)
    if record.status not in STATUSES or not good or None in map(count_of, counts):
        raise ValueError(f"record {short(record.index)} has a status, time or number of tokens that cannot be")
    return record


def run_load(url: str | Target, requests: Sequence[TraceRequest], **options: Any) -> LoadResult:
    """Runs the load and waits for it. Options are those of `run_load_async`; works inside a running event loop."""
    with ThreadPoolExecutor(1, "load") as pool:
        return pool.submit(lambda: asyncio.run(run_load_async(url, requests, **options))).result()


async def run_load_async(
    url: str | Target,
    requests: Sequence[TraceRequest],
    *,
    prompts: Prompts | None = None,
    concurrency: int | None = None,
    think_time_s: float = 0.0,
    max_in_flight: int | None = None,
    duration_s: float | None = None,
    warmup: int = 0,
    slo: SLO | None = None,
    progress: bool = True,
    settings: dict[str, Any] | None = None,
) -> LoadResult:
    """Sends `requests` to a server and returns what happened.

    url: the server, or a Target with model, key, time-out and so on. Open loop unless `concurrency` is given: each
    request goes out at its arrival_s, whatever became of those before. concurrency: closed loop of so many clients,
    each of which sends the next request `think_time_s` after its last one ended; arrival_s is passed over, and a
    request's intended arrival is the moment its client was free to send it. max_in_flight: an open loop with so many
    connections; what waits for one still counts from its intended arrival. duration_s: nothing is sent that is meant
    to arrive later. warmup: the first so many by arrival are sent and left out of the numbers. prompts: default is
    unique prompts, new in each run. Raises LoadError when nothing can be measured; a request's failure is a record.
    """
    _check(requests, concurrency, think_time_s, max_in_flight, warmup)
    target = url if isinstance(url, Target) else Target(url)
    prompts = prompts or Prompts()
    requests = sorted(requests, key=lambda row: row.arrival_s)
    if duration_s is not None and concurrency is None:
        requests = [row for row in requests if row.arrival_s < duration_s]
        _check(requests, concurrency, think_time_s, max_in_flight, warmup)
    async with LoadClient(target) as client:
        probe = prompts.ids(len(requests), TraceRequest(0.0, 8, 1))
        target = await client.settle(probe, prompts.text(probe))
        with _bar(None if duration_s and concurrency else len(requests), progress) as tick:
            run = _Run(client, requests, prompts, tick)
            if concurrency is None:
                await run.open_loop(max_in_flight)
            else:
                await run.closed_loop(concurrency, think_time_s, duration_s)
    records = [r._replace(warmup=i < warmup) for i, r in enumerate(sorted(run.records, key=lambda r: r.intended_s))]
    kept = {
        "url": target.url,
        "model": target.model,
        "endpoint": "chat" if target.chat else "completions",
        "prompts": "token ids" if target.token_ids else "words",
        "ignore_eos": target.ignore_eos,
        "loop": "open" if concurrency is None else "closed",
        "concurrency": concurrency,
        "max_in_flight": max_in_flight,
        "think_time_s": think_time_s,
        "seed": prompts.seed,
        "salt": prompts.salt,
        "shared_prefix": prompts.shared_prefix,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() - run.now())),
    }
    return LoadResult(sorted(records, key=lambda r: r.index), kept | (settings or {}), slo)


class _Run:
    """Sends requests on one clock and gathers the records."""

    def __init__(self, client: LoadClient, requests: Sequence[TraceRequest], prompts: Prompts, tick) -> None:
        self.client, self.requests, self.prompts, self.tick = client, requests, prompts, tick
        self.records: list[RequestRecord] = []
        self.started = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.started

    async def open_loop(self, max_in_flight: int | None) -> None:
        gate = asyncio.Semaphore(max_in_flight) if max_in_flight else contextlib.nullcontext()

        async def one(index: int, body: bytes) -> None:
            async with gate:
                await self._send(index, self.requests[index].arrival_s, body)

        body = self._body(0)
        self.started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for index, request in enumerate(self.requests):
                body = body if index == 0 else self._body(index)  # made before its time comes
                await asyncio.sleep(max(0.0, request.arrival_s - self.now()))
                tasks.create_task(one(index, body))

    async def closed_loop(self, clients: int, think_time_s: float, duration_s: float | None) -> None:
        waiting = iter(range(len(self.requests)))

        async def one_client() -> None:
            for index in waiting:
                body = self._body(index)
                if duration_s is not None and self.now() >= duration_s:
                    return
                await self._send(index, self.now(), body)
                await asyncio.sleep(think_time_s)

        self.started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(clients, len(self.requests))):
                tasks.create_task(one_client())

    def _body(self, index: int) -> bytes:
        request = self.requests[index]
        ids = self.prompts.ids(index, request)
        prompt = ids if self.client.target.token_ids else self.prompts.text(ids)
        return self.client.body(prompt, request.output_tokens)

    async def _send(self, index: int, intended_s: float, body: bytes) -> None:
        request = self.requests[index]
        record = await self.client.send(
            index, intended_s, body, self.started, request.output_tokens, request.prompt_tokens
        )
        self.records.append(record)
        self.tick(record)


@contextlib.contextmanager
def _bar(total: int | None, progress: bool) -> Iterator[Any]:
    """A progress bar that counts requests and, beside it, those that did not end well."""
    if not progress:
        yield lambda record: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, unit="request", leave=False) as bar:
        lost = 0

        def tick(record: RequestRecord) -> None:
            nonlocal lost
            lost += not record.ok
            bar.set_postfix_str(f"{lost} lost" if lost else "", refresh=False)
            bar.update()

        yield tick


def _check(requests, concurrency, think_time_s, max_in_flight, warmup) -> None:
    if not requests:
        raise LoadError("the load has no request; raise the count, the rate or the duration")
    for i, row in enumerate(requests):
        if not abs(row.arrival_s) < LONGEST_S or max(row.prompt_tokens, row.output_tokens) > MOST_TOKENS:
            raise LoadError(
                f"request {i} is beyond {LONGEST_S:g} s or {MOST_TOKENS} tokens; correct its time or lengths"
            )
    for name, value in (("concurrency", concurrency), ("max_in_flight", max_in_flight)):
        if value is not None and value < 1:
            raise LoadError(f"{name} is {value}; it must be 1 or more")
    if concurrency is not None and max_in_flight is not None:
        raise LoadError("concurrency is a closed loop and max_in_flight an open one; give one of them")
    if not 0 <= think_time_s < float("inf"):
        raise LoadError(f"think_time_s is {think_time_s}; it must be a number of seconds, 0 or more")
    if not 0 <= warmup < len(requests):
        raise LoadError(f"warmup is {warmup} of {len(requests)} requests; leave at least one to measure")
