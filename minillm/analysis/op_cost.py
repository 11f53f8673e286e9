"""The values of the cost model: a step, the precision it runs in, and what one operator of it costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..config import ModelConfig
from ..errors import RequestError, short
from .formats import format_of
from .numbers import MOST, whole_number
from .parameters import kept_format, weight_table

_MOST_SEQUENCES = 1 << 24  # of a step, which lists them
LOGIT_BYTES = 4  # logits are float32 whatever the model runs in


@dataclass(frozen=True)
class Step:
    """One forward pass over packed sequences: sequence i brings `new[i]` tokens and finds `cached[i]` in the cache.

    `logit_rows` rows go through the head; None means one a sequence, which is all that sampling needs.
    Raises RequestError if the numbers describe no step.
    """

    new: tuple[int, ...]
    cached: tuple[int, ...] = ()
    logit_rows: int | None = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "new", tuple(self.new))
            object.__setattr__(self, "cached", tuple(self.cached) or (0,) * len(self.new))
        except TypeError:
            given = short(f"new {self.new!r} and cached {self.cached!r}")
            raise RequestError(f"a step has {given}; each must be numbers of tokens, one a sequence") from None
        _check_step(self)

    @classmethod
    def prefill(cls, tokens: int, cached: int = 0, sequences: int = 1, logit_rows: int | None = None) -> Step:
        """`sequences` prompts of `tokens` new tokens each, after `cached` that are already there."""
        whole_number("sequences", sequences, 1, _MOST_SEQUENCES)
        return cls((tokens,) * sequences, (cached,) * sequences, logit_rows)

    @classmethod
    def decode(cls, context: int, sequences: int = 1) -> Step:
        """One new token for each of `sequences` sequences that have `context` tokens in the cache."""
        whole_number("sequences", sequences, 1, _MOST_SEQUENCES)
        return cls((1,) * sequences, (context,) * sequences)

    @property
    def tokens(self) -> int:
        return sum(self.new)

    @property
    def rows(self) -> int:
        """Rows of logits."""
        return len(self.new) if self.logit_rows is None else self.logit_rows

    @property
    def context(self) -> int:
        """Tokens attended to, summed over the sequences: cached and new."""
        return sum(self.new) + sum(self.cached)

    def pairs(self, window: int | None = None) -> int:
        """Query-key pairs of causal attention, summed over the sequences."""
        return sum(visible_pairs(new, cached, window) for new, cached in zip(self.new, self.cached, strict=True))

    def keys(self, window: int | None = None) -> int:
        """Distinct keys that some query of the step sees: the rows of the KV cache that have to be read."""
        if window is None:
            return self.context
        pairs = zip(self.new, self.cached, strict=True)
        return sum(min(cached + new, new + window - 1) for new, cached in pairs)

    def written(self, window: int | None = None) -> int:
        """Rows written to the KV cache; a sliding layer keeps no more than its window."""
        return sum(new if window is None else min(new, window) for new in self.new)


def _check_step(step: Step) -> None:
    if len(step.new) != len(step.cached):
        raise RequestError(
            f"a step has {len(step.new)} sequences with new tokens but {len(step.cached)} cache lengths; give one each"
        )
    for name, counts in (("new", step.new), ("cached", step.cached)):
        for count in counts:
            whole_number(f"{name} tokens of a sequence", count, -MOST)
    if not step.new or min(step.new) < 1 or min(step.cached) < 0:
        raise RequestError(
            f"a step of new tokens {step.new[:8]} and cached {step.cached[:8]} cannot run; "
            "every sequence needs at least 1 new token and 0 cached"
        )
    if step.logit_rows is not None:
        whole_number("logit_rows", step.logit_rows, -MOST)
    if step.logit_rows is not None and not 0 <= step.logit_rows <= step.tokens:
        raise RequestError(f"logit_rows {step.logit_rows} must lie between 0 and the step's {step.tokens} tokens")


def visible_pairs(new: int, cached: int = 0, window: int | None = None) -> int:
    """Query-key pairs of `new` causal queries after `cached` tokens: the sum of min(cached + j, window), j = 1..new.

    Without a window that is new·(cached + (new + 1) / 2), about half the square that a full score matrix has.
    """
    if window is None or cached + new <= window:
        return new * cached + new * (new + 1) // 2
    growing = max(0, window - cached)  # queries that still see everything before them
    return growing * cached + growing * (growing + 1) // 2 + (new - growing) * window


def distinct_experts(experts: int, chosen: int, tokens: int) -> float:
    """Expected number of different experts that `tokens` tokens choose, each `chosen` of `experts` at random:
    E·(1 − (1 − k/E)^T)."""
    return experts * (1 - (1 - chosen / experts) ** tokens)


@dataclass(frozen=True)
class Precision:
    """Number formats (see `format_of`) of linear weights, activations and KV cache, and of the weights that
    quantizers leave alone: vectors, routers and the parts named in `keep`. `kept` None means as `weight_bytes`."""

    weights: Any = "bfloat16"
    activations: Any = "bfloat16"
    kv: Any = "bfloat16"
    kept: Any = None
    keep: tuple[str, ...] = ("embedding", "head")

    @property
    def activation_bytes(self) -> float:
        return format_of(self.activations).bytes_per_element


@dataclass(frozen=True)
class OpCost:
    """What one operator costs in a step, all `count` instances (layers) of it together. Bytes and FLOPs."""

    name: str
    count: int
    flops: float
    weight_bytes: float = 0
    activation_bytes: float = 0
    kv_bytes: float = 0

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.activation_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """FLOPs for each byte moved."""
        return self.flops / self.bytes if self.bytes else 0.0

    def __add__(self, other: OpCost) -> OpCost:
        """Costs of both; keeps this one's name and count."""
        return OpCost(
            self.name,
            self.count,
            self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.activation_bytes + other.activation_bytes,
            self.kv_bytes + other.kv_bytes,
        )


def total(ops: Iterable[OpCost], name: str = "step") -> OpCost:
    """The sum of all operators."""
    result = OpCost(name, 1, 0)
    for op in ops:
        result = result + op
    return result


@dataclass(frozen=True)
class Weights:
    """What each operator of a model reads in weights and multiplies by, summed over the layers."""

    bytes: dict[str, int] = field(default_factory=dict)
    matrix_parameters: dict[str, int] = field(default_factory=dict)  # active ones: 2 FLOPs each for every row

    @classmethod
    def of(cls, config: ModelConfig, precision: Precision) -> Weights:
        formats = {True: format_of(precision.weights), False: kept_format(precision.weights, precision.kept)}
        sizes: dict[str, int] = {}
        matrices: dict[str, int] = {}
        for weight in weight_table(config):
            rows, columns = weight.shape if len(weight.shape) == 2 else (1, weight.shape[0])
            size = formats[weight.quantizable(precision.keep)].tensor_bytes(rows, columns) * weight.count
            sizes[weight.operator] = sizes.get(weight.operator, 0) + size
            if len(weight.shape) == 2:
                matrices[weight.operator] = matrices.get(weight.operator, 0) + weight.active_parameters
        return cls(sizes, matrices)

    def linear(self, name: str, count: int, rows: int, activation_bytes: float, share: float = 1) -> OpCost:
        """A matrix product of `rows` rows with the weights of operator `name`, of which `share` is read."""
        size = self.bytes[name] * share if share != 1 else self.bytes[name]
        return OpCost(name, count, 2 * rows * self.matrix_parameters[name], size, activation_bytes)
