"""Promise: every request is answered once, in bounded time, and never reads what another wrote. No model is needed."""

from __future__ import annotations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from minillm.batching import Scheduler, SchedulerConfig
from minillm.errors import EngineError, QueueFullError, RequestError
from minillm.request import Request, RequestStatus
from minillm.sampling_params import SamplingParams
from minillm.step_plan import Plan
from tests.shadow import ShadowRunner


def scheduler_of(**options) -> Scheduler:
    options = {"num_blocks": 33, "block_size": 4, "max_num_batched_tokens": 32, "max_num_seqs": 8, **options}
    return Scheduler(SchedulerConfig(**options))


def request(name="a", prompt=8, max_tokens=4, first=0, **more) -> Request:
    n = more.pop("n", 1)
    ids = prompt if isinstance(prompt, list) else list(range(first, first + prompt))
    return Request(name, ids, SamplingParams(max_tokens=max_tokens, n=n), **more)


def kinds(scheduler, *wanted):
    return [(e.kind, e.request) for e in scheduler.events.of(*wanted)]


# --- any schedule ---

jobs = st.fixed_dictionaries(
    {
        "prompt": st.tuples(st.sampled_from([0, 3, 8, 13]), st.lists(st.integers(0, 1), max_size=8)),
        "max_tokens": st.integers(1, 12),
        "n": st.sampled_from([1, 1, 1, 3]),
        "salt": st.sampled_from([(), (), (("salt", "x"),), (("media", "cat", 5),), (("media", "dog", 5),)]),
        "priority": st.integers(-1, 1),
        "arrival": st.integers(0, 10),
        "abort": st.one_of(st.none(), st.none(), st.integers(0, 12)),
    }
)
configs = st.fixed_dictionaries(
    {
        "block_size": st.integers(1, 6),
        "spare": st.integers(0, 10),
        "max_num_seqs": st.integers(3, 8),
        "max_num_batched_tokens": st.integers(1, 40),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 3]),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "priority_places": st.sampled_from([1, 1000]),
        "preemption": st.sampled_from(["recompute", "swap"]),
        "num_host_blocks": st.sampled_from([2, 6, 40]),
        "prefix_cache": st.sampled_from(["off", "hash", "radix"]),
        "eviction": st.sampled_from(["lru", "lfu"]),
        "watermark": st.sampled_from([0.0, 0.1]),
        "sliding_window": st.sampled_from([None, None, 1, 5]),
        "attention_sinks": st.sampled_from([0, 0, 1, 6]),
        "num_state_slots": st.sampled_from([None, None, 3, 8]),
    }
)


