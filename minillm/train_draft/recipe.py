"""Every number of the recipe, as frozen values: what is equal here and runs with equal threads gives equal weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, replace
from typing import Any

from ..config import ModelConfig
from ..errors import RequestError, short

MINUTES = 40.0  # that the recipe as it stands takes on two quiet cores; `scaled` reckons from here


@dataclass(frozen=True)
class SamplingRecipe:
    """What text the target writes. A round is `requests` prompts; kinds and temperatures are drawn by share.

    Lengths are counts of tokens. top_k: how many of the target's log-probabilities are kept for each position.
    """

    seed: int = 0
    held_out: bool = False  # other templates, other topics
    requests: int = 256
    kinds: tuple[tuple[str, float], ...] = (("chat", 0.4), ("self", 0.3), ("text", 0.25), ("free", 0.05))
    temperatures: tuple[tuple[float, float], ...] = ((0.0, 0.35), (0.7, 0.25), (1.0, 0.4))
    question_temperature: float = 0.9
    question_tokens: int = 64
    answer_tokens: int = 256
    top_k: int = 32


@dataclass(frozen=True)
class Recipe:
    """The draft's shape and its training: `tokens` of text, then `steps` steps of about `batch_tokens` each.

    Learning rates are AdamW's, at their highest: they rise over `warmup` steps and fall to 0 in a straight line.
    others: tokens drawn each step to stand for the vocabulary that no position names (loss.py).
    """

    sampling: SamplingRecipe = SamplingRecipe()
    tokens: int = 480_000
    hidden_size: int = 160
    intermediate_size: int = 640
    layers: int = 3
    heads: int = 5
    sliding_window: int = 256
    steps: int = 1500
    batch_tokens: int = 4096
    others: int = 4096
    learning_rate: float = 3e-3
    embedding_learning_rate: float = 1e-3
    weight_decay: float = 0.1
    warmup: int = 100
    clip: float = 1.0

    @property
    def held_out(self) -> SamplingRecipe:
        """The text that judges the draft, of which nothing is trained on."""
        return replace(self.sampling, held_out=True, requests=max(1, self.sampling.requests // 2))

    def scaled(self, minutes: float) -> Recipe:
        """The same recipe with less or more of everything that takes time. Raises RequestError for no time at all."""
        if not math.isfinite(minutes) or minutes <= 0:
            raise RequestError(f"minutes is {minutes}; it must be a number above 0")
        share = minutes / MINUTES
        steps = max(1, round(self.steps * share))
        return replace(self, tokens=max(1, round(self.tokens * share)), steps=steps, warmup=min(self.warmup, steps))

    def config(self, target: ModelConfig, target_name: str) -> dict[str, Any]:
        """The draft's config.json: the target's vocabulary and tokenizer, and attention that sees `sliding_window`
        tokens, so that a context longer than any text it learned from is nothing new to it."""
        return {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "vocab_size": target.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": self.hidden_size // self.heads,
            "hidden_act": "silu",
            "max_position_embeddings": target.max_position_embeddings,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "sliding_window": self.sliding_window,
            "tie_word_embeddings": True,
            "bos_token_id": target.bos_token_id,
            "eos_token_id": list(target.eos_token_ids),
            "dtype": "float16",
            "tokenizer_from": target_name,
        }


def fingerprint(recipe: SamplingRecipe | Recipe) -> str:
    """Twelve hex digits that change with any number of the recipe."""
    text = json.dumps(dataclasses.asdict(recipe), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def check_fingerprint(found: str | None, recipe: SamplingRecipe | Recipe, where: object) -> None:
    """Raises RequestError if a file was made by another recipe."""
    if found != (wanted := fingerprint(recipe)):
        raise RequestError(
            f"{short(where, 200)} was made by recipe {short(found)}, this one is {wanted}; "
            "give --work another folder, or remove the file"
        )
