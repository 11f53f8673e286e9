"""Second stage: the draft learns what the target thought likely, position by position.

Everything a step depends on is its number, the weights and the optimizer's state; so a run that was interrupted and
taken up again gives the weights, bit for bit, of one that was not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from tqdm import tqdm

from ..config import ModelConfig
from ..errors import CheckpointError, short
from ..storage import write_atomically
from ..transformer import Transformer
from .batches import Batch, Example, batches, collate
from .loss import head_loss, vocabulary_part
from .recipe import Recipe, check_fingerprint, fingerprint
from .student import hidden_states, trainable

SAVE_EVERY = 50  # steps, and the distance of points on the loss curve


class Trainer:
    """Model, optimizer and how far they are. `curve` holds (steps, tokens, seconds, mean loss) since the last point."""

    def __init__(self, config: ModelConfig, tensors: dict[str, Tensor], recipe: Recipe) -> None:
        self.recipe, self.model = recipe, trainable(config, tensors)
        self.optimizer = _optimizer(self.model, recipe)
        self.steps = self.tokens = 0
        self.seconds = 0.0
        self.curve: list[tuple[int, int, float, float]] = []
        self._losses: list[float] = []

    def step(self, batch: Batch) -> float:
        """One step of the optimizer. Returns the loss in nats a position, before it."""
        started = time.perf_counter()
        self._set_learning_rate()
        with torch.autocast("cpu", torch.bfloat16):
            hidden = hidden_states(self.model, batch.tokens)
        part = vocabulary_part(batch.ids, self.model.config.vocab_size, self.recipe.others, self.steps)
        loss = head_loss(hidden.float()[batch.real], self.model.embedding, batch.ids, batch.probs, part)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._count(len(batch.ids), loss.item(), time.perf_counter() - started)
        return loss.item()

    def _count(self, tokens: int, loss: float, seconds: float) -> None:
        self.steps, self.tokens, self.seconds = self.steps + 1, self.tokens + tokens, self.seconds + seconds
        self._losses.append(loss)
        if self.steps % SAVE_EVERY == 0 or self.steps == self.recipe.steps:
            mean = sum(self._losses) / len(self._losses)
            self.curve.append((self.steps, self.tokens, round(self.seconds, 1), mean))
            self._losses = []

    def _set_learning_rate(self) -> None:
        """Up to the highest over `warmup` steps, then down to nothing at the last."""
        done, all_steps = self.steps + 1, self.recipe.steps
        factor = min(done / max(1, self.recipe.warmup), 1 - self.steps / all_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group["highest"] * factor

    def save(self, path: Path) -> None:
        """Weights, optimizer and progress in one file, whole or not at all. Raises OSError on a full disk."""
        tensors = {f"weight.{name}": p.detach() for name, p in _named(self.model).items()}
        for name, p in _named(self.model).items():
            tensors |= {f"state.{key}.{name}": value for key, value in self.optimizer.state[p].items()}
        progress = {"steps": self.steps, "tokens": self.tokens, "seconds": self.seconds, "curve": self.curve,
                    "losses": self._losses}  # fmt: skip
        data = save(tensors, {"recipe": fingerprint(self.recipe), "progress": json.dumps(progress)})
        write_atomically(path, lambda file: file.write(data))

    def load(self, path: Path) -> None:
        """What `save` wrote. Raises RequestError for a run of another recipe, CheckpointError for a damaged file."""
        tensors, about = _read(path)
        check_fingerprint(about.get("recipe"), self.recipe, path)
        try:
            self._restore(tensors, json.loads(about["progress"]))
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise _damaged(path, error) from None

    @torch.no_grad()
    def _restore(self, tensors: dict[str, Tensor], progress: dict) -> None:
        for name, p in _named(self.model).items():
            p.copy_(tensors[f"weight.{name}"])
            keys = [key.split(".")[1] for key in tensors if key.startswith("state.") and key.endswith(f".{name}")]
            self.optimizer.state[p] = {key: tensors[f"state.{key}.{name}"] for key in keys}
        self.steps, self.tokens, self.seconds = progress["steps"], progress["tokens"], progress["seconds"]
        self.curve = [tuple(point) for point in progress["curve"]]
        self._losses = progress["losses"]


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path}: not a whole training state ({short(error, 120)}); remove it")


def _named(model: Transformer) -> dict[str, nn.Parameter]:
    """Each parameter once: the head is the embedding."""
    return dict(model.named_parameters())


def _optimizer(model: Transformer, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW; weights decay in the matrices alone, and the embedding, which starts near its goal, moves more slowly."""
    matrices = [p for name, p in _named(model).items() if p.dim() == 2 and p is not model.embedding]
    vectors = [p for p in _named(model).values() if p.dim() == 1]
    groups = [
        {"params": matrices, "highest": recipe.learning_rate, "weight_decay": recipe.weight_decay},
        {"params": vectors, "highest": recipe.learning_rate, "weight_decay": 0.0},
        {"params": [model.embedding], "highest": recipe.embedding_learning_rate, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def train(trainer: Trainer, examples: Sequence[Example], path: Path, progress: bool = True) -> None:
    """Steps until the recipe's last, from where `path` says the run stopped; saved every SAVE_EVERY."""
    recipe = trainer.recipe
    if path.exists():
        trainer.load(path)
    left = islice(batches(examples, recipe.batch_tokens, recipe.sampling.seed), trainer.steps, recipe.steps)
    with tqdm(total=recipe.steps, initial=trainer.steps, unit="step", desc="training", disable=not progress) as bar:
        for indices in left:
            loss = trainer.step(collate([examples[i] for i in indices]))
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update()
            if trainer.steps % SAVE_EVERY == 0 or trainer.steps == recipe.steps:
                trainer.save(path)
