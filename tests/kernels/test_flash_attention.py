"""FlashAttention prefill against float64, the model's attention and torch's, and what has gone wrong elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from kernels import flash_attention as file
from kernels.flash_attention import flash_attention, starts
from kernels.launch import KernelError
from minillm.attention import naive_attention
from tests.kernels import harness


def attend(q, k, v, queries=None, keys=None, **kwargs):
    """All of q and k as one sequence, unless the lengths of several are given."""
    ends = starts(queries or [len(q)], q.device), starts(keys or queries or [len(k)], q.device)
    with harness.poisoned():
        return flash_attention(q, k, v, *ends, backend="triton", **kwargs)


def normal(*shapes, seed=0):
    generator = torch.Generator("cpu").manual_seed(seed)
    return [torch.randn(*shape, generator=generator, device="cpu").to(harness.DEVICE) for shape in shapes]


def test_stays_in_bounds():
    harness.check_bounds("kernels.flash_attention")


@pytest.mark.parametrize(("case", "dtype"), harness.trials(file))
def test_against_float64(case, dtype):
    harness.check(case, dtype)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("queries", "keys"), [(97, 97), (33, 97), (1, 97), (3, 65), (2, 65)])
def test_it_is_the_attention_of_the_model(queries, keys, window):
    """Of 65 keys the first query sees one tile but for its last key, or all of it, and then it needs no mask."""
    q, k, v = normal((queries, 6, 64), (keys, 2, 64), (keys, 2, 64))
    out, _ = attend(q, k, v, window=window)
    torch.testing.assert_close(out, naive_attention(q, k, v, window), rtol=1e-4, atol=1e-5)


def test_it_is_torchs_attention():
    q, k, v = normal((97, 4, 128), (97, 2, 128), (97, 2, 128))
    out, _ = attend(q, k, v)
    apart = [t.transpose(0, 1)[None] for t in (q, k, v)]
    want = F.scaled_dot_product_attention(*apart, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


def test_a_sequence_is_what_it_is_alone():
    """NaN in one sequence of the pack stays there, though tiles hang over its ends."""
    lengths = (20, 45, 70)
    q, k, v = normal((135, 2, 64), (135, 2, 64), (135, 2, 64))
    for t in (q, k, v):
        t[20:65] = float("nan")
    out, lse = attend(q, k, v, queries=lengths)
    assert out[20:65].isnan().all()
    assert lse[:, 20:65].isnan().all()
    for part in (slice(0, 20), slice(65, 135)):
        alone, alone_lse = attend(q[part], k[part], v[part])
        assert torch.equal(out[part], alone)
        assert torch.equal(lse[:, part], alone_lse)


def test_chunks_are_the_whole():
    """Bottom-right: the last 50 queries against all keys give the last 50 rows of the whole."""
    q, k, v = normal((150, 2, 64), (150, 1, 64), (150, 1, 64))
    for window in (None, 70):
        whole, lse = attend(q, k, v, window=window)
        chunk, chunk_lse = attend(q[100:], k, v, window=window)
        torch.testing.assert_close(chunk, whole[100:])
        torch.testing.assert_close(chunk_lse, lse[:, 100:])


def test_rows_that_see_nothing_give_zero():
    """TensorRT-LLM#17477: a fully masked row got weight 1. With 40 queries of 10 keys the first 30 see none."""
    q, k, v = normal((40, 2, 64), (10, 2, 64), (10, 2, 64))
    for window in (None, 4):
        out, lse = attend(q, k, v, window=window)
        assert (out[:30] == 0).all()
        assert (lse[:, :30] == float("-inf")).all()
        torch.testing.assert_close(out[30], v[0])
    out, lse = attend(q, k[:0], v[:0])
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


def test_the_log_sum_exp_is_natural():
    """Keys of zeros: every score is 0, so query i, which sees i + 1 keys, has log(i + 1)."""
    q, k, v = normal((70, 1, 64), (70, 1, 64), (70, 1, 64))
    _, lse = attend(q, torch.zeros_like(k), v)
    torch.testing.assert_close(lse[0], torch.arange(1.0, 71).log())


