"""`python -m minillm generate`: continues raw text."""

from __future__ import annotations

import argparse
from dataclasses import replace

from ..errors import RequestError, short
from . import common, drafting

EXAMPLES = """
python -m minillm generate "The capital of France is" --max-tokens 16
python -m minillm generate "Once upon a time" --temperature 0.8 --top-p 0.9 --seed 7 --n 3
python -m minillm generate "1, 2, 3," --stop "10" --json
python -m minillm generate "1, 2, 3, 1, 2, 3, 1, 2," --speculate ngram:8 --json
cat notes.txt | python -m minillm generate - --max-tokens 64
"""


def add_parser(commands) -> None:
    parser = common.add_command(
        commands,
        "generate",
        run,
        "continue a text",
        EXAMPLES,
        description="Continue PROMPT as raw text, without a chat template. The text streams as it is drawn; with "
        "--json it comes whole, with its token ids and times, and with --n all answers under `completions`.",
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help='the text to continue; "-" reads stdin')
    parser.add_argument("--prompt-ids", metavar="IDS", help="token ids instead of a text, such as 504,3575,282")
    common.add_json(parser)
    common.add_model_options(parser, offload=True)
    common.add_kv_cache_dtype(parser)
    drafting.add_options(parser)
    common.add_sampling_options(parser, temperature=0.0, top_p=1.0, max_tokens=64)
    parser.add_argument("--logprobs", type=int, metavar="K", help="with --json: log-probabilities and the K likeliest")
    parser.add_argument("--n", type=int, default=1, metavar="N", help="answers to draw (default: 1)")


def run(args: argparse.Namespace) -> int:
    params = common.sampling_params(args)  # a bad number is told before anything is loaded
    if args.logprobs is not None and not args.json:
        raise RequestError("--logprobs is printed in JSON alone; add --json")
    prompt, config = _prompt(args), drafting.config(args)
    model, tokenizer = common.load(args)
    from .. import generate

    speculator = drafting.speculator(config, model, tokenizer)
    prompt = generate.encode_prompt(model, tokenizer, prompt)
    new_cache = _cache_of(args, model, len(prompt))
    if not args.json:
        for sequence in range(params.n):
            if params.n > 1:
                print(f"--- {sequence + 1} of {params.n}")
            one, cache = replace(params, n=1), new_cache()
            chunks = generate.stream(model, tokenizer, prompt, one, cache, sequence=sequence, speculative=speculator)
            common.show(chunk.text for chunk in chunks)
            print()
        return 0
    done = generate.generate_n(model, tokenizer, prompt, params, speculator, new_cache)
    answers = [common.completion_values(c) for c in done]
    values = {**answers[0], "seed": params.seed, "layout": model.layout, "device": str(model.device)}
    values["kv_cache_dtype"] = args.kv_cache_dtype
    if speculator is not None:
        values["speculation"] = drafting.counts(speculator)
    if args.offload_experts is not None:
        values["experts"] = model.expert_cache.counts.values()
    common.print_json(values if params.n == 1 else values | {"completions": answers})
    return 0


def _cache_of(args: argparse.Namespace, model, prompt_tokens: int):
    """() -> a cache for one answer, or None for generate's own."""
    make = common.cache_maker(model, args.kv_cache_dtype)
    if make is None:
        return lambda: None
    context = model.config.max_position_embeddings
    return lambda: make(context if args.max_tokens is None else min(context, prompt_tokens + args.max_tokens))


def _prompt(args: argparse.Namespace) -> str | list[int]:
    if (args.prompt is None) == (args.prompt_ids is None):
        raise RequestError("give one prompt: a text, - for stdin, or --prompt-ids")
    if args.prompt is not None:
        return common.read_text(args.prompt)
    try:
        return [int(part) for part in args.prompt_ids.replace(",", " ").split()]
    except ValueError:
        raise RequestError(
            f"--prompt-ids is {short(args.prompt_ids)!r}; give whole numbers with commas between"
        ) from None
