"""What rounding changed: a model against itself in float32, on text that every CPython carries.

The text is `pydoc_data.topics`. Its first half is for calibration (whatever a method looks at before it rounds), its
second half for evaluation, so that no method is graded on what it has seen.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor

from .. import checkpoint
from ..errors import RequestError
from ..kv_cache import ContiguousCache
from ..tokenizer import Tokenizer
from ..transformer import Transformer

TEXT = "\n".join(topics.topics.values())
CALIBRATION_TEXT, EVALUATION_TEXT = TEXT[: len(TEXT) // 2], TEXT[len(TEXT) // 2 :]
TOKENS = 256
WINDOW = 512  # tokens of one evaluation window, each with an empty cache


def compare_to_float32(model: Transformer, tokenizer: Tokenizer, path: Path, device: str) -> dict[str, Any]:
    """Mean KL(float32 || model) in nats a token, how often both rank the same token first, and the loss of each.

    Teacher forced, one token a step, so that it is the decode path whose rounding is measured.
    """
    ids = tokenizer.encode(TEXT[: 40 * TOKENS])[: min(TOKENS, model.config.max_position_embeddings)]
    rounded = step_logits(model, ids)
    exact_model, _ = checkpoint.load(path, "float32", device)
    exact = step_logits(exact_model, ids)
    text = tokenizer.decode(ids)
    return {
        "kl_to_float32": kl_divergence(exact, rounded),
        "top1_agreement": (exact.argmax(-1) == rounded.argmax(-1)).float().mean().item(),
        "loss": loss(rounded, ids),
        "loss_float32": loss(exact, ids),
        "tokens": len(ids),
        "text": "pydoc_data.topics",
        "characters": len(text),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


@torch.inference_mode()
def step_logits(model: Transformer, ids: list[int]) -> Tensor:
    """Logits (T, V) float32 on the CPU, each row from a decode step of its own."""
    cache = ContiguousCache(model.config, len(ids), model.dtype, model.device)
    tokens = torch.tensor(ids, device=model.device)
    positions = torch.arange(len(ids), device=model.device)
    rows = [
        model.logits(model(tokens[i : i + 1], positions[i : i + 1], cache))[0].float().cpu() for i in range(len(ids))
    ]
    return torch.stack(rows)


def kl_divergence(exact: Tensor, rounded: Tensor) -> float:
    """Mean over the rows of sum p · (log p - log q), with p and q the softmax of `exact` and `rounded` (T, V)."""
    log_p, log_q = exact.double().log_softmax(-1), rounded.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()


def loss(logits: Tensor, ids: list[int]) -> float:
    """Mean nats a token of the text itself: row t predicts token t + 1."""
    return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).item()


@dataclass(frozen=True)
class Quality:
    """A model against its full-precision self on the same tokens.

    perplexity = exp(mean nats a token); kl = mean KL(reference || model) in nats a token; top1_agreement = share of
    positions where both rank the same token first.
    """

    perplexity: float
    reference_perplexity: float
    kl: float
    top1_agreement: float
    tokens: int


def evaluation_ids(tokenizer: Tokenizer, tokens: int) -> list[int]:
    """The first `tokens` tokens of the evaluation half. Raises RequestError when the text has fewer."""
    return _first_ids(tokenizer, EVALUATION_TEXT, tokens)


def calibration_ids(tokenizer: Tokenizer, tokens: int) -> list[int]:
    """The first `tokens` tokens of the calibration half. Raises RequestError when the text has fewer."""
    return _first_ids(tokenizer, CALIBRATION_TEXT, tokens)


def _first_ids(tokenizer: Tokenizer, text: str, tokens: int) -> list[int]:
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 2:
        raise RequestError(f"tokens is {tokens!r}; give a whole number of at least 2")
    ids = tokenizer.encode(text[: 16 * tokens])[:tokens]
    if len(ids) < tokens:
        ids = tokenizer.encode(text)[:tokens]
    if len(ids) < tokens:
        raise RequestError(f"{tokens} tokens wanted, and the text has {len(ids)}; ask for fewer")
    return ids


def compare_models(
    model: Transformer,
    reference: Transformer,
    ids: list[int],
    window: int = WINDOW,
    make_cache: Callable[[int], Any] | None = None,
) -> Quality:
    """Both models on windows of `ids`, each window from an empty cache; every token but a window's first is predicted.

    Prefill, so for a quantized model the kernels of many rows are what is measured. `make_cache(tokens)` is the cache
    of `model`, by default one of its dtype; a quantized one is read in prefill as in decode, so both lose the same.
    """
    nats = reference_nats = kl = agree = 0.0
    count = 0
    for start in range(0, len(ids) - 1, window):
        part = ids[start : start + window]
        if len(part) < 2:
            break
        ours = window_logits(model, part, make_cache(len(part)) if make_cache else None)
        exact = window_logits(reference, part)
        rows = len(part) - 1
        nats += loss(ours, part) * rows
        reference_nats += loss(exact, part) * rows
        kl += kl_divergence(exact[:-1], ours[:-1]) * rows
        agree += (ours[:-1].argmax(-1) == exact[:-1].argmax(-1)).sum().item()
        count += rows
    return Quality(math.exp(nats / count), math.exp(reference_nats / count), kl / count, agree / count, count)


@torch.inference_mode()
def window_logits(model: Transformer, ids: list[int], cache=None) -> Tensor:
    """Logits (T, V) float32 on the CPU of one prefill, into an empty cache."""
    cache = ContiguousCache(model.config, len(ids), model.dtype, model.device) if cache is None else cache
    tokens = torch.tensor(ids, device=model.device)
    hidden = model(tokens, torch.arange(len(ids), device=model.device), cache)
    return model.logits(hidden).float().cpu()
