"""Pictures of a load: who waited how long, what was in flight, and where goodput leaves throughput.

Data are `serving.load_run.LoadResult`s. Latencies are in milliseconds, counted from the intended arrival.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter

from ..serving.load_definitions import Row
from ..serving.load_metrics import measured
from ..serving.load_record import RequestRecord
from ..serving.load_run import LoadResult
from .style import BLUE, GREEN, GREY, INK, ORANGE, PAPER, RED, SKY, figure, tint
from .units import number

_METRICS = (("TTFT", "ttft_s", "ttft_ms"), ("TPOT", "tpot_s", "tpot_ms"), ("E2EL", "e2el_s", "e2el_ms"))


def latency_cdfs(results: LoadResult | Mapping[str, LoadResult], title: str = "Who waited how long") -> Figure:
    """The share of requests below each TTFT, TPOT and E2EL, one panel each, with the SLO and P50, P95, P99.

    results: one, or several by name over the same axes (then without the percentile marks). A request that was
    refused or failed never gets there: its curve ends below 1.
    """
    named = results if isinstance(results, Mapping) else {"": results}
    with figure(3.6, 3, sharey=True) as (fig, axes):
        fig.suptitle(title, x=0.01, ha="left", weight="bold", size=13)
        for ax, (name, attribute, limit) in zip(axes, _METRICS, strict=True):
            for i, result in enumerate(named.values()):
                _cdf(ax, result, attribute, (BLUE, ORANGE, GREEN, SKY)[i % 4], marks=len(named) == 1)
            _slo_line(ax, next(iter(named.values())), limit)
            ax.set(xlabel=f"{name} (ms)", ylim=(0, 1.03))
            ax.set_xlim(left=0)
            ax.xaxis.set_major_formatter(lambda value, _: number(value))
        axes[0].set_ylabel("share of requests")
        if len(named) > 1:
            lines = [Line2D([], [], color=(BLUE, ORANGE, GREEN, SKY)[i % 4], label=n) for i, n in enumerate(named)]
            fig.legend(handles=lines, loc="outside lower center", ncols=len(lines))
    return fig


def _cdf(ax: Axes, result: LoadResult, attribute: str, colour: str, marks: bool) -> None:
    rows = measured(result.records)
    values = np.sort([1e3 * v for r in rows if r.ok and (v := getattr(r, attribute)) is not None])
    if not len(values):
        return
    lost = sum(not row.ok for row in rows)
    share = np.arange(1, len(values) + 1) / (len(values) + lost)
    ax.step([values[0], *values], [0, *share], where="post", color=colour)
    if not marks:
        return
    spread = getattr(result.summary, attribute.replace("_s", "_ms"))
    for label, value, q in (("P50", spread.p50, 0.5), ("P95", spread.p95, 0.95), ("P99", spread.p99, 0.99)):
        height = q * len(values) / (len(values) + lost)
        ax.plot([value], [height], "o", color=colour, markersize=5)
        ax.annotate(
            f"{label} {number(float(f'{value:.3g}'))}",
            (value, height),
            (-7, {0.5: 0, 0.95: -4, 0.99: 3}[q]),
            textcoords="offset points",
            ha="right",
            va="center",
            size=8.5,
            bbox={"facecolor": PAPER, "edgecolor": "none", "alpha": 0.8, "pad": 0.6},
        )


def _slo_line(ax: Axes, result: LoadResult, limit: str) -> None:
    value = getattr(result.slo, limit)
    if value is None:
        return
    ax.axvline(value, color=RED, linestyle="--", linewidth=1.4)
    ax.annotate(
        f"SLO {value:g}",
        (value, 0.03),
        (4, 0),
        textcoords="offset points",
        size=8.5,
        color=RED,
        rotation=90,
        va="bottom",
    )


def in_flight_timeline(result: LoadResult, title: str = "Requests in flight", lanes: int = 200) -> Figure:
    """Above, a line for each request from its intended arrival to its end; below, how many are there at each time.

    Grey: waiting for the first token, wherever. Colour: tokens come; red, a request that missed an SLO. A cross is one
    that was refused, failed or cut. lanes: draw the first so many requests only.
    """
    rows = sorted(result.records, key=lambda row: row.intended_s)
    with figure(5.6, 1, 2, sharex=True, gridspec_kw={"height_ratios": [2.2, 1]}) as (fig, (top, bottom)):
        _lanes(top, rows[:lanes], result)
        waiting, decoding = _counts(rows)
        _stack(bottom, [moment for moment, _ in waiting], decoding, waiting)
        top.set(ylabel="request, by arrival", title=title)
        bottom.set(xlabel="time since the start (s)", ylabel="in flight", xlim=(0, None), ylim=(0, None))
        bottom.yaxis.get_major_locator().set_params(integer=True)
    return fig


def _stack(ax: Axes, times, decoding, waiting) -> None:
    lower = np.array([count for _, count in decoding])
    upper = lower + np.array([count for _, count in waiting])
    ax.fill_between(times, 0, lower, step="post", color=SKY, linewidth=0)
    ax.fill_between(times, lower, upper, step="post", color=tint(GREY, 0.4), linewidth=0)


def _lanes(ax: Axes, rows: Sequence[RequestRecord], result: LoadResult) -> None:
    waits, streams, colours = [], [], []
    for lane, row in enumerate(rows):
        first = row.chunk_times[0] if row.chunk_times else row.end_s
        waits.append([(row.intended_s, lane), (first, lane)])
        streams.append([(first, lane), (row.end_s, lane)])
        colours.append(BLUE if not result.slo.any or result.slo.met_by(row) else RED)
        if not row.ok:
            ax.plot([row.end_s], [lane], "x", color=INK, markersize=5)
    width = min(4.0, max(1.2, 220 / max(1, len(rows))))
    ax.add_collection(LineCollection(waits, colors=[tint(GREY, 0.4)], linewidths=width, capstyle="butt"))
    ax.add_collection(LineCollection(streams, colors=colours, linewidths=width, capstyle="butt"))
    ax.set_ylim(len(rows) - 0.3, -0.7)
    ax.grid(False, axis="y")
    handles = [Patch(color=tint(GREY, 0.4), label="waits for its first token"), Patch(color=BLUE, label="tokens come")]
    if result.slo.any:
        handles.append(Patch(color=RED, label="missed an SLO"))
    if any(not row.ok for row in rows):
        handles.append(Line2D([], [], color=INK, marker="x", linestyle="", label="no answer"))
    ax.legend(handles=handles, loc="lower left", frameon=True, framealpha=0.9, edgecolor="none")


def _counts(rows: Sequence[RequestRecord]) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    """(time, waiting) and (time, decoding) at every change."""
    changes: dict[float, list[int]] = {}
    for row in rows:
        first = row.chunk_times[0] if row.chunk_times else row.end_s
        for moment, which, by in ((row.intended_s, 0, 1), (first, 0, -1), (first, 1, 1), (row.end_s, 1, -1)):
            changes.setdefault(moment, [0, 0])[which] += by
    totals, waiting, decoding = [0, 0], [], []
    for moment in sorted(changes):
        totals = [total + by for total, by in zip(totals, changes[moment], strict=True)]
        waiting.append((moment, totals[0]))
        decoding.append((moment, totals[1]))
    return waiting, decoding


def report(result: LoadResult) -> Figure:
    """Both of the above in one figure: what `python -m minillm load --figure` writes."""
    with figure(7.6, 3, 2, gridspec_kw={"height_ratios": [1.4, 1]}) as (fig, axes):
        for ax in axes[0]:
            ax.remove()
        top = fig.add_subplot(axes[0, 0].get_gridspec()[0, :])
        _lanes(top, sorted(result.records, key=lambda row: row.intended_s)[:200], result)
        summary = result.summary
        top.set(
            xlabel="time since the start (s)", ylabel="request, by arrival", title=_headline(result), xlim=(0, None)
        )
        for ax, (name, attribute, limit) in zip(axes[1], _METRICS, strict=True):
            _cdf(ax, result, attribute, BLUE, marks=True)
            _slo_line(ax, result, limit)
            ax.set(xlabel=f"{name} (ms)", ylim=(0, 1.03))
            ax.set_xlim(left=0)
            ax.xaxis.set_major_formatter(lambda value, _: number(value))
        axes[1, 0].set_ylabel("share of requests")
        if summary.backlogged:
            top.annotate(
                "backlogged: the queue was still growing",
                (0.99, 0.97),
                xycoords="axes fraction",
                ha="right",
                va="top",
                color=RED,
                size=10,
            )
    return fig


def _headline(result: LoadResult) -> str:
    summary = result.summary
    told = f"{summary.request_rate:.2f} requests/s, {summary.output_token_rate:.0f} output tokens/s"
    return told + (f", goodput {summary.goodput:.2f}/s" if result.slo.any else "")


def rate_sweep(results: Sequence[LoadResult], title: str = "Goodput falls before throughput does") -> Figure:
    """Runs at rising rates: left, requests a second answered and good; right, TTFT P50 and P99 with the SLO.

    results: open-loop runs with the SLO set; sorted here by the rate offered.
    """
    runs = sorted(results, key=lambda result: result.summary.offered_rate)
    rates = [run.summary.offered_rate for run in runs]
    with figure(3.9, 2) as (fig, (left, right)):
        fig.suptitle(title, x=0.01, ha="left", weight="bold", size=13)
        left.plot(rates, rates, color=GREY, linestyle=":", linewidth=1.4, label="offered")
        left.plot(rates, [run.summary.request_rate for run in runs], "o-", color=BLUE, label="answered (throughput)")
        left.plot(rates, [run.summary.goodput for run in runs], "o-", color=GREEN, label="within the SLO (goodput)")
        left.set(xlabel="requests offered (1/s)", ylabel="requests (1/s)", xlim=(0, None), ylim=(0, None))
        for label, colour, style in (("p50", SKY, "o-"), ("p99", ORANGE, "o-")):
            values = [getattr(run.summary.ttft_ms, label) for run in runs]
            right.plot(rates, values, style, color=colour, label=label.upper())
        _limit(right, runs[0].slo.ttft_ms)
        right.set(xlabel="requests offered (1/s)", ylabel="TTFT (ms)", xlim=(0, None), yscale="log")
        right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        right.yaxis.set_major_formatter(lambda value, _: number(value))
        right.yaxis.set_minor_formatter(NullFormatter())
        left.legend(loc="upper left")
        right.legend(loc="upper left")
    return fig


def _limit(ax: Axes, value: float | None) -> None:
    if value is not None:
        ax.axhline(value, color=RED, linestyle="--", linewidth=1.4)
        ax.annotate(f"SLO {value:g} ms", (1, value), (-2, 3), xycoords=("axes fraction", "data"),
                    textcoords="offset points", ha="right", size=9, color=RED)  # fmt: skip


def throughput_latency(results: Mapping[str, Sequence[LoadResult]], title: str) -> Figure:
    """Output tokens a second against the time of a token, one line a system, a point a run: down and right is better.

    P50 solid, P99 dashed, of TPOT.
    """
    with figure(4.2) as (fig, ax):
        for i, (name, runs) in enumerate(results.items()):
            runs = sorted(runs, key=lambda run: run.summary.output_token_rate)
            rates = [run.summary.output_token_rate for run in runs]
            colour = (BLUE, ORANGE, GREEN, SKY)[i % 4]
            for label, style, fill in (("p50", "o-", colour), ("p99", "o--", PAPER)):
                values = [getattr(run.summary.tpot_ms, label) for run in runs]
                ax.plot(rates, values, style, color=colour, markerfacecolor=fill, label=f"{name}, {label.upper()}")
        ax.margins(y=0.1)
        ax.set(xlabel="output tokens a second", ylabel="TPOT (ms)", title=title, xlim=(0, None), ylim=(0, None))
        ax.legend()
    return fig


def definitions(rows: Sequence[Row], title: str = "One data set, the same words, other numbers") -> Figure:
    """Mean and P99 of each tool's TTFT, TPOT and ITL, from `load_definitions.compare_definitions`."""
    metrics = list(dict.fromkeys(row.metric for row in rows))
    sizes = [sum(row.metric == metric for row in rows) for metric in metrics]
    shape = {"gridspec_kw": {"height_ratios": sizes}, "squeeze": False}
    with figure(1.9 + 0.5 * len(rows), 1, len(metrics), **shape) as (fig, axes):
        fig.suptitle(title, x=0.01, ha="left", weight="bold", size=13)
        for ax, metric in zip(axes[:, 0], metrics, strict=True):
            _definition_bars(ax, [row for row in rows if row.metric == metric])
            ax.set_xlabel(f"{metric} (ms)")
        handles = [Patch(color=BLUE, label="mean, ours"), Patch(color=tint(BLUE, 0.5), label="mean, another tool's")]
        handles.append(Line2D([], [], color=ORANGE, marker="D", linestyle="", label="P99"))
        fig.legend(handles=handles, loc="outside lower center", ncols=3)
    return fig


def _definition_bars(ax: Axes, rows: Sequence[Row]) -> None:
    places = range(len(rows))
    colours = [BLUE if row.tool.startswith("minillm") else tint(BLUE, 0.5) for row in rows]
    means = [row.spread.mean for row in rows]
    drawn = ax.barh(places, means, color=colours, height=0.7)
    ax.bar_label(drawn, [number(float(f"{mean:.3g}")) for mean in means], padding=4, size=9)
    ax.plot([row.spread.p99 for row in rows], places, "D", color=ORANGE, markersize=5)
    ax.set_yticks(places, [f"{row.tool}\n{row.rule}" for row in rows], size=8.5)
    ax.xaxis.set_major_formatter(lambda value, _: number(value))
    ax.invert_yaxis()
    ax.margins(x=0.1)
    ax.grid(False, axis="y")
