"""What a step of the paged cache does for linear layers: each sequence goes on from the state in its slot."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor


class StateStep:
    """Half of PagedStep. Decodes go together, a chunk by itself; `one_by_one` takes every token alone (exact mode)."""

    one_by_one = False

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """x (T, channels) of the packed tokens, weight (channels, K) -> (T, channels); rows of no sequence give 0.

        Products and sums of single numbers: a token's bits are the same in every mode.
        """
        states, out = self.cache.states, torch.zeros_like(x)
        for s in self._chunks:
            rows = slice(s.first, s.first + s.count)
            out[rows] = states.convolve(layer, s.state_slot, x[rows], weight)
        if self._decodes:
            rows, slots = self._single
            out[rows] = states.convolve_each(layer, slots, x[rows], weight)
        return out

    def delta_rule(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """q, k (T, Hk, Dk), v (T, Hv, Dv), g and beta (T, Hv) of the packed tokens -> (T, Hv, Dv)."""
        states, out, inputs = self.cache.states, torch.zeros_like(v), (q, k, v, g, beta)
        method = "recurrent" if self.one_by_one else "auto"
        for s in self.metadata.sequences if self.one_by_one else self._chunks:
            rows = slice(s.first, s.first + s.count)
            out[rows] = states.apply(layer, s.state_slot, *(x[rows] for x in inputs), method=method)
        if self._decodes and not self.one_by_one:
            rows, slots = self._single
            out[rows] = states.apply_each(layer, slots, *(x[rows] for x in inputs))
        return out

    @cached_property
    def _single(self) -> tuple[Tensor, Tensor]:
        """Rows and slots of the sequences that bring one token."""
        pairs = [(s.first, s.state_slot) for s in self._decodes]
        return tuple(torch.tensor(side, device=self.metadata.device) for side in zip(*pairs, strict=True))
