"""Schedules played without a model, on a clock that the test turns: a step lasts 10 ms and 1 ms a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from minillm.batching import Scheduler, SchedulerConfig
from minillm.events import EventLog
from minillm.request import Request
from minillm.sampling_params import SamplingParams
from tests.shadow import ShadowRunner


class Job(NamedTuple):
    prompt: int
    max_tokens: int
    arrival: int = 0  # before this step, counted from 0
    n: int = 1
    abort: int | None = None


def seconds_of(output) -> float:
    return 0.010 + 0.001 * output.num_tokens


def play(
    jobs: Sequence[Job], each: Callable = lambda scheduler, output: None, keep: int | None = None, **options
) -> Scheduler:
    """Runs the jobs, named by their place, to the end. `each(scheduler, output)` is called before a step's work."""
    options = {"num_blocks": 65, "block_size": 4, "max_num_batched_tokens": 32, "max_num_seqs": 8, **options}
    now = [0.0]
    scheduler = Scheduler(SchedulerConfig(**options), EventLog(keep, clock=lambda: now[0]))
    runner = ShadowRunner(scheduler)
    requests = [
        Request(str(i), range(100 * i, 100 * i + job.prompt), SamplingParams(max_tokens=job.max_tokens, n=job.n))
        for i, job in enumerate(jobs)
    ]
    step = 0
    while step <= max(job.arrival for job in jobs) or scheduler.has_unfinished_requests():
        for request, job in zip(requests, jobs, strict=True):
            if job.arrival == step:
                scheduler.add(request)
            if job.abort == step:
                scheduler.finish(request, "abort")
        if scheduler.has_unfinished_requests():
            output = scheduler.schedule()
            each(scheduler, output)
            runner.compute(output)
            now[0] += seconds_of(output)
            _draw(scheduler, scheduler.update(output))
        step += 1
        assert step < 3000
    return scheduler


def _draw(scheduler: Scheduler, drawn) -> None:
    """As Engine._append: who ends is finished first, then the step's tokens are noted."""
    for _, request in drawn:
        request.append(200 + len(request.output_token_ids))
        if len(request.output_token_ids) == request.params.max_tokens:
            scheduler.finish(request, "length")
    if drawn:
        labels = [request.label for _, request in drawn]
        scheduler.events.append("sampled", requests=labels, tokens=[0] * len(labels))


def add_and_step(scheduler: Scheduler, name: str, ids: Sequence[int], max_tokens: int = 9) -> Request:
    """One more request, and one step."""
    request = Request(name, ids, SamplingParams(max_tokens=max_tokens))
    scheduler.add(request)
    _draw(scheduler, scheduler.update(scheduler.schedule()))
    return request
