"""The packed 2:4 format: exact there and back, its layout by hand, its bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.errors import SparsityError
from minillm.sparsity import SparseLinear, pack_2_4
from minillm.sparsity.packed import packed_bytes


def random_2_4(rows: int, groups: int, seed: int, most: int = 2) -> torch.Tensor:
    """Zeros drawn freely: two, three or four in a group."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, groups, 4, generator=generator)
    ranks = torch.rand(rows, groups, 4, generator=generator).argsort(-1)
    left = torch.randint(most - 2, most + 1, (rows, groups, 1), generator=generator)
    return (weight * (ranks < left)).view(rows, 4 * groups)


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 50), st.sampled_from(["float32", "float16", "bfloat16"]))
@settings(deadline=None, max_examples=80)
def test_there_and_back(rows, groups, seed, dtype):
    weight = random_2_4(rows, groups, seed).to(getattr(torch, dtype))
    packed = pack_2_4(weight)
    assert torch.equal(packed.unpack(), weight)
    assert packed.values.shape == (rows, 2 * groups)
    assert packed.indices.shape == (rows, (groups + 1) // 2)
    assert packed.nbytes == packed_bytes(rows, 4 * groups, 8 * weight.element_size())


def test_layout_by_hand():
    weight = torch.tensor([[0.0, 5, 0, 6, 7, 0, 0, 8, 0, 0, 9, 0]])
    packed = pack_2_4(weight)
    assert packed.values.tolist() == [[5, 6, 7, 8, 0, 9]]
    # places 1 and 3 -> 1 | 3 << 2 = 13; 0 and 3 -> 12; 0 (filled up) and 2 -> 8, the last byte's upper half empty
    assert packed.indices.tolist() == [[13 | 12 << 4, 8]]


def test_every_pair_of_places():
    pairs = [(a, b) for a in range(4) for b in range(a + 1, 4)]
    weight = torch.zeros(1, 24)
    for group, (a, b) in enumerate(pairs):
        weight[0, 4 * group + a], weight[0, 4 * group + b] = 1 + group, -1 - group
    packed = pack_2_4(weight)
    halves = [h for byte in packed.indices[0].tolist() for h in (byte & 15, byte >> 4)]
    assert halves == [a | b << 2 for a, b in pairs]
    assert torch.equal(packed.unpack(), weight)


def test_bytes_as_the_format_says():
    dense = {bits: 64 * 128 * bits // 8 for bits in (8, 16, 32)}
    assert packed_bytes(64, 128, 16) / dense[16] == 0.5625
    assert packed_bytes(64, 128, 8) / dense[8] == 0.625
    assert packed_bytes(64, 128, 32) / dense[32] == 0.53125


@pytest.mark.parametrize(
    ("weight", "told"),
    [
        (torch.tensor([[1.0, 1, 0, 0, 1, 1, 1, 0]]), "columns 4 to 7 of row 0"),
        (torch.zeros(2, 6), "columns 4 divides"),
        (torch.zeros(8), "columns 4 divides"),
        (torch.full((1, 4), torch.nan), "more than two numbers"),
    ],
)
def test_what_does_not_fit_is_told(weight, told):
    with pytest.raises(SparsityError, match=told):
        pack_2_4(weight, "blocks.0.x")


@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 6)])
def test_the_layer_is_the_dense_one(bias):
    weight = random_2_4(6, 5, 0)
    layer, x = SparseLinear(pack_2_4(weight), bias), torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    assert torch.equal(layer(x), torch.nn.functional.linear(x, weight, bias))
    assert layer.stored_bytes == packed_bytes(6, 20, 32)
    assert layer.weight_bytes == layer.stored_bytes + 2 * weight.nbytes  # a CPU writes and reads the dense matrix
    halved = layer.to(torch.bfloat16)
    assert halved.indices.dtype == torch.uint8
    assert torch.equal(halved.packed.unpack(), weight.to(torch.bfloat16))


def test_what_the_hardware_has_no_kernel_for_is_told():
    """The path to the sparse tensor cores, as far as it goes without them."""
    layer = SparseLinear(pack_2_4(random_2_4(32, 16, 0)))
    with pytest.raises(SparsityError, match="float16 or bfloat16"):
        layer._hardware_weight()
    layer = SparseLinear(pack_2_4(random_2_4(30, 16, 0).half()))
    with pytest.raises(SparsityError, match="30 x 64"):
        layer._hardware_weight()


def test_the_hardware_is_handed_the_dense_matrix(monkeypatch):
    """torch makes its own layout from it, once."""
    handed, weight = [], random_2_4(64, 32, 0).half()
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", lambda dense: handed.append(dense) or dense)
    layer = SparseLinear(pack_2_4(weight))
    assert layer._hardware_weight() is layer._hardware_weight()
    assert len(handed) == 1
    assert torch.equal(handed[0], weight)
    assert handed[0].is_contiguous()
