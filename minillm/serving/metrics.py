"""Counts and times for Prometheus, under vLLM's names with our prefix.

Counts come from the engine's event log as things happen, states are read when somebody asks, and times are the
engine's own: a slow reader or a busy event loop does not lengthen them. Times to the first token begin when the
head of the HTTP request has arrived, so that its body, tokenizing and the queue are part of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..engine import Engine
from ..events import Event
from ..outputs import RequestOutput

PREFIX = "minillm:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_GAP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)
_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", _FIRST),
    "inter_token_latency_seconds": ("Between two tokens of one answer.", _GAP),
    "request_time_per_output_token_seconds": ("Mean over an answer of the times between its tokens.", _GAP),
    "e2e_request_latency_seconds": ("From a request's arrival to its last token.", _WHOLE),
    "request_queue_time_seconds": ("From a request's arrival to its first step.", _WHOLE),
    "request_prefill_time_seconds": ("From a request's first step to its first token.", _WHOLE),
    "request_decode_time_seconds": ("From a request's first token to its last.", _WHOLE),
    "request_prompt_tokens": ("Tokens of a request's prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens of one answer.", _TOKENS),
    "iteration_tokens_total": ("Tokens computed in one step.", _STEP),
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of admitted requests, those found in the cache too.",
    "generation_tokens": "Tokens drawn.",
    "num_preemptions": "Times a running request lost its blocks.",
    "spec_decode_num_drafts": "Verifications: sequences' steps with drafts.",
    "spec_decode_num_draft_tokens": "Tokens drafted and computed.",
    "spec_decode_num_accepted_tokens": "Drafts accepted.",
}
_BY_LABEL = {
    "request_success": ("finished_reason", "Answers ended, by reason: stop, length, abort or error."),
    "spec_decode_num_accepted_tokens_per_pos": ("position", "Drafts accepted, by their place in the chain, from 0."),
    "request_refused": ("cause", "Requests refused or broken off with an error, by its code."),
}


class Metrics:
    """Of one server, in a registry of its own, so that several servers may live in one process."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self.registry, self._engine, self._model = CollectorRegistry(), engine, model_name
        self._histograms = {
            name: Histogram(PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry).labels(
                model_name
            )
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {
            name: Counter(PREFIX + name, text, ["model_name"], registry=self.registry).labels(model_name)
            for name, text in _COUNTERS.items()
        }
        self._labelled = {
            name: Counter(PREFIX + name, text, ["model_name", label], registry=self.registry)
            for name, (label, text) in _BY_LABEL.items()
        }
        self.registry.register(_State(engine, model_name))
        engine.events.listeners.append(self.on_event)

    def close(self) -> None:
        self._engine.events.listeners.remove(self.on_event)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def on_event(self, event: Event) -> None:
        """Runs in the engine's thread."""
        data = event.data
        if event.kind == "sampled":
            self._counters["generation_tokens"].inc(len(data["tokens"]))
        elif event.kind == "scheduled":
            self._histograms["iteration_tokens_total"].observe(sum(data["tokens"]))
        elif event.kind == "admitted":
            self._counters["prompt_tokens"].inc(data["tokens"])
        elif event.kind == "preempted":
            self._counters["num_preemptions"].inc()
        elif event.kind == "verified":
            self._verified(data["drafted"], data["kept"])
        elif event.kind == "finished":
            self._labelled["request_success"].labels(self._model, data["reason"]).inc()

    def _verified(self, drafted: list[int], kept: list[int]) -> None:
        for name, count in (("drafts", len(drafted)), ("draft_tokens", sum(drafted)), ("accepted_tokens", sum(kept))):
            self._counters[f"spec_decode_num_{name}"].inc(count)
        by_place = self._labelled["spec_decode_num_accepted_tokens_per_pos"]
        for place in range(max(kept, default=0)):
            by_place.labels(self._model, str(place)).inc(sum(count > place for count in kept))

    def refused(self, cause: str) -> None:
        self._labelled["request_refused"].labels(self._model, cause).inc()

    def first_token(self, output: RequestOutput) -> None:
        times, histograms = output.metrics, self._histograms
        if times.first_token_time is None:
            return  # it ended without one
        histograms["time_to_first_token_seconds"].observe(times.first_token_time - times.arrival_time)
        if times.first_scheduled_time is not None:
            histograms["request_queue_time_seconds"].observe(times.first_scheduled_time - times.arrival_time)
            histograms["request_prefill_time_seconds"].observe(times.first_token_time - times.first_scheduled_time)

    def ended(self, output: RequestOutput) -> None:
        """The request will not go on; what was drawn counts, whether it was answered whole or not."""
        histograms, last = self._histograms, 0.0
        histograms["request_prompt_tokens"].observe(len(output.prompt_token_ids))
        for choice in output.outputs:
            times = choice.token_times
            histograms["request_generation_tokens"].observe(len(times))
            for earlier, later in pairwise(times):
                histograms["inter_token_latency_seconds"].observe(later - earlier)
            if len(times) > 1:
                mean = (times[-1] - times[0]) / (len(times) - 1)
                histograms["request_time_per_output_token_seconds"].observe(mean)
            last = max(last, times[-1] if times else 0.0)
        if output.finished and last:
            histograms["e2e_request_latency_seconds"].observe(last - output.metrics.arrival_time)
            histograms["request_decode_time_seconds"].observe(last - output.metrics.first_token_time)


class _State(Collector):
    """What the scheduler looks like at this moment. Lengths and integers are read without a lock: each is whole."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._scheduler, self._model = engine.scheduler, model_name

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        scheduler = self._scheduler
        pool, stats = scheduler.pool, scheduler.prefix_cache.stats
        used = 1 - pool.available / pool.total
        yield self._gauge("num_requests_running", "Sequences in the running batch.", len(scheduler.running))
        yield self._gauge("num_requests_waiting", "Requests in the queue.", len(scheduler.waiting))
        yield self._gauge("kv_cache_usage_perc", "Share of cache blocks that sequences hold, 0 to 1.", used)
        yield self._counter("prefix_cache_queries", "Tokens asked for in the prefix cache.", stats.queried_tokens)
        yield self._counter("prefix_cache_hits", "Tokens found in the prefix cache.", stats.hit_tokens)
        text = "Tokens of those found that were copied back from host memory."
        yield self._counter("external_prefix_cache_hits", text, stats.host_hit_tokens)
        yield self._info(block_size=pool.block_size, num_gpu_blocks=pool.num_blocks)

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _info(self, **values: int) -> GaugeMetricFamily:
        family = GaugeMetricFamily(PREFIX + "cache_config_info", "Settings of the cache.", labels=list(values))
        family.add_metric([str(value) for value in values.values()], 1)
        return family