@settings(max_examples=250, deadline=None)
@given(drawn=st.lists(jobs, min_size=1, max_size=9), options=configs, mid_step=st.booleans())
def test_any_schedule_keeps_every_promise(drawn, options, mid_step):
    """All end once, nobody reads another's slot, all blocks come home; aborts fall between steps or inside one."""
    requests = []
    for i, job in enumerate(drawn):
        prompt = [*range(100, 101 + job["prompt"][0]), *job["prompt"][1]]
        params = SamplingParams(max_tokens=job["max_tokens"], n=job["n"])
        requests.append(Request(str(i), prompt, params, job["priority"], job["salt"]))
    longest = max(r.num_prompt + r.params.max_tokens for r in requests)
    options = dict(options)
    if options["num_state_slots"] is not None:
        options["prefix_cache"] = "off"
    options["num_blocks"] = 1 + -(-longest // options["block_size"]) + options.pop("spare")
    scheduler = Scheduler(SchedulerConfig(**options))
    runner = ShadowRunner(scheduler)

    def abort(step):
        for r, job in zip(requests, drawn, strict=True):
            if job["abort"] is not None and job["arrival"] + job["abort"] == step:
                for live in [x for x in scheduler.requests() if x.request_id == r.request_id]:
                    assert scheduler.finish(live, "abort")
                    assert not scheduler.finish(live, "abort")
                    runner.ended.append((live.request_id, live.sequence, "abort"))

    if mid_step:
        compute = runner.compute
        runner.compute = lambda output: (compute(output), abort(scheduler.events.step - 1))
    step = 0
    while step <= 22 or scheduler.has_unfinished_requests():
        for r, job in zip(requests, drawn, strict=True):
            if job["arrival"] == step:
                scheduler.add(r)
        if not mid_step:
            abort(step)
        runner.step()
        step += 1
        assert step < 3000
    assert len(set(runner.ended)) == len(runner.ended)
    whole = {(str(i), s) for i, job in enumerate(drawn) if job["abort"] is None for s in range(job["n"])}
    assert whole <= {(i, s) for i, s, reason in runner.ended if reason == "length"}
    assert {i for i, _, _ in runner.ended} == {str(i) for i in range(len(drawn))}
    assert scheduler.pool.available == scheduler.pool.total
    assert scheduler.host.pool.available == scheduler.host.pool.total
    scheduler.states.check([], [])
    for e in scheduler.events.of("preempted", "evicted", "copied", "offloaded", "reloaded"):
        event(e.kind + " " + e.data.get("how", ""))


# --- blocks and prefix cache ---


def test_a_block_is_not_found_before_it_is_written():
    """vllm#43569: filled, then aborted in the same step; sent again it must not hit."""
    scheduler = scheduler_of()
    first = request("a", 9)
    scheduler.add(first)
    scheduler.schedule()
    scheduler.finish(first, "abort")
    scheduler.check()
    again = request("b", 9)
    scheduler.add(again)
    scheduler.schedule()
    assert again.num_cached == 0


def test_twins_in_one_step_do_not_hit_each_other():
    """vllm#29387, #41838. The third, a step later, hits."""
    scheduler = scheduler_of()
    runner = ShadowRunner(scheduler)
    twins = [request("a", 9), request("b", 9)]
    for twin in twins:
        scheduler.add(twin)
    runner.step()
    assert [t.num_cached for t in twins] == [0, 0]
    late = request("c", 9)
    scheduler.add(late)
    runner.run()
    assert late.num_cached == 8


def test_the_last_token_is_always_computed():
    """nano-vllm#144: 8 tokens, two blocks of 4, sent twice. A full hit would leave nothing to compute."""
    scheduler = scheduler_of()
    runner = ShadowRunner(scheduler)
    scheduler.add(request("a", 8))
    runner.run()
    again = request("b", 8)
    scheduler.add(again)
    output = scheduler.schedule()
    assert again.num_cached == 4
    assert [(p.start, p.count, p.samples) for p in output.scheduled] == [(4, 4, True)]


def test_a_preempted_request_hits_its_own_blocks_and_computes_the_rest():
    """nano-vllm#211, #233, FastDeploy#3080: prompt and outputs are computed again, from counters that start anew."""
    scheduler = scheduler_of(num_blocks=7, watermark=0)
    runner = ShadowRunner(scheduler)
    old, new = request("old", 11, 12), request("new", 5, 12, first=50)
    scheduler.add(old)
    scheduler.add(new)
    while not kinds(scheduler, "preempted"):
        runner.step()
    assert kinds(scheduler, "preempted") == [("preempted", "new")]
    assert new.status is RequestStatus.PREEMPTED
    assert (new.num_computed, new.block_ids) == (0, [])
    known = new.num_tokens
    assert known > new.num_prompt
    runner.run()
    resumed = scheduler.events.of("resumed", request="new")[0]
    assert resumed.data["tokens"] == known
    assert len(new.output_token_ids) == 12
    assert scheduler.prefix_cache.stats.queries == 2


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_a_conversation_hits_everything_but_its_last_block(kind):
    """Answer and prompt alike: the next turn finds every full block of the turn before."""
    scheduler = scheduler_of(prefix_cache=kind)
    runner = ShadowRunner(scheduler)
    turn = request("1", 10, 9)
    scheduler.add(turn)
    runner.run()
    following = request("2", [*turn.token_ids, 90, 91], 2)  # 18 of 19 tokens were computed
    scheduler.add(following)
    runner.run()
    assert following.num_cached == 16


def test_a_hit_on_cached_blocks_is_counted_against_the_room():
    """ATOM#902: five blocks, three of them cached and hit; only two are left to allocate."""
    scheduler = scheduler_of(num_blocks=6, watermark=0)
    runner = ShadowRunner(scheduler)
    scheduler.add(request("a", 12, 1))
    runner.run()
    assert scheduler.occupancy().cached == 3
    scheduler.add(request("b", 13, 1))
    scheduler.add(request("c", 8, 1, first=70))
    scheduler.schedule()
    scheduler.check()
    assert kinds(scheduler, "admitted") == [("admitted", "a"), ("admitted", "b")]
    assert scheduler.pool.available == 1


def test_an_abort_between_launch_and_result_frees_once():
    """mini-sglang#111."""
    scheduler = scheduler_of()
    doomed, other = request("a", 8), request("b", 8, first=60)
    scheduler.add(doomed)
    scheduler.add(other)
    output = scheduler.schedule()
    assert scheduler.finish(doomed, "abort")
    assert not scheduler.finish(doomed, "abort")
    assert [r for _, r in scheduler.update(output)] == [other]
    scheduler.check()


def test_rows_are_those_of_the_sampling_parts_even_if_one_was_aborted():
    """smol-vllm: tokens swapped between requests. The row of the second stays 1 when the first is gone."""
    scheduler = scheduler_of(max_num_batched_tokens=16)
    running = [request(n, 4, first=10 * i) for i, n in enumerate("abc")]
    for r in running:
        scheduler.add(r)
    output = scheduler.schedule()
    scheduler.finish(running[0], "abort")
    assert scheduler.update(output) == [(1, running[1]), (2, running[2])]


# --- scheduling ---


def test_running_requests_come_first_and_a_prompt_is_cut_to_the_budget():
    scheduler = scheduler_of(max_num_batched_tokens=10)
    runner = ShadowRunner(scheduler)
    scheduler.add(request("a", 4, 8))
    runner.step()
    scheduler.add(request("b", 25, 2, first=50))
    counts = []
    for _ in range(4):
        output = scheduler.schedule()
        counts.append({p.request.request_id: p.count for p in output.scheduled})
        runner.compute(output)
        for _, r in scheduler.update(output):
            r.append(1)
    assert counts == [{"a": 1, "b": 9}, {"a": 1, "b": 9}, {"a": 1, "b": 7}, {"a": 1, "b": 1}]


def test_a_long_prompt_does_not_stall_those_who_are_answered():
    """sglang#32549, ATOM#1835: with a prompt of 100 tokens in between, "a" still gets a token in every step."""
    scheduler = scheduler_of(max_num_batched_tokens=12, num_blocks=64)
    runner = ShadowRunner(scheduler)
    scheduler.add(request("a", 4, 20))
    runner.step()
    scheduler.add(request("b", 100, 2, first=50))
    for _ in range(15):
        assert "a" in [r.request_id for r in runner.step()]


def test_a_preempted_long_prompt_does_not_stall_them_either():
    """Resumed, it comes first in order; decodes still come before its chunks."""
    scheduler = scheduler_of(max_num_batched_tokens=8, num_blocks=64, prefix_cache="off")
    runner = ShadowRunner(scheduler)
    scheduler.add(request("long", 60, 4))
    for _ in range(9):
        runner.step()
    scheduler.add(request("a", 4, 20, first=90))
    runner.step()
    long = next(r for r in scheduler.running if r.request_id == "long")
    scheduler._preempt(long, Plan(8))
    for _ in range(6):
        assert "a" in [r.request_id for r in runner.step()]


def test_four_cold_prompts_at_limit_four_all_run():
    """sglang#35537."""
    scheduler = scheduler_of(max_num_seqs=4)
    for i in range(5):
        scheduler.add(request(str(i), 5, first=20 * i))
    assert len(scheduler.schedule().scheduled) == 4


def test_without_chunking_a_prompt_is_taken_whole():
    scheduler = scheduler_of(enable_chunked_prefill=False, max_model_len=30, max_num_batched_tokens=30)
    runner = ShadowRunner(scheduler)
    for i in range(3):
        scheduler.add(request(str(i), 14, 3, first=20 * i))
    assert [r.request_id for r in runner.step()] == ["0", "1"]
    assert scheduler.events.of("scheduled")[0].data == {
        "requests": ["0", "1"], "tokens": [14, 14], "held": 8, "cached": 0, "free": 24
    }  # fmt: skip
    runner.run()
    assert len(runner.ended) == 3


def test_the_lower_priority_number_runs_first_and_the_higher_is_preempted():
    scheduler = scheduler_of(policy="priority", num_blocks=7, watermark=0, max_num_seqs=2)
    runner = ShadowRunner(scheduler)
    scheduler.add(request("late", 9, 9, priority=5))
    scheduler.add(request("soon", 9, 9, first=60, priority=-5))
    scheduler.add(request("mid", 9, 9, first=30, priority=0))
    runner.run()
    admitted = [r for _, r in kinds(scheduler, "admitted")]
    assert admitted == ["soon", "mid", "late"]
    assert {r for _, r in kinds(scheduler, "preempted")} <= {"mid", "late"}
    assert [i for i, _, _ in runner.ended] == ["soon", "mid", "late"]


def test_low_priority_does_not_starve():
    """One level is worth 3 places: of an urgent stream, those who come within 3 places overtake, and no more."""
    scheduler = scheduler_of(policy="priority", priority_places=3, max_num_seqs=1)
    runner = ShadowRunner(scheduler)
    scheduler.add(request("low", 4, 1, priority=1))
    for i in range(12):
        scheduler.add(request(str(i), 4, 1, first=20))
        runner.step()
    assert [i for i, _, _ in runner.ended][:5] == ["0", "1", "low", "2", "3"]


def test_first_come_first_served_never_preempts_the_first():
    scheduler = scheduler_of(num_blocks=9, watermark=0)
    runner = ShadowRunner(scheduler)
    for i in range(6):
        scheduler.add(request(str(i), 6, 14, first=10 * i))
    runner.run()
    assert "0" not in [r for _, r in kinds(scheduler, "preempted")]
    assert [i for i, _, _ in runner.ended] == [str(i) for i in range(6)]


# --- what can never run is refused, with the reason ---


@pytest.mark.parametrize(
    ("made", "options", "reason"),
    [
        (lambda: request(prompt=[]), {}, "prompt is empty"),
        (lambda: request(prompt=300), {"max_model_len": 300}, "300 tokens and max_model_len is 300"),
        # vllm#39734: within max_model_len, and larger than the whole pool
        (lambda: request(prompt=129), {}, "129 tokens and the whole cache holds 128"),
        (lambda: request(n=9), {}, "n is 9 and at most 8 sequences"),
    ],
)
def test_what_can_never_run_is_refused_at_the_door(made, options, reason):
    scheduler = scheduler_of(**options)
    with pytest.raises(RequestError, match=reason):
        scheduler.add(made())
    scheduler.add(request("fits", 4))
    assert ShadowRunner(scheduler).run() == 4


def test_a_prompt_that_just_fits_runs():
    """128 slots: the prompt fills them all, and the one token drawn needs none."""
    scheduler = scheduler_of()
    runner = ShadowRunner(scheduler)
    scheduler.add(request(prompt=128, max_tokens=5))
    runner.run()
    assert runner.ended == [("a", 0, "length")]


def test_a_full_queue_says_so():
    scheduler = scheduler_of(max_waiting=1)
    scheduler.add(request("a"))
    with pytest.raises(QueueFullError, match="1 requests are waiting"):
        scheduler.add(request("b"))


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 0},
        {"policy": "random"},
        {"preemption": "kill"},
        {"preemption": "swap"},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 10, "max_model_len": 20},
        {"prefix_cache": "tree"},
        {"eviction": "newest"},
        {"num_blocks": 1},
    ],
)
def test_settings_that_cannot_work_are_refused(options):
    with pytest.raises(EngineError):
        scheduler_of(**options)


