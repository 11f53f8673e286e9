"""Promise: the command measures what the library measures, pictures show the data, and the whole works against our own
server."""

from __future__ import annotations

import json

import matplotlib.image
import numpy as np
import pytest

from minillm import cli
from minillm.serving.load_arrivals import arrival_times
from minillm.serving.load_definitions import compare_definitions
from minillm.serving.load_metrics import SLO
from minillm.serving.load_record import RequestRecord, TraceRequest
from minillm.serving.load_run import LoadResult, Target, run_load
from minillm.serving.load_traces import write_mooncake
from minillm.serving.load_workload import Prompts, make_requests
from minillm.viz import load_report
from tests.load_server import FakeServer, Reply, stream
from tests.serving_http import MODEL, make_chat_model, serving


def simulated(rate=4.0, count=60, refuse=5, seed=0):
    """Four slots, first come first served; every request beyond `refuse` waiting is refused."""
    rng, free, rows = np.random.default_rng(seed), [0.0] * 4, []
    for index, at in enumerate(np.cumsum(rng.exponential(1 / rate, count)).tolist()):
        slot = int(np.argmin(free))
        if free[slot] - at > refuse:
            rows.append(RequestRecord(index, at, at, at + 0.01, "refused"))
            continue
        times = tuple((max(free[slot], at) + 0.1 + np.cumsum(rng.gamma(5, 0.01, 20))).tolist())
        free[slot] = times[-1]
        rows.append(RequestRecord(index, at, at, times[-1], "ok", 9, 20, times, (1,) * 20, max_tokens=20))
    return LoadResult(rows, {"loop": "open"}, SLO(500, 60))


def test_cdfs_end_at_the_share_that_was_answered():
    result = simulated(8, refuse=1)
    answered = result.summary.statuses["ok"] / result.summary.requests
    assert answered < 0.9
    figure = load_report.latency_cdfs(result)
    assert [ax.get_xlabel() for ax in figure.axes] == ["TTFT (ms)", "TPOT (ms)", "E2EL (ms)"]
    for ax, spread in zip(figure.axes, ("ttft_ms", "tpot_ms", "e2el_ms"), strict=True):
        x, y = ax.lines[0].get_data()
        assert y[-1] == pytest.approx(answered)
        assert x[np.searchsorted(y, 0.5 * answered)] == pytest.approx(getattr(result.summary, spread).p50, rel=0.1)
    assert [len(ax.texts) for ax in figure.axes] == [4, 4, 3]  # three percentiles, and an SLO where there is one
    assert not [
        t for ax in load_report.latency_cdfs({"a": result, "b": result}).axes for t in ax.texts if "P" in t._text[:1]
    ]


def test_in_flight_adds_up():
    result = simulated(8)
    waiting, decoding = load_report._counts(result.records)
    assert max(w + d for (_, w), (_, d) in zip(waiting, decoding, strict=True)) == result.summary.max_in_flight
    assert max(d for _, d in decoding) == 4
    assert waiting[-1][1] == decoding[-1][1] == 0
    waits, streams = load_report.in_flight_timeline(result, lanes=10).axes[0].collections
    assert len(waits.get_segments()) == len(streams.get_segments()) == 10
    assert waits.get_segments()[3][0][0] == pytest.approx(result.records[3].intended_s)


def test_the_sweep_shows_throughput_and_goodput():
    runs = [simulated(rate, 100, 100) for rate in (8, 1, 3)]
    left, right = load_report.rate_sweep(runs).axes
    offered, answered, good = (line.get_ydata() for line in left.lines)
    assert list(offered) == sorted(offered)
    ordered = sorted(runs, key=lambda run: run.summary.offered_rate)
    assert list(answered) == [run.summary.request_rate for run in ordered]
    assert list(good) == [run.summary.goodput for run in ordered]
    assert good[-1] < answered[-1] / 2
    assert right.get_ylabel() == "TTFT (ms)"
    figure = load_report.throughput_latency({"a": runs, "b": runs[:1]}, "title")
    assert len(figure.axes[0].lines) == 4


@pytest.mark.parametrize("draw", ["latency_cdfs", "in_flight_timeline", "report"])
def test_a_run_in_which_nothing_ended_well_can_be_drawn(draw, tmp_path):
    rows = [RequestRecord(i, i / 10, i / 10, i / 10 + 0.1, "refused") for i in range(30)]
    getattr(load_report, draw)(LoadResult(rows, slo=SLO(500))).savefig(tmp_path / "f.png")
    assert matplotlib.image.imread(tmp_path / "f.png").shape[1] == 900


def test_the_definitions_have_a_panel_a_metric():
    figure = load_report.definitions(compare_definitions(simulated().records))
    assert [ax.get_xlabel() for ax in figure.axes] == ["TTFT (ms)", "TPOT (ms)", "ITL (ms)"]
    assert sum(len(ax.patches) for ax in figure.axes) == 9


# --- the command ---


