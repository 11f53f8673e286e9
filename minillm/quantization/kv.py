"""Keys and values in fewer bits: what a quantized cache stores of each, and what it reads back.

int8   one float32 scale for each token and head, absmax / 127: D + 4 bytes instead of 4·D
fp8    E4M3 as it is, saturating at 448, without a scale: D bytes
int4   KIVI: asymmetric, groups of 32. A few channels of the keys are large in every token, so a key's group runs along
       the tokens of one channel and an outlier channel spoils no other; values have none, and theirs runs along the
       channels of one token. 4 bits, and 16 for the scale and 16 for the minimum of a group: 5 in all

A group of keys is 32 tokens, or a block where blocks are smaller: it can be rounded only when its last token is there
(kv_tails.py says what happens before).
Sources: Liu et al. 2024, "KIVI" (arXiv 2402.02750), sections 3 and 4; Micikevicius et al. 2022 (arXiv 2209.05433).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import ModelConfig
from ..errors import EngineError, short
from .number_formats import pack_codes, to_float8, unpack_codes

KV_FORMATS = ("int8", "fp8", "int4")
GROUP = 32  # numbers of an int4 group
_LEVELS = 15  # steps of 4 bits
_FLOOR = 1e-10  # of an int8 scale: 0 / 0 is NaN in every later score
_META_FLOOR = 2.0**-24  # of an int4 scale: the least float16
_META_MAX = 65504.0  # the largest


class Stored(NamedTuple):
    """A tensor of the storage: `shape` of one block in one layer and side, `sides` that have it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sides: int

    def bytes(self) -> int:
        return self.sides * math.prod(self.shape) * self.dtype.itemsize


def key_group(block_size: int) -> int:
    """Tokens of one int4 group of keys."""
    return min(GROUP, block_size)


def layout(config: ModelConfig, name: str, block_size: int) -> list[Stored]:
    """What a block keeps of each layer. Raises EngineError for a model or block size that the format does not suit."""
    sides, heads, width = config.kv_shape
    rows = (block_size, heads, width)
    if name == "int8":
        return [Stored(rows, torch.int8, sides), Stored(rows[:2], torch.float32, sides)]
    if name == "fp8":
        return [Stored(rows, torch.uint8, sides)]
    if name != "int4":
        raise EngineError(f"kv_cache_dtype {short(repr(name))} is no quantized cache; choose {', '.join(KV_FORMATS)}")
    if config.is_mla:
        raise EngineError(
            "kv_cache_dtype int4 wants keys and values apart and this model keeps one latent; use int8 or fp8"
        )
    if width % GROUP:
        raise EngineError(
            f"kv_cache_dtype int4 has groups of {GROUP}, and heads of {width} are no multiple of it; use int8 or fp8"
        )
    group = key_group(block_size)
    if block_size % group or block_size < 2:
        raise EngineError(
            f"kv_cache_dtype int4 groups {GROUP} tokens of a block; block_size is {block_size} and must be a multiple "
            f"of it, or from 2 to {GROUP}"
        )
    return [
        Stored((block_size, heads, width // 2), torch.uint8, 2),
        Stored((block_size // group, heads, width, 2), torch.float16, 1),  # of keys
        Stored((block_size, heads, width // GROUP, 2), torch.float16, 1),  # of values
    ]


def block_bytes(config: ModelConfig, name: str, block_size: int) -> int:
    """Of one block of all layers, scales included."""
    return len(config.kv_layers) * sum(tensor.bytes() for tensor in layout(config, name, block_size))


# --- rows: each token by itself ---


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., D) -> codes (..., D) int8 and scales (...) float32, as kernels/kv_write.py writes them."""
    wide = x.to(torch.float32)
    scale = (wide.abs().amax(-1) / 127).clamp(min=_FLOOR)
    return (wide / scale[..., None]).round().to(torch.int8), scale


def dequantize_int8(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.to(torch.float32) * scale[..., None]


def quantize_fp8(x: Tensor) -> Tensor:
    """x -> the bits of E4M3 as uint8: torch indexes no float8."""
    return to_float8(x.to(torch.float32)).view(torch.uint8)


def dequantize_fp8(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


# --- groups: int4 ---


def quantize_keys(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x (..., S, H, D), S a multiple of `group` -> packed codes (..., S, H, D / 2) and (..., S / group, H, D, 2)
    float16: scale and minimum of each channel in `group` tokens."""
    grouped = x.to(torch.float32).unflatten(-3, (-1, group))  # (..., S / group, group, H, D)
    codes, meta = _asymmetric(grouped, dim=-3)
    return pack_codes(codes.flatten(-4, -3), 4), meta.squeeze(-4)


def dequantize_keys(codes: Tensor, meta: Tensor) -> Tensor:
    """-> (..., S, H, D) float32."""
    groups = meta.shape[-4]
    grouped = unpack_codes(codes, 4).unflatten(-3, (groups, -1))
    return _value(grouped, meta.unsqueeze(-4)).flatten(-4, -3)


def quantize_values(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., D) -> packed codes (..., D / 2) and (..., D / 32, 2) float16: scale and minimum of 32 channels."""
    codes, meta = _asymmetric(x.to(torch.float32).unflatten(-1, (-1, GROUP)), dim=-1)
    return pack_codes(codes.flatten(-2), 4), meta.squeeze(-2)


def dequantize_values(codes: Tensor, meta: Tensor) -> Tensor:
    """-> (..., D) float32."""
    grouped = unpack_codes(codes, 4).unflatten(-1, (-1, GROUP))
    return _value(grouped, meta.unsqueeze(-2)).flatten(-2)


def _asymmetric(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Codes 0 to 15 and (..., 2) float16 of groups along `dim`, which is 1 in the second. Codes are those of the scale
    and minimum as stored, so that their own rounding costs no more than it must."""
    x = x.clamp(-_META_MAX, _META_MAX)
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    scale = ((high - low) / _LEVELS).clamp(min=_META_FLOOR)
    meta = torch.stack([scale, low], dim=-1).to(torch.float16)
    scale, low = meta.to(torch.float32).unbind(-1)
    return ((x - low) / scale).round().clamp(0, _LEVELS).to(torch.uint8), meta


def _value(codes: Tensor, meta: Tensor) -> Tensor:
    scale, low = meta.to(torch.float32).unbind(-1)
    return codes.to(torch.float32) * scale + low


# --- a side of a layer, out of its stored tensors ---


def quantize_side(name: str, side: int, x: Tensor) -> Sequence[Tensor]:
    """Blocks of keys (side 0) or values (1), x (N, block_size, H, D), as `layout` stores them. For int8 and fp8 the two
    leading dimensions may be anything."""
    if name == "int8":
        return quantize_int8(x)
    if name == "fp8":
        return (quantize_fp8(x),)
    return quantize_values(x) if side else quantize_keys(x, key_group(x.shape[-3]))


def dequantize_side(name: str, side: int, parts: Sequence[Tensor]) -> Tensor:
    """The inverse, float32."""
    if name == "int8":
        return dequantize_int8(*parts)
    if name == "fp8":
        return dequantize_fp8(*parts)
    return dequantize_values(*parts) if side else dequantize_keys(*parts)
