"""How `bench` measures many requests at once: output tokens a second from the first request in to the last token out.

Three ways to serve the same workload, in turns: continuous batching, static batches in the same engine, and
transformers' `generate` in static batches. And what the cache's memory held meanwhile, paged against reserved.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..allocators import ContiguousAllocator
from ..batching import Scheduler
from ..engine import Engine
from ..errors import EngineError
from ..llm import scheduler_config
from ..request import Request
from ..sampling_params import SamplingParams
from ..scheduler_config import SchedulerConfig
from ..tokenizer import Tokenizer
from ..transformer import Transformer
from .workload import Job, totals

STATIC_BATCH = 8
ROUNDS = 3  # at most: one is thousands of steps long, where a round of `measure` is one answer
CACHE_BYTES = 1 << 30


def config_of(model: Transformer, kv_cache_dtype: str = "auto") -> SchedulerConfig:
    """The engine's settings, max_model_len clamped to the model's context as the engine does it."""
    options = {"prefix_cache": "off"}  # no job may find what another left
    config = scheduler_config(model, CACHE_BYTES, options, kv_cache_dtype)
    return replace(config, max_model_len=min(config.max_model_len, model.config.max_position_embeddings))


def longest(config: SchedulerConfig) -> int:
    """Tokens of prompt and output together that one job may have."""
    return Scheduler(config).max_sequence


def compare(
    model: Transformer, tokenizer: Tokenizer, jobs: Sequence[Job], rounds: int, rival=None, kv_cache_dtype: str = "auto"
) -> dict[str, Any]:
    """Median tokens/s of each way, over rounds in which they take turns, and the cache's waste."""
    config = config_of(model, kv_cache_dtype)
    static = replace(config, continuous_batching=False, max_num_seqs=STATIC_BATCH)
    ways: dict[str, Callable[[], None]] = {"continuous": lambda: serve(model, tokenizer, config, jobs, kv_cache_dtype)}
    if rival is not None:
        ways["static"] = lambda: serve(model, tokenizer, static, jobs, kv_cache_dtype)
        ways["transformers"] = lambda: rival.static_batches(jobs, STATIC_BATCH)
    brief = [Job(job.prompt_token_ids, min(2, job.max_tokens)) for job in jobs]
    serve(model, tokenizer, config, brief, kv_cache_dtype)  # warm-up
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(min(rounds, ROUNDS)):
        for name, run in ways.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    prompt, output = totals(jobs)
    speeds = {name: output / statistics.median(times) for name, times in seconds.items()}
    return {
        "throughput_tok_s": speeds.pop("continuous"),
        "workload": {"requests": len(jobs), "prompt_tokens": prompt, "output_tokens": output},
        "throughput_rounds": min(rounds, ROUNDS),
        "throughput_static": {f"{name}_tok_s": value for name, value in speeds.items()},
        **waste(config, jobs),
    }


def serve(
    model: Transformer, tokenizer: Tokenizer, config: SchedulerConfig, jobs: Sequence[Job], kv_cache_dtype: str = "auto"
) -> None:
    """All jobs at once, to the end. Raises EngineError if one of them failed."""
    engine = Engine(model, tokenizer, config, kv_cache_dtype=kv_cache_dtype)
    for i, job in enumerate(jobs):
        params = SamplingParams(temperature=0, max_tokens=job.max_tokens, ignore_eos=True)
        engine.add_request(str(i), job.prompt_token_ids, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished and len(output.outputs[0].token_ids) != jobs[int(output.request_id)].max_tokens:
                raise EngineError(f"request {output.request_id} of the workload ended early: {output.error}")


def waste(config: SchedulerConfig, jobs: Sequence[Job]) -> dict[str, float]:
    """Share of allocated slots without a token, over all steps of the workload: paged, and had each running request
    reserved max_model_len. Scheduling needs no model, so none runs."""
    scheduler = Scheduler(config)
    for i, job in enumerate(jobs):
        scheduler.add(Request(str(i), job.prompt_token_ids, SamplingParams(max_tokens=job.max_tokens)))
    held = used = reserved = 0
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        sampling = scheduler.update(output)
        now = scheduler.occupancy()
        line = ContiguousAllocator(len(scheduler.running) * config.max_model_len, config.max_model_len)
        for request in scheduler.running:
            line.start(request.label, request.num_computed, config.max_model_len)
        line_waste = line.waste()
        held, used = held + now.held_slots, used + now.used_slots
        reserved += line_waste.capacity - line_waste.free
        for _, request in sampling:
            request.append(0)
            if len(request.output_token_ids) == request.params.max_tokens:
                scheduler.finish(request, "length")
    return {"kv_waste": 1 - used / held, "kv_waste_reserved": 1 - used / reserved}
