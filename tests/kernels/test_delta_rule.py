"""The gated delta rule against its recurrence in float64, chunk against step, and where gates and keys are extreme."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from kernels import delta_rule
from kernels.launch import KernelError
from tests.kernels import harness


def test_stays_in_bounds():
    harness.check_bounds("kernels.delta_rule")


@pytest.mark.parametrize(("case", "dtype"), harness.trials(delta_rule))
def test_against_float64(case, dtype):
    harness.check(case, dtype)


def inputs(counts, **options):
    generator = torch.Generator().manual_seed(4)
    return list(delta_rule.inputs(harness.DEVICE, torch.float32, generator, counts, 1, 1, 32, 16, **options))


def test_the_two_references_are_one():
    """Chunks against the recurrence in float64, where a rounding hides nothing."""
    args = [t.double() if t is not None and t.is_floating_point() else t for t in inputs([70, 0, 33])]
    for got, want in zip(
        delta_rule.chunked_reference(*args), delta_rule.gated_delta_rule_reference(*args), strict=True
    ):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)


def test_chunks_cut_anywhere_are_the_recurrence():
    """A prompt that the scheduler cuts at random, its state carried from part to part."""
    q, k, v, g, beta, states, starts, _ = inputs([150])
    whole, final = delta_rule.gated_delta_rule(
        q, k, v, g, beta, states.clone(), starts, method="recurrent", backend="triton"
    )
    cuts = [0, *sorted(random.Random(0).sample(range(1, 150), 3)), 150]
    outs = []
    for a, b in itertools.pairwise(cuts):
        parts, ends = (x[a:b] for x in (q, k, v, g, beta)), torch.tensor([0, b - a], device=q.device).int()
        out, states = delta_rule.gated_delta_rule(*parts, states, ends, method="chunked", backend="triton")
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs), whole, atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(states, final, atol=5e-6, rtol=1e-4)


@pytest.mark.parametrize("method", ["recurrent", "chunked"])
def test_a_gate_that_forgets_everything(method):
    """g = -inf: 0 / 0 where decays are divided, and -inf - (-inf) where their logs are subtracted."""
    q, k, v, g, beta, states, starts, _ = inputs([20])
    g[7] = float("-inf")
    out, state = delta_rule.gated_delta_rule(q, k, v, g, beta, states, starts, method=method, backend="triton")
    fresh, ends = torch.zeros_like(states), torch.tensor([0, 13], device=q.device).int()
    later = (x[7:] for x in (q, k, v, g.nan_to_num(neginf=-1.0), beta))
    want, final = delta_rule.gated_delta_rule(*later, fresh, ends, method=method, backend="torch")
    torch.testing.assert_close(out[7:], want, atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(state, final, atol=2e-6, rtol=1e-4)


def test_one_key_for_every_token():
    """Powers of A would reach binomial(31, 15), 3 · 10⁸, and cancel to 1: float32 would hold nothing of it."""
    q, k, v, g, beta, states, starts, _ = inputs([64])
    k[:], beta[:], g[:] = k[0].clone(), 1.0, 0.0
    out, state = delta_rule.gated_delta_rule(q, k, v, g, beta, states, starts, method="chunked", backend="triton")
    held = torch.einsum("hkv,hk->hv", state[0], k[0])
    torch.testing.assert_close(held, v[-1], atol=1e-5, rtol=1e-5)  # each write replaced the one before
    assert out.abs().max() < 10


@pytest.mark.parametrize("method", ["recurrent", "chunked"])
def test_the_decay_comes_before_the_delta(method):
    """One token on a known state: u = beta (v - exp(g) Sᵀk), not beta (v - Sᵀk)."""
    q, k, v, g, beta, states, starts, _ = inputs([1])
    S, fade = states[0, 0].clone(), g[0, 0].exp()
    _, after = delta_rule.gated_delta_rule(q, k, v, g, beta, states, starts, method=method, backend="triton")
    u = beta[0, 0] * (v[0, 0] - fade * (S.T @ k[0, 0]))
    torch.testing.assert_close(after[0, 0], fade * S + torch.outer(k[0, 0], u))
    assert after.data_ptr() == states.data_ptr()


@pytest.mark.parametrize("method", ["recurrent", "chunked"])
def test_states_of_others_are_left_alone(method):
    q, k, v, g, beta, states, starts, slots = inputs([3, 2], slots=[2, -1])
    before = states.clone()
    out, after = delta_rule.gated_delta_rule(q, k, v, g, beta, states, starts, slots, method=method, backend="triton")
    assert torch.equal(after[:2].nan_to_num(7.0), before[:2].nan_to_num(7.0))
    assert not torch.equal(after[2], before[2])
    assert (out[3:] == 0).all()


def test_auto_steps_while_decoding_and_chunks_a_prompt(monkeypatch):
    called = []
    for name in ("_recurrent", "_chunked"):
        monkeypatch.setattr(delta_rule, name, lambda *a, name=name: called.append(name))
    for counts in ([1, 1, 1], [33]):
        delta_rule.gated_delta_rule(*inputs(counts), backend="triton")
    assert called == ["_recurrent", "_chunked"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"g": torch.zeros(5, 2)}, r"g has shape \(5, 2\); \(5, 1\) is needed"),
        ({"g": torch.zeros(5, 1).half()}, "g is float16; convert it to one of float32"),
        ({"states": torch.ones(1, 1, 16, 32)}, "states has shape"),
        ({"states": torch.ones(3, 1, 32, 16)}, "3 states for 1 sequences; give slots"),
        ({"slots": torch.zeros(2, dtype=torch.int32)}, "slots has shape"),
        ({"k": torch.ones(5, 2, 32)}, "k has shape"),
        ({"method": "scan"}, "method is 'scan'; use one of auto, recurrent, chunked"),
        ({"v": torch.ones(5, 16, 1).transpose(1, 2).half()}, "v is float16 but q is float32"),
    ],
)
def test_wrong_input_is_one_clear_error(arguments, message):
    names = ("q", "k", "v", "g", "beta", "states", "query_starts", "slots")
    good = dict(zip(names, inputs([5]), strict=True)) | {"backend": "triton"}
    with pytest.raises(KernelError, match=message):
        delta_rule.gated_delta_rule(**(good | arguments))
