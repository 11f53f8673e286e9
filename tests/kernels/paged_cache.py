"""The package's own paged cache, for the tests of the kernels that read and write it."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.config import ModelConfig
from minillm.paging import PagedCache, SequenceStep, StepMetadata
from tests.kernels import harness

FULL, SLIDING = 0, 1  # the two layers


def config(heads: int, kv_heads: int, dim: int, window: int) -> ModelConfig:
    return ModelConfig(
        "llama", 64, 32, 32, 2, heads, kv_heads, dim, 512,
        sliding_window=window, layer_types=("full_attention", "sliding_attention"),
    )  # fmt: skip


def cache(heads: int, kv_heads: int, dim: int, window: int, num_blocks: int, block_size: int) -> PagedCache:
    """Full of old numbers, finite as a block pool leaves them, with the null block zero."""
    made = PagedCache(config(heads, kv_heads, dim, window), num_blocks, block_size, device=harness.DEVICE)
    made.storage[:, :, 1:] = torch.randn_like(made.storage[:, :, 1:])
    return made


def metadata(parts: list[tuple[int, int]], num_blocks: int, block_size: int, rows: int | None = None) -> StepMetadata:
    """parts: (new tokens, cached tokens) of each sequence; their blocks lie in no order."""
    generator = torch.Generator().manual_seed(5)
    free = (torch.randperm(num_blocks - 1, generator=generator, device="cpu") + 1).tolist()
    sequences, first = [], 0
    for count, start in parts:
        blocks = [free.pop() for _ in range(-(-(start + count) // block_size))]
        sequences.append(SequenceStep(first, count, start, blocks))
        first += count
    return StepMetadata(sequences, block_size, rows, harness.DEVICE)


def draw(step: StepMetadata, heads: int, kv_heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(step.rows, h, dim, device=harness.DEVICE) for h in (heads, kv_heads, kv_heads))
