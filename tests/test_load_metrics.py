"""Promise: the serving metrics are what their definitions say, and the other tools' are what those tools compute."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.serving import load_definitions as tools
from minillm.serving.load_metrics import SLO, Spread, in_flight, is_backlogged, percentile, summarize
from minillm.serving.load_record import LoadError, RequestRecord


def record(index=0, intended=0.0, sent=None, times=(1.0, 1.1, 1.4), tokens=None, status="ok", end=None, **more):
    times = tuple(times)
    tokens = len(times) if tokens is None else tokens
    end = times[-1] if end is None and times else end
    sent = intended if sent is None else sent
    counts = (1,) * len(times) if tokens == len(times) else ()
    values = {"chunk_tokens": counts, "max_tokens": tokens, "prompt_tokens": 10} | more
    return RequestRecord(index, intended, sent, end, status, output_tokens=tokens, chunk_times=times, **values)


def test_one_request_by_hand():
    """Meant for 0.5, sent at 0.7, tokens at 1.0, 1.1 and 1.4."""
    row = record(intended=0.5, sent=0.7)
    assert row.ttft_s == pytest.approx(0.5)
    assert row.e2el_s == pytest.approx(0.9)
    assert row.tpot_s == pytest.approx(0.2)  # 0.4 s over the two tokens after the first
    assert row.itl_s == pytest.approx([0.1, 0.3])


def test_tpot_counts_tokens_and_itl_chunks():
    """Five tokens in three chunks."""
    row = record(tokens=5)
    assert row.tpot_s == pytest.approx(0.1)
    assert len(row.itl_s) == 2
    summary = summarize([row])
    assert (summary.itl_unit, summary.output_tokens) == ("chunk", 5)
    assert any("several tokens" in line for line in summary.warnings)


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_request_of_one_token_has_no_tpot(tokens):
    row = record(times=[1.0], tokens=tokens)
    assert row.tpot_s is None
    assert SLO(tpot_ms=0.001).met_by(row)


def test_the_five_definitions_by_hand():
    """Two requests: one waited 0.2 s in the client and has 3 tokens, the other 2 tokens."""
    rows = [record(intended=0.5, sent=0.7), record(1, intended=1.0, times=(2.0, 2.6))]
    assert tools.ttft_from_intended_arrival(rows) == pytest.approx([0.5, 1.0])
    assert tools.ttft_from_send(rows) == pytest.approx([0.3, 1.0])
    assert tools.tpot_per_request(rows) == pytest.approx([0.2, 0.6])
    assert tools.tpot_with_first_token(rows) == pytest.approx([0.7 / 3, 1.6 / 2])
    assert tools.itl_pooled(rows) == pytest.approx([0.1, 0.3, 0.6])
    assert tools.itl_per_request(rows) == pytest.approx([0.2, 0.6])
    assert tools.itl_with_ttft(rows) == pytest.approx([0.7 / 3, 1.6 / 2])
    assert tools.tpot_pooled_over_tokens(rows) == pytest.approx(1.0 / 3)
    assert tools.itl_spread_over_chunk(rows) == pytest.approx([0.1, 0.3, 0.6])


def test_a_chunk_of_several_tokens_looks_steady_to_one_tool():
    row = record(times=(1.0, 1.1, 1.4), tokens=5)._replace(chunk_tokens=(1, 1, 3))
    assert tools.itl_pooled([row]) == pytest.approx([0.1, 0.3])
    assert tools.itl_spread_over_chunk([row]) == pytest.approx([0.1, 0.1, 0.1, 0.1])


def test_the_comparison_has_every_definition_and_no_other_requests():
    rows = [record(), record(1, status="failed", times=()), record(2, warmup=True, times=(9.0, 99.0))]
    rows[1] = rows[1]._replace(end_s=3.0)
    table = tools.compare_definitions(rows)
    assert [row.metric for row in table] == ["TTFT"] * 2 + ["TPOT"] * 3 + ["ITL"] * 4
    assert all(row.spread.mean < 2000 for row in table)
    assert len({round(row.spread.mean, 6) for row in table if row.metric == "ITL"}) == 2  # pooled; with TTFT


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.floats(0, 100))
def test_percentiles_are_numpys(values, q):
    values.sort()
    assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)), rel=1e-9, abs=1e-9)


moments = st.floats(0, 50, allow_subnormal=False)


@st.composite
def drawn_records(draw):
    rows = []
    for index in range(draw(st.integers(1, 12))):
        intended = draw(moments)
        gaps = draw(st.lists(st.floats(0.001, 3), min_size=1, max_size=6))
        sent = intended + draw(st.floats(0, 1))
        times = sent + np.cumsum(gaps)
        status = draw(st.sampled_from(["ok", "ok", "ok", "refused", "failed", "cut", "timeout"]))
        tokens = len(gaps) + draw(st.integers(0, 3))
        rows.append(record(index, intended, sent, map(float, times), tokens, status, float(times[-1])))
    return rows


@given(drawn_records(), st.floats(1, 5000), st.floats(1, 2000))
def test_summary_against_numpy(rows, ttft, tpot):
    summary = summarize(rows, SLO(ttft, tpot))
    done = [row for row in rows if row.status == "ok"]
    start, end = min(r.intended_s for r in rows), max(r.end_s for r in rows)
    ttfts = [1e3 * (r.chunk_times[0] - r.intended_s) for r in done]
    tpots = [1e3 * (r.chunk_times[-1] - r.chunk_times[0]) / (r.output_tokens - 1) for r in done if r.output_tokens > 1]
    gaps = [1e3 * gap for r in done for gap in np.diff(r.chunk_times)]
    for spread, values in ((summary.ttft_ms, ttfts), (summary.tpot_ms, tpots), (summary.itl_ms, gaps)):
        assert spread.count == len(values)
        if values:
            expected = [np.mean(values), *np.percentile(values, [50, 95, 99])]
            assert spread[1:] == pytest.approx(expected, rel=1e-9, abs=1e-9)
    good = 0
    for row in done:
        slow = 1e3 * row.ttft_s > ttft or (row.output_tokens > 1 and 1e3 * row.tpot_s > tpot)
        good += not slow
    assert summary.good == good
    assert summary.goodput == pytest.approx(good / (end - start))
    assert summary.good_fraction == pytest.approx(good / len(rows))  # the lost ones are misses
    assert summary.output_token_rate == pytest.approx(sum(r.output_tokens for r in done) / (end - start))
    assert summary.goodput <= summary.request_rate + 1e-9
    json.dumps(summary.as_dict(), allow_nan=False)


@given(drawn_records())
def test_in_flight_against_counting(rows):
    for moment, count in in_flight(rows):
        assert count == sum(r.intended_s <= moment < r.end_s for r in rows)


def test_warm_up_is_left_out():
    rows = [record(0, 0.0, times=(50.0,), warmup=True, end=50.0)] + [
        record(i, 60 + i, times=(60.5 + i,)) for i in (1, 2)
    ]
    summary = summarize(rows)
    assert (summary.requests, summary.warmup) == (2, 1)
    assert summary.ttft_ms.p99 == pytest.approx(500)
    assert summary.window_s == pytest.approx(1.5)


def test_nothing_ended_well():
    summary = summarize([record(status="refused", times=(), end=1.0)], SLO(ttft_ms=1))
    assert summary.good == 0
    assert summary.goodput == 0
    assert math.isnan(summary.ttft_ms.p50)
    assert summary.as_dict()["ttft_ms"]["p50"] is None
    assert "1 refused" in summary.warnings[0]
    assert summarize([]).warnings == ("no request was measured",)


def test_slo_text():
    assert SLO.parse("ttft=500, tpot=50") == SLO(500, 50, None)
    assert SLO.parse("e2e=3000") == SLO.parse("e2el=3000") == SLO(None, None, 3000)
    for bad in ("", "ttft", "ttft=fast", "ttft=0", "ttft=-1", "ttft=nan", "ttft=inf", "queue=5", "any=3", "met_by=1"):
        with pytest.raises(LoadError, match="write ttft=500"):
            SLO.parse(bad)


def test_spread_of_nothing():
    assert Spread.of([]).count == 0


def queue(rate, service_s, count, seed):
    """One server, first come first served: what an M/D/1 queue does to `count` requests."""
    rng = np.random.default_rng(seed)
    free, rows = 0.0, []
    for index, at in enumerate(np.cumsum(rng.exponential(1 / rate, count))):
        begin = max(free, at)
        free = begin + service_s
        rows.append(record(index, float(at), times=(float(begin + service_s / 2), float(free))))
    return rows


def test_a_growing_queue_is_told_from_a_long_one():
    stable = [is_backlogged(queue(7, 0.1, 300, seed)) for seed in range(40)]  # 70% busy
    growing = [is_backlogged(queue(15, 0.1, 300, seed)) for seed in range(40)]  # half again too much
    assert sum(stable) <= 2
    assert sum(growing) >= 38
    assert not is_backlogged(queue(50, 0.1, 10, 0))  # too few to say


def test_backlog_is_said_in_open_loops_alone():
    rows = queue(30, 0.1, 100, 0)
    assert any("backlogged" in line for line in summarize(rows).warnings)
    assert not summarize(rows, closed=True).backlogged
