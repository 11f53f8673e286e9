"""What a few bits can say: the values of each small number format, and rounding to the nearest of them.

Integers are spaced evenly, floating-point formats evenly in the logarithm. All roundings are to nearest, ties to even,
and all of them saturate: a value beyond the range becomes the largest one, never infinity or a wrapped code.

Sources: OCP Microscaling Formats (MX) v1.0, section 5 (E2M1, E8M0); Micikevicius et al. 2022 (arXiv 2209.05433) for
E4M3 and E5M2.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # 4 bits: sign, two of exponent, one of mantissa
E2M1_MAX = 6.0
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E8M0_BIAS, E8M0_NAN = 127, 255  # a byte b is 2^(b - 127); 255 is "not a number"


def float8_max(dtype: torch.dtype) -> float:
    """448 for E4M3 (which has no infinity), 57,344 for E5M2."""
    return torch.finfo(dtype).max


def to_float8(x: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    """Nearest value of the format, saturating: torch's own cast makes what is too large NaN (E4M3) or infinite."""
    limit = float8_max(dtype)
    return x.clamp(-limit, limit).to(torch.float32).to(dtype)


def to_e2m1(x: Tensor) -> Tensor:
    """4-bit codes (uint8, sign in bit 3) of the nearest values, ties to the even code, beyond 6 saturated."""
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(E2M1)], dtype=x.dtype, device=x.device)
    size = x.abs()
    below, above = torch.bucketize(size, middles), torch.bucketize(size, middles, right=True)  # differ at a tie
    code = torch.where(below % 2 == 0, below, above)
    return (code + 8 * (x < 0)).to(torch.uint8)


def from_e2m1(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of 4-bit codes."""
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=dtype, device=codes.device)
    return table[codes.long()]


def power_of_two_scale(largest: Tensor, limit: float = E2M1_MAX, round_up: bool = False) -> Tensor:
    """E8M0 bytes of scales for blocks whose largest magnitude is `largest`, for elements up to `limit`.

    As the standard says (section 6.3), the scale is 2^(floor(log2 largest) - floor(log2 limit)): elements may then
    exceed the limit and saturate. `round_up` takes the smallest power of two under which nothing saturates. An
    all-zero block gets 1, so that nothing divides by zero. A largest value that is not finite gives 255, NaN.
    """
    mantissa, exponent = torch.frexp(largest.to(torch.float32))  # largest = mantissa · 2^exponent, mantissa in [½, 1)
    if round_up:
        mantissa, exponent = torch.frexp(largest.to(torch.float32) / limit)
        power = exponent - (mantissa == 0.5).to(exponent.dtype)
    else:
        power = exponent - 1 - int(torch.frexp(torch.tensor(limit)).exponent - 1)
    power = torch.where(largest == 0, 0, power).clamp(-E8M0_BIAS, E8M0_NAN - 1 - E8M0_BIAS)
    return torch.where(largest.isfinite(), power + E8M0_BIAS, E8M0_NAN).to(torch.uint8)


def from_e8m0(scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^(byte - 127); byte 0 is 2^-127 (a subnormal of float32), byte 255 NaN."""
    value = torch.pow(2.0, scale.to(torch.float64) - E8M0_BIAS)  # float64 holds 2^-127 without flushing it
    return torch.where(scale == E8M0_NAN, torch.nan, value).to(dtype)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """(..., K) codes below 2^bits -> (..., K · bits / 8) bytes, lowest bits first: two 4-bit codes a byte, the even
    column in the low half; eight 3-bit codes in three bytes. K · bits must be a multiple of 8."""
    if bits == 8:
        return codes
    if bits == 4:
        return codes[..., 0::2] | (codes[..., 1::2] << 4)
    each = (codes[..., None] >> torch.arange(bits, dtype=torch.uint8, device=codes.device)) & 1
    eights = each.flatten(-2).unflatten(-1, (-1, 8))
    return (eights << torch.arange(8, dtype=torch.uint8, device=codes.device)).sum(-1, dtype=torch.uint8)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """The codes (..., K) uint8 that `pack_codes` packed."""
    if bits == 8:
        return packed
    if bits == 4:
        return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    each = (packed[..., None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    groups = each.flatten(-2).unflatten(-1, (-1, bits))
    return (groups << torch.arange(bits, dtype=torch.uint8, device=packed.device)).sum(-1, dtype=torch.uint8)
