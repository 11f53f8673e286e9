"""`python -m minillm quality`: what quantizing or sparsifying a model, or quantizing its KV cache, changed."""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

from ..errors import RequestError
from . import common

EXAMPLES = """
python -m minillm quality --quantize int8
python -m minillm quality --quantize gptq-int4-g128 --tokens 4096
python -m minillm quality --quantize mxfp4 --json
python -m minillm quality --sparsify wanda-2:4
python -m minillm quality --kv-cache-dtype int4 --needle --needle-tokens 1024 2048 4096
"""


def add_parser(commands) -> None:
    parser = common.add_command(
        commands,
        "quality",
        run,
        "what quantizing or sparsifying changes: perplexity, KL, agreement, bytes",
        EXAMPLES,
        description="Quantize or sparsify the weights, quantize the KV cache, and compare the model with itself in "
        "float32 on held-out text: Python's own documentation, of which the first half is for calibration and the "
        "second for this. The default model comes from a 4-bit file, which most models do not: quantizing it to 4 bits "
        "again is not the general case. --needle hides a pass key in a long text and asks for it.",
    )
    parser.add_argument("--tokens", type=int, default=2048, metavar="N", help="to evaluate on (default: 2048)")
    parser.add_argument("--needle", action="store_true", help="also ask for a pass key from a long text")
    parser.add_argument(
        "--needle-tokens",
        type=int,
        nargs="+",
        default=[1024, 2048],
        metavar="N",
        help="its lengths (default: 1024 2048)",
    )
    common.add_json(parser)
    common.add_model_options(parser)
    common.add_kv_cache_dtype(parser)


def run(args: argparse.Namespace) -> int:
    values = _measure(args)
    if args.json:
        common.print_json(values)
    else:
        _print(values)
    return 0


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    if args.quantize is None and args.sparsify is None and args.kv_cache_dtype == "auto":
        raise RequestError(
            "nothing is quantized; give --quantize SCHEME, --sparsify METHOD-PATTERN, --kv-cache-dtype NAME, or several"
        )
    if args.dtype not in ("auto", "float32"):
        raise RequestError(f"quality compares with float32; leave --dtype {args.dtype} out, or see bench --quality")
    common.refuse_compile(args, "measures numbers and no speed")
    device = common.prepare(args)
    from .. import checkpoint
    from ..analysis import quality
    from ..analysis.kv_size import cache_format, kv_bytes_per_token

    reference, tokenizer = checkpoint.load(args.model, "float32", device, args.backend)
    model, size = _changed(args, device, reference)
    make_cache = common.cache_maker(model, args.kv_cache_dtype)
    ids = quality.evaluation_ids(tokenizer, args.tokens)
    found = quality.compare_models(model, reference, ids, make_cache=make_cache)
    stored = "float32" if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
    return {
        "scheme": ", ".join(name for name in (args.sparsify, args.quantize) if name) or None,
        "kv_cache_dtype": args.kv_cache_dtype,
        "perplexity": found.perplexity,
        "reference_perplexity": found.reference_perplexity,
        "kl": found.kl,
        "top1_agreement": found.top1_agreement,
        **size,
        "kv_bytes_per_token": kv_bytes_per_token(model.config, cache_format(model.config, stored), reserved=True),
        "kv_bytes_per_token_float32": kv_bytes_per_token(model.config, "float32", reserved=True),
        "needle": _needles(args, model, reference, tokenizer, make_cache) if args.needle else None,
        "tokens": found.tokens,
        "text": "pydoc_data.topics, second half",
        "sha256": hashlib.sha256(quality.EVALUATION_TEXT.encode()).hexdigest(),
        "layout": model.layout,
        "model": args.model or "SmolLM2-135M-Instruct",
    }


