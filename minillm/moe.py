"""Mixture of experts: a feed-forward layer of many, of which each token passes a few.

What is saved is arithmetic, and bytes only while a step's few tokens leave experts untouched: T tokens that choose k
of E at random read E·(1 - (1 - k/E)^T) of them. Three ways to compute the same sum (`Execution`):

loop      for each expert, look for its tokens: the definition
grouped   sort the (token, expert) pairs by expert, so that each one's rows are contiguous, gathered and scattered once
fixed     each chosen expert on every row of the step, the rows that did not choose it thrown away: wasteful, but an
          expert's matmul has one shape, so a token's bits do not depend on how many others chose its expert
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import ConfigError, EngineError, short
from .layers import region
from .moe_router import DROPPED, Router, Routing, capacity, drop_above, tokens_per_expert

EXECUTIONS = ("loop", "grouped", "fixed")


class Expert(nn.Module):
    """down(silu(gate(x)) · up(x)), as SwiGLU, in one region of a profile. gate_up_proj (2f, d), down_proj (d, f)."""

    def __init__(self, gate_up_proj: nn.Module, down_proj: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj

    @property
    def weight_size(self) -> int:
        """Bytes read when a token chooses it."""
        return self.gate_up_proj.weight_bytes + self.down_proj.weight_bytes

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)  # (T, f) each
        return self.down_proj(F.silu(gate) * up)


class SharedExpert(nn.Module):
    """What every token passes besides its own experts; with a gate (1, d), scaled by sigmoid(x · gate) (Qwen)."""

    def __init__(self, expert: Expert, gate: nn.Module | None = None) -> None:
        super().__init__()
        self.expert, self.gate = expert, gate

    def forward(self, x: Tensor) -> Tensor:
        y = self.expert(x)
        return y if self.gate is None else y * self.gate(x).sigmoid().to(y.dtype)


@dataclass(frozen=True)
class Load:
    """What one layer's experts got in one step: counts (E,) of tokens, on the device, and choices dropped."""

    layer: int
    tokens: int
    counts: Tensor
    dropped: int

    @property
    def distinct(self) -> int:
        """Experts that are read."""
        return int((self.counts > 0).sum())

    @property
    def imbalance(self) -> float:
        """The fullest expert's tokens over the mean: how much longer its device works, where each has a device."""
        mean = self.counts.float().mean().item()
        return self.counts.max().item() / mean if mean else 1.0


class ExpertLayer(nn.Module):
    """x (T, d) -> Σ_j weight_j · expert_j(x) + shared(x). `experts` is a list of E modules, or what stands for one
    (`moe_offload.OffloadedExperts`). `capacity_factor` None drops nothing."""

    def __init__(self, layer: int, router: Router, experts: nn.Module, shared: SharedExpert | None = None) -> None:
        super().__init__()
        self.layer, self.router, self.experts, self.shared = layer, router, experts, shared
        self.execution, self.capacity_factor = "grouped", None
        self.observers: list[Callable[[Load], None]] = []  # shared by every copy of the layer

    @property
    def num_experts(self) -> int:
        return self.router.settings.num_experts

    def forward(self, x: Tensor) -> Tensor:
        with region("router"):
            routing = self.route(x)
        with region("experts"):
            found = self.compute(x, routing)
        if self.shared is None:
            return found
        with region("shared_experts"):
            return found + self.shared(x)

    def route(self, x: Tensor) -> Routing:
        routing = self.router(x)
        if self.capacity_factor is not None:
            routing = drop_above(routing, capacity(*routing.experts.shape, self.num_experts, self.capacity_factor))
        if self.observers:
            self._tell(routing)
        return routing

    def compute(self, x: Tensor, routing: Routing) -> Tensor:
        """What the routed experts add, (T, d)."""
        return _COMPUTE[self.execution](x, routing, self.experts)

    def _tell(self, routing: Routing) -> None:
        counts = tokens_per_expert(routing.experts, self.num_experts)
        dropped = int((routing.experts == DROPPED).sum()) if self.capacity_factor is not None else 0
        load = Load(self.layer, routing.experts.shape[0], counts, dropped)
        for observer in self.observers:
            observer(load)

    def idle_bytes(self, tokens: int) -> float:
        """Bytes of the experts that a step of `tokens` tokens is expected to leave unread."""
        chosen = self.router.settings.top_k / self.num_experts
        return (1 - chosen) ** tokens * sum(expert.weight_size for expert in self.experts)


def loop(x: Tensor, routing: Routing, experts: nn.Module) -> Tensor:
    """For each expert: its tokens, through it, times their weights, added where they came from."""
    rows = [(routing.experts == e).nonzero(as_tuple=True) for e in range(len(experts))]
    chosen = [e for e, (token, _) in enumerate(rows) if len(token)]
    found = {e: experts[e](x[rows[e][0]]) for e in visits(experts, chosen)}
    out = torch.zeros_like(x)
    for e in chosen:  # a token's sum has one order, whoever was visited first
        token, choice = rows[e]
        out.index_add_(0, token, (found[e] * routing.weights[token, choice, None]).to(x.dtype))
    return out


