"""How a CPU multiplies by a quantized matrix. Each kernel holds its weights in the shape torch's operator wants.

Weight-only (x keeps 16 bits): few rows are bound by the bytes of W, so fewer bits are less time.
    Int8Fixed        torch.ops.onednn.qlinear_pointwise     int8 codes, one scale a row; x as two int8 halves of 16 bits
    Int8WeightOnly   torch._weight_int8pack_mm              the same codes, x in bfloat16; where oneDNN's is missing
    Int4Grouped      torch._weight_int4pack_mm_for_cpu      4-bit codes, groups of 32 to 128
Weight and activation (x becomes int8, one scale a token): many rows are bound by arithmetic, and int8 has twice the
multiply-adds of bfloat16 where the CPU has the instructions.
    Int8Dynamic      torch.ops.onednn.qlinear_pointwise     int8 x int8, sums in int32
For formats that no operator here reads (fp8, MXFP4, NVFP4, 3 bits, ternary), and for many rows:
    Expanded         the numbers as they come out, in bfloat16 or float32: saves bytes on disk, not in memory

A kernel with `prepare` and `finish` has its small operators apart from its one multiply, y = finish(multiply(codes),
scale) where codes, scale = prepare(x): a compiler can then fuse them with their neighbours (compilation.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..packing import BFloat16
from . import number_formats as nf
from .weight import QuantizedWeight


class Int8WeightOnly:
    """y = (x · codesᵀ) · scale, x in bfloat16."""

    input_dtype = torch.bfloat16

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        self.codes, self.scale, self.bias = weight.packed, weight.scale.view(-1).to(torch.bfloat16), bias
        self.weight_bytes = self.codes.nbytes + self.scale.nbytes

    @staticmethod
    def takes(weight: QuantizedWeight) -> bool:
        s = weight.scheme
        # the operator reads 16 columns at a time, past the end of a row that has fewer
        return s.format == "int8" and s.symmetric and s.group is None and weight.shape[1] % 16 == 0

    def __call__(self, x: Tensor) -> Tensor:
        y = torch._weight_int8pack_mm(x.to(torch.bfloat16), self.codes, self.scale).to(x.dtype)
        return y if self.bias is None else y + self.bias


class Int4Grouped:
    """The same with 4-bit codes, expanded next to the multiply."""

    input_dtype = torch.bfloat16

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        codes = nf.unpack_codes(weight.packed, 4).to(torch.int32)
        scale = weight.scales()
        # torch's kernel computes (code - 8) · scale + shift
        shift = torch.zeros_like(scale) if weight.zero is None else (8 - weight.zero.to(torch.float32)) * scale
        self.group, self.bias, self.order = weight.scheme.group, bias, weight.order
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        self.scale_and_zero = torch.stack([scale.t(), shift.t()], -1).to(torch.bfloat16).contiguous()
        self.weight_bytes = self.packed.nbytes + self.scale_and_zero.nbytes
        self.weight_bytes += 0 if self.order is None else self.order.nbytes

    @staticmethod
    def takes(weight: QuantizedWeight) -> bool:
        s = weight.scheme
        return s.format == "int4" and s.group in (32, 64, 128) and weight.shape[0] % 16 == 0

    def __call__(self, x: Tensor) -> Tensor:
        x16 = x.to(torch.bfloat16)
        if self.order is not None:
            x16 = x16.index_select(1, self.order)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu.default(x16, self.packed, self.group, self.scale_and_zero)
        y = y.to(x.dtype)
        return y if self.bias is None else y + self.bias


class _Int8Codes:
    """oneDNN's 8-bit multiply, W packed once; what x becomes is the subclass's. y is float32 times W's scales.

    x's codes are unsigned, 128 standing for 0, and oneDNN takes the 128 off in its int32 sums. It takes signed ones
    too, but only a CPU with AMX multiplies those; elsewhere its reference code does, four hundred times slower.
    """

    input_dtype = torch.float32

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        self.scale, self.bias = weight.scale.view(-1).to(torch.float32), bias
        self.zeros = torch.zeros(len(self.scale), dtype=torch.int32)
        self.packed = torch.ops.onednn.qlinear_prepack(weight.packed, None)
        self.weight_bytes = weight.packed.nbytes + self.scale.nbytes

    def multiply(self, codes: Tensor) -> Tensor:
        """codes (rows, K) uint8, 128 for 0 -> (rows, N) float32: sums in int32, exact, times W's scales."""
        if codes.shape[0] > _ROWS:  # oneDNN's blocking for more rows than that is several times slower a row
            return torch.cat([self.multiply(part) for part in codes.split(_ROWS)])
        y = (None, 1.0, 0, torch.float32, "none", [], "")  # no bias, scale and zero of y, its type, nothing fused
        return _QLINEAR(codes, 1.0, _ZERO, self.packed, self.scale, self.zeros, *y)

    def __call__(self, x: Tensor) -> Tensor:
        codes, scale = self.prepare(x)
        y = self.finish(self.multiply(codes), scale)
        return (y if self.bias is None else y + self.bias).to(x.dtype)


