"""What a layer's input looks like, gathered by running a model over text, one block at a time.

Methods that look at activations need little of them: GPTQ the second moments X^T X of each layer's input, AWQ and
SmoothQuant its mean and largest magnitudes by channel. A block is quantized before the next one is measured, so that
later layers are fitted to the inputs they will really get (GPTQ, arXiv 2210.17323, section 3.3).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import QuantizationError
from ..kv_cache import NoCache
from ..layers import Linear
from ..transformer import Transformer

WINDOW = 512


@dataclass
class InputStatistics:
    """Of one layer's input over all calibration tokens; `moments` is X^T X (K, K), `mean` and `largest` of |x| (K,)."""

    moments: Tensor
    total: Tensor
    largest: Tensor
    tokens: int = 0

    @classmethod
    def empty(cls, columns: int) -> InputStatistics:
        zeros = torch.zeros(columns)
        return cls(torch.zeros(columns, columns), zeros, zeros.clone())

    @property
    def mean(self) -> Tensor:
        return self.total / max(self.tokens, 1)

    def add(self, x: Tensor) -> None:
        x = x.reshape(-1, x.shape[-1]).to(torch.float32)
        self.moments += x.t() @ x
        size = x.abs()
        self.total = self.total + size.sum(0)
        self.largest = torch.maximum(self.largest, size.amax(0))
        self.tokens += x.shape[0]


Visit = Callable[[int, nn.Module, dict[str, InputStatistics]], None]


@torch.inference_mode()
def for_each_block(model: Transformer, tokens: Sequence[int], visit: Visit, window: int = WINDOW) -> Tensor:
    """Calls visit(index, block, statistics by the name of each Linear in it), then goes on with the block as it is
    after that. Returns the last hidden states (tokens, d), which are what the head's norm gets.

    Raises QuantizationError for a token that the model does not know, or fewer than two.
    """
    ids = _checked(model, tokens)
    windows = [ids[start : start + window] for start in range(0, len(ids), window)]
    hidden = [F.embedding(part, model.embedding) for part in windows]
    rotations = [model.rotary(torch.arange(len(part))) for part in windows]
    for index, block in enumerate(model.blocks):
        with watching(block) as statistics:
            for x, rotation in zip(hidden, rotations, strict=True):
                block(x, rotation, NoCache(model.config))
        visit(index, block, statistics)
        hidden = [block(x, rotation, NoCache(model.config)) for x, rotation in zip(hidden, rotations, strict=True)]
    return torch.cat(hidden)


def _checked(model: Transformer, tokens: Sequence[int]) -> Tensor:
    ids = torch.as_tensor(tokens, dtype=torch.int64)
    if ids.dim() != 1 or len(ids) < 2 or ids.min() < 0 or ids.max() >= model.config.vocab_size:
        raise QuantizationError(
            f"calibration tokens must be at least two ids from 0 to {model.config.vocab_size - 1}; encode a text with "
            "the model's own tokenizer"
        )
    return ids


@contextlib.contextmanager
def watching(module: nn.Module) -> Iterator[dict[str, InputStatistics]]:
    """While it lasts, the inputs of every Linear inside `module` are added up."""
    statistics, handles = {}, []
    for name, layer in module.named_modules():
        if isinstance(layer, Linear):
            found = statistics[name] = InputStatistics.empty(layer.weight.shape[1])
            handles.append(layer.register_forward_pre_hook(lambda _, args, found=found: found.add(args[0])))
    try:
        yield statistics
    finally:
        for handle in handles:
            handle.remove()
