"""The order of pairs by expert: against the reference, by its promises, and against what has gone wrong elsewhere."""

from __future__ import annotations

import pytest
import torch

from kernels import moe_align
from kernels.launch import KernelError
from tests.kernels import harness


def test_stays_in_bounds():
    harness.check_bounds("kernels.moe_align")


@pytest.mark.parametrize(("case", "dtype"), harness.trials(moe_align))
def test_is_the_reference(case, dtype):
    harness.check(case, dtype)


def test_the_example_of_the_docstring():
    experts = torch.tensor([[2, 0], [0, 2], [0, -1]])
    want = [1, 2, 4, *[6] * 13, 0, 3, *[6] * 14, 5, *[6] * 15]
    for backend in ("triton", "torch"):
        source, owner = moe_align.moe_align(experts, 3, 16, backend=backend)
        used = len(want)
        assert source[:used].tolist() == want
        assert owner[: used // 16].tolist() == [0, 2, -1]
        assert bool((source[used:] == 6).all())
        assert bool((owner[used // 16 :] == -1).all())


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize(("tokens", "k", "num_experts", "dropped"), [(150, 2, 5, 0.2), (3, 4, 64, 0.0)])
def test_promises(backend, tokens, k, num_experts, dropped):
    """Every pair once; a tile has pairs of its expert alone; pairs of an expert keep their order."""
    experts = moe_align.choices(torch.Generator().manual_seed(3), tokens, k, num_experts, dropped).to(harness.DEVICE)
    source, owner = moe_align.moe_align(experts, num_experts, 16, backend=backend)
    pairs = experts.numel()
    real = source[source < pairs]
    assert torch.equal(real.sort().values, torch.arange(pairs, dtype=torch.int32))
    assert bool((source <= pairs).all())
    rows = owner.repeat_interleave(16)[source < pairs]
    assert torch.equal(rows.long(), experts.flatten()[real.long()])
    for e in (-1, *range(num_experts)):
        assert bool((real[rows == e].diff() > 0).all())


def test_pairs_without_an_expert_are_kept_in_tiles_of_expert_minus_one():
    """vllm#12583: -1, and experts of another device, which are past the last."""
    experts = torch.tensor([[-1, 4], [7, 1], [-1, -1], [1, 2**31 - 1]])
    source, owner = moe_align.moe_align(experts, 4, 16, backend="triton")
    assert owner[:2].tolist() == [1, -1]
    assert source[:16].tolist() == [3, 6] + [8] * 14
    assert source[16:32].tolist() == [0, 1, 2, 4, 5, 7] + [8] * 10


def test_the_bound_on_tiles_is_tight():
    """One pair for each group takes a tile each, and not one more is reserved."""
    experts = torch.tensor([[0], [1], [2], [-1]])
    source, owner = moe_align.moe_align(experts, 3, 16, backend="triton")
    assert owner.tolist() == [0, 1, 2, -1]
    assert len(source) == 64
    assert moe_align.blocks_needed(0, 8, 16) == 0
    assert moe_align.blocks_needed(17, 1, 16) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"experts": torch.zeros(4, 2)}, "experts is float32; convert it to one of int32, int64"),
        ({"experts": torch.zeros(4, dtype=torch.int64)}, r"experts has shape \(4,\); \(any, any\) is needed"),
        ({"num_experts": 0}, "num_experts is 0; the kernel takes 1 to 511"),
        ({"block": 24}, "block is 24; use 16, 32, 64 or 128"),
        ({"experts": torch.zeros(2, 4, dtype=torch.int64).t()}, r"call experts.contiguous\(\)"),
    ],
)
def test_wrong_input_is_one_clear_error(arguments, message):
    good = {"experts": torch.zeros(4, 2, dtype=torch.int64), "num_experts": 4, "block": 16, "backend": "triton"}
    with pytest.raises(KernelError, match=message):
        moe_align.moe_align(**(good | arguments))
