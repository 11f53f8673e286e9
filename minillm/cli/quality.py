"""What a layout's rounding changed: the model against itself in float32, on text that every CPython carries."""

from __future__ import annotations

import hashlib
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor

from .. import checkpoint
from ..kv_cache import ContiguousCache
from ..tokenizer import Tokenizer
from ..transformer import Transformer

TEXT = "\n".join(topics.topics.values())
TOKENS = 256


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
