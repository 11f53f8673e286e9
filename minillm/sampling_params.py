"""What a request asks of the sampler, checked before anything is computed. Plain Python, no tensors."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

from .errors import RequestError

GREEDY_BELOW = 1e-3  # temperatures under this are argmax
MAX_LOGPROBS = 20

_NUMBERS = {
    "temperature": (lambda v: v >= 0, "a finite number of at least 0 (0 is greedy)"),
    "top_p": (lambda v: 0 < v <= 1, "above 0 and at most 1 (1 is off)"),
    "min_p": (lambda v: 0 <= v <= 1, "from 0 to 1 (0 is off)"),
    "repetition_penalty": (lambda v: v > 0, "a finite number above 0 (1 is off)"),
    "presence_penalty": (lambda v: -2 <= v <= 2, "from -2 to 2 (0 is off)"),
    "frequency_penalty": (lambda v: -2 <= v <= 2, "from -2 to 2 (0 is off)"),
}
_INTEGERS = {
    "top_k": (lambda v: v >= -1, "a whole number of at least 1, or 0 or -1 for off"),
    "min_tokens": (lambda v: v >= 0, "a whole number of at least 0"),
    "max_tokens": (lambda v: v >= 1, "a whole number of at least 1, or None for as many as the context holds"),
    "n": (lambda v: v >= 1, "a whole number of at least 1"),
    "seed": (lambda v: -(1 << 63) <= v < 1 << 63, "a whole number of 64 bits with sign, or None for a fresh one"),
    "logprobs": (lambda v: 0 <= v <= MAX_LOGPROBS, f"a whole number from 0 to {MAX_LOGPROBS}, or None for off"),
}
_OPTIONAL = {"seed", "max_tokens", "logprobs"}


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks of the sampler. Names and meanings are vLLM's; immutable and hashable.

    `stop`, `stop_token_ids` and `logit_bias` may be given as list, str or dict; they are stored as tuples, the bias
    as (id, value) pairs sorted by id. With n > 1, sequence i draws from its own stream of the one seed; greedy
    sequences are therefore equal. Raises RequestError naming the parameter, its value and what would be accepted.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        for name, (accepts, wanted) in _NUMBERS.items():
            self._store(name, _number(name, getattr(self, name), accepts, wanted))
        for name, (accepts, wanted) in _INTEGERS.items():
            if getattr(self, name) is not None or name not in _OPTIONAL:
                self._store(name, _integer(name, getattr(self, name), accepts, wanted))
        for name in ("include_stop_str_in_output", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise _refused(name, getattr(self, name), "True or False")
        self._store("stop", _stop_strings(self.stop))
        self._store("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._store("logit_bias", _bias(self.logit_bias))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refused("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")

    def _store(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the class is frozen; this runs in __post_init__ alone

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def seeded(self) -> SamplingParams:
        """The same parameters with a seed. A missing one is drawn here, once a request, from the system: from then
        on it is recorded, and a request that was preempted draws the same tokens again."""
        if self.seed is not None:
            return self
        return replace(self, seed=int.from_bytes(os.urandom(8), "little") >> 1)

    def validate(self, vocab_size: int) -> None:
        """Checks every token id against the vocabulary. Raises RequestError naming the id."""
        for name, ids in (("logit_bias", [i for i, _ in self.logit_bias]), ("stop_token_ids", self.stop_token_ids)):
            if outside := [i for i in ids if i >= vocab_size]:
                raise _refused(f"{name} id", outside[0], f"below the vocabulary size, {vocab_size}")
        if self.min_tokens and len(set(self.stop_token_ids)) >= vocab_size:
            raise _refused("min_tokens", self.min_tokens, "0 where every token of the vocabulary is a stop token")


def _refused(name: str, value: Any, wanted: str) -> RequestError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return RequestError(f"{name} is {shown}; it must be {wanted}")


def _number(name: str, value: Any, accepts: Any, wanted: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:  # a whole number beyond float's range
        number = math.nan
    if not math.isfinite(number) or not accepts(number):
        raise _refused(name, value, wanted)
    return number


def _integer(name: str, value: Any, accepts: Any, wanted: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not accepts(value):
        raise _refused(name, value, wanted)
    return int(value)


def _stop_strings(value: Any) -> tuple[str, ...]:
    stops = () if value is None else (value,) if isinstance(value, str) else value
    stops = tuple(stops) if isinstance(stops, Iterable) else ("",)
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise _refused("stop", value, "a string or a list of strings, none of them empty")
    return stops


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    wanted = "a list of token ids, whole numbers of at least 0"
    value = () if value is None else value
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise _refused(name, value, wanted)
    return tuple(_integer(name, i, lambda v: v >= 0, wanted) for i in value)


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    try:
        pairs = dict(() if value is None else value)
    except (TypeError, ValueError):
        raise _refused("logit_bias", value, "a dict of token id to a number from -100 to 100") from None
    ids = _token_ids("logit_bias id", pairs)
    values = [
        _number(f"logit_bias[{i}]", pairs[i], lambda v: -100 <= v <= 100, "a number from -100 to 100") for i in ids
    ]
    return tuple(sorted(zip(ids, values, strict=True)))
