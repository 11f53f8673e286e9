"""Promises of the small layers, held against float64 and against transformers' own tables."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from minillm.config import ModelConfig
from minillm.errors import ConfigError
from minillm.layers import Linear, RMSNorm, Rotary, SwiGLU, apply_rotary, region
from tests import tiny


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 5),
    size=st.sampled_from([1, 3, 64, 577]),
    scale=st.sampled_from([0.0, 1e-12, 1e-3, 1.0, 1e4, 1e15]),
    eps=st.sampled_from([0.0, 1e-6, 1e-5]),
)
def test_rms_norm_is_the_formula(rows, size, scale, eps):
    """From tiny to huge rows; a row of zeros with eps gives zeros."""
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(size)) * scale
    if scale == 0 and eps == 0:
        return  # 0 / 0 by the formula itself
    norm = RMSNorm(torch.randn(size), eps)
    x64 = x.double()
    expected = x64 / (x64.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight.double()
    assert torch.allclose(norm(x).double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_computes_in_float32(dtype):
    x = (torch.randn(4, 300) * 200).to(dtype)  # squares beyond float16
    norm = RMSNorm(torch.randn(300), 1e-5)
    expected = F.rms_norm(x.double(), (300,), norm.weight.double(), 1e-5)
    assert norm(x).dtype == dtype
    assert (norm(x).double() - expected).abs().max() < 0.02


SCALINGS = [
    {"rope_type": "default", "rope_theta": 1e4},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    tiny.LLAMA3,
    tiny.YARN,
    {**tiny.YARN, "attention_factor": 1.7},
    {**tiny.YARN, "beta_fast": 8, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.2},
    {**tiny.YARN, "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
]


@pytest.mark.parametrize("rope", SCALINGS, ids=lambda r: "-".join(map(str, r.values())))
def test_rotary_tables_equal_transformers(rope):
    shape = {**tiny.SHAPE, "head_dim": 64, "rope_parameters": dict(rope)}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**shape))
    ours = Rotary(ModelConfig.from_dict({**shape, "model_type": "llama"}))
    positions = torch.tensor([0, 1, 2, 77, 500, 4000])
    cos, sin = theirs(torch.zeros(1), positions[None])
    our_cos, our_sin = ours(positions)
    assert torch.allclose(our_cos[:, 0], cos[0], atol=1e-4)  # float32 angles of up to 4000
    assert torch.allclose(our_sin[:, 0].abs(), sin[0].abs(), atol=1e-4)


@settings(max_examples=20, deadline=None)
@given(near=st.integers(0, 400), gap=st.integers(0, 400), shift=st.integers(0, 4000))
def test_rotated_products_depend_on_distance_alone(near, gap, shift):
    rotary = Rotary(ModelConfig.from_dict({**tiny.SHAPE, "model_type": "llama"}))
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def product(i, j):
        turned = (apply_rotary(x, rotary(torch.tensor([p]))) for x, p in ((q, i), (k, j)))
        return torch.stack(list(turned)).prod(0).sum()

    assert torch.allclose(product(near + gap, near), product(near + gap + shift, near + shift), atol=2e-2)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "wavelet", "factor": 2}, "wavelet.*not supported; minillm knows linear, llama3 and yarn"),
        ({"rope_type": "llama3", "factor": 2}, "lacks low_freq_factor"),
        ({"rope_type": "linear"}, "lacks factor"),
        ({"rope_type": "linear", "factor": None}, "lacks factor"),
        ({**tiny.LLAMA3, "high_freq_factor": 1.0}, r"high_freq_factor 1\.0 of the rope scaling must be above"),
        ({**tiny.LLAMA3, "low_freq_factor": [1]}, r"low_freq_factor is \[1\]; it must be a finite number"),
        ({**tiny.YARN, "rope_theta": 1}, r"rope_theta is 1\.0; YaRN takes its logarithm"),
        ({**tiny.YARN, "beta_slow": 1e308}, r"beta_slow of the rope scaling is 1e\+308"),
        ({**tiny.YARN, "mscale": [1.0]}, r"mscale is \[1\.0\]; it must be a finite number"),
        ({**tiny.YARN, "mscale": 10**400}, r"mscale is 1000.*; it must be a finite number"),
        ({"rope_type": "divisors", "divisors": [1.0] * 8}, "exists in GGUF files alone"),
        ({"rope_type": ["linear"], "factor": 2.0}, "is not supported; minillm knows linear"),
        ("linear", "rope scaling is 'linear'; it must be an object"),
    ],
)
def test_unusable_scaling_is_one_error(scaling, message):
    with pytest.raises(ConfigError, match=message) as caught:
        Rotary(ModelConfig.from_dict({**tiny.SHAPE, "model_type": "llama", "rope_scaling": scaling}))
    assert "\n" not in str(caught.value)


def test_swiglu_is_the_formula():
    gate, up, down = torch.randn(7, 5), torch.randn(7, 5), torch.randn(5, 7)
    x = torch.randn(3, 5)
    layer = SwiGLU(Linear(torch.cat([gate, up])), Linear(down))
    expected = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    assert torch.allclose(layer(x), expected, atol=1e-5)


def test_regions_appear_in_a_profile_only_when_one_runs():
    with torch.profiler.profile() as profile, region("attn_norm"):
        torch.ones(1)
    assert any(event.key == "attn_norm" for event in profile.key_averages())
    assert region("attn_norm") is region("other")  # nothing is built when nobody profiles
