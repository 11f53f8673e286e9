"""Merging attention states against float64, against attention over all keys, and where there are none."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import merge_states
from kernels.launch import KernelError
from tests.kernels import harness


def test_stays_in_bounds():
    harness.check_bounds("kernels.merge_states")


@pytest.mark.parametrize(("case", "dtype"), harness.trials(merge_states))
def test_against_float64(case, dtype):
    harness.check(case, dtype)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_two_without_keys_are_zero_and_minus_infinity(backend):
    """vllm#39148: -inf - (-inf)."""
    outs, lses = torch.full((2, 1, 1, 16), float("nan")), torch.full((2, 1, 1), float("-inf"))
    out, lse = merge_states.merge_states(outs, lses, backend=backend)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_parts_of_the_keys_give_attention_over_all(backend):
    scores, values = torch.randn(4, 60, dtype=torch.float64) * 4, torch.randn(60, 32, dtype=torch.float64)
    cuts = scores.split([1, 30, 29], dim=1), values.split([1, 30, 29])
    outs = torch.stack([s.softmax(-1) @ v for s, v in zip(*cuts, strict=True)])
    lses = torch.stack([s.logsumexp(-1) for s in cuts[0]])
    out, lse = merge_states.merge_states(outs.float()[:, :, None], lses.float()[:, :, None], backend=backend)
    torch.testing.assert_close(out[:, 0], (scores.softmax(-1) @ values).float())
    torch.testing.assert_close(lse[:, 0], scores.logsumexp(-1).float())


def test_far_from_zero_nothing_overflows():
    outs = torch.stack([torch.zeros(1, 1, 16), torch.ones(1, 1, 16)])
    lses = torch.tensor([200.0, 200.0 + math.log(3)])[:, None, None]
    out, lse = merge_states.merge_states(outs, lses, backend="triton")
    torch.testing.assert_close(out, torch.full_like(out, 0.75))
    torch.testing.assert_close(lse, torch.full_like(lse, 200 + math.log(4)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lses": torch.ones(2, 3, 5)}, r"lses has shape \(2, 3, 5\); \(2, 3, 4\) is needed"),
        ({"lses": torch.ones(2, 3, 4).half()}, "lses is float16; convert it to one of float32"),
        ({"outs": torch.ones(3, 4, 8)}, "outs has shape"),
        ({"dtype": torch.int8}, "dtype is torch.int8"),
        ({"outs": torch.ones(0, 3, 4, 8), "lses": torch.ones(0, 3, 4)}, "outs has 0 parts"),
    ],
)
def test_wrong_input_is_one_clear_error(arguments, message):
    good = {"outs": torch.ones(2, 3, 4, 8), "lses": torch.ones(2, 3, 4), "backend": "triton"}
    with pytest.raises(KernelError, match=message):
        merge_states.merge_states(**(good | arguments))
