"""A linear layer over a quantized matrix: which kernel multiplies, for few rows and for many."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..packing import BFloat16, available
from .kernels import Expanded, Int4Grouped, Int8Dynamic, Int8Fixed, Int8WeightOnly
from .scheme import parse
from .weight import QuantizedWeight, quantize_weight

FEW = 4  # rows up to which reading W decides; measured on two AVX-512 cores, see chapter 13
_SLOW = 20.0  # times float32: oneDNN's reference code takes 200 and more, its own less than 1
PACKED = (Int8Dynamic, Int8Fixed, Int8WeightOnly, Int4Grouped)


class QuantizedLinear(nn.Module):
    """x (T, d_in) -> (T, d_out) of x's type, W quantized.

    `exact` multiplies by the dequantized numbers in float32: what quality is measured with, and what every kernel is
    tested against.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None, exact: bool = False) -> None:
        super().__init__()
        self.weight, self.bias, self.exact = weight, bias, exact
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

    def held(self) -> list[Tensor]:
        """What its kernels multiply by: with `take`, all that makes another layer of this form compute the same."""
        return [tensor for kernel in dict.fromkeys((self.few, self.many)) for tensor in _tensors(kernel)]

    def slot(self) -> QuantizedLinear:
        """A layer of this form in memory of its own, for `take` to write into."""
        parts = {f.name: getattr(self.weight, f.name) for f in fields(self.weight)}
        copies = {name: part.clone() for name, part in parts.items() if isinstance(part, Tensor)}
        return QuantizedLinear(
            replace(self.weight, **copies), None if self.bias is None else self.bias.detach().clone(), self.exact
        )

    def take(self, other: QuantizedLinear) -> None:
        """Becomes the other layer. Its codes stay where that one has them: kernels are what is multiplied by."""
        for mine, theirs in zip(self.held(), other.held(), strict=True):
            mine.copy_(theirs)
        self.weight = other.weight

    def form(self) -> tuple:
        """Equal for two layers of which one can take the other."""
        return type(self.few), type(self.many), *((t.shape, t.dtype) for t in self.held())

    def extra_repr(self) -> str:
        names = " and ".join(dict.fromkeys(type(k).__name__ for k in (self.few, self.many)))
        return f"{self.in_features}, {self.out_features}, {self.weight.scheme.name}, {names}"


def _tensors(kernel: object) -> Iterator[Tensor]:
    for value in vars(kernel).values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, BFloat16):  # of Expanded
            yield from _tensors(value)


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
    """Whether this build of torch has the operator for this CPU, found by multiplying a small matrix.

    Wrong sums say no (where instructions add pairs of products in 16 bits, large ones saturate: pytorch#44939); so does
    code so slow that the operator must be a reference nobody wrote for this CPU.
    """
    name = "int8-dynamic" if kernel is Int8Dynamic else "int4-g32" if kernel is Int4Grouped else "int8"
    matrix = torch.linspace(-1, 1, 512 * 512).view(512, 512).clone()
    matrix[0] = 1  # beside a row of equal numbers, the largest codes everywhere
    x = torch.linspace(-1, 2, 4 * 512).view(4, 512).clone()
    x[0] = 2
    small = quantize_weight(matrix, parse(name))
    try:
        multiply = kernel(small, None)
        y = multiply(x)
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    exact = x @ small.dequantize().t()
    near = (y - exact).norm(dim=1) <= 0.02 * exact.norm(dim=1)
    return bool(near.all()) and _fastest(lambda: multiply(x)) < _SLOW * _fastest(lambda: F.linear(x, matrix))


def _fastest(call: Callable[[], Tensor]) -> float:
    """Seconds, the best of a few."""
    times = []
    for _ in range(5):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)
