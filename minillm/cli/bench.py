"""`python -m minillm bench`: speed, memory and accuracy of a model here, beside what bounds them."""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from typing import TYPE_CHECKING, Any

from . import common, drafting
from .roof import DecodeBound, decode_bound, held_bytes

FORM = '[{"prompt_token_ids": [1, 2, 3], "max_tokens": 16}, ...]'

if TYPE_CHECKING:
    from .measure import Engine, Sizes

EXAMPLES = """
python -m minillm bench
python -m minillm bench --threads 2 --compare transformers --quality
python -m minillm bench --dtype float32 --rounds 3 --json
python -m minillm bench --quantize int8 --compile --compare transformers
python -m minillm bench --speculate ngram:5
python -m minillm bench --workload requests.json --json
"""


def add_parser(commands) -> None:
    parser = common.add_command(
        commands,
        "bench",
        run,
        "measure speed and memory, beside the bound that the bandwidth sets",
        EXAMPLES,
        description="Measure decoding at batch 1, prefill, many requests at once, loading and peak memory; every "
        "figure is a median over rounds, after a warm-up, and comparisons take turns with minillm in the same run. "
        "load_s leaves out imports and the measurement, once a machine, of which layout is fastest "
        "(layout_measurement_s).",
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument("--prompt-tokens", type=int, default=32, metavar="N", help="before decoding (default: 32)")
    parser.add_argument("--output-tokens", type=int, default=64, metavar="N", help="decode steps (default: 64)")
    parser.add_argument("--prefill-tokens", type=int, default=512, metavar="N", help="default: 512")
    parser.add_argument(
        "--workload",
        metavar="FILE",
        help=f"many requests to serve at once, as JSON: {FORM} (default: 32 mixed ones, drawn here)",
    )
    parser.add_argument(
        "--compare", choices=("transformers",), help="run the same weights, in float32, in it too; and static batches"
    )
    parser.add_argument("--quality", action="store_true", help="what the layout's rounding changed, against float32")
    common.add_json(parser)
    drafting.add_options(parser)
    common.add_model_options(parser, offload=True)
    common.add_kv_cache_dtype(parser)


def run(args: argparse.Namespace) -> int:
    device = common.prepare(args)
    values = _bench(args, device)
    if args.json:
        common.print_json(values)
    else:
        from .bench_table import print_table

        print_table(values)
    return 0


def _bench(args: argparse.Namespace, device: str) -> dict[str, Any]:
    from . import measure

    sizes, speculative = _sizes(args), drafting.config(args)
    changed = args.quantize or args.sparsify or args.offload_experts
    path, layout_s = measure.settle_layout(args.model, "float32" if changed else args.dtype, device)
    started = time.perf_counter()
    model, tokenizer = common.load(args)
    report = getattr(model, "report", None)  # of compilation, which is not loading
    load_s = time.perf_counter() - started - (report.seconds if report else 0.0)
    sizes.check(model.config.max_position_embeddings)
    jobs = _jobs(args.workload, model, tokenizer, args.kv_cache_dtype)
    ours = measure.Minillm(model, tokenizer, common.cache_maker(model, args.kv_cache_dtype))
    prompt = measure.text_ids(tokenizer, max(sizes.prompt, sizes.prefill))
    measure.warm_up(ours, prompt, sizes)
    peak = measure.peak_rss_bytes()  # before anything that is not the model takes memory
    from ..analysis import measure as measure_machine

    hardware = measure_machine(device)
    engines: dict[str, Engine] = {"minillm": ours}
    if args.compare:
        from .transformers_engine import TransformersEngine

        engines["transformers"] = TransformersEngine(path, device)
        measure.warm_up(engines["transformers"], prompt, sizes)
    runs = measure.take_turns(engines, prompt, sizes)
    from .throughput import compare

    many = compare(model, tokenizer, jobs, sizes.rounds, engines.get("transformers"), args.kv_cache_dtype)
    bound = decode_bound(model, sizes.prompt + sizes.output / 2, hardware, args.kv_cache_dtype)
    values = {
        **_speeds(runs["minillm"], sizes),
        **_roofline(runs["minillm"], sizes, bound),
        **many,
        "bandwidth_spread": hardware.measured.get("spread"),
        "peak_rss_mb": peak / 1e6,
        "load_s": load_s,
        "layout_measurement_s": layout_s,
        "layout": model.layout,
        "dtype": args.dtype,
        "quantize": args.quantize,
        "sparsify": args.sparsify,
        "kv_cache_dtype": args.kv_cache_dtype,
        "compile": report and {"made": report.made, "found": report.found, "seconds": report.seconds},
        "weight_bytes_held": held_bytes(model),
        **_circumstances(args, hardware, sizes),
    }
    if args.offload_experts is not None:
        values["experts"] = model.expert_cache.counts.values()
    if args.compare:
        values["transformers"] = _comparison(runs, engines["transformers"], sizes, many)
    if speculative is not None:
        values["speculation"] = _speculation(model, tokenizer, speculative, sizes, args.kv_cache_dtype)
    if args.quality:
        from ..analysis.quality import compare_to_float32

        values["quality"] = compare_to_float32(model, tokenizer, path, device)
    return values


def _speculation(model, tokenizer, config, sizes: Sizes, kv_cache_dtype: str) -> dict[str, Any]:
    from .speculation import measure

    return measure(model, tokenizer, config, sizes.output, sizes.rounds, kv_cache_dtype)


def _jobs(path: str | None, model, tokenizer, kv_cache_dtype: str) -> list:
    from . import throughput, workload

    longest = throughput.longest(throughput.config_of(model, kv_cache_dtype))
    if path is None:
        return workload.draw(tokenizer, longest)
    return workload.read(path, min(model.config.vocab_size, tokenizer.vocab_size), longest)


def _sizes(args: argparse.Namespace) -> Sizes:
    from .measure import Sizes

    return Sizes(args.prompt_tokens, args.output_tokens, args.prefill_tokens, args.rounds)


def _speeds(runs: list, sizes: Sizes) -> dict[str, Any]:
    """Medians over the rounds; the percentiles are over all decode steps."""
    steps = sorted(step for run in runs for step in run.decode_steps)
    return {
        "decode_tok_s": sizes.output / statistics.median(sum(run.decode_steps) for run in runs),
        "prefill_tok_s": sizes.prefill / statistics.median(run.prefill_s for run in runs),
        "decode_ms": {
            "median": statistics.median(steps) * 1e3,
            "p10": steps[len(steps) // 10] * 1e3,
            "p90": steps[len(steps) * 9 // 10] * 1e3,
        },
        "prefill_ms": statistics.median(run.prefill_s for run in runs) * 1e3,
    }


def _roofline(runs: list, sizes: Sizes, bound: DecodeBound) -> dict[str, Any]:
    step = statistics.median(sum(run.decode_steps) for run in runs) / sizes.output
    return {
        "read_bandwidth_gb_s": bound.bandwidth / 1e9,
        "bytes_per_step": bound.bytes,
        "weight_bytes_per_step": bound.weight_bytes,
        "kv_bytes_per_step": bound.kv_bytes,
        "decode_bound_ms": bound.seconds * 1e3,
        "decode_fraction_of_roofline": bound.seconds / step,
    }


def _comparison(runs: dict[str, list], engine: Engine, sizes: Sizes, many: dict[str, Any]) -> dict[str, Any]:
    from .throughput import STATIC_BATCH

    ours, theirs = _speeds(runs["minillm"], sizes), _speeds(runs["transformers"], sizes)
    return {
        **theirs,
        "throughput_tok_s": many["throughput_static"]["transformers_tok_s"],
        "throughput_speedup": many["throughput_tok_s"] / many["throughput_static"]["transformers_tok_s"],
        "static_batch": STATIC_BATCH,
        "decode_speedup": ours["decode_tok_s"] / theirs["decode_tok_s"],
        "prefill_speedup": ours["prefill_tok_s"] / theirs["prefill_tok_s"],
        "same_tokens": _agreeing(runs["minillm"][0].token_ids, runs["transformers"][0].token_ids),
        "version": engine.version,
        "dtype": "float32",
        "attention": "sdpa",
    }


def _agreeing(left: list[int], right: list[int]) -> int:
    """Tokens up to the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), len(left))


def _circumstances(args: argparse.Namespace, hardware, sizes: Sizes) -> dict[str, Any]:
    import torch

    return {
        "model": args.model or "SmolLM2-135M-Instruct",
        "prompt_tokens": sizes.prompt,
        "output_tokens": sizes.output,
        "prefill_tokens": sizes.prefill,
        "rounds": sizes.rounds,
        "threads": torch.get_num_threads(),
        "device": hardware.name,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