# --- sequences that share ---


def test_forks_share_the_prompt_and_copy_what_they_write():
    scheduler = scheduler_of()
    runner = ShadowRunner(scheduler)
    scheduler.add(request("a", 10, 3, n=3))
    assert len(runner.step()) == 3
    assert scheduler.occupancy().held == 3
    tables = [r.block_ids for r in scheduler.running]
    assert tables[0] == tables[1] == tables[2]
    runner.step()
    assert scheduler.pool.copies == 2  # the last holder of the half-filled block writes in place
    assert scheduler.occupancy().held == 2 + 3
    assert scheduler.occupancy().used_slots == 8 + 3 * 3
    runner.run()
    assert sorted(runner.ended) == [("a", i, "length") for i in range(3)]


def test_a_prompt_of_whole_blocks_is_forked_without_a_copy():
    scheduler = scheduler_of()
    scheduler.add(request("a", 8, 3, n=3))
    ShadowRunner(scheduler).run()
    assert scheduler.pool.copies == 0


def test_swapping_out_loses_no_computed_token():
    scheduler = scheduler_of(num_blocks=7, watermark=0, preemption="swap", num_host_blocks=9, prefix_cache="off")
    runner = ShadowRunner(scheduler)
    scheduler.add(request("old", 11, 12))
    scheduler.add(request("new", 5, 12, first=50))
    runner.run()
    gone, back = scheduler.events.of("preempted")[0], scheduler.events.of("resumed")[0]
    assert (gone.data["how"], gone.data["lost"], back.data["how"]) == ("swap", 0, "swap")
    assert back.data["cached"] == back.data["tokens"] - 1
    assert len(runner.ended) == 2


