"""MLA decode against float64, against plain attention with the keys and values that the latent stands for."""

from __future__ import annotations

import pytest
import torch

from kernels import mla_decode
from kernels.launch import KernelError
from kernels.paged_decode import paged
from tests.kernels import harness


def test_stays_in_bounds():
    harness.check_bounds("kernels.mla_decode", "odd")


@pytest.mark.parametrize(("case", "dtype"), harness.trials(mla_decode))
def test_against_float64(case, dtype):
    harness.check(case, dtype)


def test_absorbed_is_expanded_attention_at_the_expanded_scale():
    """Keys W_UK c and the rotary key, values W_UV c, per head; the scale is that of 32 + 16 numbers, not of 80."""
    heads, rank, nope, rope, length = 3, 64, 32, 16, 20
    generator = torch.Generator().manual_seed(0)
    latents, _, tables, lengths = paged(generator, [length], 8, 1, rank + rope, "cpu", torch.float32)
    draw = lambda *shape: torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float64)  # noqa: E731
    w_uk, w_uv = draw(heads, nope, rank) * rank**-0.5, draw(heads, 24, rank)
    q_nope, q_rope, scale = draw(heads, nope), draw(heads, rope), (nope + rope) ** -0.5

    cached = latents[tables[0].long(), :, 0].flatten(0, 1)[:length].double()
    c, k_rope = cached.split([rank, rope], dim=-1)
    scores = torch.einsum("hn,hnr,sr->hs", q_nope, w_uk, c) + q_rope @ k_rope.T
    want = torch.einsum("hs,hvr,sr->hv", (scores * scale).softmax(-1), w_uv, c)

    q = torch.cat([torch.einsum("hn,hnr->hr", q_nope, w_uk), q_rope], dim=-1).float()[None]
    to = lambda t: t.to(harness.DEVICE)  # noqa: E731
    out = mla_decode.mla_decode(to(q), to(latents[:, :, 0]), to(tables), to(lengths), rank, scale, backend="triton")
    got = torch.einsum("hr,hvr->hv", out[0].double().cpu(), w_uv)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    wrong = mla_decode.mla_decode(q, latents[:, :, 0], tables, lengths, rank, (rank + rope) ** -0.5, backend="torch")
    assert (torch.einsum("hr,hvr->hv", wrong[0].double(), w_uv) - want).abs().max() > 0.01


def test_a_context_of_nothing_is_zero():
    latents, _, tables, lengths = paged(torch.Generator(), [9], 8, 1, 80, harness.DEVICE, torch.float32)
    q = torch.randn(1, 4, 80, device=harness.DEVICE)
    out = mla_decode.mla_decode(q, latents[:, :, 0], tables, lengths * 0, 64, 0.1, splits=3, backend="triton")
    assert (out == 0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 80}, "rank is 80; it must leave a rotary part of q's 80"),
        ({"rank": 48}, "rank is 48; the kernel takes powers of two"),
        ({"latents": torch.ones(2, 8, 96)}, r"latents has shape \(2, 8, 96\); \(any, any, 80\) is needed"),
        ({"latents": torch.ones(2, 8, 80).half()}, "latents is float16 but q is float32"),
        ({"context_lengths": torch.ones(2)}, "context_lengths is float32"),
        ({"splits": 0}, "splits is 0"),
        ({"q": torch.ones(1, 80, 4).transpose(1, 2)}, r"q has stride 4 in its last dimension"),
    ],
)
def test_wrong_input_is_one_clear_error(arguments, message):
    good = {"q": torch.ones(1, 4, 80), "latents": torch.ones(2, 8, 80), "rank": 64, "scale": 0.1, "backend": "triton"}
    integers = {"block_tables": torch.zeros(1, 2), "context_lengths": torch.ones(1)}
    good |= {name: t.int() for name, t in integers.items()}
    with pytest.raises(KernelError, match=message):
        mla_decode.mla_decode(**(good | arguments))
