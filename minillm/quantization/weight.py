"""A weight matrix in few bits: packed codes, scales, and how to get numbers back.

Everything is symmetric around one formula: w ≈ (code - zero) · scale, where a scale belongs to a group of columns of
one row, a whole row, a block, or the tensor. Rounding to nearest is here; gptq.py, awq.py and hqq.py choose other codes
or scales and hand them to the same class.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import QuantizationError
from . import number_formats as nf
from .scheme import FP8_BLOCK, Scheme

SCALE_DTYPE = torch.bfloat16  # of groups: float32's range at half the bytes; a whole row's scale is float32


@dataclass(frozen=True)
class QuantizedWeight:
    """A (rows, columns) matrix under a Scheme.

    packed: what is stored. int8 codes (rows, columns); int4, int3, ternary bytes (rows, columns · bits / 8);
    float8 values (rows, columns); E2M1 codes two a byte.
    scale: (rows, groups) bfloat16 for groups, (rows, 1) float32 for rows, (1, 1) for a tensor, (rows/128, columns/128)
    for fp8 blocks, (rows, groups) float32 for float8 rows that are no longer in their blocks; uint8 exponents for
    MXFP4, float8 for NVFP4.
    zero: (rows, groups) of asymmetric codes: uint8, or float for HQQ. None means symmetric.
    global_scale: NVFP4's one float32 for the tensor.
    order: (columns,) int32: which column of the matrix each column of the codes is, so that groups lie side by side;
    None where codes are in the matrix's own order.
    """

    scheme: Scheme
    shape: tuple[int, int]
    packed: Tensor
    scale: Tensor
    zero: Tensor | None = None
    global_scale: Tensor | None = None
    order: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held: codes and everything needed to read them."""
        parts = (self.packed, self.scale, self.zero, self.global_scale, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])

    @property
    def in_blocks(self) -> bool:
        """Whether 128 rows share a scale."""
        return self.scheme.format.startswith("fp8") and self.scheme.granularity == "block"

    def codes(self) -> Tensor:
        """(rows, columns): integers as stored minus nothing, floating formats as their values."""
        if self.scheme.format in ("mxfp4", "nvfp4"):
            return nf.from_e2m1(nf.unpack_codes(self.packed, 4))
        if self.scheme.format.startswith("fp8"):
            return self.packed.to(torch.float32)
        codes = nf.unpack_codes(self.packed, self.scheme.bits)
        return codes if codes.dtype == torch.int8 else codes.to(torch.int16)

    def scales(self) -> Tensor:
        """Scales as float32, in their stored shape."""
        if self.scheme.format == "mxfp4":
            return nf.from_e8m0(self.scale)
        scale = self.scale.to(torch.float32)
        return scale if self.global_scale is None else scale * self.global_scale

    def dequantize(self) -> Tensor:
        """(rows, columns) float32."""
        rows, columns = self.shape
        codes, scale = self.codes().to(torch.float32), self.scales()
        if self.in_blocks:
            scale = scale.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]
            return codes * scale
        groups = scale.shape[1]
        codes = codes.view(rows, groups, columns // groups)
        if self.zero is not None:
            codes = codes - self.zero.to(torch.float32)[..., None]
        elif (middle := middle_of(self.scheme)) is not None:
            codes = codes - middle
        numbers = (codes * scale[..., None]).view(rows, columns)
        return numbers if self.order is None else numbers[:, self.order.argsort()]

    def map_rows(self, change: Callable[[Tensor], Tensor], rows: int) -> QuantizedWeight:
        """The same change of rows to everything that has rows: a slice takes a stacked matrix apart, an order of rows
        turns one file's layout into another's. Every number stays what it is: where rows of one block of 128 part, each
        keeps its scales."""
        if self.in_blocks:
            return self.by_rows().map_rows(change, rows).by_blocks()
        scale = _bytewise(change, self.scale) if self.scale.shape[0] > 1 or self.shape[0] == 1 else self.scale
        zero = None if self.zero is None else change(self.zero)
        packed = _bytewise(change, self.packed)
        return replace(self, shape=(rows, self.shape[1]), packed=packed, scale=scale, zero=zero)

    def by_rows(self) -> QuantizedWeight:
        """The same numbers in float8, scales that rows share written out for each of them: columns are grouped by the
        largest number that divides both their count and a block's 128."""
        rows, columns = self.shape
        group = math.gcd(columns, FP8_BLOCK) if self.in_blocks else self.scheme.group or columns
        scale = self.scale
        if self.in_blocks:
            block_of_group = torch.arange(0, columns, group) // FP8_BLOCK
            scale = scale.repeat_interleave(FP8_BLOCK, 0)[:rows, block_of_group]
        elif scale.shape[0] == 1:
            scale = scale.expand(rows, -1)
        whole = group == columns
        scheme = replace(self.scheme, granularity="channel" if whole else "group", group=None if whole else group)
        return replace(self, scheme=scheme, scale=scale.contiguous())

    def by_blocks(self) -> QuantizedWeight:
        """The inverse, where all scales of each 128 x 128 numbers are one; elsewhere the matrix as it is."""
        every = FP8_BLOCK // (self.scheme.group or FP8_BLOCK)
        scheme = replace(self.scheme, granularity="block", group=None)
        blocks = replace(self, scheme=scheme, scale=self.scale[::FP8_BLOCK, ::every].contiguous())
        same = blocks.by_rows()
        return blocks if same.scheme == self.scheme and torch.equal(same.scale, self.scale) else self


def in_order(packed: Tensor, bits: int, order: Tensor) -> Tensor:
    """Packed codes (rows, columns) with their columns in another order."""
    return _bytewise(lambda t: nf.pack_codes(nf.unpack_codes(t, bits)[:, order], bits), packed)


def _bytewise(change: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """torch joins and indexes bytes, but no float8."""
    return change(tensor) if tensor.dtype.itemsize > 1 else change(tensor.view(torch.uint8)).view(tensor.dtype)


def middle_of(scheme: Scheme) -> int | None:
    """What packed symmetric codes are shifted by, so that they are not negative: 8 for int4. int8 is stored signed."""
    return {"int4": 8, "int3": 4, "ternary": 1}.get(scheme.format)


def quantize_weight(weight: Tensor, scheme: Scheme) -> QuantizedWeight:
    """Rounds a (rows, columns) matrix to nearest. Raises QuantizationError for one that does not fit the scheme."""
    check_weight(weight, scheme)
    weight = weight.to(torch.float32)
    if scheme.format.startswith("int"):
        scale, zero = integer_scales(weight, scheme)
        return pack_integers(integer_codes(weight, scale, zero, scheme), scale, zero, scheme)
    return {"mxfp4": _mxfp4, "nvfp4": _nvfp4, "ternary": _ternary}.get(scheme.format, _fp8)(weight, scheme)


def check_weight(weight: Tensor, scheme: Scheme, name: str = "the weight") -> None:
    """Raises QuantizationError for a shape that the scheme's groups do not divide, and for NaN or infinity."""
    if weight.dim() != 2:
        raise QuantizationError(f"{name} has shape {tuple(weight.shape)}; a matrix (rows, columns) can be quantized")
    columns = weight.shape[1]
    if scheme.group and columns % scheme.group:
        fitting = [g for g in (128, 64, 32) if columns % g == 0] if scheme.format.startswith("int") else []
        remedy = f"use groups of {fitting[0]}" if fitting else "choose a scheme without groups, such as int8"
        raise QuantizationError(
            f"{name} has {columns} columns, which groups of {scheme.group} ({scheme.name}) do not divide; {remedy}"
        )
    if columns * scheme.bits % 8:
        raise QuantizationError(f"{name} has {columns} columns; {scheme.name} packs whole bytes, so pad them")
    if not weight.isfinite().all():
        raise QuantizationError(f"{name} holds NaN or infinity, which no scale can hold; get the checkpoint again")


def integer_range(scheme: Scheme) -> tuple[int, int]:
    """Lowest and highest code, before any shift: -127..127 for int8 (the -128 would make it lopsided), -8..7 for
    symmetric int4, 0..15 for asymmetric."""
    top = 2 ** (scheme.bits - 1) - 1
    if not scheme.symmetric:
        return 0, 2**scheme.bits - 1
    return (-top, top) if scheme.bits == 8 else (-top - 1, top)


def integer_scales(weight: Tensor, scheme: Scheme, shrink: Tensor | float = 1.0) -> tuple[Tensor, Tensor | None]:
    """(scale, zero), each (rows, groups), from the largest magnitude of a group, or from its smallest and largest.

    The scale is rounded to its stored type here, before codes are chosen, so that they answer to the scale that is
    kept. `shrink` narrows the range (a clip search). An all-zero group gets scale 1.
    """
    rows, columns = weight.shape
    grouped = weight.view(rows, -1, scheme.group or columns)
    low, high = integer_range(scheme)
    if scheme.symmetric:
        reach, zero = grouped.abs().amax(-1) * shrink / high, None
    else:  # the range must hold 0, or the zero point would not be a code
        least, most = grouped.amin(-1).clamp(max=0) * shrink, grouped.amax(-1).clamp(min=0) * shrink
        reach = (most - least) / (high - low)
    stored = SCALE_DTYPE if scheme.group else torch.float32
    scale = torch.where(reach > 0, reach, 1).to(stored)
    scale = torch.where(scale == 0, torch.finfo(stored).tiny, scale)  # a range below the smallest scale
    if not scheme.symmetric:
        zero = (-least / scale.to(torch.float32)).round().clamp(low, high).to(torch.uint8)
    return scale, zero


def integer_codes(weight: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme) -> Tensor:
    """(rows, columns) codes, unshifted: round(w / scale) + zero, saturated."""
    rows, columns = weight.shape
    low, high = integer_range(scheme)
    codes = (weight.view(rows, scale.shape[1], -1) / scale.to(torch.float32)[..., None]).round()
    if zero is not None:
        codes = codes + zero.to(torch.float32)[..., None]
    return codes.clamp(low, high).view(rows, columns)


def pack_integers(codes: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme) -> QuantizedWeight:
    """Codes as `integer_codes` gives them, stored."""
    if scheme.bits == 8:
        packed = codes.to(torch.int8 if scheme.symmetric else torch.uint8)
    else:
        shift = middle_of(scheme) if zero is None else 0
        packed = nf.pack_codes((codes + shift).to(torch.uint8), scheme.bits)
    return QuantizedWeight(scheme, tuple(codes.shape), packed, scale, zero)


def _fp8(weight: Tensor, scheme: Scheme) -> QuantizedWeight:
    """Scales bring the largest magnitude of a tensor, row or block to the format's largest value."""
    dtype = nf.E5M2 if scheme.format == "fp8-e5m2" else nf.E4M3
    rows, columns = weight.shape
    if scheme.granularity == "block":
        high, wide = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
        padded = weight.new_zeros(high * FP8_BLOCK, wide * FP8_BLOCK)
        padded[:rows, :columns] = weight
        largest = padded.view(high, FP8_BLOCK, wide, FP8_BLOCK).abs().amax((1, 3))
    else:
        largest = (
            weight.abs().amax(1, keepdim=True) if scheme.granularity == "channel" else weight.abs().amax().view(1, 1)
        )
    scale = torch.where(largest > 0, largest / nf.float8_max(dtype), 1).clamp(min=torch.finfo(torch.float32).tiny)
    spread = scale
    if scheme.granularity == "block":
        spread = scale.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    return QuantizedWeight(scheme, (rows, columns), nf.to_float8(weight / spread, dtype), scale)


def _mxfp4(weight: Tensor, scheme: Scheme) -> QuantizedWeight:
    rows, columns = weight.shape
    blocks = weight.view(rows, -1, scheme.group)
    scale = nf.power_of_two_scale(blocks.abs().amax(-1))
    codes = nf.to_e2m1(blocks / nf.from_e8m0(scale)[..., None]).view(rows, columns)
    return QuantizedWeight(scheme, (rows, columns), nf.pack_codes(codes, 4), scale)


def _nvfp4(weight: Tensor, scheme: Scheme) -> QuantizedWeight:
    """The tensor's scale brings block scales into E4M3's range, a block's scale its largest element to 6."""
    rows, columns = weight.shape
    blocks = weight.view(rows, -1, scheme.group)
    largest = blocks.abs().amax(-1)
    whole = (largest.amax() / (nf.float8_max(nf.E4M3) * nf.E2M1_MAX)).clamp(min=torch.finfo(torch.float32).tiny)
    scale = nf.to_float8(largest / nf.E2M1_MAX / whole)
    step = scale.to(torch.float32) * whole
    codes = nf.to_e2m1(blocks / torch.where(step > 0, step, 1)[..., None]).view(rows, columns)
    return QuantizedWeight(scheme, (rows, columns), nf.pack_codes(codes, 4), scale, global_scale=whole)


def _ternary(weight: Tensor, scheme: Scheme) -> QuantizedWeight:
    """-1, 0, 1 times the mean magnitude of the row, as BitNet b1.58 trains its weights (Ma et al. 2024, arXiv
    2402.17764, section 2). On weights that were not trained so it destroys the model: it is here as a warning."""
    scale = weight.abs().mean(1, keepdim=True)
    scale = torch.where(scale > 0, scale, 1)
    codes = (weight / scale).round().clamp(-1, 1)
    return QuantizedWeight(scheme, tuple(weight.shape), nf.pack_codes((codes + 1).to(torch.uint8), 2), scale)
