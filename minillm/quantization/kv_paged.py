"""The paged cache in fewer bits: codes and scales lie in the same blocks, so a block is shared, copied, swapped and
found again with its scales.

Whoever attends reads what is stored, its own token included, so a token's key is one number for every later query,
whatever chunk it came in: chunked = whole, batched = alone and hit = miss hold as in a cache that rounds nothing. Steps
of other numbers of rows add in another order, which may turn a code that lies between two; in exact mode nothing turns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..block_pool import NULL
from ..config import ModelConfig
from ..paging import ExactStep, PagedCache, PagedStep, StepMetadata
from . import kv
from .kv_tails import ExactTailStep, TailStep, begin_tails, tails_of


class QuantizedPagedCache(PagedCache):
    """As PagedCache, with `name` one of int8, fp8 and int4 (kv.py). `read_dtype` is what attention computes with.

    Bytes = num_blocks · kv.block_bytes, and for int4 a tail of each sequence (kv_tails.py). Linear layers' states are
    float32 as ever. Raises EngineError for a model or a block size that does not suit the format.
    """

    read_as_written = False

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        name: str,
        read_dtype: torch.dtype = torch.float32,
        device="cpu",
        step_class: type[PagedStep] | None = None,
        state_slots: int = 0,
    ) -> None:
        self.config, self.num_blocks, self.block_size, self.name = config, num_blocks, block_size, name
        self.step_class = step_class or PagedStep
        layers, sides = len(config.kv_layers), config.kv_shape[0]
        self.tensors = [
            torch.empty((layers, t.sides, num_blocks, *t.shape), dtype=t.dtype, device=device)
            for t in kv.layout(config, name, block_size)
        ]
        for t in self.tensors:
            t[:, :, NULL] = 0
        self.parts = {layer: [self._parts(i, s) for s in range(sides)] for i, layer in enumerate(config.kv_layers)}
        self._describe(read_dtype, state_slots)
        self.tails = {}
        if name == "int4":
            tails = tails_of(config, block_size, 1 + state_slots, read_dtype, device)
            self.tails = dict(zip(config.kv_layers, tails, strict=True))
            self.slotted.append(tails)

    def _parts(self, index: int, side: int) -> list[Tensor]:
        """Codes of one side of a layer, then what belongs to them. Of int4 each side has a tensor of its own."""
        codes, *meta = self.tensors
        own = meta[side : side + 1] if self.name == "int4" else meta
        return [codes[index, side], *(m[index, 0 if self.name == "int4" else side] for m in own)]

    @staticmethod
    def bytes_of_block(config: ModelConfig, block_size: int, dtype: str) -> int:
        return kv.block_bytes(config, dtype, block_size)

    def step(self, metadata: StepMetadata, exact: bool = False) -> PagedStep:
        self._begin(metadata)
        if self.name == "int4":
            return (ExactTailStep if exact else TailStep)(self, metadata)
        return (ExactStep if exact else self.step_class)(self, metadata)

    def _begin(self, metadata: StepMetadata) -> None:
        super()._begin(metadata)
        if self.tails:
            begin_tails(self.slotted[-1], metadata)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
        """Each token by itself: int8 and fp8."""
        for side, new in enumerate((k,) if v is None else (k, v)):
            codes = kv.quantize_side(self.name, side, new)
            for part, code in zip(self.parts[layer][side], codes, strict=True):
                part.flatten(0, 1).index_copy_(0, slots, code)  # a view: blocks and places are contiguous

    def write_blocks(self, layer: int, blocks: Tensor, k: Tensor, v: Tensor) -> None:
        """Whole blocks, k and v (N, block_size, Hkv, D)."""
        for side, new in enumerate((k, v)):
            codes = kv.quantize_side(self.name, side, new)
            for part, code in zip(self.parts[layer][side], codes, strict=True):
                part.index_copy_(0, blocks, code)

    def for_kernels(self, layer: int) -> tuple[Tensor, Tensor, dict[str, Tensor]] | None:
        """int8 and fp8 are the kernels' own formats; they know nothing of int4, and of a latent only as it is."""
        if self.name not in ("int8", "fp8") or self.one_row:
            return None
        if self.name == "fp8":
            (keys,), (values,) = self.parts[layer]
            return keys.view(torch.float8_e4m3fn), values.view(torch.float8_e4m3fn), {}
        (keys, k_scales), (values, v_scales) = self.parts[layer]
        return keys, values, {"k_scales": k_scales, "v_scales": v_scales}

    def take(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """As read: dequantized."""
        sides = []
        for side, parts in enumerate(self.parts[layer]):
            taken = [part.index_select(0, blocks) for part in parts]
            sides.append(kv.dequantize_side(self.name, side, taken).to(self.read_dtype))
        return (sides[0], sides[0][..., : self.value_width]) if self.one_row else tuple(sides)