def test_a_victim_that_was_already_scheduled_is_taken_out_again():
    """A chunk of an older prompt takes the blocks of decodes scheduled before it in this step, copies planned and all.

    Over all small pools, so that the rare meeting is certain to occur.
    """
    victims = copied = 0
    for spare in range(8):
        for chunk in (3, 4, 8):
            scheduler = scheduler_of(
                num_blocks=8 + spare, watermark=0, preemption="swap", num_host_blocks=20, prefix_cache="off",
                long_prefill_token_threshold=chunk,
            )  # fmt: skip
            runner = ShadowRunner(scheduler)
            scheduler.add(request("old", 20, 2))
            scheduler.add(request("new", 6, 8, first=50, n=4))
            drop = Plan.drop

            def counting(plan, r, drop=drop):
                nonlocal victims, copied
                part = drop(plan, r)
                victims += part is not None
                copied += part is not None and bool(part.copies)
                return part

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Plan, "drop", counting)
                runner.run()
            assert len(runner.ended) == 5
    assert victims > 3
    assert copied > 0


def test_a_full_host_falls_back_to_computing_again():
    scheduler = scheduler_of(num_blocks=7, watermark=0, preemption="swap", num_host_blocks=2, prefix_cache="off")
    scheduler.add(request("old", 11, 12))
    scheduler.add(request("new", 7, 12, first=50))
    ShadowRunner(scheduler).run()
    assert scheduler.events.of("preempted")[0].data["how"] == "recompute"


