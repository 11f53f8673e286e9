"""`python -m minillm serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import os

from ..errors import EngineError
from . import common, drafting

EXAMPLES = """
python -m minillm serve
python -m minillm serve --port 9000 --max-num-seqs 32 --max-waiting 100
python -m minillm serve --host 0.0.0.0 --api-key secret
python -m minillm serve --speculate ngram:5
"""
KEY_VARIABLE = "MINILLM_API_KEY"
MAX_WAITING = 1000  # a queue without an end only turns a refusal into a time-out

# flag -> (type, metavar, help); the names are those of SchedulerConfig
_ENGINE = {
    "max-num-seqs": (int, "N", "sequences that run at once (default: 256)"),
    "max-num-batched-tokens": (int, "N", "tokens of one step; long prompts are cut into chunks (default: 512)"),
    "max-model-len": (int, "N", "tokens of prompt and answer together (default: 8192, and the model's context)"),
    "num-blocks": (int, "N", "blocks of the KV cache, instead of --kv-cache-bytes"),
    "block-size": (int, "N", "tokens of one block (default: 16)"),
    "policy": (str, "NAME", "fcfs, or priority: a request's priority counts, lower runs first"),
    "prefix-cache": (str, "NAME", "hash, radix or off (default: hash)"),
    "preemption": (str, "NAME", "recompute, or swap to host memory (default: recompute)"),
    "watermark": (float, "SHARE", "of the blocks, which an admission leaves free (default: 0.01)"),
    "long-prefill-token-threshold": (int, "N", "most tokens of one prompt in a step (default: 0, no limit)"),
    "num-host-blocks": (int, "N", "blocks in host memory (default: 0)"),
    "host-reuse": (str, "NAME", "measured, always or never: whether prefixes come back from host memory"),
    "max-waiting": (int, "N", f"requests in the queue before further ones get 429 (default: {MAX_WAITING})"),
    "ttft-slo": (float, "SECONDS", "refuse requests whose first token would come later than this"),
}
_FIELDS = {"ttft_slo": "ttft_slo_s"}
_ALSO = {"policy": ["--scheduling-policy"]}  # vLLM's name
_SWITCHES = {
    "no-enable-prefix-caching": "the same as --prefix-cache off",
    "no-enable-chunked-prefill": "take prompts whole",
}


def add_parser(commands) -> None:
    parser = common.add_command(
        commands,
        "serve",
        run,
        "serve the model to OpenAI clients",
        EXAMPLES,
        description="Serve /v1/completions and /v1/chat/completions, with /v1/models, /health and /metrics. "
        "SIGTERM or Ctrl-C lets running requests finish; a second one ends at once.",
    )
    common.add_model_options(parser, offload=True)
    drafting.add_options(parser)
    _add_server_options(parser.add_argument_group("server"))
    group = parser.add_argument_group("engine")
    for flag, (kind, metavar, text) in _ENGINE.items():
        names = [f"--{flag}", *_ALSO.get(flag, ())]
        group.add_argument(*names, dest=flag.replace("-", "_"), type=kind, metavar=metavar, help=text)
    for flag, text in _SWITCHES.items():
        group.add_argument(f"--{flag}", action="store_true", help=text)
    common.add_kv_cache_dtype(group)
    group.add_argument("--kv-cache-bytes", type=int, default=1 << 30, metavar="N", help="memory for the KV cache "
                       "(default: 1 GiB)")  # fmt: skip


def _add_server_options(group) -> None:
    group.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="default: 127.0.0.1, this machine alone")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="0 for a free one (default: 8000)")
    group.add_argument(
        "--api-key", action="append", default=[], metavar="KEY",
        help=f"clients must send one of these; may be repeated (default: ${KEY_VARIABLE}, which others cannot see in "
        "the list of processes)",
    )  # fmt: skip
    group.add_argument("--served-model-name", metavar="NAME", help="what clients call the model (default: its own)")
    group.add_argument("--max-body-bytes", type=int, default=1 << 20, metavar="N", help="default: 1 MiB")
    group.add_argument("--max-prompt-tokens", type=int, metavar="N", help="default: as many as the engine holds")
    group.add_argument(
        "--max-connections", type=int, default=4096, metavar="N",
        help="held at once, and fewer if ulimit -n leaves room for fewer (default: 4096)",
    )  # fmt: skip
    group.add_argument(
        "--request-timeout", type=float, default=600.0, metavar="SECONDS", help="0 for none (default: 600)"
    )
    group.add_argument(
        "--drain-timeout", type=float, default=30.0, metavar="SECONDS",
        help="what running requests get to finish in at the end (default: 30)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from ..serving.lifecycle import bind, serve_process
    from ..serving.settings import ServerSettings

    keys = tuple(args.api_key) or tuple(filter(None, [os.environ.get(KEY_VARIABLE)]))
    settings = ServerSettings(
        model_name=args.served_model_name or common.model_name(args.model),
        host=args.host,
        port=args.port,
        api_keys=keys,
        max_body_bytes=args.max_body_bytes,
        max_prompt_tokens=args.max_prompt_tokens,
        max_connections=args.max_connections,
        request_timeout_s=args.request_timeout or None,
        drain_timeout_s=args.drain_timeout,
    )
    with bind(settings.host, settings.port) as sock:
        if not keys and not _is_local(sock.getsockname()[0]):
            common.say(f"minillm: warning: {settings.host} is open to others and no API key is set; use --api-key")
        return serve_process(_engine(args), settings, sock)


def _engine(args: argparse.Namespace):
    from ..async_engine import AsyncEngine
    from ..engine import Engine
    from ..llm import scheduler_config

    names = {flag: flag.replace("-", "_") for flag in _ENGINE}
    options = {_FIELDS.get(n, n): v for n in names.values() if (v := getattr(args, n)) is not None}
    options.setdefault("max_waiting", MAX_WAITING)
    if args.no_enable_prefix_caching:
        options["prefix_cache"] = "off"
    if args.no_enable_chunked_prefill:
        options["enable_chunked_prefill"] = False
    _check_options(options)
    speculative = drafting.config(args)
    model, tokenizer = common.load(args)
    dtype = args.kv_cache_dtype
    config = scheduler_config(model, args.kv_cache_bytes, options, dtype)
    return AsyncEngine(Engine(model, tokenizer, config, kv_cache_dtype=dtype, speculative=speculative))


def _check_options(options: dict) -> None:
    """A bad setting is told before a model is loaded."""
    from ..scheduler_config import SchedulerConfig

    try:
        SchedulerConfig(**options)
    except TypeError as error:
        raise EngineError(f"this engine has no such setting: {error}") from None


def _is_local(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
