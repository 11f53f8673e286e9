"""Promise: what is read off the event log is what happened, in seconds and in steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.analysis.history import SLO, History, histories, idle_slots, judge, steps
from minillm.errors import RequestError
from minillm.events import Event
from minillm.sampling import SamplingParams
from tests.schedules import Job, add_and_step, play, seconds_of
from tests.serving import make_engine, make_tiny, run

SMALL_POOL = {"num_blocks": 9, "watermark": 0, "prefix_cache": "off"}
CROWD = [Job(9, 12), Job(6, 12), Job(5, 9, 1), Job(14, 5, 3)]

jobs = st.lists(
    st.builds(
        Job,
        prompt=st.integers(1, 20),
        max_tokens=st.integers(1, 10),
        arrival=st.integers(0, 12),
        n=st.sampled_from([1, 1, 3]),
        abort=st.one_of(st.none(), st.none(), st.integers(0, 15)),
    ).filter(lambda job: job.abort is None or job.abort >= job.arrival),
    min_size=1,
    max_size=7,
)
options = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([9, 12, 40]),
        "max_num_batched_tokens": st.sampled_from([5, 32]),
        "preemption": st.sampled_from(["recompute", "swap"]),
        "num_host_blocks": st.just(20),
        "prefix_cache": st.sampled_from(["off", "hash"]),
        "watermark": st.just(0.0),
    }
)


def named(scheduler, by="time"):
    return {history.request: history for history in histories(scheduler.events, by)}


@settings(max_examples=120, deadline=None)
@given(drawn=jobs, chosen=options, by=st.sampled_from(["time", "step"]))
def test_any_log_reads_back_as_what_was_scheduled(drawn, chosen, by):
    """Tokens and moments against an account kept beside the schedule, step by step."""
    work: dict[tuple[str, int], int] = {}
    begins: list[float] = []
    clock = [0.0]

    def each(scheduler, output):
        for part in output.scheduled:
            work[part.request.label, scheduler.events.step] = part.count
        begins.append(clock[0] if by == "time" else float(scheduler.events.step - 1))
        clock[0] += seconds_of(output)

    scheduler = play(drawn, each, **chosen)
    lives = histories(scheduler.events, by)
    got = {(h.request, p.step): p.tokens for h in lives for p in h.parts if p.step}
    assert got == work
    assert [record.start for record in steps(scheduler.events, by)] == pytest.approx(begins)
    for life in lives:
        edges = [edge for part in life.parts for edge in (part.start, part.end)]
        assert edges == sorted(edges)
        assert all(life.added <= edge <= life.finished for edge in edges)
        assert life.token_times == sorted(life.token_times)


@settings(max_examples=60, deadline=None)
@given(drawn=jobs)
def test_what_preemption_lost_is_what_is_computed_again(drawn):
    drawn = [job._replace(abort=None, n=1) for job in drawn]
    scheduler = play(drawn, **SMALL_POOL, max_num_batched_tokens=8)
    lost = sum(event.data["lost"] for event in scheduler.events.of("preempted"))
    lives = named(scheduler)
    assert sum(life.recomputed for life in lives.values()) == lost
    for i, job in enumerate(drawn):
        computed = sum(part.tokens for part in lives[str(i)].parts)
        assert computed - lives[str(i)].recomputed == job.prompt + job.max_tokens - 1
        assert len(lives[str(i)].token_times) == job.max_tokens


def test_a_life_by_hand():
    """Prompt of 9 in chunks of 4, then three decodes; arrival one step before there is a slot."""
    life = named(play([Job(4, 2), Job(9, 4, 0)], max_num_seqs=1, max_num_batched_tokens=4), "step")["1"]
    assert [(p.kind, p.start, p.end, p.tokens) for p in life.parts] == [
        ("queued", 0, 2, 0),
        ("prefill", 2, 3, 4),
        ("prefill", 3, 4, 4),
        ("prefill", 4, 5, 1),
        ("decode", 5, 6, 1),
        ("decode", 6, 7, 1),
        ("decode", 7, 8, 1),
    ]
    assert (life.ttft, life.tpot, life.longest_gap) == (5, 1, 1)
    assert (life.finished, life.reason, life.prompt) == (8, "length", 9)


def test_recompute_and_swap_are_told_apart():
    lost = named(play(CROWD, **SMALL_POOL))
    kept = named(play(CROWD, **SMALL_POOL, preemption="swap", num_host_blocks=30))
    victims = [name for name in lost if lost[name].num_preemptions]
    assert victims
    for name in victims:
        kinds = [part.kind for part in lost[name].parts]
        assert kinds[kinds.index("preempted") + 1] == "recompute"
        assert lost[name].recomputed > 0
    assert "swapped" in {part.kind for life in kept.values() for part in life.parts}
    assert sum(life.recomputed for life in kept.values()) == 0


def test_a_prefix_hit_is_no_work_and_not_computed_again():
    scheduler = play([Job(9, 2)])
    add_and_step(scheduler, "again", range(11), max_tokens=1)
    life = named(scheduler)["again"]
    assert (life.cached, life.recomputed, [(p.kind, p.tokens) for p in life.parts]) == (8, 0, [("prefill", 3)])


def test_sequences_of_one_request_have_lives_of_their_own():
    lives = named(play([Job(6, 3, n=3)]), "step")
    assert sorted(lives) == ["0", "0/1", "0/2"]
    for name, life in lives.items():
        assert life.added == 0
        assert life.ttft == 1
        assert [p.kind for p in life.parts] == (["prefill"] if name == "0" else []) + ["decode"] * 2


def test_an_id_that_is_used_again_is_another_life():
    scheduler = play([Job(4, 2)])
    add_and_step(scheduler, "0", range(50, 55))
    lives = histories(scheduler.events, "step")
    assert [(life.request, life.prompt, len(life.parts)) for life in lives] == [("0", 4, 2), ("0", 5, 1)]


def test_who_is_aborted_after_a_step_that_drew_nothing_leaves_nothing_to_its_successor():
    """A chunk draws no token, so its step is still open in the log when the id is taken again."""
    scheduler = play([Job(4, 1)], max_num_batched_tokens=8)
    for prompt in (20, 30):
        scheduler.finish(add_and_step(scheduler, "long", range(prompt, 2 * prompt)), "abort")
    lives = [life for life in histories(scheduler.events, "step") if life.request == "long"]
    assert [(life.prompt, [part.tokens for part in life.parts]) for life in lives] == [(20, [8]), (30, [8])]


def test_a_log_that_no_longer_reaches_back_is_read_as_far_as_it_goes():
    whole = named(play(CROWD, **SMALL_POOL), "step")
    for keep in range(1, 60, 3):
        for name, life in named(play(CROWD, keep=keep, **SMALL_POOL), "step").items():
            times, known = whole[name].token_times, [p[1:5] for p in whole[name].parts if p.step]
            seen = [p[1:5] for p in life.parts if p.step]
            assert seen == known[len(known) - len(seen) :]
            assert life.token_times == times[len(times) - len(life.token_times) :]


def test_an_empty_log_has_nobody_in_it():
    assert histories([]) == []
    assert steps([]) == []
    assert idle_slots([], 4) == (0, 0)


def test_an_unknown_axis_is_refused():
    with pytest.raises(RequestError, match="'time' or by 'step'"):
        histories([], "tokens")


def test_waiting_still_lasts_to_the_end_of_the_log():
    log = [
        Event(0, 1.0, "added", "a", {"tokens": 3, "priority": 0}),
        Event(0, 4.0, "added", "b", {"tokens": 3, "priority": 0}),
    ]
    life = histories(log)[0]
    assert [(p.kind, p.start, p.end) for p in life.parts] == [("queued", 1.0, 4.0)]
    assert (life.ttft, life.finished) == (None, None)


@pytest.mark.parametrize("continuous", [True, False])
def test_idle_slots_by_hand(continuous):
    """Two slots, answers of 1, 4 and 3 tokens: continuous fills the first slot from the second step on."""
    scheduler = play(
        [Job(2, 1), Job(2, 4), Job(2, 3)], max_num_seqs=2, continuous_batching=continuous, prefix_cache="off"
    )
    assert idle_slots(scheduler.events, 2) == ((0, 8) if continuous else (6, 14))


# --- verdicts


def test_a_promise_is_kept_up_to_its_limit():
    life = History("a", added=1.0, token_times=[1.5, 2.0, 2.5])
    assert judge(life, SLO(0.5, 0.5)) == (True, True)
    assert judge(life, SLO(0.4, 0.5)) == (False, True)
    assert judge(life, SLO(None, 0.4)) == (None, False)
    assert [judge(life, slo).met for slo in (SLO(0.5, 0.5), SLO(0.4), SLO(tpot=0.4), SLO())] == [
        True,
        False,
        False,
        True,
    ]


def test_one_token_has_no_pace_to_judge():
    assert judge(History("a", added=0.0, token_times=[1.0]), SLO(1.0, 0.1)) == (True, None)


def test_no_token_in_time_is_a_miss_and_too_early_to_say_is_none():
    waiting = [part._replace(end=3.0) for part in named(play([Job(2, 1)])).popitem()[1].parts]
    late = History("a", added=0.0, parts=waiting)
    assert judge(late, SLO(2.0)).ttft is False
    assert judge(late, SLO(4.0)).ttft is None
    assert judge(History("a", added=0.0, finished=1.0, reason="abort"), SLO(2.0)).ttft is None


def test_the_engines_own_metrics_agree(tmp_path_factory):
    """It reads its clock a moment before the log does, so each of its times lies between two of ours."""
    pair = make_tiny("llama", tmp_path_factory)
    engine = make_engine(pair, max_num_batched_tokens=8)
    for i in range(4):
        engine.add_request(
            str(i), list(range(3, 9 + 3 * i)), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        )
    done = run(engine)
    for life in histories(engine.events):
        times = done[life.request].outputs[0].token_times
        assert len(life.token_times) == len(times) == 5
        for ours, theirs, after in zip(life.token_times, times, [*times[1:], float("inf")], strict=True):
            assert theirs <= ours < after
