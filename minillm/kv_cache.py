"""Where the keys and values of earlier tokens live, for one sequence.

A cache has one verb that matters, `attend`: it takes this step's q, k and v of one layer, remembers k and v, and
returns the attention of q over everything remembered. The model calls it layer by layer and `advance` at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import sdpa_attention
from .config import ModelConfig
from .errors import RequestError


class NoCache:
    """Remembers nothing: every call must bring the whole sequence. What generation costs without a cache."""

    def __init__(self, config: ModelConfig, attention=sdpa_attention) -> None:
        self.config, self.attention = config, attention
        self.length = 0
        self.allocated_bytes = self.used_bytes = 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q, k, v, self.config.window(layer))

    def advance(self, count: int) -> None:
        """Nothing was kept, so nothing moves."""

    def reset(self) -> None:
        """Nothing to forget."""


class ContiguousCache:
    """One tensor for all layers, reserved for `max_tokens` from the start.

    storage (layers, 2, max_tokens, Hkv, D): a token's keys in row `length`, so appending is one copy and nothing
    ever moves. Bytes = 2 · L · max_tokens · Hkv · D · bytes per element, used or not: the waste of reserving is the
    subject of chapter 09. Raises RequestError when a sequence outgrows it.
    """

    def __init__(
        self, config: ModelConfig, max_tokens: int, dtype=torch.float32, device="cpu", attention=sdpa_attention
    ) -> None:
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise RequestError(f"max_tokens is {max_tokens!r}; a cache must hold at least one token, a whole number")
        self.config, self.attention, self.max_tokens, self.length = config, attention, max_tokens, 0
        shape = (config.num_hidden_layers, 2, max_tokens, config.num_key_value_heads, config.head_dim)
        self.storage = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = [(layer[0], layer[1]) for layer in self.storage]  # views: indexing costs as much as a small op

    @property
    def allocated_bytes(self) -> int:
        return self.storage.nbytes

    @property
    def used_bytes(self) -> int:
        return self.storage.nbytes // self.max_tokens * self.length

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (T, H, D), k and v (T, Hkv, D) of the next T tokens -> (T, H, D)."""
        start, end = self.length, self.length + q.shape[0]
        if end > self.max_tokens:
            raise RequestError(
                f"the sequence needs {end} tokens of cache and {self.max_tokens} were reserved; ask for a larger cache"
            )
        keys, values = self._layers[layer]
        keys[start:end], values[start:end] = k, v
        out = self.attention(q.to(keys.dtype), keys[:end], values[:end], self.config.window(layer))
        return out.to(q.dtype)  # a cache of fewer bits than the model computes in its own precision

    def advance(self, count: int) -> None:
        """The model calls this once a step, after the last layer: `count` more tokens are now remembered."""
        self.length += count

    def truncate(self, length: int) -> None:
        """Forgets the tokens from `length` on; their rows are overwritten by the next ones."""
        if not 0 <= length <= self.length:
            raise RequestError(f"cannot truncate to {length} tokens: the cache holds {self.length}")
        self.length = length

    def reset(self) -> None:
        self.length = 0
