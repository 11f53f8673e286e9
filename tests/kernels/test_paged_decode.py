"""Paged decode against float64, against the paged cache in torch, and against what has gone wrong elsewhere."""

from __future__ import annotations

import pytest
import torch

from kernels import kv_write, paged_decode
from kernels.launch import KernelError
from minillm.paging import PagedStep
from tests.kernels import harness, paged_cache


def test_stays_in_bounds():
    harness.check_bounds("kernels.paged_decode")


@pytest.mark.parametrize(("case", "dtype"), harness.trials(paged_decode))
def test_against_float64(case, dtype):
    harness.check(case, dtype)


@pytest.mark.parametrize("layer", [paged_cache.FULL, paged_cache.SLIDING])
def test_equals_the_paged_cache(layer):
    """On storage and tables as the engine has them, after the cache has written the step's own tokens."""
    step = paged_cache.metadata([(1, 0), (1, 40), (1, 15), (1, 70)], 14, 16)
    cache = paged_cache.cache(6, 2, 32, 19, 14, 16)
    q, k, v = paged_cache.draw(step, 6, 2, 32)
    want = PagedStep(cache, step).attend(layer, q, k, v)
    got = paged_decode.paged_decode(
        q, *cache.layers[layer], step.block_tables, step.context_lengths, window=cache.config.window(layer), splits=2,
        backend="triton",
    )  # fmt: skip
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-5)


def inputs(contexts=(40, 9), heads=4, kv_heads=2, d=16):
    generator = torch.Generator().manual_seed(1)
    cache = paged_decode.paged(generator, contexts, 16, kv_heads, d, harness.DEVICE, torch.float32)
    return torch.randn(len(contexts), heads, d, device=harness.DEVICE), *cache


def test_a_context_of_nothing_is_zero():
    """TensorRT-LLM#17477: a fully masked row got weight 1. Padding rows of a captured graph look like this."""
    q, k, v, tables, lengths = inputs()
    out = paged_decode.paged_decode(q, k, v, tables, torch.zeros_like(lengths), splits=2, backend="triton")
    assert (out == 0).all()


def test_soft_cap_far_out_is_the_cap():
    """vllm#56578: NaN beyond 88. Every score is far beyond the cap, so all are equal to it, and weights are uniform."""
    q, k, v, tables, lengths = inputs((20,))
    k = k.abs() * 1e4 + 1
    for sign in (1, -1):
        out = paged_decode.paged_decode(q.abs() * sign + sign, k, v, tables, lengths, soft_cap=30.0, backend="triton")
        mean = v[tables[0].long()].flatten(0, 1)[:20].mean(0).repeat_interleave(2, dim=0)
        torch.testing.assert_close(out[0], mean)


def test_all_of_head_128_counts():
    """triton#621: head 128 used its first 64."""
    q, k, v, tables, lengths = inputs((3,), 1, 1, 128)
    block = tables[0, 0].long()
    k[block] = 0.0
    q.fill_(0.0)[..., 127] = 1.0
    k[block, 1, 0, 127] = 1e4  # only the last number tells token 1 from the others
    out = paged_decode.paged_decode(q, k, v, tables, lengths, backend="triton")
    torch.testing.assert_close(out[0, 0], v[block, 1, 0])


def test_a_block_beyond_two_to_the_31_bytes():
    """vllm#47671, sglang#20389: block · stride in 32 bits. The caches are views that only touch two blocks.

    8 · 2²⁹ is 0 in 32 bits, so that the mistake reads block 0 instead of what does not exist.
    """
    stride, blocks = 2**29, 9
    storage = torch.empty(stride * (blocks - 1) + 2 * 2 * 16, dtype=torch.int8, device=harness.DEVICE)
    k, v = (torch.as_strided(storage, (blocks, 2, 1, 16), (stride, 16, 16, 1), offset) for offset in (0, 32))
    for side in (k, v):
        side[0], side[blocks - 1] = 1, torch.randint(-127, 127, (2, 1, 16), device=harness.DEVICE)
    scales = [torch.full((blocks, 2, 1), 0.01, device=harness.DEVICE) for _ in range(2)]
    ints = {"dtype": torch.int32, "device": harness.DEVICE}
    args = (torch.randn(1, 1, 16, device=harness.DEVICE), k, v, torch.tensor([[blocks - 1]], **ints))
    options = {"context_lengths": torch.tensor([2], **ints), "k_scales": scales[0], "v_scales": scales[1]}
    torch.testing.assert_close(
        paged_decode.paged_decode(*args, **options, backend="triton"),
        paged_decode.paged_decode(*args, **options, backend="torch"),
    )


