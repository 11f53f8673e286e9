"""The same words in other tools: what each computes, as functions on the same records. For comparison, not for use.

Each rule was read in the tool's public source; tools change, so each says where to look. A function returns the
values, in seconds, that the tool takes mean and percentiles of. All of these tools start the clock at the actual
send; our own definitions, in `load_metrics`, are those of vLLM from the intended arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .load_metrics import Spread, measured
from .load_record import RequestRecord


def _done(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    return [record for record in measured(records) if record.ok and record.chunk_times]


def ttft_from_intended_arrival(records: Sequence[RequestRecord]) -> list[float]:
    """Ours. First token minus the moment when the request was meant to arrive."""
    return [record.ttft_s for record in _done(records)]


def ttft_from_send(records: Sequence[RequestRecord]) -> list[float]:
    """First token minus the actual send: what a request waited inside the client is left out.

    `vllm bench serve` (vllm/benchmarks/lib/endpoint_request_func.py: the clock starts inside the request function,
    which `--max-concurrency` holds back behind a semaphore); so do the others below, genai-perf and SGLang too.
    """
    return [record.chunk_times[0] - record.sent_s for record in _done(records)]


def tpot_per_request(records: Sequence[RequestRecord]) -> list[float]:
    """Ours, and vLLM's (vllm/benchmarks/serve.py, calculate_metrics): (E2EL − TTFT) / (n − 1), one value a request.

    genai-perf and AIPerf compute exactly this and call it inter-token latency.
    """
    return [record.tpot_s for record in _done(records) if record.tpot_s is not None]


def tpot_with_first_token(records: Sequence[RequestRecord]) -> list[float]:
    """(last token − send) / n: the first token's wait, queue and prefill included, is spread over all tokens.

    GuideLLM (src/guidellm/schemas/request_stats.py, time_per_output_token_ms, "including first token").
    """
    return [(r.chunk_times[-1] - r.sent_s) / r.output_tokens for r in _done(records) if r.output_tokens]


def tpot_pooled_over_tokens(records: Sequence[RequestRecord]) -> float:
    """The mean ITL taken as TPOT, in seconds: decode time of all requests over all tokens after the first.

    A long answer weighs more than a short one. So is the mean of GuideLLM's inter_token_latency_ms, which weighs each
    request's value by its n − 1 tokens (src/guidellm/benchmark/benchmark.py of 2025).
    """
    rows = [record for record in _done(records) if record.output_tokens > 1]
    tokens = sum(record.output_tokens - 1 for record in rows)
    return sum(r.chunk_times[-1] - r.chunk_times[0] for r in rows) / tokens if tokens else float("nan")


def itl_pooled(records: Sequence[RequestRecord]) -> list[float]:
    """Ours, and vLLM's: every gap between consecutive chunks of every request, in one pool."""
    return [gap for record in _done(records) for gap in record.itl_s]


def itl_per_request(records: Sequence[RequestRecord]) -> list[float]:
    """The mean gap of each request first, percentiles over requests then: a stall of one token is averaged away.

    genai-perf (genai_perf/profile_data_parser/llm_profile_data_parser.py: (latency − TTFT) / (tokens − 1)) and its
    successor AIPerf (src/aiperf/metrics/types/inter_token_latency_metric.py).
    """
    return tpot_per_request(records)


def itl_with_ttft(records: Sequence[RequestRecord]) -> list[float]:
    """(TTFT + all gaps) / chunks, one value a request: the wait for the first token counts as a gap.

    llmperf (token_benchmark_ray.py divides the sum of time_to_next_token, whose first entry is TTFT, by the tokens
    received; src/llmperf/ray_clients/openai_chat_completions_client.py).
    """
    return [(r.chunk_times[-1] - r.sent_s) / len(r.chunk_times) for r in _done(records)]


def itl_spread_over_chunk(records: Sequence[RequestRecord]) -> list[float]:
    """The gap before a chunk is divided by its tokens, and counted once for each: a burst looks like a steady stream.

    SGLang (python/sglang/bench_serving.py, adjust_itl). Equal to the pooled ITL where a chunk carries one token. Where
    the tokens of a chunk are unknown they are taken to be spread evenly over the chunks after the first.
    """
    gaps: list[float] = []
    for record in _done(records):
        later = len(record.chunk_times) - 1
        even = max(1, round((record.output_tokens - 1) / later)) if later else 1
        counts = record.chunk_tokens[1:] or (even,) * later
        for gap, tokens in zip(record.itl_s, counts, strict=True):
            gaps += [gap / tokens] * tokens
    return gaps


class Definition(NamedTuple):
    metric: str
    tool: str
    rule: str
    values: Callable[[Sequence[RequestRecord]], list[float]]


DEFINITIONS = (
    Definition("TTFT", "minillm", "from the intended arrival", ttft_from_intended_arrival),
    Definition("TTFT", "vLLM, SGLang, GuideLLM, genai-perf, llmperf", "from the actual send", ttft_from_send),
    Definition("TPOT", "minillm, vLLM", "(E2EL − TTFT) / (n − 1), a request", tpot_per_request),
    Definition("TPOT", "GuideLLM", "first token included: latency / n", tpot_with_first_token),
    Definition("ITL", "minillm, vLLM", "all gaps pooled", itl_pooled),
    Definition("ITL", "SGLang", "gaps split over the tokens of a chunk, pooled", itl_spread_over_chunk),
    Definition("ITL", "genai-perf, AIPerf", "mean of a request, then over requests", itl_per_request),
    Definition("ITL", "llmperf", "TTFT counts as a gap, mean of a request", itl_with_ttft),
)


class Row(NamedTuple):
    """One line of the comparison; the spread is in milliseconds."""

    metric: str
    tool: str
    rule: str
    spread: Spread


def compare_definitions(records: Sequence[RequestRecord]) -> list[Row]:
    """One data set under every definition, ours first for each metric."""
    rows = [Row(d.metric, d.tool, d.rule, Spread.of(d.values(records))) for d in DEFINITIONS]
    pooled = 1e3 * tpot_pooled_over_tokens(records)
    weighed = Spread(0, pooled, *[float("nan")] * 3)  # a mean alone
    return [
        *rows[:4],
        Row("TPOT", "GuideLLM (as ITL)", "all decode time / all tokens after the first", weighed),
        *rows[4:],
    ]
