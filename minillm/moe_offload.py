"""Experts that do not all fit: they live in the host's memory, and the device keeps the ones used last.

A step reads few of many experts, and tokens that follow each other tend to choose alike, so a small cache hits more
often than its size says; how much more is measured, not promised (`CacheCounts`). A miss costs a copy over the bus,
which is slower than the device's memory by an order of magnitude or two: what an expert saves is then lost.

A step of several tokens goes through more experts than fit, and then through all the other layers' experts, before it
comes back: a scan, of which a plain LRU finds nothing. Two rules against that. Experts that are resident are computed
first, which a sum does not mind. And a layer that holds its share of the slots replaces its own experts, so that
what is resident when the layer's turn comes again is its share, and not the layer before.

On a machine without an accelerator host and device are two pools in one memory. The counts are those that a GPU would
have; the time of a copy is that of a copy within memory, not over a bus.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

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

    def values(self) -> dict[str, int | float]:
        return {**asdict(self), "hit_rate": self.hit_rate}

    @property
    def hit_rate(self) -> float:
        uses = self.hits + self.misses
        return self.hits / uses if uses else 0.0


class ExpertCache:
    """`slots` experts of one shape on the device, for `layers` layers. Given up first: the least recently used of
    those layers that hold more than slots / layers.

    Keys are (layer, expert). A slot's memory is allocated once and written over.
    """

    def __init__(self, slots: int, device: str | torch.device = "cpu", layers: int = 1) -> None:
        if slots < 1:
            raise EngineError(f"resident_experts is {slots}; an expert must be on the device to be used, so at least 1")
        self.slots, self.device = slots, torch.device(device)
        self.share = max(slots // layers, 1)
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
            self._resident[key] = slot = self._free_slot(host, key[0])
            for mine, theirs in zip(slot.parameters(), host.parameters(), strict=True):
                mine.copy_(theirs)
        return slot

    def _free_slot(self, like: Expert, layer: int) -> Expert:
        if len(self._resident) < self.slots:
            return copy.deepcopy(like).to(self.device)
        self.counts.evictions += 1
        held = Counter(owner for owner, _ in self._resident)
        held[layer] += 1  # with the one that comes
        oldest = next(iter(self._resident))
        return self._resident.pop(next((key for key in self._resident if held[key[0]] > self.share), oldest))

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

    def order(self, chosen: Sequence[int]) -> list[int]:
        """Those on the device first: a copy that makes room for another must not throw out what this step will use."""
        resident = set(self.cache.resident)
        return sorted(chosen, key=lambda e: ((self.layer, e) not in resident, e))

    def __getitem__(self, e: int) -> Expert:
        return self.cache.get((self.layer, e), self.host[e])

    def _apply(self, fn, recurse: bool = True):
        """Experts stay where they are when the model moves to a device."""
        return self


def offload_experts(model: nn.Module, resident_experts: int, device: str | torch.device | None = None) -> ExpertCache:
    """Moves the model's experts, in place, behind one cache of `resident_experts` for all layers, and returns it; it is
    the model's `expert_cache` from then on.

    Router, shared experts and attention stay resident. Call it before an engine is made. Raises EngineError for a model
    without experts, or with experts that are quantized or packed, which cannot be copied into a slot.
    """
    layers = expert_layers(model)
    if not layers:
        raise EngineError("the model has no experts, so there are none to offload; leave offload_experts out")
    for layer in layers:
        _check(layer)
    cache = ExpertCache(resident_experts, device or layers[0].router.gate.weight.device, len(layers))
    for layer in layers:
        layer.experts = OffloadedExperts(layer.layer, layer.experts.cpu(), cache)
    model.expert_cache = cache
    return cache


def _check(layer: ExpertLayer) -> None:
    if isinstance(layer.experts, OffloadedExperts):
        raise EngineError("the model's experts are offloaded already; load it again for another cache")
    kinds = {type(m) for expert in layer.experts for m in (expert.gate_up_proj, expert.down_proj)}
    if kinds != {Linear}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        if "QuantizedLinear" in names:
            raise EngineError("quantized experts cannot be offloaded, a kernel holds them packed; do one or the other")
        raise EngineError(f"experts stored as {names} cannot be offloaded; load with dtype float32")
