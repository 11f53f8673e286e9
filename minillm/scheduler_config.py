"""The settings of a scheduler, checked before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import EngineError


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

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "priority_places"):
            if getattr(self, name) < 1:
                raise EngineError(f"{name} is {getattr(self, name)}; it must be at least 1")
        choices_of = {
            "policy": ("fcfs", "priority"),
            "preemption": ("recompute", "swap"),
            "host_reuse": ("measured", "always", "never"),
        }
        for name, choices in choices_of.items():
            if getattr(self, name) not in choices:
                raise EngineError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(choices)}")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise EngineError(
                f"without chunked prefill a step must take a whole prompt: max_num_batched_tokens is "
                f"{self.max_num_batched_tokens}, make it at least max_model_len, {self.max_model_len}"
            )
        if self.max_waiting is not None and self.max_waiting < 1:
            raise EngineError(f"max_waiting is {self.max_waiting}; it must be at least 1, or None for no limit")
        if self.ttft_slo_s is not None and not self.ttft_slo_s > 0:
            raise EngineError(
                f"ttft_slo_s is {self.ttft_slo_s}; give seconds above 0, or None to admit by memory alone"
            )
        if self.preemption == "swap" and self.num_host_blocks < 2:
            raise EngineError("preemption by swap needs host memory; set num_host_blocks, or preemption to 'recompute'")
