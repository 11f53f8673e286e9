"""Last stage: a folder that `checkpoint.load` reads, with a card that says how it came about."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save

from ..errors import CheckpointError
from ..storage import write_atomically
from .evaluation import Acceptance, best_speed_up, speed_up
from .recipe import fingerprint
from .student import exported
from .training_stage import Trainer

WEIGHTS, CARD = "model.safetensors", "README.md"


@dataclass(frozen=True)
class Measured:
    """What the card reports beside the recipe. Seconds of one decode step at batch 1."""

    text_tokens: int
    answer_tokens: int
    held_out_tokens: int
    acceptance: Acceptance
    draft_step_s: float
    target_step_s: float
    target: str
    machine: str

    @property
    def cost(self) -> float:
        return self.draft_step_s / self.target_step_s


def write_weights(trainer: Trainer, folder: Path) -> int:
    """config.json and the weights in float16. Returns the bytes of the latter. Raises CheckpointError for weights that
    float16 does not hold, OSError on a full disk."""
    tensors = exported(trainer.model)
    for name, tensor in tensors.items():
        if not tensor.abs().max() < torch.finfo(torch.float16).max:  # NaN is caught too
            raise CheckpointError(f"{name} holds what float16 cannot; the training diverged, lower the learning rate")
    data = save({name: tensor.to(torch.float16) for name, tensor in tensors.items()}, {"format": "pt"})
    config = json.dumps(dict(trainer.model.config.raw), indent=2) + "\n"
    write_atomically(folder / WEIGHTS, lambda file: file.write(data))
    write_atomically(folder / "config.json", lambda file: file.write(config.encode()))
    return len(data)


def write_card(trainer: Trainer, folder: Path, measured: Measured, weight_bytes: int) -> None:
    text = card(trainer, measured, weight_bytes)
    write_atomically(folder / CARD, lambda file: file.write(text.encode()))


def card(trainer: Trainer, measured: Measured, weight_bytes: int) -> str:
    """The model card, in Markdown."""
    parts = [
        f"# A draft for {measured.target}",
        *_what_it_is(trainer, weight_bytes),
        "## How it was made",
        *_how_it_was_made(trainer, measured),
        "## How good it is",
        *_how_good_it_is(measured),
    ]
    return "\n\n".join(part if part[0] in "|#" else textwrap.fill(part, 118) for part in parts) + "\n"


def _what_it_is(trainer: Trainer, weight_bytes: int) -> list[str]:
    recipe, count = trainer.recipe, sum(p.numel() for p in trainer.model.parameters())
    return [
        f"{count / 1e6:.2f} million parameters, {weight_bytes / 1e6:.1f} MB in float16: {recipe.layers} layers of "
        f"width {recipe.hidden_size} (feed-forward {recipe.intermediate_size}, {recipe.heads} heads, a window of "
        f"{recipe.sliding_window} tokens), tied embedding, the target's vocabulary. All it ever read is what the "
        "target wrote after short prompts, so it is good for guessing the target's next token, and for nothing else.",
        "`checkpoint.load_draft()` loads the one that comes with minillm, `--model smollm2-draft` names it on the "
        "command line; its tokenizer is the target's. License: Apache-2.0, like the target's.",
    ]


def _how_it_was_made(trainer: Trainer, measured: Measured) -> list[str]:
    recipe, passes = trainer.recipe, trainer.tokens / measured.answer_tokens
    return [
        f"`python -m minillm.train_draft`, recipe `{fingerprint(recipe)}`, seed {recipe.sampling.seed}, on "
        f"{measured.machine}.",
        f"The target wrote {measured.text_tokens:,} tokens, prompts included, at temperatures 0, 0.7 and 1, and its "
        f"{recipe.sampling.top_k} likeliest next tokens were kept for each position. The embedding began as the "
        f"target's own, seen through the {recipe.hidden_size} directions that its predictions use most "
        "(minillm/train_draft/projection.py); all else began random.",
        f"Then {trainer.steps:,} steps of AdamW on {trainer.tokens:,} positions in all, {passes:.1f} passes over the "
        f"answers, against those candidates' probabilities: {trainer.seconds / 60:.0f} minutes of steps.",
        f"Loss, nats a position, at step {_curve(trainer)}.",
    ]


def _how_good_it_is(measured: Measured) -> list[str]:
    found, cost = measured.acceptance, measured.cost
    rows = (_row(name, alpha, cost) for name, alpha in (("0", found.greedy), ("1", found.sampled)))
    head = ["| temperature | α | best γ | speed-up by the formula | at γ = 4 |", "|---|---|---|---|---|"]
    return [
        f"On {measured.held_out_tokens:,} tokens of held-out text: other templates, other topics, other seeds. The "
        "acceptance α is the share of positions where both models have the same likeliest token (temperature 0, "
        f"{found.positions[0]:,} positions), or the mean of Σ min(p, q) (temperature 1, {found.positions[1]:,} "
        f"positions). A decode step at batch 1 takes {measured.draft_step_s * 1e3:.2f} ms for the draft and "
        f"{measured.target_step_s * 1e3:.2f} ms for the target, so c = {cost:.3f}.",
        "\n".join([*head, *rows]),
        "The formula takes each position to be accepted independently of the others. Tokens a step that greedy "
        "verification would really yield on the held-out answers: "
        + ", ".join(f"{mean:.2f} at γ = {gamma}" for gamma, mean in found.runs.items())
        + ".",
    ]


def _row(temperature: str, alpha: float, cost: float) -> str:
    gamma, best = best_speed_up(alpha, cost)
    return f"| {temperature} | {alpha:.3f} | {gamma} | {best:.2f} | {speed_up(alpha, 4, cost):.2f} |"


def _curve(trainer: Trainer) -> str:
    """About eight points of the loss curve, the last among them."""
    points = trainer.curve
    every = max(1, len(points) // 8)
    chosen = points[::-1][::every][::-1]
    return ", ".join(f"{steps}: {loss:.2f}" for steps, _, _, loss in chosen)
