"""Where the keys and values of earlier tokens live, for one sequence.

A cache has one verb that matters, `attend`: it takes this step's q, k and v of one layer, remembers k and v, and
returns the attention of q over everything remembered. The model calls it layer by layer and `advance` at the end.

    attend(layer, q (T, H, D), k (T, Hkv, D), v (T, Hkv, D)) -> (T, H, D)       multi-head, grouped, multi-query
    attend(layer, q (T, H, C + P), row (T, 1, C + P), None, scale) -> (T, H, C)  MLA, absorbed: a value is the first C
                                                                                 entries of its key, and only the key
                                                                                 is stored
    attend(layer, q, k, v, scale, keep=row)                                      MLA, expanded: attends over this step's
                                                                                 k and v, and remembers row instead;
                                                                                 for a step that is `fresh`

`fresh` says that nothing was cached before this step, so that its own keys and values are all there is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import last_seen, sdpa_attention
from .config import ModelConfig
from .delta_rule import causal_conv, gated_delta_rule
from .delta_state import DeltaStates
from .errors import RequestError


def keys_and_values(config: ModelConfig, storage: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """Of each layer that has them, by its number, out of storage (layers, sides, …, width); the values of MLA are the
    first entries of its keys."""
    layers = zip(config.kv_layers, storage, strict=True)
    if config.is_mla:
        return {i: (layer[0], layer[0, ..., : config.kv_lora_rank]) for i, layer in layers}
    return {i: (layer[0], layer[1]) for i, layer in layers}


def check_max_tokens(max_tokens: int) -> None:
    """Raises RequestError for room that is none."""
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise RequestError(f"max_tokens is {max_tokens!r}; a cache must hold at least one token, a whole number")


class NoCache:
    """Remembers nothing: every call must bring the whole sequence. What generation costs without a cache."""

    def __init__(self, config: ModelConfig, attention=sdpa_attention) -> None:
        self.config, self.attention = config, attention
        self.length = 0
        self.allocated_bytes = self.used_bytes = 0
        self.fresh = True

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, scale: float | None = None, keep=None):
        v = k[..., : self.config.kv_lora_rank] if v is None else v
        return self.attention(q, k, v, self.config.window(layer), scale, self.config.sinks(layer))

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        return causal_conv(x, weight, x.new_zeros(weight.shape[1] - 1, x.shape[1], dtype=torch.float32))[0]

    def delta_rule(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return gated_delta_rule(q, k, v, g, beta)[0]

    def advance(self, count: int) -> None:
        """Nothing was kept, so nothing moves."""

    def reset(self) -> None:
        """Nothing to forget."""


class StateOfOne:
    """What a cache of one sequence does for linear layers; `states` has one slot."""

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """x (T, channels), weight (channels, K) -> (T, channels): a linear layer's short convolution."""
        return self.states.convolve(layer, 0, x, weight)

    def delta_rule(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """q, k (T, Hk, Dk), v (T, Hv, Dv), g and beta (T, Hv) of the next T tokens -> (T, Hv, Dv)."""
        return self.states.apply(layer, 0, q, k, v, g, beta)


class ContiguousCache(StateOfOne):
    """One tensor for all layers, reserved for `max_tokens` from the start.

    storage (layers, 2, max_tokens, Hkv, D): a token's keys in row `length`, so appending is one copy and nothing
    ever moves. Bytes = 2 · L · max_tokens · Hkv · D · bytes per element, used or not: the waste of reserving is the
    subject of chapter 09. For MLA storage is (layers, 1, max_tokens, 1, C + P). Raises RequestError when a sequence
    outgrows it.
    L counts the layers that keep keys and values. A linear layer keeps a state instead, of one size at every length.
    With dtype "int8", "fp8" or "int4" it is a QuantizedCache (quantization/kv_contiguous.py).
    `most_drafts` says how many tokens can surely be taken back.
    """

    most_drafts: float = float("inf")

    def __new__(cls, config: ModelConfig, max_tokens: int, dtype=torch.float32, *args, **options):
        if cls is ContiguousCache and isinstance(dtype, str):
            from .quantization.kv_contiguous import QuantizedCache as cls
        return super().__new__(cls)

    def __init__(
        self, config: ModelConfig, max_tokens: int, dtype=torch.float32, device="cpu", attention=sdpa_attention
    ) -> None:
        check_max_tokens(max_tokens)
        self.config, self.attention, self.max_tokens, self.length = config, attention, max_tokens, 0
        sides, heads, width = config.kv_shape
        self.storage = torch.zeros((len(config.kv_layers), sides, max_tokens, heads, width), dtype=dtype, device=device)
        self._layers = keys_and_values(config, self.storage)  # views: indexing costs as much as a small op
        self.states = DeltaStates(config, 1, device)  # empty where no layer is linear

    @property
    def allocated_bytes(self) -> int:
        return self.storage.nbytes + self.states.nbytes

    @property
    def used_bytes(self) -> int:
        return self.storage.nbytes // self.max_tokens * self.length + self.states.nbytes

    @property
    def fresh(self) -> bool:
        return self.length == 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, scale: float | None = None, keep=None):
        """q, k and v of the next T tokens, as above."""
        start, end = self.length, self.length + q.shape[0]
        if end > self.max_tokens:
            raise RequestError(
                f"the sequence needs {end} tokens of cache and {self.max_tokens} were reserved; ask for a larger cache"
            )
        keys, values = self._layers[layer]
        keys[start:end] = k if keep is None else keep
        if keep is not None:  # MLA, expanded
            keys, values = k, v
        elif v is not None:  # the values of MLA, absorbed, were written with its keys
            values[start:end] = v
        window, sinks = self.config.window(layer), self.config.sinks(layer)
        out = self.attention(q.to(keys.dtype), keys[:end], values[:end], window, scale, sinks)
        return out.to(q.dtype)  # a cache of fewer bits than the model computes in its own precision

    def advance(self, count: int) -> None:
        """The model calls this once a step, after the last layer: `count` more tokens are now remembered."""
        self.length += count

    def truncate(self, length: int) -> None:
        """Forgets the tokens from `length` on; their rows are overwritten by the next ones.

        A state cannot go back, except to the beginning. Raises RequestError.
        """
        if not 0 <= length <= self.length:
            raise RequestError(f"cannot truncate to {length} tokens: the cache holds {self.length}")
        if self.config.linear_layers and length not in (0, self.length):
            raise RequestError(f"cannot truncate to {length} tokens: linear layers keep one state; reset and recompute")
        if length == 0:
            self.states.clear([0])
        self.length = length

    def reset(self) -> None:
        self.truncate(0)


