"""What experts cost a step, measured beside the formula: how many are read, and how unevenly they are loaded."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .analysis.op_cost import distinct_experts
from .moe import EXECUTIONS, ExpertLayer, Load, with_experts
from .moe_router import RouterSettings, balanced_correction, choose, tokens_per_expert


@dataclass(frozen=True)
class Distinct:
    """Experts that a step of `tokens` tokens reads: E·(1 - (1 - k/E)^T) if choices are even and independent, and the
    mean that was measured. Below the formula: tokens choose alike, or some experts are favoured."""

    tokens: int
    formula: float
    measured: float


def random_choices(tokens: int, num_experts: int, top_k: int, skew: float = 0.0, seed: int = 0) -> Tensor:
    """(T, k) different experts a token, drawn with popularity 1 / rank^skew; 0 is even."""
    generator = torch.Generator().manual_seed(seed)
    popularity = torch.arange(1, num_experts + 1, dtype=torch.float32) ** -skew
    order = torch.randperm(num_experts, generator=generator)
    return torch.multinomial(popularity[order].expand(tokens, -1), top_k, generator=generator)


def distinct_of_choices(
    steps: Sequence[int], num_experts: int, top_k: int, skew: float = 0.0, trials: int = 30
) -> list[Distinct]:
    """Formula and mean of `trials` random steps for each number of tokens in `steps`."""
    return [
        Distinct(
            tokens,
            distinct_experts(num_experts, top_k, tokens),
            statistics.mean(
                len(random_choices(tokens, num_experts, top_k, skew, seed).unique()) for seed in range(trials)
            ),
        )
        for tokens in steps
    ]


def distinct_of_loads(loads: Iterable[Load], top_k: int) -> list[Distinct]:
    """The same of a model's steps (`recorded_loads`): a row for each number of tokens, over layers and steps."""
    by_tokens: dict[int, list[Load]] = {}
    for load in loads:
        by_tokens.setdefault(load.tokens, []).append(load)
    return [
        Distinct(
            tokens,
            distinct_experts(len(group[0].counts), top_k, tokens),
            statistics.mean(load.distinct for load in group),
        )
        for tokens, group in sorted(by_tokens.items())
    ]


def device_loads(counts: Tensor, devices: int) -> Tensor:
    """counts (E,) -> (devices,): what each has to do when neighbouring experts share one."""
    return torch.stack([part.sum() for part in counts.tensor_split(devices)])


def straggler(counts: Tensor, devices: int) -> float:
    """How much longer a step takes than with even loads, where all wait for the fullest device: max / mean."""
    loads = device_loads(counts, devices).float()
    return (loads.max() / loads.mean()).item() if loads.sum() else 1.0


@dataclass(frozen=True)
class ExecutionTimes:
    """Median seconds of an expert layer over `tokens` tokens, by execution."""

    tokens: int
    seconds: dict[str, float]

    @property
    def speedup(self) -> float:
        """grouped against loop."""
        return self.seconds["loop"] / self.seconds["grouped"]


@torch.inference_mode()
def time_executions(
    layer: ExpertLayer, tokens: int, executions: Sequence[str] = EXECUTIONS, rounds: int = 7, seed: int = 0
) -> ExecutionTimes:
    """Times the layer each way on the same random rows, in turn, so that a disturbance hits all of them alike."""
    weight = layer.router.gate.weight
    x = torch.randn(tokens, weight.shape[1], generator=torch.Generator().manual_seed(seed)).to(weight)
    ways = {name: with_experts(layer, name) for name in executions}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):  # the first is warm-up
        for name, way in ways.items():
            times[name].append(_seconds(lambda way=way: way(x)))
    return ExecutionTimes(tokens, {name: statistics.median(t[1:]) for name, t in times.items()})


def _seconds(call: Callable[[], Tensor]) -> float:
    started = time.perf_counter()
    if call().device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


@torch.inference_mode()
def balance(
    logits: Callable[[int], Tensor], settings: RouterSettings, steps: int, speed: float = 1e-3
) -> tuple[Tensor, list[float]]:
    """DeepSeek-V3's balancing alone: logits(step) (T, E) are routed, then the correction moves by `speed`.

    Returns the correction (E,) and each step's imbalance, max / mean tokens of an expert. Nothing else is trained, so
    what falls is due to the bias.
    """
    correction, imbalance = torch.zeros(settings.num_experts), []
    for step in range(steps):
        counts = tokens_per_expert(choose(logits(step), settings, correction).experts, settings.num_experts)
        imbalance.append((counts.max() / counts.float().mean()).item())
        correction = balanced_correction(correction, counts, speed)
    return correction, imbalance
