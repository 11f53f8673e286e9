"""Promise: two thousand requests of any shape, a fifth of them abandoned and some of them nonsense, in a third of the
memory they would like: all answered, nothing left behind, memory flat."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
from collections import Counter
from pathlib import Path

import httpx
import pytest

from minillm.request import Request
from minillm.request_group import RequestGroup
from minillm.sampling_params import SamplingParams
from tests.serving import expected
from tests.serving_http import MODEL, make_chat_model, scheduler_of, serving, wait_idle

REQUESTS, AT_ONCE, SEQUENCES = 2000, 48, 12
LONGEST = 40 + 24  # prompt and output
INVALID = [
    {"prompt": []},
    {"prompt": ""},
    {"prompt": [3] * 300},
    {"prompt": [-1]},
    {"prompt": {"text": "the"}},
    {"temperature": -1},
    {"temperature": "hot"},
    {"max_tokens": 0},
    {"n": 0},
    {"logit_bias": {"99999999": 1}},
    {"stop": [""]},
    {"stream": "yes"},
    {"tokens": 3},
]


def draw(rng: random.Random, i: int) -> dict:
    """One request: what to send, and what its client will do."""
    head = [list(range(3, 15)), list(range(30, 50)), []][rng.randrange(3)]
    prompt = head + [rng.randrange(3, 200) for _ in range(rng.randint(1, 40 - len(head)))]
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": rng.randint(1, 24),
        "temperature": rng.choice([0, 0.9]),
        "seed": i,
        "n": rng.choice([1, 1, 1, 2, 3]),
        "stream": rng.random() < 0.5,
        "ignore_eos": True,
    }
    kind = rng.random()
    if kind < 0.05:
        return {"does": "refused", "body": {**body, **rng.choice(INVALID)}}
    if kind < 0.25:
        return {"does": "leaves", "body": body, "after": rng.choice([0, 0, 1, 3])}
    return {"does": "reads", "body": body}


async def ask(client: httpx.AsyncClient, job: dict) -> tuple[str, list]:
    """(what came of it, the texts)."""
    body = job["body"]
    if job["does"] == "leaves" and not body["stream"]:
        try:
            await client.post("/v1/completions", json=body, timeout=0.02)
        except httpx.TimeoutException:
            return "left", []
        return "too fast to leave", []
    if not body["stream"] or job["does"] == "refused":
        response = await client.post("/v1/completions", json=body)
        if response.status_code != 200:
            return f"{response.status_code}", []
        return "read", [choice["text"] for choice in response.json()["choices"]]
    return await stream(client, job)


async def stream(client: httpx.AsyncClient, job: dict) -> tuple[str, list]:
    texts, ended, seen = Counter(), set(), 0
    async with client.stream("POST", "/v1/completions", json=job["body"]) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if job["does"] == "leaves" and seen >= job["after"]:
                return "left", []
            if line == "data: [DONE]":
                break
            if line:
                seen += 1
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    texts[choice["index"]] = (texts[choice["index"]] or "") + choice["text"]
                    ended |= {choice["index"]} if choice["finish_reason"] else set()
    assert len(ended) == job["body"]["n"], "a sequence did not end"
    if job["does"] == "leaves":
        return "too fast to leave", []
    return "read", [texts[i] or "" for i in range(job["body"]["n"])]


def resident_mb() -> float:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


async def soak(server, pair, jobs) -> tuple[Counter, list[float]]:
    outcomes, memory, left = Counter(), [], iter(enumerate(jobs))
    limits = httpx.Limits(max_connections=AT_ONCE)

    async def client_loop(client):
        for i, job in left:
            outcome, texts = await ask(client, job)
            outcomes[job["does"], outcome] += 1
            if outcome == "read" and i % 40 == 0:
                check(pair, job["body"], texts)
            if i % 500 == 499 and sys.platform == "linux":
                gc.collect()
                memory.append(resident_mb())

    async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60) as client:
        await asyncio.gather(*(client_loop(client) for _ in range(AT_ONCE)))
    return outcomes, memory


def check(pair, body: dict, texts: list[str]) -> None:
    """The answer is the one that generate gives alone."""
    params = SamplingParams(
        temperature=body["temperature"], seed=body["seed"], n=body["n"], max_tokens=body["max_tokens"], ignore_eos=True
    )
    assert texts == [text for _, text, _, _ in expected(pair, tuple(body["prompt"]), params)]


def living(*kinds: type) -> int:
    gc.collect()
    return sum(type(thing) in kinds for thing in gc.get_objects())


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_soak(tmp_path_factory, preemption):
    pair = make_chat_model(tmp_path_factory)
    rng = random.Random(preemption)
    jobs = [draw(rng, i) for i in range(REQUESTS // 2)]
    before = living(Request, RequestGroup)
    options = {
        "num_blocks": 1 + SEQUENCES * LONGEST // 4 // 3,  # a third of what all places could use
        "max_num_seqs": SEQUENCES,
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
        "preemption": preemption,
        "num_host_blocks": 40,
        "watermark": 0.0,
    }
    preempted = Counter()
    with serving(pair, **options) as server:
        events = scheduler_of(server).events
        events.listeners.append(lambda e: preempted.update([e.kind] if e.kind in ("preempted", "finished") else []))
        outcomes, memory = asyncio.run(soak(server, pair, jobs))
        wait_idle(server)
        assert httpx.get(server.url + "/health").status_code == 200
    asked = Counter(job["does"] for job in jobs)
    answered = Counter()
    for (does, outcome), count in outcomes.items():
        answered[does] += count
        assert outcome in {"reads": {"read"}, "refused": {"400"}, "leaves": {"left", "too fast to leave"}}[does], (
            outcome
        )
    assert answered == asked
    assert outcomes["leaves", "left"] > 0.5 * asked["leaves"]
    assert preempted["preempted"] > 50, "the pool was not small enough to matter"
    assert living(Request, RequestGroup) <= before + 4  # the event log and a reader's last output may hold one
    if len(memory) > 1:
        assert memory[-1] < memory[0] + 30, f"resident memory grew: {memory}"
