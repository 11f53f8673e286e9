"""The header of a GGUF file: metadata, and where each tensor lies. Every length is checked against the file's end.

Layout (version 2 and 3, little endian): magic, version, tensor count, metadata count, then the metadata as
(name, type, value), then the tensors as (name, dimensions innermost first, type, offset), then padding, then data.
The `gguf` package reads the same in 2 s for a vocabulary of 49,152, one numpy object a string; this takes 0.1 s, and
a damaged length is an error instead of a surprise. The block formats themselves are left to the package.
Source: ggml's docs/gguf.md.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from .errors import CheckpointError, short

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class GGUFTensor:
    """shape is outermost first, (rows, columns); data (bytes,) uint8 is a view of the mapped file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: np.ndarray


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Metadata as Python values, and tensors by GGUF's names. Raises CheckpointError naming what is wrong."""
    try:
        data = np.memmap(path, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; check the path, or leave it out for SmolLM2") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    try:
        return _Reader(data).file()
    except _Damaged as damage:
        raise CheckpointError(f"{path}: not a whole GGUF file ({damage}); download it again") from None
    except (RecursionError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not a whole GGUF file ({error}); download it again") from None


class _Damaged(Exception):
    pass


class _Reader:
    def __init__(self, data: np.ndarray) -> None:
        self.data, self.bytes, self.at = data, memoryview(data), 0

    def file(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if bytes(self.take(4)) != b"GGUF":
            raise _Damaged("it does not begin with the letters GGUF")
        version, tensor_count, field_count = self.number("<I"), self.number("<Q"), self.number("<Q")
        if version not in (2, 3):
            raise _Damaged(f"version {version} is not 2 or 3; a big-endian file is not supported")
        fields = dict(self.field() for _ in range(self.count(field_count, "metadata entries")))
        places = [self.place() for _ in range(self.count(tensor_count, "tensors"))]
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise _Damaged(f"general.alignment is {alignment!r}")
        start = -(-self.at // alignment) * alignment
        tensors = {name: self.tensor(name, shape, kind, start + offset) for name, shape, kind, offset in places}
        if len(tensors) != len(places):
            raise _Damaged("two tensors have one name")
        return fields, tensors

    def take(self, size: int) -> memoryview:
        if size > len(self.bytes) - self.at:
            raise _Damaged(f"it ends at byte {len(self.bytes)}, {size} bytes were to follow byte {self.at}")
        piece = self.bytes[self.at : self.at + size]
        self.at += size
        return piece

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, count: int, what: str) -> int:
        """Each item takes a byte at least, so a count beyond the rest of the file is damage, found before any loop."""
        if count > len(self.bytes) - self.at:
            raise _Damaged(f"it claims {count} {what} in {len(self.bytes) - self.at} bytes")
        return count

    def string(self) -> str:
        return str(self.take(self.number("<Q")), "utf-8")

    def field(self) -> tuple[str, Any]:
        return self.string(), self.value(self.number("<I"))

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise _Damaged(f"metadata type {kind} is not known")
        item, count = self.number("<I"), self.number("<Q")
        if item in _SCALARS:  # all at once: a vocabulary carries tens of thousands of scores and types
            form = np.dtype(_SCALARS[item])
            return np.frombuffer(self.take(count * form.itemsize), form).tolist()
        return [self.value(item) for _ in range(self.count(count, "array items"))]

    def place(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self.string(), self.number("<I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise _Damaged(f"tensor {short(name)!r} has {dimensions} dimensions")
        shape = tuple(self.number("<Q") for _ in range(dimensions))[::-1]
        if 0 in shape:
            raise _Damaged(f"tensor {short(name)!r} is empty, of shape {shape}")
        return name, shape, self.number("<I"), self.number("<Q")

    def tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GGUFTensor:
        try:
            kind = GGMLQuantizationType(kind)
        except ValueError:
            raise _Damaged(f"tensor {short(name)!r} is of type {kind}, which no GGUF file has") from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise _Damaged(f"tensor {short(name)!r} has rows of {shape[-1]}, not a multiple of its block of {block}")
        size = math.prod(shape) // block * block_bytes
        if start + size > len(self.data):
            raise _Damaged(f"tensor {short(name)!r} ends at byte {start + size}, the file at {len(self.data)}")
        return GGUFTensor(shape, kind, self.data[start : start + size])
