"""Promise: the fused attention is the formula, for every shape, and the formula is right."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.analysis.costs import Step
from minillm.analysis.kv_size import kv_bytes, kv_bytes_per_token
from minillm.attention import causal_mask, naive_attention, sdpa_attention
from minillm.config import ModelConfig
from minillm.errors import RequestError
from minillm.kv_cache import ContiguousCache, NoCache, WindowCache


def by_hand(q, k, v, window, sinks=0, sink_logits=None):
    """One query, one head, one key at a time, in float64: the definition with no tensor tricks."""
    (T, H, D), (S, Hkv, _) = q.shape, k.shape
    out = torch.zeros(T, H, v.shape[-1], dtype=torch.float64)
    for t in range(T):
        position = S - T + t
        first = 0 if window is None else max(0, position - window + 1)
        seen = sorted({*range(min(sinks, position + 1)), *range(first, position + 1)})
        for h in range(H):
            kv = h // (H // Hkv)
            scores = [math.fsum((q[t, h] * k[s, kv]).tolist()) / math.sqrt(D) for s in seen]
            sink = [] if sink_logits is None else [float(sink_logits[h])]
            top = max(scores + sink)
            weights = [math.exp(s - top) for s in scores]
            total = math.fsum(weights + [math.exp(s - top) for s in sink])
            for s, w in zip(seen, weights, strict=True):
                out[t, h] += v[s, kv] * (w / total)
    return out


shapes = st.fixed_dictionaries(
    {
        "queries": st.integers(1, 6),
        "earlier": st.integers(0, 7),
        "kv_heads": st.integers(1, 3),
        "group": st.integers(1, 3),
        "dim": st.sampled_from([2, 6, 16]),
        "window": st.one_of(st.none(), st.integers(1, 14)),
        "sinks": st.integers(0, 4),
        "logits": st.booleans(),
        "seed": st.integers(0, 10_000),
    }
)


def draw(s):
    g = torch.Generator().manual_seed(s["seed"])
    T, S, Hkv, D = s["queries"], s["queries"] + s["earlier"], s["kv_heads"], s["dim"]
    q = torch.randn(T, Hkv * s["group"], D, generator=g, dtype=torch.float64) * 3
    return q, *(torch.randn(S, Hkv, D, generator=g, dtype=torch.float64) for _ in range(2))


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_both_are_the_definition(s):
    q, k, v = draw(s)
    logits = torch.linspace(-2, 3, q.shape[1], dtype=torch.float64) if s["logits"] else None
    expected = by_hand(q, k, v, s["window"], s["sinks"], logits)
    for attention in (naive_attention, sdpa_attention):
        out = attention(q, k, v, s["window"], sinks=s["sinks"], sink_logits=logits)
        assert torch.allclose(out, expected, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(shapes)
def test_later_tokens_change_nothing(s):
    """Causal: overwrite the last key and value, and every query but the last answers as before."""
    q, k, v = draw(s)
    before = sdpa_attention(q, k, v, s["window"])
    k[-1], v[-1] = 1e3, -1e3
    assert torch.equal(sdpa_attention(q, k, v, s["window"])[:-1], before[:-1])


def test_mask_is_aligned_bottom_right():
    assert causal_mask(2, 4).tolist() == [[True, True, True, False], [True, True, True, True]]
    assert causal_mask(2, 4, window=2).tolist() == [[False, True, True, False], [False, False, True, True]]
    assert causal_mask(2, 4, window=1, sinks=1).tolist() == [[True, False, True, False], [True, False, False, True]]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 8), st.integers(0, 4))
def test_the_cost_model_counts_what_the_mask_shows(new, cached, window, sinks):
    mask, step = causal_mask(new, new + cached, window, sinks=sinks), Step((new,), (cached,))
    assert mask.sum() == step.pairs(window + sinks)  # as attention_costs counts a window with sinks
    assert mask.any(dim=0).sum() == step.keys(window + sinks)


def test_a_learned_sink_is_that_of_gpt_oss():
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    q, k, v = draw({"queries": 5, "earlier": 0, "kv_heads": 2, "group": 3, "dim": 16, "window": None, "seed": 2})
    module = torch.nn.Module()
    module.sinks, module.num_key_value_groups = torch.randn(6, dtype=torch.float64), 3
    mask = torch.zeros(5, 5).masked_fill(~causal_mask(5, 5), -math.inf)
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    expected, _ = eager_attention_forward(module, *heads_first, mask[None, None], scaling=16**-0.5)
    assert torch.allclose(naive_attention(q, k, v, sink_logits=module.sinks), expected[0], atol=1e-12)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_scale(scale):
    q, k, v = draw({"queries": 3, "earlier": 2, "kv_heads": 2, "group": 2, "dim": 16, "window": None, "seed": 1})
    scaled = naive_attention(q * (1 if scale is None else scale * 4), k, v)
    assert torch.allclose(sdpa_attention(q, k, v, scale=scale), scaled)


CONFIG = ModelConfig(
    model_type="mistral", vocab_size=10, hidden_size=8, intermediate_size=8, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=6, max_position_embeddings=64, sliding_window=3,
    layer_types=("full_attention", "sliding_attention", "full_attention"),
)  # fmt: skip


def test_cache_bytes_are_the_formula_and_the_tensor():
    cache = ContiguousCache(CONFIG, 20)
    assert cache.allocated_bytes == 2 * 3 * 2 * 6 * 4 * 20 == cache.storage.untyped_storage().nbytes()
    assert cache.used_bytes == 0
    cache.advance(5)
    assert cache.used_bytes == 2 * 3 * 2 * 6 * 4 * 5
    assert ContiguousCache(CONFIG, 20, torch.bfloat16).allocated_bytes * 2 == cache.allocated_bytes


@pytest.mark.parametrize("sinks", [0, 2])
def test_a_window_cache_stops_growing_where_the_formula_does(sinks):
    config = replace(CONFIG, attention_sinks=sinks)
    for tokens in (2, 20, 40):
        cache = WindowCache(config, tokens)
        assert cache.allocated_bytes == kv_bytes(config, tokens, "float32")
        cache.advance(tokens)
        assert cache.used_bytes == cache.allocated_bytes
    one_more = WindowCache(config, 41).allocated_bytes - WindowCache(config, 40).allocated_bytes
    assert one_more == kv_bytes_per_token(config, "float32") == 2 * 2 * 2 * 6 * 4  # of the two layers without a window
    assert ContiguousCache(config, 40).allocated_bytes == kv_bytes(config, 40, "float32", reserved=True)


@pytest.mark.parametrize("kind", [ContiguousCache, WindowCache])
@settings(max_examples=30, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    layer=st.integers(0, 2),
    sinks=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_cache_attends_as_if_it_had_everything(kind, cuts, layer, sinks, seed):
    """A cache is NoCache that remembers, whatever the cuts, windows included."""
    config = replace(CONFIG, attention_sinks=sinks)
    g, total = torch.Generator().manual_seed(seed), sum(cuts)
    q = torch.randn(total, 4, 6, generator=g)
    k, v = torch.randn(total, 2, 6, generator=g), torch.randn(total, 2, 6, generator=g)
    cache, rows, start = kind(config, total), [], 0
    for cut in cuts:
        rows.append(cache.attend(layer, q[start : start + cut], k[start : start + cut], v[start : start + cut]))
        cache.advance(cut)
        start += cut
    whole = NoCache(config).attend(layer, q, k, v)
    assert torch.allclose(torch.cat(rows), whole, atol=1e-5)


def test_truncate_forgets_and_rewrites():
    cache = ContiguousCache(CONFIG, 8)
    q, k, v = torch.randn(3, 4, 6), torch.randn(3, 2, 6), torch.randn(3, 2, 6)
    cache.attend(0, q, k, v)
    cache.advance(3)
    cache.truncate(2)
    again = cache.attend(0, q[2:], k[2:], v[2:])
    assert torch.allclose(again, NoCache(CONFIG).attend(0, q, k, v)[2:], atol=1e-6)
    with pytest.raises(RequestError, match="holds 2"):
        cache.truncate(3)


@pytest.mark.parametrize("kind", [ContiguousCache, WindowCache])
def test_outgrowing_the_cache_says_so_and_keeps_what_it_has(kind):
    cache = kind(CONFIG, 2)
    q, k, v = torch.randn(3, 4, 6), torch.randn(3, 2, 6), torch.randn(3, 2, 6)
    with pytest.raises(RequestError, match="needs 3 tokens of cache and 2 were reserved"):
        cache.attend(0, q, k, v)
    assert cache.length == 0
    with pytest.raises(RequestError, match="at least one token"):
        ContiguousCache(CONFIG, 0)
