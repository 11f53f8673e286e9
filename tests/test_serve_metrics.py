"""Promise: /metrics is Prometheus's format, under vLLM's names, and its numbers are those that the answers show."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from minillm.serving.metrics import PREFIX
from tests.serving_http import (
    MODEL,
    make_chat_model,
    post,
    raw_request,
    scheduler_of,
    serving,
    slowed,
    wait_idle,
    wait_until,
)

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_chat_model(tmp_path_factory)


def read(server) -> dict[str, float]:
    """{name without prefix, with its label where it has one of its own: value}; histograms give _sum and _count."""
    answer = httpx.get(server.url + "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            if sample.name.endswith(("_bucket", "_created")):
                continue
            assert sample.name.startswith(PREFIX)
            labels = dict(sample.labels)
            assert labels.pop("model_name", MODEL) == MODEL
            name = sample.name.removeprefix(PREFIX)
            values[name if not labels else f"{name} {' '.join(labels.values())}"] = sample.value
    return values


def test_counts_are_those_of_the_answers(pair):
    with serving(pair) as server:
        usages = []
        for body in ({"n": 2}, {"prompt": list(range(9, 29))}, {"prompt": list(range(9, 29)), "stop": "a"}):
            body = {"prompt": "the cat", "max_tokens": 10, "seed": 1, **body}
            usages.append(post(server, TEXT, body).json())
        post(server, TEXT, {"prompt": "a", "temperature": -1})
        post(server, TEXT, {"prompt": "a", "model": "other"})
        httpx.get(server.url + "/v1/none")
        wait_idle(server)
        found = read(server)
    total = {key: sum(u["usage"][key] for u in usages) for key in ("prompt_tokens", "completion_tokens")}
    reasons = [c["finish_reason"] for u in usages for c in u["choices"]]
    assert found["prompt_tokens_total"] == found["request_prompt_tokens_sum"] == total["prompt_tokens"]
    assert found["generation_tokens_total"] == total["completion_tokens"]
    assert found["request_generation_tokens_sum"] == total["completion_tokens"]
    assert found["request_generation_tokens_count"] == len(reasons) == 4
    for reason in set(reasons):
        assert found[f"request_success_total {reason}"] == reasons.count(reason)
    assert found["prefix_cache_hits_total"] == 16
    assert found["prefix_cache_queries_total"] == total["prompt_tokens"]
    assert found["request_refused_total invalid_value"] == 1
    assert found["request_refused_total model_not_found"] == 1
    assert found["request_refused_total not_found"] == 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert found[f"{name}_count"] == 3
    assert found["inter_token_latency_seconds_count"] == total["completion_tokens"] - len(reasons)
    assert 0 < found["time_to_first_token_seconds_sum"] < found["e2e_request_latency_seconds_sum"]
    parts = ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds")
    assert sum(found[f"{part}_sum"] for part in parts) == pytest.approx(found["e2e_request_latency_seconds_sum"])
    assert found["num_requests_running"] == found["num_requests_waiting"] == found["kv_cache_usage_perc"] == 0


def test_states_are_those_of_the_moment(pair):
    with serving(pair, max_num_seqs=1, num_blocks=65) as server:
        slowed(server, 0.05)
        sockets = [raw_request(server, {"prompt": [5] * 16, "max_tokens": 200, "ignore_eos": True}) for _ in range(3)]
        scheduler = scheduler_of(server)
        wait_until(lambda: (len(scheduler.running), len(scheduler.waiting)) == (1, 2))  # one may wait before any runs
        found = read(server)
        for sock in sockets:
            sock.close()
        assert found["num_requests_running"] == 1
        assert found["num_requests_waiting"] == 2
        held = found["kv_cache_usage_perc"] * 64
        assert 4 <= round(held, 6) < 54
        assert held == pytest.approx(round(held))
        assert found["cache_config_info 4 65"] == 1


def test_preemptions_and_aborts_are_counted(pair):
    with serving(pair, num_blocks=40, prefix_cache="off") as server:
        body = {"prompt": ["a", "b", "c"], "max_tokens": 60, "ignore_eos": True, "seed": 1}
        assert post(server, TEXT, body).status_code == 200
        slowed(server)
        sock = raw_request(server, {**body, "prompt": "a", "max_tokens": 120})
        wait_until(lambda: scheduler_of(server).running)
        sock.close()
        wait_until(lambda: "request_success_total abort" in read(server))
        found = read(server)
        events = server.engine.engine.events
        assert found["num_preemptions_total"] == len(events.of("preempted")) > 0
        assert found["iteration_tokens_total_count"] == len(events.of("scheduled"))
        assert found["generation_tokens_total"] == sum(len(e.data["tokens"]) for e in events.of("sampled"))


def test_two_servers_count_apart(pair):
    with serving(pair) as one, serving(pair) as two:
        post(one, TEXT, {"prompt": "a", "max_tokens": 3, "ignore_eos": True})
        assert read(one)["generation_tokens_total"] == 3
        assert read(two)["generation_tokens_total"] == 0