class WindowCache(StateOfOne):
    """As ContiguousCache, but a sliding layer holds only what a later query may see: its first `sinks` tokens and the
    last `window`. Its bytes stop growing there; nothing can be taken back.

    What is held and what is new, laid end to end, is a sequence from which unseen tokens were cut out. Distances within
    the window are what they were, and sinks are seen at any distance, so the same mask holds.
    """

    def __init__(self, config: ModelConfig, max_tokens: int, dtype=torch.float32, device="cpu") -> None:
        self.config, self.max_tokens, self.length = config, max_tokens, 0
        sides, heads, width = config.kv_shape
        most = [config.visible(layer) or max_tokens for layer in range(config.num_hidden_layers)]
        self.layers = {
            i: torch.zeros((sides, min(max_tokens, most[i]), heads, width), dtype=dtype, device=device)
            for i in config.kv_layers
        }
        self.states = DeltaStates(config, 1, device)

    @property
    def allocated_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values()) + self.states.nbytes

    @property
    def used_bytes(self) -> int:
        held = sum(layer[:, : self.length].nbytes for layer in self.layers.values())
        return held + self.states.nbytes

    @property
    def fresh(self) -> bool:
        return self.length == 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, scale: float | None = None, keep=None):
        window, sinks = self.config.window(layer), self.config.sinks(layer)
        sides = self.layers[layer]
        seen = []
        for side, new in zip(sides, (k if keep is None else keep, v), strict=False):
            both = torch.cat([side[: self.length], new.to(side.dtype)])
            held = both if window is None else last_seen(both, window, sinks)
            if len(held) > len(side):
                raise RequestError(
                    f"the sequence needs {len(held)} tokens of cache and {len(side)} were reserved; ask for more"
                )
            side[: len(held)] = held
            seen.append(both)
        keys, values = seen if len(seen) == 2 else (seen[0], seen[0][..., : self.config.kv_lora_rank])
        if keep is not None:
            keys, values = k, v
        return sdpa_attention(q.to(keys.dtype), keys, values, window, scale, sinks).to(q.dtype)

    def advance(self, count: int) -> None:
        self.length += count

    def reset(self) -> None:
        self.states.clear([0])
        self.length = 0
