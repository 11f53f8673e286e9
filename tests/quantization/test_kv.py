"""Keys and values in fewer bits: the error of each format, where it goes, and what a block weighs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.kv_write import kv_write_reference
from minillm.analysis.kv_size import cache_format, kv_bytes
from minillm.analysis.quality import evaluation_ids
from minillm.config import ModelConfig
from minillm.errors import EngineError
from minillm.kv_cache import ContiguousCache
from minillm.quantization import kv
from minillm.quantization.kv_paged import QuantizedPagedCache


def relative(x, y) -> float:
    return ((x - y).norm() / x.norm()).item()


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def there_and_back(name, side, x):
    return kv.dequantize_side(name, side, kv.quantize_side(name, side, x))


# --- errors ---


@pytest.mark.parametrize(
    ("name", "side", "shape", "golden"),
    [
        ("int8", 0, (4, 8, 2, 4096), 0.0087),
        ("fp8", 1, (4, 8, 2, 4096), 0.0265),
        # 0.080 with whole zero points. A minimum is no code, so 2 of 32 numbers, the extremes, have no error: √(30/32)
        ("int4", 0, (16, 32, 4, 64), 0.080 * math.sqrt(30 / 32)),
        ("int4", 1, (16, 32, 4, 64), 0.080 * math.sqrt(30 / 32)),
    ],
)
def test_relative_error_on_a_normal_distribution(name, side, shape, golden):
    x = normal(*shape)
    assert relative(x, there_and_back(name, side, x)) == pytest.approx(golden, rel=0.02)


def test_smaller_groups_of_keys_err_less_and_weigh_more():
    x = normal(16, 16, 4, 64)
    assert relative(x, there_and_back("int4", 0, x)) == pytest.approx(0.065, rel=0.02)
    assert kv.block_bytes(config(), "int4", 16) > kv.block_bytes(config(), "int4", 32) / 2


def test_int8_is_what_the_kernel_writes():
    x = normal(5, 3, 64)
    codes, scale = kv.quantize_int8(x)
    empty = [torch.zeros(2, 4, 3, 64, dtype=torch.int8)] * 2, [torch.zeros(2, 4, 3)] * 2
    keys, _, scales, _ = kv_write_reference(x, x, *empty[0], torch.arange(5), *empty[1])
    assert torch.equal(keys.flatten(0, 1)[:5], codes)
    assert torch.equal(scales.flatten(0, 1)[:5], scale)


def test_asymmetric_codes_are_float64s_own():
    """x = minimum + code · step with 16 levels between the smallest and the largest of a group, worked out anew."""
    x = normal(2, 64, 3, 32) * 3 + 5
    got = there_and_back("int4", 0, x)
    for block in range(2):
        for first in (0, 32):
            group = x[block, first : first + 32].double()  # (32, 3, 32): a group is a column
            low, step = group.amin(0), (group.amax(0) - group.amin(0)) / 15
            nearest = low + ((group - low) / step).round() * step
            here = got[block, first : first + 32]
            assert ((here - group).abs() <= 0.51 * step + 4e-3).all()
            assert ((here - nearest).abs() < 0.01 * step).float().mean() > 0.99  # but for ties: the step is a float16


def test_a_minimum_of_the_wrong_sign_is_caught(monkeypatch):
    right = kv._value
    monkeypatch.setattr(kv, "_value", lambda codes, meta: right(codes, meta * torch.tensor([1.0, -1.0])))
    with pytest.raises(AssertionError):
        test_asymmetric_codes_are_float64s_own()


def test_an_outlier_channel_spoils_no_other():
    """Why keys go by channel: one channel is a hundred times the rest in every token."""
    x = normal(4, 32, 2, 64)
    x[..., 7] += 100
    rest = [c for c in range(64) if c != 7]
    by_channel, by_token = there_and_back("int4", 0, x), there_and_back("int4", 1, x)
    assert relative(x[..., rest], by_channel[..., rest]) < 0.09
    assert relative(x[..., rest], by_token[..., rest]) > 0.5


@pytest.mark.parametrize("name", kv.KV_FORMATS)
@given(value=st.floats(-400, 400, width=32))
@settings(max_examples=30, deadline=None)
def test_what_is_constant_stays(name, value):
    """An all-equal group has no range: no division by it, and the zero of an empty head stays zero."""
    x = torch.full((1, 32, 1, 32), value)
    for side in (0, 1):
        y = there_and_back(name, side, x)
        assert torch.allclose(x, y, rtol=2**-4 if name == "fp8" else 2**-7, atol=2**-9)


@pytest.mark.parametrize("name", kv.KV_FORMATS)
def test_what_is_too_large_saturates_and_nan_stays(name):
    x = normal(1, 32, 1, 32)
    x[0, 3, 0, 4] = 1e6
    assert there_and_back(name, 0, x).isfinite().all()
    x[0, 3, 0, 4] = math.nan
    assert there_and_back(name, 0, x)[0, 3, 0, 4].isnan()


# --- real keys ---


@pytest.fixture(scope="module")
def real_keys(smollm2):
    """(layers, 1, 64, 3, 64) of keys and values that SmolLM2 makes of real text."""
    model, tokenizer = smollm2
    ids = torch.tensor(evaluation_ids(tokenizer, 64))
    cache = ContiguousCache(model.config, 64)
    with torch.inference_mode():
        model(ids, torch.arange(64), cache)
    return cache.storage[:, 0, None], cache.storage[:, 1, None]


def test_real_keys_have_outlier_channels_and_values_have_not(real_keys):
    def worst(x):  # the largest channel's mean magnitude over the median one's, by layer and head
        size = x.abs().mean(dim=(1, 2))
        return (size.amax(-1) / size.median(-1).values).median().item()

    assert worst(real_keys[0]) > 4 > 3 > worst(real_keys[1])


def test_errors_on_real_keys(real_keys):
    keys, values = real_keys
    errors = {name: relative(keys, there_and_back(name, 0, keys)) for name in kv.KV_FORMATS}
    assert errors["int8"] < 0.012
    assert errors["fp8"] < 0.03
    assert errors["int4"] < 0.05
    by_token = relative(keys, there_and_back("int4", 1, keys))
    assert by_token > 2 * errors["int4"]  # keys by token, as values are
    assert relative(values, there_and_back("int4", 1, values)) < 0.1


# --- bytes ---


def config(**changes) -> ModelConfig:
    return ModelConfig.from_dict(
        {
            "model_type": "llama", "vocab_size": 100, "hidden_size": 128, "intermediate_size": 64,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        } | changes
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "size", "bits"),
    [("int8", 16, 8 + 32 / 64), ("fp8", 16, 8), ("int4", 32, 5), ("int4", 64, 5), ("int4", 16, 5.5)],
)
def test_a_block_weighs_what_the_formula_says(name, size, bits):
    numbers = 3 * 2 * size * 2 * 64
    cache = QuantizedPagedCache(config(), 7, size, name)
    assert cache.block_bytes == QuantizedPagedCache.bytes_of_block(config(), size, name) == numbers * bits / 8
    assert cache.block_bytes == kv_bytes(config(), size, cache_format(config(), name, size))
    held = [*cache.tensors, *cache.slotted]
    assert cache.allocated_bytes == sum(t.untyped_storage().nbytes() for t in held)
    tails = 2 * 3 * 2 * size * 2 * 64 * 4 if name == "int4" else 0  # slot 0
    assert cache.allocated_bytes == 7 * cache.block_bytes + tails


@pytest.mark.parametrize(
    ("name", "size", "changes", "reason"),
    [
        ("int4", 32, {"head_dim": 80}, "heads of 80"),
        ("int4", 48, {}, "block_size is 48"),
        ("int4", 1, {}, "block_size is 1"),
        ("int3", 32, {}, "'int3'"),
    ],
)
def test_what_does_not_fit_is_told(name, size, changes, reason):
    with pytest.raises(EngineError, match=reason):
        QuantizedPagedCache(config(**changes), 4, size, name)
