"""Experts that do not all fit: they live in the host's memory, and the device keeps the ones used last.

A step reads few of many experts, and tokens that follow each other tend to choose alike, so a small cache hits more
often than its size says; how much more is measured, not promised (`CacheCounts`). A miss costs a copy over the bus,
which is slower than the device's memory by an order of magnitude or two: what an expert saves is then lost.

On a machine without an accelerator host and device are two pools in one memory. The counts are those that a GPU would
have; the time of a copy is that of a copy within memory, not over a bus.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from .errors import EngineError
from .layers import Linear
from .moe import Expert, ExpertLayer, expert_layers


@dataclass
class CacheCounts:
    """Uses of experts since the cache was made or reset: found on the device, copied to it, thrown out for that."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    copied_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        uses = self.hits + self.misses
        return self.hits / uses if uses else 0.0


class ExpertCache:
    """`slots` experts of one shape on the device, the least recently used one given up first.

    Keys are (layer, expert). A slot's memory is allocated once and written over.
    """

    def __init__(self, slots: int, device: str | torch.device = "cpu") -> None:
        if slots < 1:
            raise EngineError(f"resident_experts is {slots}; an expert must be on the device to be used, so at least 1")
        self.slots, self.device = slots, torch.device(device)
        self.counts = CacheCounts()
        self._resident: OrderedDict[tuple[int, int], Expert] = OrderedDict()

    @property
    def resident(self) -> list[tuple[int, int]]:
        """From the least to the most recently used."""
        return list(self._resident)

    @property
    def device_bytes(self) -> int:
        return sum(expert.weight_size for expert in self._resident.values())

    def get(self, key: tuple[int, int], host: Expert) -> Expert:
        """The expert on the device, copied there if it is not."""
        if key in self._resident:
            self.counts.hits += 1
            self._resident.move_to_end(key)
            return self._resident[key]
        self.counts.misses += 1
        self.counts.copied_bytes += host.weight_size
        with torch.inference_mode():  # slots made inside it can be written only inside it
            self._resident[key] = slot = self._free_slot(host)
            for mine, theirs in zip(slot.parameters(), host.parameters(), strict=True):
                mine.copy_(theirs)
        return slot

    def _free_slot(self, like: Expert) -> Expert:
        if len(self._resident) < self.slots:
            return copy.deepcopy(like).to(self.device)
        self.counts.evictions += 1
        return self._resident.popitem(last=False)[1]

    def reset_counts(self) -> None:
        self.counts = CacheCounts()


class OffloadedExperts(nn.Module):
    """Stands for a layer's list of experts: `experts[e]` is on the device by the time it is used."""

    def __init__(self, layer: int, host: nn.ModuleList, cache: ExpertCache) -> None:
        super().__init__()
        self.layer, self.host, self.cache = layer, host, cache

    def __len__(self) -> int:
        return len(self.host)

    def __iter__(self) -> Iterator[Expert]:
        """The experts in host memory, to look at: iterating copies nothing."""
        return iter(self.host)

    def __getitem__(self, e: int) -> Expert:
        return self.cache.get((self.layer, e), self.host[e])

    def _apply(self, fn, recurse: bool = True):
        """Experts stay where they are when the model moves to a device."""
        return self


def offload_experts(model: nn.Module, resident_experts: int, device: str | torch.device | None = None) -> ExpertCache:
    """Moves the model's experts, in place, behind one cache of `resident_experts` for all layers, and returns it.

    Router, shared experts and attention stay resident. Call it before an engine is made. Raises EngineError for a model
    without experts, or with experts in a packed layout, which cannot be copied into a slot.
    """
    layers = expert_layers(model)
    if not layers:
        raise EngineError("the model has no experts, so there are none to offload")
    for layer in layers:
        _check(layer)
    cache = ExpertCache(resident_experts, device or layers[0].router.gate.weight.device)
    for layer in layers:
        layer.experts = OffloadedExperts(layer.layer, layer.experts.cpu(), cache)
    return cache


def _check(layer: ExpertLayer) -> None:
    if isinstance(layer.experts, OffloadedExperts):
        raise EngineError("the model's experts are offloaded already; load it again for another cache")
    kinds = {type(m) for expert in layer.experts for m in (expert.gate_up_proj, expert.down_proj)}
    if kinds != {Linear}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise EngineError(f"experts stored as {names} cannot be offloaded; load with dtype float32")
