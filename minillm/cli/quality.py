"""`python -m minillm quality`: what quantizing a model changed, and what it saved."""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

from . import common

EXAMPLES = """
python -m minillm quality --quantize int8
python -m minillm quality --quantize gptq-int4-g128 --tokens 4096
python -m minillm quality --quantize mxfp4 --json
"""


def add_parser(commands) -> None:
    parser = common.add_command(
        commands,
        "quality",
        run,
        "what quantizing changes: perplexity, KL, agreement, bytes",
        EXAMPLES,
        description="Quantize the model and compare it with itself in float32 on held-out text: Python's own "
        "documentation, of which the first half is for calibration and the second for this. The default model comes "
        "from a 4-bit file, which most models do not: quantizing it to 4 bits again is not the general case.",
    )
    parser.add_argument("--tokens", type=int, default=2048, metavar="N", help="to evaluate on (default: 2048)")
    common.add_json(parser)
    common.add_model_options(parser, quantize="required")


def run(args: argparse.Namespace) -> int:
    values = _measure(args)
    if args.json:
        common.print_json(values)
    else:
        _print(values)
    return 0


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    device = common.prepare(args)
    from .. import checkpoint
    from ..analysis import quality
    from ..quantization.loading import load_quantized

    model, tokenizer, report = load_quantized(args.model, args.quantize, device)
    ids = quality.evaluation_ids(tokenizer, args.tokens)
    reference, _ = checkpoint.load(args.model, "float32", device)
    found = quality.compare_models(model, reference, ids)
    return {
        "scheme": args.quantize,
        "perplexity": found.perplexity,
        "reference_perplexity": found.reference_perplexity,
        "kl": found.kl,
        "top1_agreement": found.top1_agreement,
        "weight_bytes": report.stored_bytes,
        "float32_bytes": report.float32_bytes,
        "bits_per_weight": report.bits_per_weight,
        "groups": {str(size): count for size, count in sorted(report.groups.items())},
        "tokens": found.tokens,
        "text": "pydoc_data.topics, second half",
        "sha256": hashlib.sha256(quality.EVALUATION_TEXT.encode()).hexdigest(),
        "layout": model.layout,
        "model": args.model or "SmolLM2-135M-Instruct",
    }


def _print(v: dict[str, Any]) -> None:
    print(f"{v['model']}, {v['scheme']}, against itself in float32 on {v['tokens']} tokens of {v['text']}\n")
    common.print_rows(
        "Quality",
        [
            ("perplexity", f"{v['perplexity']:.3f}", f"float32: {v['reference_perplexity']:.3f}"),
            ("KL divergence", f"{v['kl']:.2e}", "nats a token, float32 against quantized"),
            ("same first choice", f"{v['top1_agreement']:.1%}", "of tokens"),
        ],
    )
    matrices = sum(v["groups"].values())
    groups = ", ".join(f"{n} in groups of {size}" for size, n in v["groups"].items())
    common.print_rows(
        "Size",
        [
            (
                "weight matrices",
                common.size_text(v["weight_bytes"]),
                f"float32: {common.size_text(v['float32_bytes'])}",
            ),
            ("bits a weight", f"{v['bits_per_weight']:.2f}", "scales and zero points included"),
            ("matrices", str(matrices), groups),
        ],
    )
