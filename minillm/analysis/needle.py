"""A needle in a haystack: five digits said once, somewhere in a long text, and asked for at its end.

Perplexity is an average over tokens that the last few words mostly decide. This asks for one thing from far away, which
is what a cache of few bits would lose first. The haystack is the evaluation half of `pydoc_data.topics` (quality.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import RequestError
from ..kv_cache import ContiguousCache
from ..tokenizer import Tokenizer
from ..transformer import Transformer
from .quality import evaluation_ids

LENGTHS, DEPTHS = (1024, 2048), (0.1, 0.5, 0.9)
SAID = "\n\nThe secret pass key is {key}. Remember it: {key} is the secret pass key.\n\n"
ASKED = "\n\nWhat is the secret pass key? The secret pass key is"


@dataclass(frozen=True)
class Needle:
    """One question. `depth` is the share of the text before the needle, `logprob` the mean of the key's tokens in nats,
    `found` whether greedy decoding says the whole key."""

    tokens: int
    depth: float
    logprob: float
    found: bool


def question(tokenizer: Tokenizer, tokens: int, depth: float, key: str) -> tuple[list[int], list[int]]:
    """(prompt of `tokens` tokens, the key's tokens that should follow it). Raises RequestError for a prompt too short
    for the needle and the question."""
    said, asked = tokenizer.encode(SAID.format(key=key)), tokenizer.encode(ASKED)
    answer = tokenizer.encode(f"{ASKED} {key}")[len(asked) :]
    room = tokens - len(said) - len(asked)
    if room < 16:
        raise RequestError(f"a needle in {tokens} tokens leaves {max(room, 0)} for the text around it; ask for more")
    if isinstance(depth, bool) or not isinstance(depth, int | float) or not 0 <= depth <= 1:
        raise RequestError(f"depth is {depth!r}; it must be a share from 0 to 1")
    text = evaluation_ids(tokenizer, room)
    before = round(depth * room)
    return [*text[:before], *said, *text[before:], *asked], answer


@torch.inference_mode()
def ask(model: Transformer, prompt: Sequence[int], answer: Sequence[int], cache) -> tuple[float, bool]:
    """(mean log-probability of the answer's tokens, whether each is the likeliest), in one pass, teacher forced: the
    first token that is not the likeliest is where greedy decoding would leave the key too."""
    ids = torch.tensor([*prompt, *answer[:-1]], device=model.device)
    hidden = model(ids, torch.arange(len(ids), device=model.device), cache)
    logits = model.logits(hidden[len(prompt) - 1 :]).float().cpu()
    wanted = torch.tensor(answer)
    logprob = logits.log_softmax(-1).gather(1, wanted[:, None]).mean().item()
    return logprob, bool((logits.argmax(-1) == wanted).all())


def needles(
    model: Transformer,
    tokenizer: Tokenizer,
    lengths: Sequence[int] = LENGTHS,
    depths: Sequence[float] = DEPTHS,
    make_cache: Callable[[int], Any] | None = None,
    seed: int = 0,
) -> list[Needle]:
    """Every length at every depth, each with a key of its own, the same ones for a seed. `make_cache(tokens)` is by
    default a ContiguousCache of the model's dtype. Raises RequestError for a length beyond the model's context."""
    make_cache = make_cache or (lambda count: ContiguousCache(model.config, count, model.dtype, model.device))
    drawn, context, results = random.Random(seed), model.config.max_position_embeddings, []
    for tokens in lengths:
        if tokens >= context:
            raise RequestError(f"a needle in {tokens} tokens does not fit into the model's context of {context}")
        for depth in depths:
            prompt, answer = question(tokenizer, tokens, depth, str(drawn.randrange(10_000, 100_000)))
            cache = make_cache(len(prompt) + len(answer))
            results.append(Needle(tokens, depth, *ask(model, prompt, answer, cache)))
    return results


def summary(results: Sequence[Needle]) -> dict[str, Any]:
    """Accuracy and mean log-probability over all, then each."""
    return {
        "accuracy": sum(r.found for r in results) / len(results),
        "logprob": sum(r.logprob for r in results) / len(results),
        "each": [{"tokens": r.tokens, "depth": r.depth, "logprob": r.logprob, "found": r.found} for r in results],
    }
