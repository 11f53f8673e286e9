"""Promise: arrivals have the statistics they name, traces come back as written or are refused by line, and no prompt
repeats unless it was meant to."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.serving.load_arrivals import ARRIVALS, arrival_times
from minillm.serving.load_record import LoadError, TraceRequest
from minillm.serving.load_traces import read_trace, write_mooncake
from minillm.serving.load_workload import Lengths, Prompts, make_requests


@pytest.mark.parametrize(("kind", "cv"), [("poisson", 1.0), ("bursty", 3.0), ("bursty", 0.5), ("constant", 0.0)])
def test_rate_and_variation(kind, cv):
    gaps = np.diff(arrival_times(kind, rate=5, count=40_000, seed=1, cv=cv or 1))
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-9)
    assert gaps.min() >= 0


def test_poisson_counts_have_the_variance_of_their_mean():
    counts = np.bincount(np.asarray(arrival_times("poisson", 10, 50_000, seed=2), int))[:-1]
    assert counts.var() == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize("kind", ["poisson", "constant", "bursty"])
def test_duration_ends_arrivals(kind):
    times = arrival_times(kind, rate=20, duration_s=30, seed=3)
    assert times == sorted(times)
    assert 29 < times[-1] < 30
    assert times == arrival_times(kind, rate=20, duration_s=30, seed=3)
    assert times[:50] == arrival_times(kind, rate=20, count=50, seed=3)  # the same stream, however long
    assert kind == "constant" or times != arrival_times(kind, rate=20, duration_s=30, seed=4)


def test_batch_and_constant():
    assert arrival_times("batch", count=3) == [0, 0, 0]
    assert arrival_times("constant", 2, 4) == pytest.approx([0, 0.5, 1, 1.5])


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "poison", "count": 1}, {"rate": 0, "count": 1}, {"rate": float("nan"), "count": 1}, {"count": 0}, {},
        {"kind": "bursty", "cv": 0, "count": 1}, {"kind": "batch", "duration_s": 3}, {"duration_s": -1},
        {"duration_s": float("inf")}, {"rate": 1e9, "duration_s": 1e9}, {"count": 10**9},
    ],
)  # fmt: skip
def test_arrivals_that_cannot_be(options):
    with pytest.raises(LoadError):
        arrival_times(**options)


def test_every_kind_is_tested():
    assert set(ARRIVALS) == {"poisson", "constant", "bursty", "batch"}


# --- lengths and prompts ---


def test_lengths():
    rng = np.random.default_rng(0)
    assert Lengths.parse("7").draw(rng, 3) == [7, 7, 7]
    assert Lengths.parse("list:1,2").draw(rng, 3) == [1, 2, 1]
    drawn = Lengths.parse("uniform:3:6").draw(rng, 1000)
    assert set(drawn) == {3, 4, 5, 6}
    logs = np.log(Lengths.parse("lognormal:200:0.5").draw(rng, 20_000))
    assert (np.exp(np.median(logs)), logs.std()) == pytest.approx((200, 0.5), rel=0.03)


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "1.5", "x", "uniform:5:2", "uniform:5", "uniform:1.5:2", "lognormal:0:1", "list:",
             "list:3,0", "lognormal:5:-1", "uniform:nan:nan", "lognormal:inf:1", "99999999999",
             "10000001", "list:5,10000001", "uniform:1:1e308", "normal:3:4"],
)  # fmt: skip
def test_lengths_that_cannot_be(text):
    with pytest.raises(LoadError, match="lengths"):
        Lengths.parse(text)


def test_requests_follow_the_seed():
    once = make_requests([0.0, 0.5], "uniform:1:1000", "uniform:1:1000", seed=4)
    assert once == make_requests([0.0, 0.5], "uniform:1:1000", "uniform:1:1000", seed=4)
    assert once != make_requests([0.0, 0.5], "uniform:1:1000", "uniform:1:1000", seed=5)
    assert [row.arrival_s for row in once] == [0.0, 0.5]


def shared(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_prompts_are_new_in_each_run_and_unique_within():
    """The trap: a fixed seed must not send last run's tokens, which the server's prefix cache still holds."""
    row = TraceRequest(0.0, 64, 1)
    one, two = Prompts(seed=3), Prompts(seed=3)
    assert shared(one.ids(0, row), two.ids(0, row)) < 4
    assert shared(one.ids(0, row), one.ids(1, row)) < 4
    assert one.ids(0, row) == one.ids(0, row)
    assert Prompts(3, salt="a").ids(0, row) == Prompts(3, salt="a").ids(0, row)
    assert len(set(one.ids(0, row))) > 32


@given(st.integers(1, 80), st.integers(0, 60), st.integers(0, 3))
def test_prompt_lengths_and_shared_prefix(length, prefix, blocks):
    prompts = Prompts(salt="s", shared_prefix=prefix, token_ids=(5, 300), block_tokens=16)
    row = TraceRequest(0.0, length, 1, tuple(range(blocks)))
    one, two = prompts.ids(0, row), prompts.ids(1, row)
    assert len(one) == len(two) == length
    assert all(5 <= token < 300 for token in one)
    assert shared(one, two) >= min(length, prefix + 16 * blocks)
    for text in (prompts.text(one), prompts.text(two)):
        assert len(text.split()) == length
    assert shared(prompts.text(one).split(), prompts.text(two).split()) >= min(length, prefix + 16 * blocks)


def test_equal_hash_ids_are_equal_tokens():
    prompts = Prompts(salt="s", block_tokens=8)
    one = prompts.ids(0, TraceRequest(0.0, 20, 1, (7, 8, 9)))
    two = prompts.ids(1, TraceRequest(0.0, 24, 1, (7, 8, 3)))
    assert shared(one, two) == 16
    assert one[:16] != prompts.ids(2, TraceRequest(0.0, 16, 1, (8, 7)))


@pytest.mark.parametrize(
    "options",
    [
        {"token_ids": (5, 5)},
        {"token_ids": (-1, 5)},
        {"shared_prefix": -1},
        {"seed": -1},
        {"token_ids": (0, 2**80)},
        {"shared_prefix": 10**9},
    ],
)
def test_prompts_that_cannot_be(options):
    with pytest.raises(LoadError):
        Prompts(**options)


# --- traces ---

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""
AZURE_2024 = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,API log
45.5,GPT-4,417,276,693,Conversation log
"""
BURST_2 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,a,1.5,ChatGPT,472,18,490,Conversation log
"""
MOON = """{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 0, "input_length": 655, "output_length": 26, "hash_ids": [46, 47]}
"""


def written(tmp_path, text, name="trace"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_azure(tmp_path):
    first, second = read_trace(written(tmp_path, AZURE)).requests
    assert first == TraceRequest(0.0, 4808, 10)
    assert second.arrival_s == pytest.approx(0.052)
    assert len(read_trace(written(tmp_path, AZURE_2024), "azure").requests) == 1


def test_burstgpt_leaves_failures_out_and_counts_them(tmp_path):
    trace = read_trace(written(tmp_path, BURST))
    assert trace.requests == (TraceRequest(0.0, 472, 18), TraceRequest(40.5, 417, 276))
    assert trace.left_out == 1
    assert read_trace(written(tmp_path, BURST_2), "burstgpt").requests == (TraceRequest(0.0, 472, 18),)


def test_mooncake_sorted_scaled_and_clipped(tmp_path):
    path = written(tmp_path, MOON)
    first, second = read_trace(path).requests
    assert first == TraceRequest(0.0, 655, 26, (46, 47))
    assert second == TraceRequest(27.482, 6955, 52, (46, 47, 48))
    small = read_trace(path, time_scale=0.5, length_scale=1 / 32, max_prompt_tokens=40, max_output_tokens=2)
    assert small.block_tokens == 16
    assert small.requests == (TraceRequest(0.0, 20, 1, (46, 47)), TraceRequest(13.741, 40, 2, (46, 47, 48)))
    assert len(read_trace(path, limit=1).requests) == 1


def test_quoted_columns(tmp_path):
    for text in (AZURE, BURST):
        quoted = "\n".join(",".join(f'"{value}"' for value in line.split(",")) for line in text.splitlines())
        assert read_trace(written(tmp_path, quoted)) == read_trace(written(tmp_path, text))


def test_a_long_first_line(tmp_path):
    """A prompt of millions of tokens has as many thousand hash ids; that is no CSV field."""
    row = TraceRequest(0.0, 10**7, 1, tuple(range(10**6, 10**6 + 19532)))
    write_mooncake(tmp_path / "t", [row])
    assert read_trace(tmp_path / "t").requests == (row,)


@pytest.mark.parametrize("options", [{"length_scale": 1e308}, {"length_scale": 2e4}, {"time_scale": 1e308}], ids=str)
def test_a_scale_that_leaves_all_bounds(tmp_path, options):
    with pytest.raises(LoadError, match=r"trace, line \d: .*; "):
        read_trace(written(tmp_path, MOON), **options)


def test_what_is_clipped_may_be_long(tmp_path):
    long = MOON.replace("6955", "2000000000")
    with pytest.raises(LoadError, match="line 1: a prompt or output of more than 10000000 tokens"):
        read_trace(written(tmp_path, long))
    assert read_trace(written(tmp_path, long), max_prompt_tokens=70).requests[1].prompt_tokens == 70
    assert read_trace(written(tmp_path, long), length_scale=1e-6).requests[1].prompt_tokens == 2000


def test_a_byte_order_mark_and_empty_lines_are_no_matter(tmp_path):
    assert len(read_trace(written(tmp_path, "\ufeff" + AZURE.replace("\n", "\r\n\r\n"))).requests) == 2
    assert len(read_trace(written(tmp_path, MOON + "\n \n")).requests) == 2


@given(
    st.lists(
        st.builds(
            TraceRequest,
            st.integers(0, 10**6).map(lambda ms: ms / 1e3),
            st.integers(1, 5000),
            st.integers(1, 5000),
            st.lists(st.integers(0, 10**6), max_size=12).map(tuple),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_round_trip(tmp_path_factory, rows):
    path = tmp_path_factory.getbasetemp() / "round.jsonl"
    write_mooncake(path, rows)
    start = min(row.arrival_s for row in rows)
    for got, row in zip(read_trace(path).requests, sorted(rows, key=lambda row: row.arrival_s), strict=True):
        assert got.arrival_s == pytest.approx(row.arrival_s - start, abs=1e-9)
        assert got[1:3] == row[1:3]
        assert got.hash_ids == row.hash_ids[: -(-row.prompt_tokens // 512)]


BROKEN = {
    "no such column": (AZURE.replace("ContextTokens", "Tokens"), "azure", 1),
    "a time that is none": (AZURE.replace("2023-11-16 18:17:04", "yesterday"), None, 3),
    "a number that is none": (AZURE.replace("3180", "many"), None, 3),
    "a negative number": (AZURE.replace("3180", "-1"), None, 3),
    "a fraction": (AZURE.replace("3180", "31.5"), None, 3),
    "an empty prompt": (AZURE.replace("3180", "0"), None, 3),
    "a short line": (AZURE.replace(",3180,8", ",3180"), None, 3),
    "a time of NaN": (BURST.replace("45.5", "nan"), None, 4),
    "a huge number": (BURST.replace("417", "9" * 5000), None, 4),
    "no JSON": (MOON + "{", None, 3),
    "a list": (MOON + "[1]", None, 3),
    "deep nonsense": (MOON + "[" * 100_000, None, 3),
    "a field is missing": (MOON.replace('"output_length": 26, ', ""), None, 2),
    "a text for a number": (MOON.replace("655", '"655x"'), None, 2),
    "a truth value": (MOON.replace("655", "true"), None, 2),
    "a time of null": (MOON.replace('"timestamp": 0', '"timestamp": null'), None, 2),
    "an infinite time": (MOON.replace('"timestamp": 0', '"timestamp": 1e999'), None, 2),
    "a time beyond all numbers": (MOON.replace('"timestamp": 0', f'"timestamp": {10**400}'), None, 2),
    "a negative time beyond all": (MOON.replace('"timestamp": 0', f'"timestamp": -{10**400}'), None, 2),
    "a far time": (BURST.replace("45.5", "1e300"), None, 4),
    "a length beyond all numbers": (MOON.replace("655", str(10**400)), None, 2),
    "deep from the first line": ('{"a":' * 100_000, None, 1),
    "hash ids that are none": (MOON.replace("[46, 47]", '["a"]'), None, 2),
    "unknown": ("a,b,c\n1,2,3\n", None, 1),
    "empty": ("", None, 1),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_trace_names_file_line_and_remedy(tmp_path, case):
    text, format, line = BROKEN[case]
    with pytest.raises(LoadError) as error:
        read_trace(written(tmp_path, text, "broken.csv"), format)
    said = str(error.value)
    assert f"broken.csv, line {line}: " in said
    assert ";" in said
    assert "\n" not in said
    assert len(said) < 500


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (AZURE.splitlines()[0], {}), (BURST.replace(",18,", ",0,").replace(",276,", ",0,"), {}),
        (b"\x1f\x8b\x08\xff", {}), (AZURE, {"format": "csv"}), (AZURE, {"time_scale": 0}),
        (AZURE, {"length_scale": float("nan")}),
        (AZURE, {"limit": 0}), (AZURE, {"max_prompt_tokens": 0}), (AZURE + '2023-11-16 18:17:05,"' + "x" * 200_000, {}),
    ],
)  # fmt: skip
def test_a_trace_that_cannot_be_used(tmp_path, text, options):
    with pytest.raises(LoadError):
        read_trace(written(tmp_path, text), **options)


def test_write_mooncake_is_the_published_schema(tmp_path):
    write_mooncake(tmp_path / "t", [TraceRequest(1.5, 600, 3, (1, 2))])
    expected = {"timestamp": 1500, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
    assert json.loads((tmp_path / "t").read_text()) == expected
