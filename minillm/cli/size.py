"""`python -m minillm size`: does this model fit on that GPU?"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from ..errors import ConfigError, RequestError, short
from . import common

if TYPE_CHECKING:
    from ..analysis import MemoryBudget
    from ..config import ModelConfig

EXAMPLES = """
python -m minillm size Llama-3-8B --tokens 8192 --sequences 16 --gpu h100
python -m minillm size Llama-3.1-70B --tokens 4096 --sequences 64 --gpu h100 --tp 4 --weights fp8 --json
python -m minillm size path/to/config.json --weights int4-g128 --kv fp8 --gpu l4
python -m minillm size --list
"""
_LABELS = {"kv": "KV cache", "headroom": "headroom for the allocator"}


def add_parser(commands) -> None:
    parser = common.add_command(
        commands, "size", run, "say whether a model fits on a GPU, and with how many sequences", EXAMPLES
    )
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG",
        help="a config.json, a folder that holds one, a .gguf file, or a name of the built-in table",
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, default=4096, help="of each sequence, prompt and output (default: 4096)")
    parser.add_argument("--sequences", type=int, default=1, help="at once (default: 1)")
    parser.add_argument("--gpu", default="h100", help="a name of the datasheet table (default: h100)")
    parser.add_argument("--tp", type=int, default=1, metavar="RANKS", help="tensor-parallel GPUs (default: 1)")
    parser.add_argument("--weights", default="bf16", metavar="FORMAT", help="bf16, fp8, int8, int4-g128, mxfp4, ...")
    parser.add_argument("--kv", default="bf16", metavar="FORMAT", help="of the KV cache (default: bf16)")
    parser.add_argument("--list", action="store_true", help="print the names of the built-in tables and stop")
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.list:
        return _list(args.json)
    from ..analysis import budget

    name, config = find_config(args.config)
    result = budget(
        config, args.tokens, args.sequences, args.gpu,
        weight_dtype=args.weights, kv_dtype=args.kv, tensor_parallel=args.tp,
    )  # fmt: skip
    if args.json:
        common.print_json({"model": name, **result.to_dict()})
    else:
        _print(name, result)
    return 0


def find_config(source: str | None) -> tuple[str, ModelConfig]:
    """(name to show, config) of a file, a folder, or a model of the built-in table. Raises MinillmError."""
    from ..analysis import MODELS, find_model
    from ..config import ModelConfig
    from ..storage import user_path

    if not source or not source.strip():
        raise RequestError("give a config.json or a model's name; size --list prints the names")
    path = user_path(source, "config")
    if path.suffix == ".gguf":
        from ..gguf_file import GGUFFile

        return path.stem, GGUFFile(path).config
    if os.path.exists(path) or path.suffix == ".json":
        return str(path), ModelConfig.from_file(path)
    if source.startswith((".", "~", "/")) or source.count("/") > 1:  # a path, and no hub name
        raise ConfigError(f"{short(source)}: no such file or folder; check the path, or size --list prints the names")
    by_hub_name = {entry.source.lower(): entry for entry in MODELS.values()}
    entry = by_hub_name.get(source.lower()) or find_model(source)
    return entry.name if entry.checked else f"{entry.name} (shape from memory)", entry.config


def _print(name: str, result: MemoryBudget) -> None:
    plan = result.plan
    gpus = plan.gpu.name if plan.tensor_parallel == 1 else f"{plan.tensor_parallel} x {plan.gpu.name}"
    note = "" if plan.gpu.checked else ", figures from memory"
    print(f"{common.one_line(name, 100)} on {gpus} ({common.size_text(result.gpu_bytes)} each{note})")
    rows = [(_LABELS.get(part, part), size) for part, size in result.parts().items()]
    rows += [("total", result.total), ("free" if result.fits else "missing", abs(result.free))]
    share = [(label, common.size_text(size), f"{size / result.gpu_bytes:7.1%}") for label, size in rows]
    values = result.to_dict()
    formats = f"weights {values['weight_format']}, KV {values['kv_format']}"
    common.print_rows(f"{plan.sequences} x {plan.tokens:,} tokens, {formats}; on each GPU:", share)
    print(_verdict(result))


def _verdict(result: MemoryBudget) -> str:
    plan = result.plan
    most = f"at most {result.max_sequences:,} sequences of {plan.tokens:,} tokens"
    if result.fits:
        return f"Fits, {most}."
    if result.gpus_needed is None:
        return f"Does not fit ({most}), and no number of these GPUs helps; try fewer sequences or smaller formats."
    return f"Does not fit ({most}); {result.gpus_needed} GPUs hold it: --tp {result.gpus_needed}."


def _list(as_json: bool) -> int:
    from ..analysis import HARDWARE, MODELS

    if as_json:
        common.print_json({"models": list(MODELS), "gpus": list(HARDWARE)})
        return 0
    print("models: " + ", ".join(MODELS))
    print("GPUs:   " + ", ".join(HARDWARE))
    return 0