@pytest.mark.parametrize("sinks", [0, 1, 5])
def test_a_sliding_window_holds_no_more_than_it_sees(sinks):
    scheduler = scheduler_of(sliding_window=6, attention_sinks=sinks, max_num_batched_tokens=4)
    runner = ShadowRunner(scheduler)
    scheduler.add(request("a", 40, 30))
    most = 0
    while scheduler.has_unfinished_requests():
        runner.step()
        most = max(most, scheduler.occupancy().held)
    kept = -(-sinks // 4)  # the shadow runner reads the sinks in every step
    assert most <= 4 + kept  # 6 tokens lie in at most three blocks, and the chunk of a step begins one


def test_a_victims_tokens_return_to_the_budget():
    """A decode is scheduled, then loses its block to an earlier prefill: the next prefill gets its token."""
    scheduler = scheduler_of(num_blocks=8, watermark=0, max_num_batched_tokens=6, policy="priority", prefix_cache="off")
    runner = ShadowRunner(scheduler)
    scheduler.add(request("late", 1, 30, priority=1))
    runner.step()
    scheduler.add(request("first", 12, 3, first=50))
    scheduler.add(request("second", 10, 3, first=90))
    runner.run()  # asserts in every step that no budget is left while a running request could use it
    assert scheduler.events.of("preempted", request="late")