def test_bits_with_given_splits_do_not_depend_on_the_batch():
    q, k, v, tables, lengths = inputs((70, 20, 33))
    together = paged_decode.paged_decode(q, k, v, tables, lengths, splits=2, backend="triton")
    for row in range(3):
        one = slice(row, row + 1)
        alone = paged_decode.paged_decode(q[one], k, v, tables[one], lengths[one], splits=2, backend="triton")
        assert torch.equal(alone, together[one])


def test_splits_fill_the_device_and_no_more():
    assert paged_decode.choose_splits(8, 16384, 132) == 64  # one sequence: 256 tokens each
    assert paged_decode.choose_splits(256, 4096, 132) == 2
    assert paged_decode.choose_splits(4096, 4096, 132) == 1
    assert paged_decode.choose_splits(0, 0, 132) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": torch.ones(2, 4, 512)}, "q has heads of 512; the kernel takes 1 to 256"),
        ({"q": torch.ones(2, 3, 16)}, "number of query heads is 3, not a multiple of 2"),
        ({"q": torch.ones(2, 4, 16).half()}, "k_cache is float32; convert it to one of float16, int8"),
        ({"k_cache": torch.zeros(9, 16, 2, 16).to(torch.float8_e5m2)}, "k_cache is float8_e5m2; convert it to one of"),
        ({"block_tables": torch.zeros(2, 3)}, "block_tables is float32; convert it to one of int32"),
        ({"block_tables": torch.zeros(3, 3, dtype=torch.int32)}, "context_lengths has shape"),
        ({"window": 0}, "window is 0"),
        ({"soft_cap": -1.0}, "soft_cap is -1.0"),
        ({"splits": 0}, "splits is 0"),
        ({"k_scales": torch.ones(2, 16, 2)}, "1 scale tensors with a cache of torch.float32"),
    ],
)
def test_wrong_input_is_one_clear_error(arguments, message):
    names = ("q", "k_cache", "v_cache", "block_tables", "context_lengths")
    good = dict(zip(names, inputs(), strict=True)) | {"backend": "triton"}
    arguments = {k: v.to(harness.DEVICE) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with pytest.raises(KernelError, match=message):
        paged_decode.paged_decode(**(good | arguments))


def test_an_fp8_cache_is_read_as_the_numbers_it_holds():
    """All 256 bytes, through the integers: both zeros, subnormals, 448; and NaN stays NaN, for its own row alone."""
    every = torch.arange(256, dtype=torch.uint8, device=harness.DEVICE).view(torch.float8_e4m3fn)
    numbers = every.float()[every.float().isfinite()]
    count = len(numbers)  # 254: one token each, whose probability is 1
    k = torch.zeros(count + 2, 1, 1, 16, dtype=torch.float8_e4m3fn, device=harness.DEVICE)
    v = torch.cat([numbers, numbers.new_tensor([torch.nan, 1.0])]).view(-1, 1, 1, 1).expand_as(k).to(k.dtype)
    tables = torch.arange(count + 2, dtype=torch.int32, device=harness.DEVICE)[:, None]
    for dtype in (torch.float32, torch.float16):
        q = torch.ones(count + 2, 1, 16, dtype=dtype, device=harness.DEVICE)
        out = paged_decode.paged_decode(q, k, v, tables, torch.ones_like(tables[:, 0]), splits=1, backend="triton")
        assert torch.equal(out[:count, 0, 0].float(), numbers)
        assert out[count].isnan().all()
        assert (out[count + 1] == 1).all()


def test_e4m3_as_a_type_gives_the_same_numbers(monkeypatch):
    """What GPUs from sm_89 on do: the hardware converts. The interpreter has the type as well."""
    q, k, v, tables, lengths = inputs((40, 9))
    k, v = (side.nan_to_num(0).to(torch.float8_e4m3fn) for side in (k, v))
    by_integers = paged_decode.paged_decode(q, k, v, tables, lengths, backend="triton")
    monkeypatch.setattr(kv_write, "converts_e4m3", lambda tensor: True)
    assert torch.equal(paged_decode.paged_decode(q, k, v, tables, lengths, backend="triton"), by_integers)


@pytest.mark.parametrize(("capability", "stored"), [((7, 5), torch.uint8), ((8, 0), torch.uint8), ((8, 9), None)])
def test_older_gpus_get_the_bytes(monkeypatch, capability, stored):
    """Triton refuses e4m3 as a type before sm_89."""
    monkeypatch.setattr(kv_write, "converts_e4m3", lambda tensor: capability >= (8, 9))
    caches = [torch.zeros(2, 4, 1, 16, dtype=torch.float8_e4m3fn) for _ in range(2)]
    assert {cache.dtype for cache in kv_write.as_loaded(*caches)} == {stored or torch.float8_e4m3fn}
    plain = [torch.zeros(2, 4, 1, 16) for _ in range(2)]
    assert kv_write.as_loaded(*plain) == tuple(plain)
