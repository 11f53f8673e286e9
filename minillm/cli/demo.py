"""`python -m minillm demo`: one answer, and what it cost."""

from __future__ import annotations

import argparse
import textwrap
import time
from typing import TYPE_CHECKING, Any

from ..sampling_params import SamplingParams
from . import common
from .roof import DecodeBound, decode_bound, held_bytes

if TYPE_CHECKING:
    from ..analysis import Hardware
    from ..generate import Completion
    from ..kv_cache import ContiguousCache
    from ..tokenizer import Tokenizer
    from ..transformer import Transformer

QUESTION = "Explain in two sentences why the sky is blue."
EXAMPLES = """
python -m minillm demo
python -m minillm demo --question "What does a compiler do?" --max-tokens 60
python -m minillm demo --dtype float32
python -m minillm demo --json
"""
NEXT = """
What next
  make lab                    the notebooks: how this works, and why these numbers
  python -m minillm chat      talk to the model
  python -m minillm bench     the same measurement with medians, and against transformers
  python -m minillm size Llama-3-8B --gpu h100    does a larger model fit
"""


def add_parser(commands) -> None:
    parser = common.add_command(
        commands,
        "demo",
        run,
        "answer a question and report what the answer cost",
        EXAMPLES,
        description="Answer a question with the default model, then report tokens, times and bytes beside what this "
        "machine's memory bandwidth allows. The first run fetches the model (93 MB) and measures the machine.",
    )
    parser.add_argument("--question", default=QUESTION, metavar="TEXT", help=f"default: {QUESTION}")
    parser.add_argument("--refresh", action="store_true", help="measure this machine's bandwidth again")
    parser.add_argument("--max-tokens", type=int, default=120, metavar="N", help="default: 120")
    common.add_json(parser)
    common.add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    device = common.prepare(args)
    from ..analysis import this_machine
    from ..storage import cache_dir

    started = time.perf_counter()
    model, tokenizer = common.load(args)
    load_s = time.perf_counter() - started
    if args.refresh or not any(cache_dir().glob(f"ceilings-{device}*")):
        common.say("Measuring this machine, once (some seconds)")
    hardware = this_machine(device, args.refresh)
    if not args.json:
        print(f"{args.question}\n")
    answer, cache = _answer(model, tokenizer, args.question, params, stream=not args.json)
    values = _report(model, answer, cache, hardware) | {"load_s": load_s}
    if args.json:
        common.print_json(values)
    else:
        _print(values, decode_bound(model, _mean_context(answer), hardware))
        print(NEXT, end="")
    return 0