@pytest.fixture(scope="module")
def server():
    with FakeServer(lambda body: Reply(stream([0.01] + [0.001] * (body["max_tokens"] - 1)))) as server:
        yield server


def load(capsys, *arguments, code=0):
    assert cli.main(["load", *map(str, arguments)]) == code
    return capsys.readouterr()


def test_the_command_prints_a_table(server, capsys):
    said = load(capsys, "--url", server.url, "--rate", 200, "--num-requests", 20, "--slo", "ttft=1000,tpot=500",
                "--prompt-tokens", "uniform:4:9", "--output-tokens", 3)  # fmt: skip
    assert "20  all ended well" in said.out
    assert "100.0% met TTFT 1000 ms, TPOT 500 ms" in said.out
    for name in ("TTFT", "TPOT", "ITL", "E2EL", "goodput"):
        assert name in said.out
    # A machine that stalls within these 0.1 s may truly have a backlog, or send late, and is told so too.
    assert all(line.startswith("minillm: warning: ") for line in said.err.splitlines())
    assert "minillm: warning: 20 requests ended well: a P99 of fewer than 100 is nearly the largest value\n" in said.err


def test_json_output_and_figure(server, capsys, tmp_path):
    out, picture = tmp_path / "run.json", tmp_path / "run.png"
    said = load(capsys, "--url", server.url, "--concurrency", 2, "--num-requests", 6, "--output-tokens", 3, "--json",
                "--output", out, "--figure", picture, "--seed", 3, "--warmup", 1, "--salt", "s")  # fmt: skip
    assert said.err == ""
    values, result = json.loads(said.out), LoadResult.load(out)
    assert values["requests"] == result.summary.requests == 5
    assert values["ttft_ms"]["p95"] == result.summary.ttft_ms.p95
    assert (values["settings"]["loop"], values["settings"]["salt"], values["settings"]["seed"]) == ("closed", "s", 3)
    assert matplotlib.image.imread(picture).shape[1] == 900


def test_a_trace(server, capsys, tmp_path):
    rows = [TraceRequest(i / 1000, 600, 256, (1, i + 2)) for i in range(4)]
    write_mooncake(tmp_path / "t.jsonl", rows)
    server.bodies.clear()
    said = load(capsys, "--url", server.url, "--trace", tmp_path / "t.jsonl", "--length-scale", 1 / 64,
                "--num-requests", 3, "--max-output-tokens", 2, "--json")  # fmt: skip
    assert json.loads(said.out)["requests"] == 3
    prompts = [body["prompt"] for body in server.bodies]
    assert {len(prompt) for prompt in prompts} == {9}
    assert prompts[0][:8] == prompts[1][:8] == prompts[2][:8]  # one hash id is 512 / 64 tokens
    assert len({prompt[8] for prompt in prompts}) > 1


@pytest.mark.parametrize(
    "options",
    [
        ["--url", "http://127.0.0.1:9"], ["--url", "x"], ["--rate", 0], ["--num-requests", 0], ["--slo", "fast"],
        ["--token-ids", "7"], ["--prompt-tokens", "x"], ["--trace", "no-such-file"], ["--figure", "run.txt"],
        ["--output", "no/such/folder/run.json"], ["--concurrency", 0], ["--warmup", 100], ["--seed", -1],
        ["--timeout", 0], ["--concurrency", 2, "--max-in-flight", 2],
    ],
)  # fmt: skip
def test_bad_options_are_one_line(capsys, options):
    said = load(capsys, *options, code=2)
    assert said.out == ""
    assert said.err.startswith("minillm: error: ")
    assert said.err.count("\n") == 1


# --- against our own server ---


def test_end_to_end(tmp_path_factory):
    """Lengths, streams and cache hits of our own server, as the load generator sees them."""
    prompts = Prompts(shared_prefix=24, token_ids=(20, 200))
    requests = make_requests(
        arrival_times("poisson", rate=60, count=24, seed=1), "uniform:30:40", "uniform:2:12", seed=1
    )
    with serving(make_chat_model(tmp_path_factory)) as server:
        result = run_load(server.url, requests, prompts=prompts, slo=SLO(ttft_ms=60_000), progress=False)
        chat = run_load(Target(server.url, chat=True), requests[:4], concurrency=2, progress=False)
    summary = result.summary
    assert summary.statuses["ok"] == 24, [r.error for r in result.records]
    assert [r.prompt_tokens for r in result.records] == [r.prompt_tokens for r in requests]
    assert [r.output_tokens for r in result.records] == [r.output_tokens for r in requests]
    assert summary.token_source == "usage"
    assert summary.good_fraction == 1
    assert summary.cached_tokens > 0  # the shared prefix; but no run finds another's tokens
    assert result.settings["model"] == MODEL
    assert result.settings["prompts"] == "token ids"
    assert chat.summary.statuses["ok"] == 4
    assert [r.output_tokens for r in chat.records] == [r.output_tokens for r in requests[:4]]