def _changed(args: argparse.Namespace, device: str, reference):
    """(model, what is to be said about the size of its weights)."""
    if args.sparsify is None and args.quantize is None:
        return reference, _sizes(reference, None)
    if args.sparsify is None:
        from ..quantization.loading import load_quantized

        model, _, report = load_quantized(args.model, args.quantize, device, backend=args.backend)
        return model, _sizes(model, report)
    from ..sparsity.loading import load_sparse

    model, _, sparse, report = load_sparse(args.model, args.sparsify, device, args.quantize, backend=args.backend)
    zeros = {"sparsity": sparse.fraction, "packed_bytes": sparse.packed_bytes}
    held = {"weight_bytes": sparse.stored_bytes, "float32_bytes": sparse.float32_bytes, "bits_per_weight": 32.0}
    return model, (held | {"groups": {}} if report is None else _sizes(model, report)) | zeros


def _sizes(model, report) -> dict[str, Any]:
    """Of the weights. Without a scheme they are the float32 ones."""
    if report is None:
        size = sum(p.nbytes for p in model.parameters())
        return {"weight_bytes": size, "float32_bytes": size, "bits_per_weight": 32.0, "groups": {}}
    return {
        "weight_bytes": report.stored_bytes,
        "float32_bytes": report.float32_bytes,
        "bits_per_weight": report.bits_per_weight,
        "groups": {str(size): count for size, count in sorted(report.groups.items())},
    }


def _needles(args: argparse.Namespace, model, reference, tokenizer, make_cache) -> dict[str, Any]:
    from ..analysis.needle import needles, summary

    ours = summary(needles(model, tokenizer, args.needle_tokens, make_cache=make_cache))
    return ours | {"reference": summary(needles(reference, tokenizer, args.needle_tokens))}


def _print(v: dict[str, Any]) -> None:
    what = [v["scheme"], f"KV cache {v['kv_cache_dtype']}" if v["kv_cache_dtype"] != "auto" else None]
    what = ", ".join(filter(None, what))
    print(f"{v['model']}, {what}, against itself in float32 on {v['tokens']} tokens of {v['text']}\n")
    rows = [
        ("perplexity", f"{v['perplexity']:.3f}", f"float32: {v['reference_perplexity']:.3f}"),
        ("KL divergence", f"{v['kl']:.2e}", "nats a token, float32 against this"),
        ("same first choice", f"{v['top1_agreement']:.1%}", "of tokens"),
    ]
    if v["needle"] is not None:
        rows += _needle_rows(v["needle"])
    common.print_rows("Quality", rows)
    float32 = f"float32: {common.size_text(v['float32_bytes'])}"
    rows = [("weight matrices", common.size_text(v["weight_bytes"]), float32)] if v["scheme"] else []
    if v["scheme"]:
        rows.append(("bits a weight", f"{v['bits_per_weight']:.2f}", "scales and zero points included"))
    if v["groups"]:
        groups = ", ".join(f"{n} in groups of {size}" for size, n in v["groups"].items())
        rows.append(("matrices", str(sum(v["groups"].values())), groups))
    if "sparsity" in v:
        rows.append(("weights that are zero", f"{v['sparsity']:.1%}", "left in place: size and speed are as before"))
    if v.get("packed_bytes") is not None:
        packed = common.size_text(v["packed_bytes"])
        rows.append(("packed as 2:4", packed, "in 16 bits, for a GPU with sparse tensor cores"))
    float32 = f"float32: {common.size_text(v['kv_bytes_per_token_float32'])}"
    rows.append(("KV cache, a token", common.size_text(v["kv_bytes_per_token"]), float32))
    common.print_rows("Size", rows)


def _needle_rows(needle: dict[str, Any]) -> list[tuple[str, str, str]]:
    """One line for each length and depth, beside the reference's."""
    rows = []
    for ours, exact in zip(needle["each"], needle["reference"]["each"], strict=True):
        name = f"needle, {ours['tokens']} at {ours['depth']:.0%}"
        rows.append((name, "found" if ours["found"] else "lost",
                     f"{ours['logprob']:.3f} nats a token of the key; float32: {exact['logprob']:.3f}"))  # fmt: skip
    return rows
