"""The stages one after another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .. import checkpoint
from ..config import ModelConfig
from ..errors import CheckpointError
from ..kv_cache import NoCache
from ..storage import remove_leftovers
from ..tokenizer import Tokenizer
from ..transformer import Transformer
from .batches import Example, split
from .evaluation import acceptance, step_seconds
from .export import Measured, write_card, write_weights
from .projection import project_embedding
from .recipe import Recipe, fingerprint
from .sampling_stage import Sampler, Texts, sample_texts
from .student import fresh_tensors
from .training_stage import Trainer, train

DEFAULT = "SmolLM2-135M-Instruct"
SEEN = 12_000  # positions whose hidden states choose the directions of the embedding


def make_draft(name: str | None, recipe: Recipe, work: Path, out: Path, machine: str, progress: bool = True) -> str:
    """Texts, training, folder. Returns the card. Raises OSError for a full disk and MinillmError for the rest."""
    remove_leftovers(work, "*.part")
    model, tokenizer = _writer(name)
    held_out = next(sample_texts(Sampler(model, tokenizer, recipe.held_out), work, 1, progress))
    texts = list(sample_texts(Sampler(model, tokenizer, recipe.sampling), work, recipe.tokens, progress))
    examples = [example for part in texts for example in split(part)]
    trainer = start(model, name or DEFAULT, examples, recipe)
    del model, tokenizer
    train(trainer, examples, work / f"training-{fingerprint(recipe)}.safetensors", progress)
    size = write_weights(trainer, out)
    measured = measure(name, out, texts, held_out, machine)
    write_card(trainer, out, measured, size)
    return (out / "README.md").read_text(encoding="utf-8")


def _writer(name: str | None) -> tuple[Transformer, Tokenizer]:
    """The target in bfloat16, fastest for many tokens at once, or float32 where this CPU has no kernel for that."""
    try:
        return checkpoint.load(name, "bfloat16")
    except CheckpointError as error:
        if "no fast kernel" not in str(error):
            raise
        return checkpoint.load(name, "float32")


@torch.no_grad()
def start(target: Transformer, name: str, examples: Sequence[Example], recipe: Recipe) -> Trainer:
    """The draft before its first step."""
    config = ModelConfig.from_dict(recipe.config(target.config, name), "the draft's recipe")
    head = target.lm_head(torch.eye(target.config.hidden_size)).t().float()  # (V, D), whatever its layout
    embedding = project_embedding(head, _states(target, examples), recipe.hidden_size)
    return Trainer(config, fresh_tensors(config, embedding, recipe.sampling.seed), recipe)


@torch.inference_mode()
def _states(target: Transformer, examples: Sequence[Example]) -> Tensor:
    """(N, D): the target's final normed hidden states over the first texts."""
    found, count = [], 0
    for example in examples:
        tokens = example.tokens.long()
        found.append(target.final_norm(target(tokens, torch.arange(len(tokens)), NoCache(target.config))).float())
        count += len(tokens)
        if count >= SEEN:
            break
    return torch.cat(found)


def measure(name: str | None, folder: Path, texts: Sequence[Texts], held_out: Texts, machine: str) -> Measured:
    """The exported draft beside its target, both as this machine runs them fastest; acceptance in float32."""
    exact = acceptance(checkpoint.load_model(folder, "float32"), checkpoint.load(name, "float32")[0], held_out)
    target = checkpoint.load(name, "auto")[0]
    draft_s, target_s = step_seconds(checkpoint.load_model(folder, "auto"), target)
    label = name or DEFAULT
    tokens, prompts = (sum(int(getattr(part, name).sum()) for part in texts) for name in ("lengths", "starts"))
    return Measured(tokens, tokens - prompts, len(held_out.tokens), exact, draft_s, target_s, label, machine)
