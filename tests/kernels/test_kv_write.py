"""KV write against float64, against the paged cache of the package, and against what has gone wrong elsewhere."""

from __future__ import annotations

import pytest
import torch

from kernels import kv_write
from kernels.launch import KernelError
from minillm.paging import PagedStep
from tests.kernels import harness, paged_cache


def test_stays_in_bounds():
    harness.check_bounds("kernels.kv_write")


@pytest.mark.parametrize(("case", "dtype"), harness.trials(kv_write))
def test_against_float64(case, dtype):
    harness.check(case, dtype)


def test_the_paged_cache_holds_the_same_bits():
    mine, theirs = paged_cache.cache(3, 3, 16, 8, 6, 4), paged_cache.cache(3, 3, 16, 8, 6, 4)
    mine.storage.copy_(theirs.storage)
    step = paged_cache.metadata([(5, 2), (1, 4)], 6, 4, rows=8)
    q, k, v = paged_cache.draw(step, 3, 3, 16)
    PagedStep(theirs, step).attend(1, q, k, v)
    kv_write.kv_write(k, v, *mine.layers[1], step.slot_mapping, backend="triton")
    assert torch.equal(mine.storage, theirs.storage)


def test_every_float16_becomes_the_e4m3_that_torch_makes_of_it():
    """Through the integers, all 65536 of them: carries, subnormals, both zeros, NaN, and what lies beyond 448."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).view(16, 16, 256)
    caches = [torch.zeros(1, 16, 16, 256).to(torch.float8_e4m3fn) for _ in range(2)]
    slots = torch.arange(16)
    k_cache, _ = kv_write.kv_write(every, every, *caches, slots, backend="triton")
    want = every.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    numbers = ~every.isnan()
    assert torch.equal(k_cache[0].view(torch.uint8)[numbers], want.view(torch.uint8)[numbers])
    assert k_cache[0].float()[~numbers].isnan().all()


def test_an_all_zero_head_has_a_scale():
    """kernels-community#681: 0 / 0."""
    k = torch.randn(2, 2, 64)
    k[0, 1] = 0
    caches = [torch.full((1, 4, 2, 64), 5, dtype=torch.int8) for _ in range(2)]
    scales = [torch.full((1, 4, 2), float("nan")) for _ in range(2)]
    kv_write.kv_write(k, k, *caches, torch.tensor([2, 0]), *scales, backend="triton")
    assert scales[0][0, 2, 1] > 0
    assert (caches[0][0, 2, 1] == 0).all()


def test_a_block_beyond_two_to_the_31_bytes():
    """vllm#47671, sglang#20389: block · stride in 32 bits. The cache is a view that only touches its last block."""
    stride, blocks = 2**29, 9
    storage = torch.empty(stride * (blocks - 1) + 2 * 16, dtype=torch.int8)  # pages appear when they are written
    caches = [torch.as_strided(storage, (blocks, 1, 1, 16), (stride, 16, 16, 1), offset) for offset in (0, 16)]
    scales = [torch.empty(blocks, 1, 1) for _ in range(2)]
    k, v = torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    kv_write.kv_write(k, v, *caches, torch.tensor([blocks - 1]), *scales, backend="triton")
    for x, cache, scale in zip((k, v), caches, scales, strict=True):
        torch.testing.assert_close(cache[-1, 0].float() * scale[-1, 0], x[0], atol=float(scale[-1]), rtol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"v": torch.ones(3, 2, 32)}, r"v has shape \(3, 2, 32\); \(4, 2, 32\) is needed"),
        ({"v": torch.ones(4, 2, 32).half()}, "v is float16 but k is float32"),
        ({"k_cache": torch.ones(2, 4, 2, 64)}, "k_cache has shape"),
        ({"slot_mapping": torch.zeros(4, dtype=torch.int32)}, "slot_mapping is int32; convert it to one of int64"),
        ({"slot_mapping": torch.zeros(5, dtype=torch.int64)}, "slot_mapping has shape"),
        ({"k_scales": torch.ones(2, 4, 2)}, "1 scale tensors with a cache of torch.float32"),
        ({"k": torch.ones(4, 32, 2).transpose(1, 2)}, r"k has stride 2 in its last dimension"),
    ],
)
def test_wrong_input_is_one_clear_error(arguments, message):
    good = {"k": torch.ones(4, 2, 32), "v": torch.ones(4, 2, 32), "slot_mapping": torch.arange(4), "backend": "triton"}
    caches = {"k_cache": torch.ones(2, 4, 2, 32), "v_cache": torch.ones(2, 4, 2, 32)}
    with pytest.raises(KernelError, match=message):
        kv_write.kv_write(**(good | caches | arguments))
