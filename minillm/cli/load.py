"""`python -m minillm load`: sends requests to a server as users would, and says how long they waited."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from . import common
from .serve import KEY_VARIABLE

if TYPE_CHECKING:
    from ..serving.load_metrics import Spread, Summary
    from ..serving.load_run import LoadResult
    from ..serving.load_traces import Trace

EXAMPLES = """
python -m minillm load --rate 2 --num-requests 100 --slo ttft=500,tpot=50
python -m minillm load --arrival bursty --cv 3 --rate 2 --duration 60 --output run.json --figure run.png
python -m minillm load --concurrency 4 --num-requests 40 --prompt-tokens lognormal:200:0.8
python -m minillm load --trace mooncake.jsonl --time-scale 2 --length-scale 0.03125 --num-requests 200
"""
DEFAULT_REQUESTS = 100
ENOUGH = 100_000  # for a closed loop that ends by the clock


def add_parser(commands) -> None:
    parser = common.add_command(
        commands,
        "load",
        run,
        "send load to a server and measure TTFT, TPOT, ITL, E2EL and goodput",
        EXAMPLES,
        description="Send requests to any OpenAI-compatible server, in an open loop (arrivals do not wait for answers) "
        "or a closed one (--concurrency clients), and measure from the intended arrival. Prompts are new tokens in "
        "each run, so that a prefix cache warmed by the last run does not make this one look fast.",
    )
    _server_options(parser.add_argument_group("server"))
    _arrival_options(parser.add_argument_group("arrivals"))
    _workload_options(parser.add_argument_group("requests"))
    group = parser.add_argument_group("result")
    group.add_argument("--slo", metavar="LIMITS", help="ttft=500,tpot=50,e2el=3000, any of them, in ms; for goodput")
    group.add_argument(
        "--warmup", type=int, default=0, metavar="N", help="leave the first N requests out of the numbers"
    )
    group.add_argument("--output", metavar="FILE", help="write every request's times as JSON")
    group.add_argument("--figure", metavar="FILE", help="draw latencies and requests in flight (.png, .svg, .pdf)")
    common.add_json(parser)


def _server_options(group) -> None:
    group.add_argument("--url", default="http://127.0.0.1:8000", help="default: http://127.0.0.1:8000")
    group.add_argument("--model", metavar="NAME", help="default: the first that the server names")
    group.add_argument("--api-key", metavar="KEY", help=f"default: ${KEY_VARIABLE}")
    group.add_argument("--chat", action="store_true", help="/v1/chat/completions instead of /v1/completions")
    group.add_argument(
        "--prompts", choices=("auto", "ids", "words"), default="auto", help="token ids are exact lengths"
    )
    group.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of one request (default: 600)")


def _arrival_options(group) -> None:
    group.add_argument("--arrival", choices=("poisson", "constant", "bursty", "batch"), default="poisson")
    group.add_argument("--rate", type=float, default=1.0, metavar="R", help="requests a second (default: 1)")
    group.add_argument(
        "--cv", type=float, default=2.0, help="of bursty gaps: deviation / mean; 1 is Poisson (default: 2)"
    )
    group.add_argument("--concurrency", type=int, metavar="N", help="closed loop: N clients that wait for answers")
    group.add_argument("--think-time", type=float, default=0.0, metavar="S", help="between a client's requests")
    group.add_argument("--max-in-flight", type=int, metavar="N", help="open loop through N connections")
    group.add_argument(
        "--num-requests", type=int, metavar="N", help=f"default: {DEFAULT_REQUESTS}, or what fits --duration"
    )
    group.add_argument("--duration", type=float, metavar="S", help="send nothing later than this")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of arrivals and lengths (default: 0)")


def _workload_options(group) -> None:
    lengths = "N, uniform:A:B, lognormal:MEDIAN:SIGMA or list:A,B,C"
    group.add_argument("--prompt-tokens", default="128", metavar="LEN", help=f"{lengths} (default: 128)")
    group.add_argument("--output-tokens", default="64", metavar="LEN", help="the same (default: 64)")
    group.add_argument("--shared-prefix", type=int, default=0, metavar="N", help="tokens that all prompts begin with")
    group.add_argument("--salt", metavar="TEXT", help="repeat the tokens of an earlier run, and find its cache warm")
    group.add_argument(
        "--token-ids", default="1000:10000", metavar="A:B", help="ids to draw from (default: 1000:10000)"
    )
    group.add_argument("--trace", metavar="FILE", help="arrivals and lengths from a trace")
    group.add_argument("--trace-format", choices=("azure", "burstgpt", "mooncake"), help="default: by its first line")
    group.add_argument("--time-scale", type=float, default=1.0, metavar="X", help="0.5 makes a trace twice as fast")
    group.add_argument("--length-scale", type=float, default=1.0, metavar="X", help="multiply a trace's lengths")
    group.add_argument("--max-prompt-tokens", type=int, metavar="N", help="clip a trace's prompts")
    group.add_argument("--max-output-tokens", type=int, metavar="N", help="clip a trace's outputs")


def run(args: argparse.Namespace) -> int:
    from ..serving.load_metrics import SLO
    from ..serving.load_run import run_load

    slo = SLO.parse(args.slo) if args.slo else SLO()
    _check_files(args)
    requests, prompts, settings = _workload(args)
    result = run_load(
        _target(args),
        requests,
        prompts=prompts,
        concurrency=args.concurrency,
        think_time_s=args.think_time,
        max_in_flight=args.max_in_flight,
        duration_s=args.duration,
        warmup=args.warmup,
        slo=slo,
        progress=sys.stderr.isatty(),
        settings=settings,
    )
    if args.output:
        result.save(args.output)
    if args.figure:
        from ..viz.load_report import report

        report(result).savefig(args.figure)
    if args.json:
        common.print_json({"settings": result.settings, **result.summary.as_dict()})
    else:
        print_summary(result)
    return 0


def _target(args: argparse.Namespace):
    from ..serving.load_client import Target

    ids = {"auto": None, "ids": True, "words": False}[args.prompts]
    key = args.api_key or os.environ.get(KEY_VARIABLE)
    return Target(args.url, args.model, key, args.chat, ids, args.timeout)


def _check_files(args: argparse.Namespace) -> None:
    """Before the run, not after it. Raises LoadError."""
    from ..serving.load_record import LoadError

    for path in filter(None, (args.output, args.figure)):
        if not os.path.isdir(os.path.dirname(path) or "."):
            raise LoadError(f"{path}: its folder is not there; make it first")
    if args.figure and not args.figure.lower().endswith((".png", ".svg", ".pdf")):
        raise LoadError(f"{args.figure}: a figure's name ends with .png, .svg or .pdf")


def _workload(args: argparse.Namespace) -> tuple[Any, Any, dict[str, Any]]:
    """The requests, their prompts and what to keep of the options."""
    from ..serving.load_arrivals import arrival_times
    from ..serving.load_workload import Prompts, make_requests

    options = {"seed": args.seed, "salt": args.salt, "shared_prefix": args.shared_prefix}
    options["token_ids"] = _token_ids(args.token_ids)
    if args.trace:
        trace = _trace(args)
        settings = {"trace": os.path.basename(args.trace), "time_scale": args.time_scale}
        settings |= {"length_scale": args.length_scale, "left_out": trace.left_out}
        return trace.requests, Prompts(**options, block_tokens=trace.block_tokens), settings
    closed = args.concurrency is not None
    count = args.num_requests
    if count is None and closed and args.duration is not None:
        count = ENOUGH
    elif count is None and (args.duration is None or args.arrival == "batch"):
        count = DEFAULT_REQUESTS
    kind = "batch" if closed else args.arrival
    arrivals = arrival_times(kind, args.rate, count, None if closed else args.duration, args.seed, args.cv)
    settings = {"arrival": None if closed else kind, "rate": None if closed else args.rate, "cv": args.cv}
    settings |= {"prompt_tokens": args.prompt_tokens, "output_tokens": args.output_tokens}
    return make_requests(arrivals, args.prompt_tokens, args.output_tokens, args.seed), Prompts(**options), settings


def _trace(args: argparse.Namespace) -> Trace:
    from ..serving.load_traces import read_trace

    return read_trace(
        args.trace,
        args.trace_format,
        args.num_requests,
        args.time_scale,
        args.length_scale,
        args.max_prompt_tokens,
        args.max_output_tokens,
    )


def _token_ids(text: str) -> tuple[int, int]:
    from ..serving.load_record import LoadError

    low, _, high = text.partition(":")
    try:
        return int(low), int(high)
    except ValueError:
        raise LoadError(f"token ids {text!r}: write the lowest and one past the highest, as 1000:10000") from None


def print_summary(result: LoadResult) -> None:
    """The numbers as a table; warnings on stderr."""
    summary, settings = result.summary, result.settings
    print(f"{settings.get('model')} at {settings.get('url')}, {settings.get('loop')} loop")
    common.print_rows("requests", _counts(summary, settings))
    print(f"\nlatency, ms   {'mean':>10}{'P50':>10}{'P95':>10}{'P99':>10}")
    of_token = "token" if summary.itl_unit == "token" else "chunk"
    rows = (
        ("TTFT", summary.ttft_ms, "from the intended arrival"),
        ("TPOT", summary.tpot_ms, "(E2EL - TTFT) / (n - 1), a request"),
        ("ITL", summary.itl_ms, f"gaps between {of_token}s, pooled"),
        ("E2EL", summary.e2el_ms, "from the intended arrival"),
    )
    for name, spread, remark in rows:
        print(f"  {name:<12}{_cells(spread)}  {remark}")
    for warning in summary.warnings:
        common.say(f"minillm: warning: {warning}")


def _counts(summary: Summary, settings: dict[str, Any]) -> list[tuple[str, str, str]]:
    lost = [f"{count} {status}" for status, count in summary.statuses.items() if count and status != "ok"]
    cached = f"{summary.cached_tokens} from the prefix cache" if summary.cached_tokens else ""
    rows = [
        ("measured", str(summary.requests), ", ".join(lost) or f"all ended well, in {summary.window_s:.1f} s"),
        (
            "offered",
            f"{summary.offered_rate:.2f}/s",
            "as clients became free" if settings.get("loop") == "closed" else "intended arrivals",
        ),
        ("answered", f"{summary.request_rate:.2f}/s", f"at most {summary.max_in_flight} in flight"),
        (
            "output tokens",
            f"{summary.output_token_rate:.1f}/s",
            f"{summary.output_tokens}, counted by {summary.token_source}",
        ),
        ("prompt tokens", str(summary.prompt_tokens), cached),
    ]
    if summary.slo.any:
        met = f"{100 * summary.good_fraction:.1f}% met " + ", ".join(
            f"{name.removesuffix('_ms').upper()} {limit:g} ms" for name, limit in summary.slo._asdict().items() if limit
        )
        rows.append(("goodput", f"{summary.goodput:.2f}/s", met))
    if settings.get("left_out"):
        rows.append(("left out of the trace", str(settings["left_out"]), "requests that had failed"))
    return rows


def _cells(spread: Spread) -> str:
    return "".join(f"{'-' if value != value else f'{value:,.1f}':>10}" for value in spread[1:])
