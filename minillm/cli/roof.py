"""The bound that `demo` and `bench` hold decoding to: the bytes a step must read, over the machine's bandwidth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..analysis import Hardware
    from ..transformer import Transformer


@dataclass(frozen=True)
class DecodeBound:
    """What one decode step at batch 1 cannot beat. Bytes; bytes/s; seconds.

    `weight_bytes` are those of the matrices as they are stored, `kv_bytes` those of the mean context, `seconds` the
    time to read both once. `arithmetic_s` is the time of the multiplications alone at the machine's matrix rate.
    """

    weight_bytes: int
    kv_bytes: int
    bandwidth: float
    arithmetic_s: float

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    @property
    def seconds(self) -> float:
        return self.bytes / self.bandwidth


def decode_bound(model: Transformer, context: float, hardware: Hardware, kv_cache_dtype: str = "auto") -> DecodeBound:
    """The bound of a step that attends to `context` tokens, a mean over the steps measured."""
    from ..analysis import Step, kv_bytes, step_costs, total
    from ..analysis.kv_size import cache_format

    kv = model.dtype if kv_cache_dtype == "auto" else cache_format(model.config, kv_cache_dtype)
    kv = kv_bytes(model.config, round(context), kv)
    flops = total(step_costs(model.config, Step.decode(round(context)))).flops
    return DecodeBound(model.decode_bytes(), round(kv), hardware.bandwidth, flops / hardware.peak(_arithmetic(model)))


def _arithmetic(model: Transformer) -> str:
    """The dtype that the kernels of the model's layout multiply in: float16 weights are widened to float32."""
    if model.device.type == "cuda":
        return str(model.dtype)
    return "bfloat16" if model.layout.startswith(("bfloat16", "int4", "int8")) else "float32"


def held_bytes(model: Transformer) -> int:
    """Bytes of all weights in memory. More than a step reads: the embedding table is there beside the packed head,
    and a matrix may be kept in two layouts."""
    from ..packing import PackedLinear
    from ..quantization import QuantizedLinear
    from ..sparsity import SparseLinear

    packed = [layer for layer in model.linears() if isinstance(layer, PackedLinear | QuantizedLinear)]
    layouts = {id(layout): layout for layer in packed for layout in (layer.few, layer.many)}
    indices = sum(layer.indices.nbytes for layer in model.linears() if isinstance(layer, SparseLinear))
    parameters = sum(p.nbytes for p in model.parameters())
    return parameters + indices + sum(layout.weight_bytes for layout in layouts.values())