def test_two_halves_merge_by_their_log_sum_exp():
    """What lse is for: softmax over all keys from the softmaxes over two parts of them."""
    q, k, v = normal((1, 2, 64), (90, 2, 64), (90, 2, 64))
    whole, lse = attend(q, k, v)
    parts = [attend(q, k[part], v[part]) for part in (slice(0, 50), slice(50, 90))]
    merged_lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(out * (part - merged_lse).exp().t()[..., None] for out, part in parts)
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(merged_lse, lse)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_soft_cap_holds_far_beyond_88(sign):
    """vllm#56578: tanh by exponentials overflowed. Scores of ±6400 become ±30, and the capped weights are exact."""
    q = torch.full((2, 1, 64), 10.0)
    k = torch.full((2, 1, 64), 10.0) * sign
    k[1] = 0
    v = torch.stack((torch.ones(1, 64), torch.zeros(1, 64)))
    out, lse = attend(q, k, v, scale=1.0, soft_cap=30.0)
    assert lse[0, 0].item() == pytest.approx(30 * sign, rel=1e-6)
    weight = 1 / (1 + math.exp(-30 * sign))
    torch.testing.assert_close(out[1], torch.full((1, 64), weight), rtol=1e-5, atol=0)


@pytest.mark.parametrize("d", file.HEADS)
def test_every_column_of_a_head_counts(d):
    """triton#621: head 128 used its first 64. Each column alone decides which of two keys wins."""
    columns = torch.tensor([c for c in (0, 31, 32, 63, 64, 95, 96, 127, 128, 191, 192, 255) if c < d])
    n = len(columns)
    sequence = torch.arange(n)
    q, k, v = (torch.zeros(2 * n, 1, d) for _ in range(3))
    q[2 * sequence + 1, 0, columns] = 100.0
    k[2 * sequence, 0, columns] = 1.0
    v[2 * sequence, 0, columns] = columns + 1.0
    out, _ = attend(q, k, v, queries=[2] * n, scale=1.0)
    torch.testing.assert_close(out[1::2], v[::2])


def test_each_tensor_has_strides_of_its_own():
    """LightLLM#1467, TensorRT-LLM#14810: one stride used for all. k and v here are views of one cache."""
    q, cache = normal((4, 97, 64), (97, 2, 2, 64))
    q, k, v = q.transpose(0, 1), cache[:, 0], cache[:, 1]
    v = torch.cat((v, torch.full_like(v, float("nan"))), dim=-1)[..., :64]
    assert len({q.stride(), k.stride(), v.stride()}) == 3
    out, _ = attend(q, k, v)
    torch.testing.assert_close(out, naive_attention(q, k, v), rtol=1e-4, atol=1e-5)


def test_offsets_pass_two_to_the_31():
    """vllm#47671, sglang#20389: 150 tokens, 2^24 - 16 elements apart, end past 2^31. Only touched pages exist."""
    apart, length = 2**24 - 16, 150
    small = normal((length, 1, 64), seed=1)[0].half()
    wide = torch.empty(apart * length, dtype=torch.float16).as_strided((length, 1, 64), (apart, 64, 1))
    wide.copy_(small)
    out, _ = attend(wide, wide, wide)
    want, _ = attend(small, small, small)
    assert torch.equal(out, want)


def test_longest_bounds_the_grid_alone():
    q, k, v = normal((60, 2, 64), (60, 2, 64), (60, 2, 64))
    want = attend(q, k, v, queries=(12, 48))
    for longest in (48, 1000):
        got = attend(q, k, v, queries=(12, 48), longest=longest)
        assert torch.equal(got[0], want[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": torch.ones(4, 3, 64)}, "the number of query heads is 3, not a multiple of 2"),
        ({"q": torch.ones(4, 2, 80), **dict.fromkeys("kv", torch.ones(4, 2, 80))}, "heads of 80; the kernel takes 64"),
        ({"k": torch.ones(4, 2, 128)}, r"k has shape \(4, 2, 128\)"),
        ({"v": torch.ones(5, 2, 64)}, r"v has shape \(5, 2, 64\); \(4, 2, 64\)"),
        ({"v": torch.ones(4, 2, 64).half()}, "v is float16 but q is float32"),
        ({"k": torch.ones(4, 64, 2).transpose(1, 2)}, "k has stride 2 in its last dimension"),
        ({"query_starts": torch.tensor([0, 4])}, "query_starts is int64; convert it to one of int32"),
        ({"key_starts": torch.zeros(3, dtype=torch.int32)}, r"key_starts has shape \(3,\); \(2\) is needed"),
        ({"window": 0}, "window is 0; at least 1"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0"),
        ({"scale": -1.0}, "scale is -1.0"),
        ({"backend": "cuda"}, "backend is 'cuda'"),
    ],
)
def test_wrong_input_is_one_clear_error(arguments, message):
    good = {name: torch.ones(4, 2, 64) for name in "qkv"} | {"backend": "triton"}
    good |= {name: torch.tensor([0, 4], dtype=torch.int32) for name in ("query_starts", "key_starts")}
    with pytest.raises(KernelError, match=message):
        flash_attention(**(good | arguments))