def _answer(
    model: Transformer, tokenizer: Tokenizer, question: str, params: SamplingParams, stream: bool
) -> tuple[Completion, ContiguousCache]:
    from .. import generate
    from ..backend import attention
    from ..kv_cache import ContiguousCache

    ids = generate.encode_prompt(model, tokenizer, tokenizer.encode_chat([{"role": "user", "content": question}]))
    generate.generate(model, tokenizer, ids[:8], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    size = min(model.config.max_position_embeddings, len(ids) + params.max_tokens)
    cache = ContiguousCache(model.config, size, model.dtype, model.device, attention(model))
    started = time.perf_counter()
    done = generate.Completion(ids)
    texts = common.collect(generate.stream(model, tokenizer, ids, params, cache), done, started)
    if stream:
        common.show(texts)
        print("\n")
    else:
        list(texts)
    return done, cache


def _mean_context(answer: Completion) -> float:
    """Tokens that an average decode step attends to, itself included: step i of n - 1 sees prompt + i."""
    return len(answer.prompt_token_ids) + len(answer.tokens) / 2


def _report(model: Transformer, answer: Completion, cache: ContiguousCache, hardware: Hardware) -> dict[str, Any]:
    import torch

    bound = decode_bound(model, _mean_context(answer), hardware)
    return {
        **common.completion_values(answer),
        "tokens_per_s": 1 / answer.tpot_s if answer.tpot_s else None,
        "prefill_tok_s": len(answer.prompt_token_ids) / answer.ttft_s,
        "weight_bytes_held": held_bytes(model),
        "weight_bytes_read_per_step": bound.weight_bytes,
        "kv_bytes_held": cache.allocated_bytes,
        "kv_bytes_used": cache.used_bytes,
        "kv_bytes_read_per_step": bound.kv_bytes,
        "read_bandwidth_gb_s": hardware.bandwidth / 1e9,
        "bandwidth_measured": hardware.measured["date"],
        "predicted_tpot_s": bound.seconds,
        "arithmetic_s": bound.arithmetic_s,
        "decode_fraction_of_roofline": bound.seconds / answer.tpot_s if answer.tpot_s else None,
        "layout": model.layout,
        "device": hardware.name,
        "threads": torch.get_num_threads(),
    }


def _print(v: dict[str, Any], bound: DecodeBound) -> None:
    size, seconds = common.size_text, common.time_text
    rate = f"{v['tokens_per_s']:.1f} tokens/s" if v["tokens_per_s"] else ""
    common.print_rows(
        f"What it cost ({v['device']}, {v['threads']} threads, weights {v['layout']})",
        [
            ("prompt", f"{v['prompt_tokens']} tokens", "the question in the model's chat template"),
            ("output", f"{v['output_tokens']} tokens", f"ended by {_ended(v['finish_reason'])}"),
            ("TTFT, to the first token", seconds(v["ttft_s"]), f"prefill at {v['prefill_tok_s']:.0f} tokens/s"),
            ("TPOT, each token after it", seconds(v["tpot_s"]), rate),
            ("weights", size(v["weight_bytes_held"]), f"{size(bound.weight_bytes)} of it read for each token"),
            ("KV cache", size(v["kv_bytes_held"]), f"{size(bound.kv_bytes)} read for each token, on average"),
        ],
    )
    if v["tpot_s"] is None:
        return
    fraction = v["decode_fraction_of_roofline"]
    common.print_rows(
        "How fast could it be",
        [
            ("read bandwidth, measured", f"{bound.bandwidth / 1e9:.1f} GB/s", v["bandwidth_measured"][:10]),
            ("predicted TPOT", seconds(bound.seconds), f"{size(bound.bytes)} / bandwidth"),
            ("measured TPOT", seconds(v["tpot_s"]), ""),
            ("fraction of the roofline", f"{fraction:.0%}", "predicted / measured"),
        ],
    )
    print("\n" + textwrap.fill(explain(bound, v["tpot_s"]), 100))


BUSY_BELOW = 0.15  # of the roofline: quiet machines of every kind seen so far reach more


def _ended(reason: str) -> str:
    return {"stop": "the model's end token", "length": "--max-tokens or the context"}[reason]


def explain(bound: DecodeBound, tpot_s: float) -> str:
    """What limited decoding, and why the fraction is not 1."""
    fraction, seconds = bound.seconds / tpot_s, common.time_text
    if fraction > 1:
        return (
            "Decoding read its weights faster than memory delivers: part of them stayed in the processor's cache "
            "between steps, or the machine was busy when its bandwidth was measured."
        )
    if bound.arithmetic_s > bound.seconds:
        return (
            f"Arithmetic was the limit: the multiplications of one token take {seconds(bound.arithmetic_s)} at this "
            f"machine's matrix rate, longer than the {seconds(bound.seconds)} of reading the weights."
        )
    floor = (
        f"each token reads every weight once, which takes {seconds(bound.seconds)}, and its arithmetic would take "
        f"{seconds(bound.arithmetic_s)}. The other {seconds(tpot_s - bound.seconds)} went to kernels that read more "
        "slowly than memory delivers, and to hundreds of small operators started one after another"
    )
    if fraction >= 0.5:
        return f"Memory bandwidth was the limit: {floor}."
    if fraction >= BUSY_BELOW:
        return f"Memory bandwidth sets the floor: {floor}; other programs on this machine add to that."
    return (
        f"Memory bandwidth sets the floor: each token reads every weight once, which takes {seconds(bound.seconds)}. "
        f"Measured was {1 / fraction:.0f} times that, more than slow kernels and small operators usually cost: other "
        "programs are probably using the processor. Run it again when it is idle."
    )
