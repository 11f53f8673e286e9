"""The roofline: how fast an operator or a step could possibly run on a device.

Williams, Waterman, Patterson, "Roofline: an insightful visual performance model" (CACM 2009): a rate is at most
min(peak, intensity x bandwidth). Everything here is plain numbers, ready to be drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import ModelConfig
from ..errors import RequestError
from .costs import OpCost, Precision, Step, step_costs, total
from .hardware import Hardware


@dataclass(frozen=True)
class Prediction:
    """An operator at the roof: the least seconds it can take, and which of the two ceilings says so."""

    name: str
    seconds: float
    bound: str  # "memory" or "compute"
    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.seconds if self.seconds else 0.0


def predict_op(op: OpCost, hardware: Hardware, dtype: Any = "bfloat16") -> Prediction:
    """max(FLOPs / peak, bytes / bandwidth). `dtype` is that of the arithmetic, not of the stored weights.

    Raises ConfigError if the device has no rate for `dtype`.
    """
    compute, memory = op.flops / hardware.peak(dtype), op.bytes / hardware.bandwidth
    bound = "compute" if compute > memory else "memory"
    return Prediction(op.name, max(compute, memory), bound, op.flops, op.bytes)


def predict(ops: Iterable[OpCost], hardware: Hardware, dtype: Any = "bfloat16") -> list[Prediction]:
    """Every operator at the roof, one after the other, as an implementation that fuses nothing would run them."""
    return [predict_op(op, hardware, dtype) for op in ops]


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of a step and what they are made of. `linear` is max(FLOPs / peak, weight bytes / bandwidth),
    and `bound` says which of the two that is."""

    kv: float
    linear: float
    bound: str
    communication: float = 0.0
    overhead: float = 0.0

    @property
    def seconds(self) -> float:
        return self.kv + self.linear + self.communication + self.overhead


def step_time(
    kv_bytes: float,
    flops: float,
    weight_bytes: float,
    hardware: Hardware,
    dtype: Any = "bfloat16",
    communication: float = 0.0,
    overhead: float = 0.0,
) -> StepTime:
    """KV bytes / bandwidth + max(FLOPs / peak, weight bytes / bandwidth) + communication + overhead, in seconds.

    The KV cache stands apart because no batch size lets its reads hide behind arithmetic: each sequence reads its own.
    """
    compute, memory = flops / hardware.peak(dtype), weight_bytes / hardware.bandwidth
    bound = "compute" if compute > memory else "memory"
    return StepTime(kv_bytes / hardware.bandwidth, max(compute, memory), bound, communication, overhead)


def predict_step(
    ops: Iterable[OpCost],
    hardware: Hardware,
    dtype: Any = "bfloat16",
    communication: float = 0.0,
    overhead: float = 0.0,
) -> StepTime:
    """`step_time` of a step's operators. Activations are left out: a good implementation keeps them on the chip, so
    this is the floor, below the sum of `predict`."""
    whole = total(ops)
    return step_time(whole.kv_bytes, whole.flops, whole.weight_bytes, hardware, dtype, communication, overhead)


@dataclass(frozen=True)
class Point:
    """A dot on the roofline: FLOPs a byte across, FLOP/s up. `kind` is "predicted" or "measured"."""

    label: str
    intensity: float
    flops_per_s: float
    kind: str = "predicted"


@dataclass(frozen=True)
class Pair:
    """A prediction and the measurement of the same thing. `fraction` is predicted / measured seconds: 1 is the roof."""

    label: str
    predicted: Point
    measured: Point
    predicted_seconds: float
    measured_seconds: float
    bound: str

    @property
    def fraction(self) -> float:
        return self.predicted_seconds / self.measured_seconds


def point(prediction: Prediction) -> Point:
    """The dot of a prediction, on the roof."""
    return Point(prediction.name, prediction.intensity, prediction.flops_per_s)


def join(predictions: Iterable[Prediction], seconds: Mapping[str, float]) -> list[Pair]:
    """Pairs predictions with measured `seconds` by name, in the order of the predictions.

    Names that only one side has are left out; raises RequestError if a measured time is not above 0.
    """
    pairs = []
    for prediction in predictions:
        taken = seconds.get(prediction.name)
        if taken is None:
            continue
        if not taken > 0:
            raise RequestError(f"measured time of {prediction.name} is {taken}; it must be above 0 seconds")
        measured = Point(prediction.name, prediction.intensity, prediction.flops / taken, "measured")
        pairs.append(Pair(prediction.name, point(prediction), measured, prediction.seconds, taken, prediction.bound))
    return pairs


def roof(hardware: Hardware, intensities: Sequence[float], dtype: Any = "bfloat16") -> list[float]:
    """FLOP/s of the roof above each intensity."""
    peak = hardware.peak(dtype)
    return [min(peak, intensity * hardware.bandwidth) for intensity in intensities]


def critical_batch(
    config: ModelConfig,
    hardware: Hardware,
    precision: Precision | None = None,
    dtype: Any = "bfloat16",
    limit: int = 1 << 17,
) -> int | None:
    """Smallest number of sequences at which a decode step's matrix products take longer than reading the weights.

    The KV cache is left out: it grows with the batch and never turns. Near ridge x weight bytes / 2 for a dense model,
    about ridge x E / k for experts; None if even `limit` sequences leave the step memory-bound.
    """

    def is_compute_bound(batch: int) -> bool:
        whole = total(op for op in step_costs(config, Step.decode(0, batch), precision) if op.name != "embed")
        return whole.flops / hardware.peak(dtype) > whole.weight_bytes / hardware.bandwidth

    high = 1
    while not is_compute_bound(high):
        high *= 2
        if high > limit:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_compute_bound(middle) else (middle, high)
    return high