_QLINEAR = torch.ops.onednn.qlinear_pointwise.default
_ROWS = 256
_ZERO = 128


class Int8Dynamic(_Int8Codes):
    """Both sides int8: each token's largest magnitude becomes 127, sums are exact in int32, two scales make numbers.

    One scale a token, not one a batch, so that a token's result does not depend on who shares its step.
    """

    @staticmethod
    def takes(weight: QuantizedWeight) -> bool:
        return weight.scheme.dynamic

    @staticmethod
    def prepare(x: Tensor) -> tuple[Tensor, Tensor]:
        """x (T, K) -> uint8 codes (T, K), 128 for 0, and float32 scales (T, 1), one a token."""
        x = x.to(torch.float32)
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        return ((x / scale).round() + _ZERO).to(torch.uint8), scale

    @staticmethod
    def finish(y: Tensor, scale: Tensor) -> Tensor:
        return y * scale


class Int8Fixed(_Int8Codes):
    """Weight-only: x becomes 16-bit fixed point, its high and low byte two rows of the int8 multiply.

    x ≈ scale · (256 · high + low), so y = 256 · (W high) + W low, both sums exact. A second row costs nothing where the
    bytes of W decide, and x is nearer than in bfloat16: its error is at most scale / 2, in the root mean square
    sqrt(K) / 113000 of x's own even if a single entry holds all of it, where bfloat16 loses about 1 / 900.
    """

    @staticmethod
    def takes(weight: QuantizedWeight) -> bool:
        return Int8WeightOnly.takes(weight)

    @staticmethod
    def prepare(x: Tensor) -> tuple[Tensor, Tensor]:
        """x (T, K) -> (2T, K) uint8, all high bytes and then all low ones, and float32 scales (T, 1)."""
        x = x.to(torch.float32)
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / (127 * 256 + 127)
        codes = (x / scale).round().to(torch.int32)
        high = (codes + 128) >> 8  # -127 to 127, and the low byte -128 to 127
        return (torch.cat([high, codes - (high << 8)]) + _ZERO).to(torch.uint8), scale

    @staticmethod
    def finish(y: Tensor, scale: Tensor) -> Tensor:
        high, low = y.view(2, -1, y.shape[-1])
        return (high * 256 + low) * scale


class Expanded:
    """The matrix as numbers, expanded once. bfloat16 holds E2M1 times a power of two exactly, and 8 bits of others."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype = torch.bfloat16) -> None:
        self.input_dtype, self.bias = dtype, bias
        if dtype == torch.bfloat16:
            self._multiply = BFloat16(weight.dequantize(), bias)
            self.weight_bytes = self._multiply.weight_bytes
        else:
            self.numbers = weight.dequantize()
            self.weight_bytes, self._multiply = self.numbers.nbytes, self._float32

    def _float32(self, x: Tensor) -> Tensor:
        return F.linear(x.to(torch.float32), self.numbers, self.bias).to(x.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x)
