"""The cache of one sequence in fewer bits: the paged cache with a table of its own, whose blocks follow one another."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import ModelConfig
from ..errors import RequestError
from ..kv_cache import ContiguousCache, check_max_tokens
from ..paging import PagedStep, SequenceStep, StepMetadata
from .kv import GROUP
from .kv_paged import QuantizedPagedCache

SLOT = 1


class QuantizedCache(ContiguousCache):
    """What ContiguousCache(config, max_tokens, "int8") is; also fp8 and int4. Rooms for whole blocks of 32 tokens.

    `read_dtype` is what attention computes with. Raises RequestError as ContiguousCache, EngineError for a format that
    does not suit the model.
    """

    fresh = False  # what this step brings is read as it is stored, like everything else

    def __init__(
        self, config: ModelConfig, max_tokens: int, dtype: str, device="cpu", attention=None, read_dtype=torch.float32
    ) -> None:
        check_max_tokens(max_tokens)
        self.config, self.max_tokens, self.length = config, max_tokens, 0
        blocks = -(-max_tokens // GROUP)
        self.paged = QuantizedPagedCache(config, blocks, GROUP, dtype, read_dtype, device, state_slots=SLOT)
        self.table = list(range(blocks))  # the null block too: one table is never padded
        self.most_drafts = GROUP if dtype == "int4" else float("inf")
        self._view: PagedStep | None = None
        self._oldest = 0  # the first block whose tokens int4 still has in full precision

    @property
    def allocated_bytes(self) -> int:
        return self.paged.allocated_bytes

    @property
    def used_bytes(self) -> int:
        blocks = sum(t.nbytes for t in self.paged.tensors) * self.length // (len(self.table) * GROUP)
        return blocks + sum(t.nbytes for t in self.paged.slotted)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, scale: float | None = None, keep=None):
        return self._step(q.shape[0]).attend(layer, q, k, v, scale)

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        return self._step(x.shape[0]).convolve(layer, x, weight)

    def delta_rule(self, layer: int, q: Tensor, *inputs: Tensor) -> Tensor:
        return self._step(q.shape[0]).delta_rule(layer, q, *inputs)

    def _step(self, count: int) -> PagedStep:
        """Of the next `count` tokens, for all layers."""
        end = self.length + count
        if end > self.max_tokens:
            raise RequestError(
                f"the sequence needs {end} tokens of cache and {self.max_tokens} were reserved; ask for a larger cache"
            )
        if self._view is None or self._view.metadata.rows != count:
            sequence = SequenceStep(0, count, self.length, self.table, SLOT)
            self._view = self.paged.step(StepMetadata([sequence], GROUP, device=self.paged.device))
        return self._view

    def advance(self, count: int) -> None:
        self.length += count
        self._view = None
        self._oldest = max(self._oldest, self.length // GROUP - 1)

    def truncate(self, length: int) -> None:
        """As ContiguousCache. int4 goes back to where any block begins, or into the newest two. Raises RequestError."""
        if not 0 <= length <= self.length:
            raise RequestError(f"cannot truncate to {length} tokens: the cache holds {self.length}")
        if self.config.linear_layers and length not in (0, self.length):
            raise RequestError(f"cannot truncate to {length} tokens: linear layers keep one state; reset and recompute")
        if self.paged.tails and length % GROUP and length // GROUP < self._oldest:
            raise RequestError(
                f"cannot truncate to {length} tokens: int4 has them rounded; take {length - length % GROUP}, where a "
                "block begins"
            )
        self.length, self._view = length, None
        self._oldest = min(self._oldest, length // GROUP)
