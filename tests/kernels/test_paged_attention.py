"""The kernel for mixed steps against float64, against the paged cache in torch, and where rows see nothing."""

from __future__ import annotations

import pytest
import torch

from kernels import paged_attention
from kernels.launch import KernelError
from kernels.paged_decode import paged, paged_decode
from minillm.paging import PagedStep
from tests.kernels import harness, paged_cache


def test_stays_in_bounds():
    harness.check_bounds("kernels.paged_attention")


@pytest.mark.parametrize(("case", "dtype"), harness.trials(paged_attention))
def test_against_float64(case, dtype):
    harness.check(case, dtype)


@pytest.mark.parametrize("layer", [paged_cache.FULL, paged_cache.SLIDING])
@pytest.mark.parametrize("parts", [[(7, 40), (1, 15), (33, 0), (1, 70)], [(1, 3), (1, 33)], [(20, 13)]], ids=str)
def test_equals_the_paged_cache(parts, layer):
    """Chunks behind cached tokens, whole prompts, decodes and padding rows, after the cache wrote the step's tokens."""
    step = paged_cache.metadata(parts, 14, 16, rows=sum(n for n, _ in parts) + 2)
    cache = paged_cache.cache(6, 2, 32, 19, 14, 16)
    q, k, v = paged_cache.draw(step, 6, 2, 32)
    want = PagedStep(cache, step).attend(layer, q, k, v)
    with harness.poisoned():
        got = paged_attention.paged_attention(
            q, *cache.layers[layer], step.query_starts, step.block_tables, step.context_lengths,
            window=cache.config.window(layer), backend="triton",
        )  # fmt: skip
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-5)


def test_every_tile_finds_its_sequence():
    """Many short sequences, some empty: the bisection against counting them off."""
    counts = [0, 5, 1, 0, 0, 17, 1, 1, 9, 0]
    generator = torch.Generator().manual_seed(2)
    k, v, tables, lengths = paged(generator, [n + 3 for n in counts], 4, 1, 16, harness.DEVICE, torch.float32)
    starts = torch.tensor([0, *counts], device=harness.DEVICE).cumsum(0).int()
    q = torch.randn(sum(counts), 4, 16, device=harness.DEVICE)
    args = (q, k, v, starts, tables, lengths)
    got = paged_attention.paged_attention(*args, backend="triton")
    torch.testing.assert_close(got, paged_attention.paged_attention(*args, backend="torch"), atol=2e-6, rtol=2e-5)


def test_a_step_of_decodes_is_paged_decode():
    generator = torch.Generator().manual_seed(3)
    k, v, tables, lengths = paged(generator, [40, 9, 1], 16, 2, 32, harness.DEVICE, torch.float32)
    q, starts = torch.randn(3, 4, 32, device=harness.DEVICE), torch.arange(4, device=harness.DEVICE).int()
    got = paged_attention.paged_attention(q, k, v, starts, tables, lengths, window=17, backend="triton")
    want = paged_decode(q, k, v, tables, lengths, window=17, backend="triton")
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-5)


def test_a_chunk_is_aligned_bottom_right():
    """Values that count positions: with equal keys a query's output is the mean of the positions it may see."""
    _, _, tables, lengths = paged(torch.Generator(), [40], 16, 1, 16, harness.DEVICE, torch.float32)
    k, v = torch.zeros(5, 16, 1, 16, device=harness.DEVICE), torch.zeros(5, 16, 1, 16, device=harness.DEVICE)
    v[tables[0].long()] = torch.arange(48.0, device=harness.DEVICE).view(3, 16, 1, 1)
    q, starts = torch.randn(5, 1, 16, device=harness.DEVICE), torch.tensor([0, 5], device=harness.DEVICE).int()
    got = paged_attention.paged_attention(q, k, v, starts, tables, lengths, backend="triton")[:, 0, 0]
    torch.testing.assert_close(got, torch.arange(35.0, 40.0, device=got.device) / 2)
    got = paged_attention.paged_attention(q, k, v, starts, tables, lengths, window=3, backend="triton")[:, 0, 0]
    torch.testing.assert_close(got, torch.arange(34.0, 39.0, device=got.device))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query_starts": torch.zeros(2, dtype=torch.int64)}, "query_starts is int64; convert it to one of int32"),
        ({"query_starts": torch.zeros(2, dtype=torch.int32)}, r"query_starts has shape \(2,\); \(3\) is needed"),
        ({"q": torch.ones(7, 3, 16)}, "number of query heads is 3, not a multiple of 2"),
        ({"q": torch.ones(7, 256, 16)}, "128 query heads share a KV head"),
        ({"context_lengths": torch.ones(3, dtype=torch.int32)}, "context_lengths has shape"),
        ({"window": 0}, "window is 0"),
    ],
)
def test_wrong_input_is_one_clear_error(arguments, message):
    cache = paged(torch.Generator(), [20, 5], 16, 2, 16, harness.DEVICE, torch.float32)
    good = dict(zip(("k_cache", "v_cache", "block_tables", "context_lengths"), cache, strict=True))
    good |= {"q": torch.ones(7, 4, 16), "query_starts": torch.tensor([0, 5, 7]).int(), "backend": "triton"}
    both = {k: v.to(harness.DEVICE) if isinstance(v, torch.Tensor) else v for k, v in (good | arguments).items()}
    with pytest.raises(KernelError, match=message):
        paged_attention.paged_attention(**both)
