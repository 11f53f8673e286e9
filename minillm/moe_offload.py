"""Experts that do not all fit: they live in the host's memory, and the device keeps the ones used last.

A step reads few of many experts, and tokens that follow each other tend to choose alike, so a small cache hits more
often than its size says; how much more is measured, not promised (`CacheCounts`). A miss costs a copy over the bus,
which is slower than the device's memory by an order of magnitude or two: what an expert saves is then lost.

A step of several tokens goes through more experts than fit, and then through all the other layers' experts, before it
comes back: a scan, of which a plain LRU finds nothing. Two rules against that. Experts that are resident are computed
first, which a sum does not mind. And a layer that holds its share of the slots replaces its own experts, so that
what is resident when the layer's turn comes again is its share, and not the layer before.

Quantized experts are copied as they are multiplied, packed by their kernels, so that a slot is ready when it is filled:
int8 is a quarter of float32, but 4-bit codes come with the 16-bit numbers that many rows are multiplied by.

On a machine without an accelerator host and device are two pools in one memory. The counts are those that a GPU would
have; the time of a copy is that of a copy within memory, not over a bus.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

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
    """`slots` experts on the device, for `layers` layers. Given up first: the least recently used of those layers that
    hold more than slots / layers.

    Keys are (layer, expert). A slot's memory is allocated once and written over, unless experts differ in form. Threads
    that share a cache (two engines, one model) take turns, an expert at a time.
    """

    def __init__(self, slots: int, device: str | torch.device = "cpu", layers: int = 1) -> None:
        if slots < 1:
            raise EngineError(f"resident_experts is {slots}; an expert must be on the device to be used, so at least 1")
        self.slots, self.device = slots, torch.device(device)
        self.share = max(slots // layers, 1)
        self.counts = CacheCounts()
        self._resident: OrderedDict[tuple[int, int], Expert] = OrderedDict()
        self._turn = threading.Lock()

    def __deepcopy__(self, memo: dict) -> ExpertCache:
        """A copied model has a cache of its own, empty at first: whose turn it is cannot be copied."""
        new = ExpertCache(self.slots, self.device)
        new.share = self.share
        return new

    @property
    def resident(self) -> list[tuple[int, int]]:
        """From the least to the most recently used."""
        with self._turn:
            return list(self._resident)

    @property
    def device_bytes(self) -> int:
        with self._turn:
            return sum(t.nbytes for expert in self._resident.values() for t in _held(expert))

    def compute(self, key: tuple[int, int], host: Expert, x: Tensor) -> Tensor:
        """The expert's y for x. Nobody else's turn comes before it is computed: a slot is written over by the next."""
        with self._turn:
            return self.get(key, host)(x)

    def get(self, key: tuple[int, int], host: Expert) -> Expert:
        """The expert on the device, copied there if it is not; its slot is its own until the next call."""
        if key in self._resident:
            self.counts.hits += 1
            self._resident.move_to_end(key)
            return self._resident[key]
        self.counts.misses += 1
        with torch.inference_mode():  # slots made inside it can be written only inside it
            slot = self._free_slot(host, key[0])
            _fill(slot, host)
        self.counts.copied_bytes += sum(t.nbytes for t in _held(host))
        self._resident[key] = slot  # now that it is whole: a copy may be interrupted
        return slot

    def _free_slot(self, like: Expert, layer: int) -> Expert:
        if len(self._resident) < self.slots:
            return _slot(like, self.device)
        self.counts.evictions += 1
        held = Counter(owner for owner, _ in self._resident)
        held[layer] += 1  # with the one that comes
        oldest = next(iter(self._resident))
        freed = self._resident.pop(next((key for key in self._resident if held[key[0]] > self.share), oldest))
        return freed if _form(freed) == _form(like) else _slot(like, self.device)

    def reset_counts(self) -> None:
        self.counts = CacheCounts()


class OffloadedExperts(nn.Module):
    """Stands for a layer's list of experts: `experts[e](x)` is computed on the device."""

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

    def __getitem__(self, e: int) -> Callable[[Tensor], Tensor]:
        return functools.partial(self.cache.compute, (self.layer, e), self.host[e])

    def _apply(self, fn, recurse: bool = True):
        """Experts stay where they are when the model moves to a device."""
        return self


def offload_experts(model: nn.Module, resident_experts: int, device: str | torch.device | None = None) -> ExpertCache:
    """Moves the model's experts, in place, behind one cache of `resident_experts` for all layers, and returns it; it is
    the model's `expert_cache` from then on.

    Router, shared experts and attention stay resident. Call it before an engine is made, and after quantize_. Raises
    EngineError for a model without experts, with experts packed by `dtype`, which cannot be copied into a slot, or with
    quantized ones on a device that has no kernels for them.
    """
    layers = expert_layers(model)
    if not layers:
        raise EngineError("the model has no experts, so there are none to offload; leave offload_experts out")
    device = torch.device(device or layers[0].router.gate.weight.device)
    for layer in layers:
        _check(layer, device)
    cache = ExpertCache(resident_experts, device, len(layers))
    for layer in layers:
        layer.experts = OffloadedExperts(layer.layer, layer.experts.cpu(), cache)
    model.expert_cache = cache
    return cache


def _check(layer: ExpertLayer, device: torch.device) -> None:
    if isinstance(layer.experts, OffloadedExperts):
        raise EngineError("the model's experts are offloaded already; load it again for another cache")
    matrices = [m for expert in layer.experts for m in (expert.gate_up_proj, expert.down_proj)]
    if any(type(m) is not Linear and not _is_quantized(m) for m in matrices):
        names = ", ".join(sorted({type(m).__name__ for m in matrices}))
        raise EngineError(f"experts stored as {names} cannot be offloaded; load with dtype float32")
    if device.type != "cpu" and any(_is_quantized(m) for m in matrices):
        raise EngineError(f"quantized experts are computed on the CPU here, not on {device}; use device cpu")


# An expert's two matrices, plain or quantized: what is copied, and into what ------------------------------------------


def _is_quantized(matrix: nn.Module) -> bool:
    """quantization/linear.py, which comes after this file."""
    return hasattr(matrix, "held")


def _matrices(expert: Expert) -> tuple[nn.Module, nn.Module]:
    return expert.gate_up_proj, expert.down_proj


def _held(expert: Expert) -> list[Tensor]:
    return [t for m in _matrices(expert) for t in (m.held() if _is_quantized(m) else m.parameters())]


def _form(expert: Expert) -> list[tuple]:
    return [m.form() if _is_quantized(m) else (Linear, *(p.shape for p in m.parameters())) for m in _matrices(expert)]


def _slot(like: Expert, device: torch.device) -> Expert:
    return Expert(*(m.slot() if _is_quantized(m) else copy.deepcopy(m).to(device) for m in _matrices(like)))


def _fill(slot: Expert, host: Expert) -> None:
    for mine, theirs in zip(_matrices(slot), _matrices(host), strict=True):
        if _is_quantized(mine):
            mine.take(theirs)
            continue
        for into, source in zip(mine.parameters(), theirs.parameters(), strict=True):
            into.copy_(source)
