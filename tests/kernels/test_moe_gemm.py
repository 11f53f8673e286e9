"""The MoE layer against a loop over experts in float64, and against what has gone wrong elsewhere."""

from __future__ import annotations

import pytest
import torch

from kernels import moe_gemm
from kernels.launch import KernelError
from kernels.moe_align import moe_align
from tests.kernels import harness


def test_stays_in_bounds():
    harness.check_bounds("kernels.moe_gemm")


@pytest.mark.parametrize(("case", "dtype"), harness.trials(moe_gemm))
def test_against_float64(case, dtype):
    harness.check(case, dtype)


def _layer(tokens=6, d=32, f=16, num_experts=4, k=2):
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator, device="cpu").to(harness.DEVICE)  # noqa: E731
    experts = torch.rand(tokens, num_experts, generator=generator, device="cpu").topk(k).indices.to(harness.DEVICE)
    return draw(tokens, d).half(), draw(num_experts, 2 * f, d).half() / 6, draw(num_experts, d, f).half() / 4, experts


def test_dropped_pairs_are_zeros_and_not_what_was_there():
    """vllm#12583: a pair of expert -1 kept whatever its output held before."""
    x, gate_up, _, experts = _layer()
    experts[1] = -1
    experts[3, 0] = 99
    order = moe_align(experts, 4, 16, backend="triton")
    with harness.poisoned():
        h = moe_gemm.moe_gemm(x, gate_up, *order, share=2, swiglu=True, backend="triton")
    assert h.isfinite().all()
    assert (h == 0).all(1).nonzero().flatten().tolist() == [2, 3, 6]


def test_the_router_weight_counts_once():
    """Twice the weights are twice the output, exactly, since 2 is a power of two; applied twice it would be four."""
    x, gate_up, down, experts = _layer()
    weight = torch.rand(6, 2)
    once = moe_gemm.moe_layer(x, gate_up, down, experts, weight, backend="triton")
    assert torch.equal(moe_gemm.moe_layer(x, gate_up, down, experts, 2 * weight, backend="triton"), 2 * once)
    assert not once.eq(0).any()


def test_a_token_is_the_same_in_any_company():
    """No atomics, and each row is summed for itself: the bits of a token do not depend on the other tokens."""
    x, gate_up, down, experts = _layer(tokens=40)
    weight = torch.rand(40, 2)
    with harness.plain_matmul():
        together = moe_gemm.moe_layer(x, gate_up, down, experts, weight, backend="triton")
        backwards = moe_gemm.moe_layer(x.flip(0), gate_up, down, experts.flip(0), weight.flip(0), backend="triton")
    assert torch.equal(together, backwards.flip(0))


def test_the_sum_over_experts_is_float32():
    """In float16, 2048 + 1 + 1 + 1 stays 2048."""
    y = torch.tensor([2048.0, 1.0, 1.0, 1.0, 1.0]).half()[:, None].repeat(1, 17)
    out = moe_gemm.moe_combine(y, torch.ones(1, 5), backend="triton")
    assert torch.equal(out, torch.full((1, 17), 2052.0).half())


def test_where_the_gate_is():
    """The gate is the first half of the rows. Far above zero silu(g) is g, so y is then the product of the halves."""
    x, gate_up, _, experts = _layer()
    order = moe_align(experts, 4, 16, backend="triton")
    gate_up[:, :16] = 20.0 * torch.eye(16, 32).half()
    x = x.abs() + 1  # so that every gate is 20 or more
    got = moe_gemm.moe_gemm(x, gate_up, *order, share=2, swiglu=True, backend="triton")
    up = torch.stack([x[p // 2].float() @ gate_up[experts.flatten()[p], 16:].float().t() for p in range(12)])
    want = 20 * x[:, :16].float().repeat_interleave(2, 0) * up
    torch.testing.assert_close(got.float(), want, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight": torch.ones(4, 32, 31).half()}, r"weight has shape \(4, 32, 31\); \(any, any, 32\) is needed"),
        ({"weight": torch.ones(4, 32, 32)}, "weight is float32 but x is float16"),
        ({"weight": torch.ones(4, 31, 32).half()}, r"weight.shape\[1\] is 31, not a multiple of 2"),
        ({"source": torch.zeros(65, dtype=torch.int32)}, "source has 65 rows and expert_of_block 4; take both from"),
        ({"source": torch.zeros(64)}, "source is float32"),
        ({"share": 0}, "share is 0"),
        ({"x": torch.ones(32, 6).half().t()}, r"call x.contiguous\(\)"),
    ],
)
def test_wrong_input_is_one_clear_error(arguments, message):
    good = {"x": torch.ones(6, 32).half(), "weight": torch.ones(4, 32, 32).half(), "share": 2, "swiglu": True}
    good |= {"source": torch.zeros(64, dtype=torch.int32), "expert_of_block": torch.zeros(4, dtype=torch.int32)}
    with pytest.raises(KernelError, match=message):
        moe_gemm.moe_gemm(**(good | {"backend": "triton"} | arguments))


def test_wrong_input_to_the_sum_and_the_layer():
    x, gate_up, down, experts = _layer()
    with pytest.raises(KernelError, match=r"y has shape \(11, 32\); \(12, any\) is needed"):
        moe_gemm.moe_combine(torch.ones(11, 32), torch.ones(6, 2))
    with pytest.raises(KernelError, match="down has shape"):
        moe_gemm.moe_layer(x, gate_up, down[:, :, :8], experts, torch.ones(6, 2))
    with pytest.raises(KernelError, match="router_weight has shape"):
        moe_gemm.moe_layer(x, gate_up, down, experts, torch.ones(6, 3))
