"""Promise: what the device gave up is found again in host memory, and is never another's, half copied, or stale."""

from __future__ import annotations

import pytest

from minillm.batching import Scheduler, SchedulerConfig
from minillm.errors import EngineError
from minillm.pace import Pace
from minillm.prefix_cache import Prefix
from minillm.request import Request
from minillm.sampling_params import SamplingParams
from tests.serving import answers, expected, make_engine, make_tiny, run
from tests.shadow import ShadowRunner


def scheduler_of(**options) -> Scheduler:
    options = {"num_blocks": 7, "block_size": 4, "watermark": 0, "num_host_blocks": 12, **options}
    return Scheduler(SchedulerConfig(**options))


def serve(runner, name, first, tokens=17, max_tokens=1) -> Request:
    r = Request(name, list(range(first, first + tokens)), SamplingParams(max_tokens=max_tokens))
    runner.scheduler.add(r)
    runner.run()
    return r


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_an_evicted_prefix_comes_back(prefix_cache, eviction):
    scheduler = scheduler_of(prefix_cache=prefix_cache, eviction=eviction)
    runner = ShadowRunner(scheduler)  # checks the contents of every slot that is read
    serve(runner, "a", 100)
    serve(runner, "b", 200)
    assert scheduler.events.of("offloaded")
    again = serve(runner, "c", 100)
    assert again.num_cached == 16
    stats = scheduler.prefix_cache.stats
    assert stats.hit_tokens == 16
    assert 0 < stats.host_hit_tokens <= 16
    assert scheduler.events.of("reloaded", request="c")[0].data["tokens"] == stats.host_hit_tokens


def test_device_first_then_host():
    """The head is still on the device, the tail only in host memory: one hit of both."""
    scheduler = scheduler_of(num_blocks=8)
    runner = ShadowRunner(scheduler)
    serve(runner, "a", 100)
    serve(runner, "b", 200, tokens=18)  # takes free blocks and a's tail, not its head
    again = serve(runner, "c", 100)
    assert again.num_cached == 16
    assert 0 < scheduler.prefix_cache.stats.host_hit_tokens < 16


@pytest.mark.parametrize(
    ("reuse", "pays", "cached"), [("always", True, 16), ("measured", False, 0), ("never", True, 0)]
)
def test_the_rule_decides(reuse, pays, cached):
    scheduler = scheduler_of(num_blocks=6, host_reuse=reuse)  # the second prompt takes every block of the first
    scheduler.host.pays = lambda tokens: pays
    runner = ShadowRunner(scheduler)
    serve(runner, "a", 100)
    serve(runner, "b", 200)
    assert serve(runner, "c", 100).num_cached == cached
    assert bool(scheduler.events.of("offloaded")) == (reuse != "never")


def test_a_block_being_read_is_not_overwritten():
    """Reloading makes room on the device, whose evicted blocks want room in the host: not the ones being read."""
    for host_blocks in range(3, 14):
        scheduler = scheduler_of(num_host_blocks=host_blocks)
        runner = ShadowRunner(scheduler)
        for round_ in range(4):
            for first in (100, 200, 300):
                serve(runner, f"{first}-{round_}", first, tokens=14 + round_)
        assert scheduler.host.pool.available == scheduler.host.pool.total


def test_nothing_is_found_before_its_copy_was_made():
    scheduler = scheduler_of()
    runner = ShadowRunner(scheduler)
    serve(runner, "a", 100)
    tokens = list(range(200, 217))
    scheduler.add(Request("b", tokens, SamplingParams(max_tokens=1)))
    output = scheduler.schedule()  # evicts, and plans the copies
    assert output.swap_out
    prefix = Prefix.of()
    assert scheduler.host.match(prefix, list(range(100, 117)), 0, 4) == []
    scheduler.check()
    for r in scheduler.discard(output):  # the step failed: the copies cannot be relied on
        scheduler.finish(r, "error")
    scheduler.check()
    assert all(scheduler.host.match(Prefix.of(), list(range(100, 117)), i, 4) == [] for i in range(4))
    assert scheduler.host.pool.available == scheduler.host.pool.total


def test_swapped_requests_push_cached_prefixes_out():
    """Host memory serves both; a request that would lose its work comes before a prefix that might be asked for."""
    scheduler = scheduler_of(num_blocks=7, num_host_blocks=7, preemption="swap")
    runner = ShadowRunner(scheduler)
    serve(runner, "a", 100)
    serve(runner, "b", 200)
    assert scheduler.host.cache.pool.available == 6
    for name, first in (("old", 300), ("new", 400)):
        scheduler.add(Request(name, list(range(first, first + 9)), SamplingParams(max_tokens=12)))
    runner.run()
    assert {e.data["how"] for e in scheduler.events.of("preempted")} == {"swap"}


def test_a_request_swapped_out_in_a_failed_step_computes_again(tmp_path_factory):
    pair = make_tiny("llama", tmp_path_factory)
    engine = make_engine(
        pair, num_blocks=8, watermark=0, preemption="swap", num_host_blocks=20, prefix_cache="off", block_size=4
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for name, first in (("old", 3), ("new", 20)):
        engine.add_request(name, list(range(first, first + 9)), params)
    compute, failed = engine.runner.run, []

    def once(output):
        if output.preempted and not failed:
            failed.append([r.request_id for r in output.preempted])
            raise RuntimeError("out of luck")
        return compute(output)

    engine.runner.run = once
    done = run(engine)
    assert failed == [["new"]]
    assert done["old"].error is not None
    assert answers(done["new"]) == expected(pair, tuple(range(20, 29)), params)


@pytest.mark.parametrize("family", ["llama", "deepseek", "mistral-sinks"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_an_answer_is_the_same_from_host_memory(tmp_path_factory, batch_invariant, family):
    pair = make_tiny(family, tmp_path_factory)
    engine = make_engine(
        pair, batch_invariant, num_blocks=8, watermark=0, num_host_blocks=20, host_reuse="always", block_size=4
    )
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=6, ignore_eos=True)
    prompts = {name: tuple(range(first, first + 15)) for name, first in (("a", 3), ("b", 20), ("c", 3))}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
        done = run(engine)
        assert answers(done[name]) == expected(pair, prompt, params)
    assert engine.scheduler.prefix_cache.stats.host_hit_tokens > 0


# --- the rule ---


def test_reload_pays_when_copying_is_faster():
    """16 tokens a block, 1 ms a copy: 62.5 µs a token. Computing costs a full step's price, here 100 tokens a step."""
    pace = Pace(16, budget=100)
    assert pace.reload_pays(100)  # nothing measured
    pace.copy.observe(0.001, 1)
    pace.observe_step(0.0062, 100)  # 62 µs a token
    assert not pace.reload_pays(100)
    for _ in range(5):
        pace.observe_step(0.0066, 100)  # (62 · 0.77 + 66 · 4.52) / 5.3 = 65.4 µs
    assert pace.reload_pays(100)


def test_host_memory_takes_a_size_and_a_known_rule():
    with pytest.raises(EngineError, match="host_reuse is 'sometimes'; choose one of measured, always, never"):
        SchedulerConfig(host_reuse="sometimes")
    scheduler = scheduler_of(num_host_blocks=0, num_blocks=6)
    runner = ShadowRunner(scheduler)
    serve(runner, "a", 100)
    serve(runner, "b", 200)
    assert not scheduler.events.of("offloaded")
    assert serve(runner, "c", 100).num_cached == 0