def grouped(x: Tensor, routing: Routing, experts: nn.Module) -> Tensor:
    """The pairs sorted by expert: one gather in, one matmul an expert over contiguous rows, one scatter out."""
    tokens, k = routing.experts.shape
    order, counts = sorted_pairs(routing.experts, len(experts))
    rows = x[order // k]  # (T · k, d), expert by expert
    parts = rows.split([*counts, tokens * k - sum(counts)])  # the last: what was dropped
    chosen = [e for e, count in enumerate(counts) if count]
    found = {e: experts[e](parts[e]) for e in visits(experts, chosen)}
    y = torch.empty_like(rows)
    y[order] = torch.cat([*(found[e] for e in chosen), torch.zeros_like(parts[-1])])
    return combine(y.view(tokens, k, x.shape[-1]), routing.weights)


def fixed(x: Tensor, routing: Routing, experts: nn.Module) -> Tensor:
    """Each chosen expert on all of x, so that it always sees one shape and a token in one place."""
    y = x.new_zeros((*routing.experts.shape, x.shape[-1]))  # (T, k, d)
    for e in visits(experts, [e for e in routing.experts.unique().tolist() if e != DROPPED]):
        mine = routing.experts == e
        y[mine] = experts[e](x)[mine.any(1)]
    return combine(y, routing.weights)


def visits(experts: nn.Module, chosen: list[int]) -> list[int]:
    """The chosen experts in the order to compute them in: of offloaded ones, those on the device first."""
    return experts.order(chosen) if hasattr(experts, "order") else chosen


def combine(y: Tensor, weights: Tensor) -> Tensor:
    """y (T, k, d), weights (T, k) float32 -> (T, d): the router's weights come in here, once, choice by choice."""
    return (y * weights[..., None]).sum(1).to(y.dtype)


def sorted_pairs(experts: Tensor, num_experts: int) -> tuple[Tensor, list[int]]:
    """experts (T, k) -> pairs t · k + j in order of their expert, then of the token; and how many each expert has.

    Dropped pairs come last and are in no count.
    """
    flat = torch.where(experts == DROPPED, num_experts, experts).flatten()
    return flat.argsort(stable=True), tokens_per_expert(experts, num_experts).tolist()


_COMPUTE = {"loop": loop, "grouped": grouped, "fixed": fixed}


# A whole model -----------------------------------------------------------------------------------------------------


def expert_layers(model: nn.Module) -> list[ExpertLayer]:
    return [module for module in model.modules() if isinstance(module, ExpertLayer)]


def with_experts(model: nn.Module, execution: str | None = None, capacity_factor: float | None = None) -> nn.Module:
    """The model with its expert layers computed so: a copy that shares every weight; itself if it has none.

    Raises ConfigError for an unknown execution or a capacity that is none, EngineError for a capacity beside "fixed":
    who is dropped depends on the batch-mates, which is what "fixed" rules out.
    """
    if execution is not None and execution not in EXECUTIONS:
        raise ConfigError(f"execution {short(repr(execution))} is not known; choose one of {', '.join(EXECUTIONS)}")
    if capacity_factor is not None:
        capacity(1, 1, 1, capacity_factor)

    def change(layer: ExpertLayer) -> None:
        layer.execution = execution or layer.execution
        layer.capacity_factor = layer.capacity_factor if capacity_factor is None else capacity_factor
        if layer.execution == "fixed" and layer.capacity_factor is not None:
            raise EngineError("experts with a capacity drop tokens by who else is there; give batch_invariant=False")

    return _changed(model, change)


def _changed(module: nn.Module, change: Callable[[ExpertLayer], None]) -> nn.Module:
    """A shallow copy down to each expert layer; what holds none is the same object."""
    if isinstance(module, ExpertLayer):
        new = copy.copy(module)
        new._modules = dict(module._modules)
        change(new)
        return new
    children = {name: _changed(child, change) for name, child in module.named_children()}
    if all(getattr(module, name) is child for name, child in children.items()):
        return module
    new = copy.copy(module)
    new._modules = {**module._modules, **children}
    return new


@contextmanager
def recorded_loads(model: nn.Module) -> Iterator[list[Load]]:
    """`with recorded_loads(model) as loads:` gathers a Load for each expert layer of each step, copies of the model
    included. In exact mode a step is a tile, its empty rows included."""
    loads: list[Load] = []
    layers = expert_layers(model)
    for layer in layers:
        layer.observers.append(loads.append)
    try:
        yield loads
    finally:
        for layer in layers:
            layer.observers.remove(loads.append)
