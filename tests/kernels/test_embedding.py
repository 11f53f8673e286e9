"""The gather of rows against torch's own, with ids outside the vocabulary and offsets beyond 32 bits."""

from __future__ import annotations

import pytest
import torch

from kernels import embedding
from kernels.launch import KernelError
from tests.kernels import harness


def test_stays_in_bounds():
    harness.check_bounds("kernels.embedding")


@pytest.mark.parametrize(("case", "dtype"), harness.trials(embedding))
def test_against_float64(case, dtype):
    harness.check(case, dtype)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_it_is_torchs_operator_bit_for_bit(index):
    weight, ids = torch.randn(33, 81).half(), torch.randint(33, (9,)).to(index)
    want = torch.nn.functional.embedding(ids, weight)
    assert torch.equal(embedding.embedding(ids, weight, backend="triton"), want)
    assert torch.equal(embedding.embedding(ids, weight, backend="torch"), want)


def test_ids_outside_the_vocabulary_are_refused_where_looking_is_free():
    weight = torch.randn(10, 4, device="cpu")
    for wrong in (-1, 10, 2**31 - 1):
        with pytest.raises(KernelError, match=f"ids holds {wrong}, outside 0 to 9"):
            embedding.embedding(torch.tensor([3, wrong], device="cpu"), weight)


@pytest.mark.parametrize("wrong", [-1, 10, 2**31, -(2**62)])
def test_ids_outside_the_vocabulary_give_nan_and_read_nothing(wrong):
    """What a GPU does. At 2^62 a read would end this process."""
    weight = torch.randn(10, 81)
    y = embedding._launch(torch.tensor([3, wrong, 9]), weight)
    assert y[1].isnan().all()
    assert torch.equal(y[::2], weight[[3, 9]])
    assert embedding.embedding_reference(torch.tensor([wrong]), weight).isnan().all()


def test_offsets_pass_two_to_the_31():
    """vllm#47671: 3 · 2^30 elements is past 31 bits, and in 32 bits negative. Only the pages that are touched exist."""
    memory = torch.empty(3 * 2**30 + 64, dtype=torch.float16)
    weight = memory.as_strided((4, 64), (2**30, 1))
    for row in range(4):
        weight[row] = row + 1
    for index in (torch.int32, torch.int64):
        y = embedding.embedding(torch.tensor([3, 0, 2], dtype=index), weight, backend="triton")
        assert y.unique(dim=1).flatten().tolist() == [4.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ids": torch.ones(4)}, "ids is float32; convert it to one of int32, int64"),
        ({"ids": torch.ones(2, 2, dtype=torch.int64)}, r"ids has shape \(2, 2\)"),
        ({"weight": torch.ones(8, 4, dtype=torch.int8)}, "weight is int8; convert it"),
        ({"weight": torch.ones(32, 8).t()}, r"weight has stride 8 in its last dimension; call weight.contiguous\(\)"),
        ({"weight": torch.ones(0, 8), "ids": torch.ones(0, dtype=torch.int64)}, "weight has no rows"),
        ({"backend": "cuda"}, "backend is 'cuda'; use one of auto, triton, torch"),
    ],
)
def test_wrong_input_is_one_clear_error(arguments, message):
    good = {"ids": torch.tensor([1, 2]), "weight": torch.ones(8, 32), "backend": "triton"}
    with pytest.raises(KernelError, match=message):
        embedding.embedding(**(good | arguments))
