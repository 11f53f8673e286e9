"""Promise: the delta rule is one function, token by token, in chunks, and as transformers computes it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from kernels.delta_rule import gated_delta_rule_reference
from minillm.delta_rule import (
    causal_conv,
    chunked,
    delta_step,
    gated_delta_rule,
    l2norm,
    log_decay,
    recurrent,
)
from minillm.errors import RequestError

RULES = ["gated", "kimi"]


def inputs(rule, tokens, seed=0, key_heads=2, share=2, dk=12, dv=8, gate=0.5, dtype=torch.float64):
    """q, k, v, g, beta and a state that is not zero. `gate` is the size of the log of the decay."""
    generator = torch.Generator().manual_seed(seed)
    heads = key_heads * (1 if rule == "kimi" else share)  # Kimi's heads all have keys of their own
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    q, k = draw(tokens, key_heads, dk), l2norm(draw(tokens, key_heads, dk), eps=0)
    g = -gate * draw(tokens, heads, *([dk] if rule == "kimi" else [])).abs()
    beta, v, state = draw(tokens, heads).sigmoid(), draw(tokens, heads, dv), draw(heads, dk, dv)
    return [x.to(dtype) for x in (q, k, v, g, beta, state)]


def close(found, expected, tolerance):
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b.double()).norm() <= tolerance * (1e-30 + b.double().norm())


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(0, 70),
    chunk=st.integers(1, 40),
    gate=st.sampled_from([0, 0.1, 3, 100]),
    fresh=st.booleans(),
    seed=st.integers(0, 99),
)
def test_chunked_equals_recurrent(rule, tokens, chunk, gate, fresh, seed):
    args = inputs(rule, tokens, seed, gate=gate)
    args[5] = None if fresh else args[5]
    expected = recurrent(*args)
    close(chunked(*args, chunk=chunk), expected, 1e-10)
    single = [None if x is None else x.float() for x in args]
    close(chunked(*single, chunk=chunk), expected, 2e-5)
    close(recurrent(*single), expected, 2e-5)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, 40), min_size=2, max_size=6), seed=st.integers(0, 99))
def test_a_sequence_goes_on_from_its_state(rule, cuts, seed):
    """Any cut, recurrent or chunked piece by piece; the state handed in stays as it was."""
    q, k, v, g, beta, state = inputs(rule, sum(cuts), seed)
    expected, kept = recurrent(q, k, v, g, beta, state), state.clone()
    outs, start, S = [], 0, state
    for cut in cuts:
        rows = slice(start, start + cut)
        out, S = gated_delta_rule(q[rows], k[rows], v[rows], g[rows], beta[rows], S)
        outs.append(out)
        start += cut
    close((torch.cat(outs), S), expected, 1e-10)
    assert torch.equal(state, kept)


@pytest.mark.parametrize("rule", RULES)
def test_repeated_keys_and_hard_gates_stay_finite(rule):
    """The same key throughout, written whole: powers of the triangle would reach 10^8. And a gate that forgets all."""
    q, k, v, g, beta, state = inputs(rule, 64, dtype=torch.float32)
    k[:], beta[:] = k[0], 1
    g[::7] = -1e4
    close(chunked(q, k, v, g, beta, state), recurrent(*(x.double() for x in (q, k, v, g, beta, state))), 2e-5)


def batched(x):
    return None if x is None else x[None]


@pytest.mark.parametrize("tokens", [1, 5, 64, 130])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("gate", [0.05, 2.0])
def test_equals_transformers_gated_delta_rule(tokens, fresh, gate):
    """Qwen3-Next's own recurrent and chunked functions, norm of q and k included."""
    q, k, v, g, beta, state = inputs("gated", tokens, 3, gate=gate, dtype=torch.float32)
    k, state = 3 * k, None if fresh else state
    ours = gated_delta_rule(l2norm(q), l2norm(k), v, g, beta, state)
    for theirs in (qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule):
        out, last = theirs(
            *map(batched, (q, k, v)), g=g[None], beta=beta[None], initial_state=batched(state),
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        close(ours, (out[0], last[0]), 1e-5)


@pytest.mark.parametrize("tokens", [1, 5, 64, 130])
@pytest.mark.parametrize("fresh", [True, False])
def test_equals_transformers_kimi_delta_attention(tokens, fresh):
    q, k, v, g, beta, state = inputs("kimi", tokens, 4, dtype=torch.float32)
    state = None if fresh else state
    ours = gated_delta_rule(l2norm(q), l2norm(k), v, g, beta, state)
    for theirs in (kimi.recurrent_kimi_delta_attention, kimi.chunk_kimi_delta_attention):
        out, last = theirs(
            *map(batched, (q, k, v)), g=g[None], beta=beta[None], initial_state=batched(state),
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        close(ours, (out[0], last[0]), 1e-5)


def test_equals_the_kernel_reference():
    """kernels/delta_rule.py computes the same from the same names."""
    q, k, v, g, beta, state = inputs("gated", 40, 5, dtype=torch.float32)
    out, states = gated_delta_rule_reference(q, k, v, g, beta, state[None], torch.tensor([0, 40], dtype=torch.int32))
    close(gated_delta_rule(q, k, v, g, beta, state), (out, states[0]), 1e-5)


def test_kimi_with_equal_channels_is_the_gated_rule():
    q, k, v, g, beta, state = inputs("gated", 50, 6, share=1)
    per_channel = g[..., None].expand(*g.shape, q.shape[-1])
    for rule in (recurrent, chunked):
        close(rule(q, k, v, per_channel, beta, state), rule(q, k, v, g, beta, state), 1e-12)


def test_the_correction_is_of_the_faded_state():
    """One key, one channel, by hand: S = 2 fades to 1, holds 1 under k, 3 is missing, half of it is written."""
    one = lambda x: torch.tensor([[[float(x)]]])  # noqa: E731
    g, beta = torch.tensor([[0.5]]).log(), torch.tensor([[0.5]])
    out, state = recurrent(one(1), one(1), one(4), g, beta, torch.tensor([[[2.0]]]))
    assert state.item() == pytest.approx(2.5)
    assert out.item() == pytest.approx(2.5)


def test_beta_one_stores_the_value_exactly():
    """What was written under a key of length 1 is what is read under it, and nothing of what was there before."""
    _, k, v, g, beta, state = inputs("gated", 9, 7, share=1)
    out, _ = recurrent(k, k, v, g, torch.ones_like(beta), state, scale=1.0)
    close((out,), (v,), 1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_one_step_of_many_sequences_is_one_step_of_each(rule):
    steps = [inputs(rule, 1, seed) for seed in range(5)]
    each = [delta_step(*(x[0] for x in (q, k, v, g, beta)), state) for q, k, v, g, beta, state in steps]
    q, k, v, g, beta = (torch.cat(parts) for parts in list(zip(*steps, strict=True))[:5])
    together = delta_step(q, k, v, g, beta, torch.stack([step[5] for step in steps]))
    close(together, [torch.stack(side) for side in zip(*each, strict=True)], 1e-12)


def test_an_unknown_method_is_one_error():
    with pytest.raises(RequestError, match="use one of auto, recurrent, chunked"):
        gated_delta_rule(*inputs("gated", 3), method="scan")


# --- the short convolution, norm and gates ---


@settings(max_examples=20, deadline=None)
@given(tokens=st.integers(0, 30), cut=st.integers(0, 30), kernel=st.integers(1, 5))
def test_the_convolution_is_torchs_and_goes_on_from_its_state(tokens, cut, kernel):
    generator = torch.Generator().manual_seed(tokens)
    x, weight = (torch.randn(*shape, generator=generator).double() for shape in ((tokens, 6), (6, kernel)))
    zero = torch.zeros(kernel - 1, 6, dtype=torch.float64)
    padded = torch.cat([zero, x]).T[None]
    expected = torch.nn.functional.conv1d(padded, weight[:, None], groups=6)[0].T if tokens else x
    y, state = causal_conv(x, weight, zero)
    close((y,), (expected,), 1e-12)
    assert torch.equal(state, torch.cat([zero, x])[tokens:])
    cut = min(cut, tokens)
    first, middle = causal_conv(x[:cut], weight, zero)
    second, last = causal_conv(x[cut:], weight, middle)
    assert torch.equal(torch.cat([first, second]), y)
    assert torch.equal(last, state)


def test_l2norm_is_transformers():
    x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0)) * 1e-3  # small, so that eps shows
    torch.testing.assert_close(l2norm(x), qwen.l2norm(x, eps=1e-6), rtol=1e-6, atol=0)
    torch.testing.assert_close(l2norm(x), kimi.l2norm(x, eps=1e-6), rtol=1e-6, atol=0)


def test_the_gate_is_kimis():
    """transformers' forget gate, from its own projections on. It takes log(1 + exp(x)), which rounds to 1 before the
    logarithm, so small gates differ by the float32 of a number near 1 times the rate, e² here."""
    generator = torch.Generator().manual_seed(1)
    config = kimi.KimiLinearConfig(hidden_size=24, linear_num_heads=3, linear_head_dim=8)
    gate = kimi.KimiLinearForgetGate(config).float()
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        x = torch.randn(1, 7, 24, generator=generator) * 5
        a = gate.f_b_proj(gate.f_a_proj(x))[0].view(7, 3, 8)
        ours = log_decay(a, gate.A_log.view(3, 1), gate.dt_bias.view(3, 8))
        torch.testing.assert_close(ours, gate(x)[0], rtol=1e-5, atol=2e-6)
        assert ours.max() <= 0
