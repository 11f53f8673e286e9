"""The settings of a scheduler, checked before anything is allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

from .block_pool import EVICTION
from .errors import EngineError, short
from .prefix_cache import PREFIX_CACHES

MOST = (1 << 31) - 1  # block tables are int32
_ABOVE_0 = 1e-9
_RANGES = {  # name -> (kind, least, most)
    "num_blocks": (Integral, 2, MOST),
    "block_size": (Integral, 1, MOST),
    "max_num_seqs": (Integral, 1, MOST),
    "max_num_batched_tokens": (Integral, 1, MOST),
    "max_model_len": (Integral, 1, MOST),
    "long_prefill_token_threshold": (Integral, 0, MOST),
    "priority_places": (Integral, 1, MOST),
    "num_host_blocks": (Integral, 0, MOST),
    "watermark": (Real, 0, 1),
    "max_waiting": (Integral, 1, MOST),
    "ttft_slo_s": (Real, _ABOVE_0, math.inf),
    "sliding_window": (Integral, 1, MOST),
    "attention_sinks": (Integral, 0, MOST),
    "num_state_slots": (Integral, 1, MOST),
}
_OPTIONAL = ("max_waiting", "ttft_slo_s", "sliding_window", "num_state_slots")
_CHOICES = {
    "policy": ("fcfs", "priority"),
    "preemption": ("recompute", "swap"),
    "host_reuse": ("measured", "always", "never"),
    "prefix_cache": PREFIX_CACHES,
    "eviction": EVICTION,
}


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits and policies, under vLLM's names where it has the same one. Tokens and blocks are counts.

    priority_places: under "priority", one level (lower runs first) is worth this many places in the queue; so a low
    request is overtaken by a bounded number of later ones, and does not starve.
    continuous_batching: False admits the next batch only when the last has ended whole, as engines did before Orca.
    watermark: share of blocks that an admission leaves free while others run, so that their growth does not preempt.
    num_blocks counts the null block; num_host_blocks are in host memory, 0 for none: for requests swapped out, and for
    cached prefixes that the device gave up, which come back by `host_reuse`: "measured" (if copying is predicted to be
    faster than computing), "always", or "never".
    num_state_slots: of a model with linear layers, the sequences that can have a state at once; None is max_num_seqs.
    Likewise of an int4 KV cache, whose states are the tokens of unfilled blocks: `states_of_blocks`, which the engine
    sets, says that they are no more than that, and that a prefix of whole blocks needs none.
    A model with linear layers runs without prefix cache: what a prefix left in the state is not kept, so a hit would
    have no state to go on from, and the engine sets prefix_cache to "off".
    ttft_slo_s: refuse a request whose time to first token is predicted to be longer than this (pace.py).
    """

    num_blocks: int = 512
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    max_model_len: int = 8192
    enable_chunked_prefill: bool = True
    continuous_batching: bool = True
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"
    priority_places: int = 1000
    preemption: str = "recompute"
    num_host_blocks: int = 0
    host_reuse: str = "measured"
    prefix_cache: str = "hash"
    eviction: str = "lru"
    watermark: float = 0.01
    max_waiting: int | None = None
    ttft_slo_s: float | None = None
    sliding_window: int | None = None  # of a model all of whose layers slide: blocks that fell out are released
    attention_sinks: int = 0  # first tokens that such a model sees all the same, whose blocks stay
    num_state_slots: int | None = None
    states_of_blocks: bool = False

    def __post_init__(self) -> None:
        for name, (kind, least, most) in _RANGES.items():
            self._check(name, kind, least, most)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise EngineError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(choices)}")
        for name in ("enable_chunked_prefill", "continuous_batching", "states_of_blocks"):
            if not isinstance(getattr(self, name), bool):
                raise EngineError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise EngineError(
                f"without chunked prefill a step must take a whole prompt: max_num_batched_tokens is "
                f"{self.max_num_batched_tokens}, make it at least max_model_len, {self.max_model_len}"
            )
        if self.preemption == "swap" and self.num_host_blocks < 2:
            raise EngineError("preemption by swap needs host memory; set num_host_blocks, or preemption to 'recompute'")

    @property
    def max_running(self) -> int:
        """Sequences that can run at once."""
        return min(self.max_num_seqs, self.num_state_slots or self.max_num_seqs)

    def _check(self, name: str, kind: type, least: float, most: float) -> None:
        value = getattr(self, name)
        if value is None and name in _OPTIONAL:
            return
        number = isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not least <= value <= most:
            wanted = "a whole number" if kind is Integral else "a number"
            limit = f"of at least {least:g}" if most in (MOST, math.inf) else f"from {least:g} to {most:g}"
            limit = "above 0" if least == _ABOVE_0 else limit
            none = ", or None" if name in _OPTIONAL else ""
            raise EngineError(f"{name} is {short(repr(value))}; it must be {wanted} {limit}{none}")
