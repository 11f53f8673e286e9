"""FP8 checkpoints as DeepSeek-V3 is published: E4M3 codes, one float32 scale for each block of 128 x 128.

A matrix X is `X.weight` (float8_e4m3fn) with `X.weight_scale_inv` (rows / 128, columns / 128, rounded up), by which the
codes of its block are multiplied: inverse of what they were divided by. config.json says so under
`quantization_config` ("quant_method": "fp8", "weight_block_size": [128, 128]). The numbers are what is loaded, in
float32, the nearest to the exact product; `--quantize fp8-block` makes codes of them again.
Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 3.3.2; its published files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import CheckpointError, short

SUFFIX = "_scale_inv"  # of the name of what it scales
_LARGEST = 1 << 20


class FP8Blocks(Mapping):
    """A safetensors folder whose float8 matrices are float32.

    files: a mapping with `raw(name)`, tensors as stored. Raises CheckpointError for a config of another kind, and, when
    a matrix is taken, for a scale that is missing, misshapen or not finite.
    """

    def __init__(self, files, quantization: Mapping[str, Any]) -> None:
        block = quantization.get("weight_block_size")
        sizes = block if isinstance(block, list | tuple) else ()
        if len(sizes) != 2 or any(type(n) is not int or not 0 < n <= _LARGEST for n in sizes):
            raise CheckpointError(
                f"weight_block_size is {short(repr(block))}; an fp8 file must say two sizes, such as [128, 128]"
            )
        self.files, self.block = files, tuple(sizes)
        self._names = [name for name in files if not name.endswith(SUFFIX)]

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> Tensor:
        if name.endswith(SUFFIX):
            raise KeyError(name)
        codes, scale = self.files.raw(name), name + SUFFIX
        if codes.dtype != torch.float8_e4m3fn:
            if scale in self.files:
                raise CheckpointError(f"tensor {name} is {codes.dtype} and has a scale; download the model again")
            return self.files[name]
        if scale not in self.files:
            raise CheckpointError(f"tensor {scale} is missing from the checkpoint; download the whole model again")
        return dequantized(codes, self.files[scale], self.block, name)


def dequantized(codes: Tensor, scale: Tensor, block: tuple[int, int], name: str = "weight") -> Tensor:
    """codes (rows, columns) e4m3, scale (rows / block[0], columns / block[1], rounded up) -> float32 (rows, columns).

    A code times its block's scale, rounded once. Raises CheckpointError naming the tensor.
    """
    if codes.dim() != 2:
        raise CheckpointError(f"tensor {name} has shape {tuple(codes.shape)}; in fp8 a matrix is stored")
    want = tuple(-(-size // n) for size, n in zip(codes.shape, block, strict=True))
    if tuple(scale.shape) != want:
        raise CheckpointError(f"tensor {name}{SUFFIX} has shape {tuple(scale.shape)}, blocks of {block} need {want}")
    if not scale.isfinite().all():
        raise CheckpointError(f"tensor {name}{SUFFIX} holds NaN or infinity; download the model again")
    rows, columns = codes.shape
    spread = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return codes.to(torch.float32) * spread
