"""KV bytes against the table of published configs and against tensors that transformers allocates."""

import pytest
import torch
from hf_shapes import HF_CONFIGS, build, ours
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from minillm.analysis import kv_bytes, kv_bytes_per_token, kv_row_bytes, model_config
from minillm.errors import RequestError


@pytest.mark.parametrize(
    ("name", "per_token"),
    [("SmolLM2-135M", 23_040), ("Qwen3-0.6B", 114_688), ("Qwen3-8B", 147_456), ("Qwen3-32B", 262_144),
     ("Qwen3-30B-A3B", 98_304), ("Qwen3-235B-A22B", 192_512), ("Llama-3-8B", 131_072), ("Mixtral-8x7B", 131_072),
     ("Llama-3-70B", 327_680), ("Llama-3.1-405B", 516_096), ("DeepSeek-V3", 70_272), ("Kimi-K2", 70_272),
     ("gpt-oss-120b", 36_864), ("Gemma-3-27B", 81_920)],
)  # fmt: skip
def test_bytes_per_token_of_published_configs(name, per_token):
    assert kv_bytes_per_token(model_config(name)) == per_token


@pytest.mark.parametrize(
    ("name", "constant", "reserved"), [("gpt-oss-120b", 4.7e6, 73_728), ("Gemma-3-27B", 436e6, 507_904)]
)
def test_sliding_layers_hold_a_constant_beyond_their_window(name, constant, reserved):
    config = model_config(name)
    tokens = 100_000
    assert kv_bytes(config, tokens) - tokens * kv_bytes_per_token(config) == pytest.approx(constant, rel=0.01)
    assert kv_bytes_per_token(config, reserved=True) == reserved
    assert kv_bytes(config, tokens, reserved=True) == tokens * reserved


def _cache_of(name: str, tokens: int) -> DynamicCache:
    torch.manual_seed(0)
    model = build(name)
    with torch.no_grad():
        return model(torch.randint(0, 97, (1, tokens)), use_cache=True).past_key_values


def _nbytes(cache: DynamicCache) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("tokens", [1, 11])
def test_equals_what_transformers_allocates(name, tokens):
    assert kv_bytes(ours(HF_CONFIGS[name]), tokens, "float32") == _nbytes(_cache_of(name, tokens))


@pytest.mark.parametrize("name", ["mistral", "gpt_oss", "gemma3_text"])
def test_sliding_layers_equal_transformers_less_the_row_it_has_not_written(name):
    """Between steps transformers keeps window − 1 rows of a sliding layer, since the next token brings its own; at
    the moment of attention there are `window` of them, which is what has to be allocated."""
    config, tokens = ours(HF_CONFIGS[name]), 40
    sliding = config.layer_types.count("sliding_attention")
    row = kv_row_bytes(1, config.num_key_value_heads, config.head_dim, "float32")
    assert kv_bytes(config, tokens, "float32") == _nbytes(_cache_of(name, tokens)) + sliding * row
    assert kv_bytes(config, 3, "float32") == _nbytes(_cache_of(name, 3))


def test_an_mla_latent_is_what_transformers_keeps_and_far_from_expanded_heads():
    config, tokens = ours(HF_CONFIGS["deepseek_v3"]), 9
    assert kv_bytes(config, tokens, "float32") == _nbytes(_cache_of("deepseek_v3", tokens))
    full = model_config("DeepSeek-V3")
    expanded = full.num_attention_heads * (full.qk_nope_head_dim + full.qk_rope_head_dim + full.v_head_dim)
    assert 2 * full.num_hidden_layers * expanded / kv_bytes_per_token(full) == pytest.approx(71.1, abs=0.05)


# What calculators get wrong, with the factor by which they are off. The right value is asserted above.
@pytest.mark.parametrize(
    ("name", "wrong", "factor"),
    [
        ("Llama-3-70B", lambda c: kv_row_bytes(c.num_hidden_layers, c.num_attention_heads, c.head_dim), 8),  # no GQA
        ("Qwen3-0.6B", lambda c: kv_row_bytes(c.num_hidden_layers, c.num_key_value_heads, c.hidden_size // 16), 0.5),
        ("DeepSeek-V3", lambda c: kv_row_bytes(c.num_hidden_layers, c.num_attention_heads, c.v_head_dim), 56.9),
        ("Gemma-3-27B", lambda c: kv_row_bytes(c.num_hidden_layers, c.num_key_value_heads, c.head_dim), 6.2),
        ("gpt-oss-120b", lambda c: kv_row_bytes(c.num_hidden_layers, c.num_key_value_heads, c.head_dim), 2),
    ],
)
def test_popular_wrong_formulas_are_not_ours(name, wrong, factor):
    config = model_config(name)
    assert wrong(config) / kv_bytes_per_token(config) == pytest.approx(factor, rel=1e-3)


def test_experts_do_not_change_the_cache():
    dense, sparse = model_config("Mistral-7B"), model_config("Mixtral-8x7B")
    assert kv_bytes(dense, 1000) == kv_bytes(sparse, 1000)


def test_the_cache_is_linear_in_its_length():
    config = model_config("Llama-3-8B")
    assert kv_bytes(config, 8192) == 2 * kv_bytes(config, 4096) == 8192 * kv_bytes_per_token(config)
    assert kv_bytes(config, 4096, "int8") == kv_bytes(config, 4096) / 2


@settings(deadline=None)
@given(tokens=st.integers(0, 5000), block=st.integers(1, 64), ranks=st.sampled_from([1, 2, 4, 8, 16, 64]))
def test_blocks_and_ranks_only_round_up(tokens, block, ranks):
    config = model_config("Gemma-3-27B")
    exact = kv_bytes(config, tokens)
    assert exact <= kv_bytes(config, tokens, block_size=block) < exact + config.num_hidden_layers * block * 8192
    share = kv_bytes(config, tokens, tensor_parallel=ranks)
    assert share == exact / min(ranks, config.num_key_value_heads)


def test_more_ranks_than_kv_heads_means_copies_and_mla_is_never_split():
    llama, deepseek = model_config("Llama-3-70B"), model_config("DeepSeek-V3")
    assert kv_bytes(llama, 100, tensor_parallel=16) == kv_bytes(llama, 100, tensor_parallel=8)
    assert kv_bytes(deepseek, 100, tensor_parallel=8) == kv_bytes(deepseek, 100)
    assert kv_bytes(llama, 100, tensor_parallel=3) == kv_bytes(llama, 100) * 3 / 8  # heads are never halved


def test_impossible_lengths_are_refused():
    with pytest.raises(RequestError, match="tokens is -1"):
        kv_bytes(model_config("Llama-3-8B"), -1)
    with pytest.raises(RequestError, match="block_size is 0"):
        kv_bytes(model_config("Llama-3-8B"), 1, block_size=0)
    for tokens in (float("nan"), "8", None, 8.0, True, 10**5000):
        with pytest.raises(RequestError, match=r"tokens is .*; it must be"):
            kv_bytes(model_config("Llama-3-8B"), tokens)
