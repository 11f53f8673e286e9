"""A linear layer over a quantized matrix: which kernel multiplies, for few rows and for many."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from ..packing import available
from .kernels import Expanded, Int4Grouped, Int8Dynamic, Int8Fixed, Int8WeightOnly
from .scheme import parse
from .weight import QuantizedWeight, quantize_weight

FEW = 4  # rows up to which reading W decides; measured on two AVX-512 cores, see chapter 13
PACKED = (Int8Dynamic, Int8Fixed, Int8WeightOnly, Int4Grouped)


class QuantizedLinear(nn.Module):
    """x (T, d_in) -> (T, d_out) of x's type, W quantized.

    `exact` multiplies by the dequantized numbers in float32: what quality is measured with, and what every kernel is
    tested against.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None, exact: bool = False) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape
        self.few, self.many = _kernels(weight, bias, exact)

    @property
    def stored_bytes(self) -> int:
        """Codes and scales: what the file holds."""
        return self.weight.nbytes

    @property
    def weight_bytes(self) -> int:
        """Bytes that a step of one row reads here."""
        return self.few.weight_bytes

    def input_dtype(self, rows: int) -> torch.dtype:
        return (self.few if rows <= FEW else self.many).input_dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.few(x) if x.shape[0] <= FEW else self.many(x)

    def extra_repr(self) -> str:
        names = " and ".join(dict.fromkeys(type(k).__name__ for k in (self.few, self.many)))
        return f"{self.in_features}, {self.out_features}, {self.weight.scheme.name}, {names}"


def _kernels(weight: QuantizedWeight, bias: Tensor | None, exact: bool) -> tuple:
    if exact:
        whole = Expanded(weight, bias, torch.float32)
        return whole, whole
    wide = torch.bfloat16 if "bfloat16" in available_layouts() else torch.float32
    kernel = next((k for k in PACKED if k.takes(weight) and works(k)), None)
    if kernel in (Int8Dynamic, Int8Fixed):  # good for many rows too
        both = kernel(weight, bias)
        return both, both
    many = Expanded(weight, bias, wide)
    return (many if kernel is None else kernel(weight, bias)), many


@functools.cache
def available_layouts() -> tuple[str, ...]:
    return tuple(available())


@functools.cache
def works(kernel: type) -> bool:
    """Whether this build of torch has the operator for this CPU, found by multiplying a small matrix."""
    name = "int8-dynamic" if kernel is Int8Dynamic else "int4-g32" if kernel is Int4Grouped else "int8"
    small = quantize_weight(torch.linspace(-1, 1, 32 * 64).view(32, 64), parse(name))
    x = torch.linspace(-1, 2, 128).view(2, 64)
    try:
        y = kernel(small, None)(x)
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    exact = x @ small.dequantize().t()
    return bool((y - exact).norm() <= 0.02 * exact.norm())
