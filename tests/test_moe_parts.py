"""Promise: what surrounds an expert layer does what it says: balance, capacity, counts, the cache of experts."""

from __future__ import annotations

import copy
import math
import threading
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from minillm import moe_measure, moe_router
from minillm.analysis import distinct_experts
from minillm.errors import ConfigError, EngineError
from minillm.layers import Linear
from minillm.moe import EXECUTIONS, Expert, ExpertLayer, recorded_loads, with_experts
from minillm.moe_offload import OffloadedExperts, offload_experts
from minillm.moe_router import DROPPED, RouterSettings, Routing, auxiliary_loss, choose, drop_above
from minillm.packing import PackedLinear, linear_maker
from minillm.quantization import QuantizedLinear, parse, quantize_weight
from tests.moe_layers import (
    E,
    rows,
    small_layer,
)

# --- balance and capacity ---


def test_auxiliary_loss_equals_transformers_and_is_one_when_even():
    logits = torch.randn(60, E, generator=torch.Generator().manual_seed(3))
    routing = choose(logits, RouterSettings(E, 2))
    theirs = load_balancing_loss_func((logits,), E, 2)
    assert auxiliary_loss(routing) == pytest.approx(theirs.item() / 2, rel=1e-5)  # they count k choices as k
    even = Routing(torch.arange(E)[:, None], torch.ones(E, 1), torch.full((E, E), 1 / E))
    assert auxiliary_loss(even) == pytest.approx(1)
    one = Routing(torch.zeros(E, 1, dtype=torch.long), torch.ones(E, 1), torch.eye(E)[:1].expand(E, -1))
    assert auxiliary_loss(one) == pytest.approx(E)


def test_the_correction_moves_against_the_load():
    correction = moe_router.balanced_correction(torch.zeros(4), torch.tensor([10, 0, 4, 2]), 0.5)
    assert correction.tolist() == [-0.5, 0.5, 0.0, 0.5]


def test_balancing_by_the_correction_alone_evens_a_skewed_router():
    favour = torch.linspace(1, -1, 16)

    def logits(step):
        return torch.randn(256, 16, generator=torch.Generator().manual_seed(step)) + favour

    correction, imbalance = moe_measure.balance(logits, RouterSettings(16, 2, "sigmoid"), 300, 0.005)
    assert imbalance[0] > 2
    assert sum(imbalance[-20:]) / 20 < 1.4
    assert correction[0] < 0 < correction[-1]


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(1, 30), k=st.integers(1, 4), room=st.integers(0, 12), seed=st.integers(0, 99))
def test_capacity_seats_first_choices_first(tokens, k, room, seed):
    routing = choose(torch.randn(tokens, 6, generator=torch.Generator().manual_seed(seed)), RouterSettings(6, k))
    seated, want = dict.fromkeys(range(6), 0), torch.full((tokens, k), DROPPED)
    for j in range(k):
        for t in range(tokens):
            expert = routing.experts[t, j].item()
            if seated[expert] < room:
                seated[expert] += 1
                want[t, j] = expert
    kept = drop_above(routing, room)
    assert torch.equal(kept.experts, want)
    assert torch.equal(kept.weights, routing.weights)


def test_dropped_choices_are_counted():
    layer = with_experts(small_layer(), capacity_factor=0.5)
    with recorded_loads(layer) as loads:
        layer(rows(40))
    (load,) = loads
    assert load.counts.max() <= math.ceil(0.5 * 40 * 2 / 5)
    assert load.dropped == 80 - load.counts.sum() > 0


# --- what a step is told to have done ---


def test_loads_of_a_step():
    layer = small_layer()
    with recorded_loads(layer) as loads, recorded_loads(layer) as also:
        with_experts(layer, "loop")(rows(30))  # a copy is heard too
    layer(rows(3))
    assert len(loads) == len(also) == 1
    chosen = layer.route(rows(30)).experts
    assert loads[0].counts.tolist() == [(chosen == e).sum().item() for e in range(5)]
    assert (loads[0].tokens, loads[0].distinct, loads[0].dropped) == (30, len(chosen.unique()), 0)
    assert loads[0].imbalance == pytest.approx(loads[0].counts.max().item() / 12)
    assert moe_measure.straggler(torch.tensor([4, 0, 1, 1]), 2) == pytest.approx(4 / 3)
    assert moe_measure.straggler(torch.tensor([2, 2, 2, 2]), 4) == 1


@pytest.mark.parametrize(("num_experts", "k"), [(8, 2), (64, 6), (256, 8)])
def test_distinct_experts_follow_the_formula_when_choices_are_even(num_experts, k):
    for row in moe_measure.distinct_of_choices([1, 4, 16, 64], num_experts, k, trials=200):
        assert row.formula == distinct_experts(num_experts, k, row.tokens)
        assert row.measured == pytest.approx(row.formula, rel=0.03)
    skewed = moe_measure.distinct_of_choices([16], num_experts, k, skew=1.0)[0]
    assert skewed.measured < skewed.formula


def test_distinct_experts_of_loads_are_grouped_by_the_step_size():
    layer = small_layer()
    with recorded_loads(layer) as loads:
        for tokens in (1, 1, 7):
            layer(rows(tokens, seed=tokens))
    single, seven = moe_measure.distinct_of_loads(loads, 2)
    assert (single.tokens, single.formula, single.measured) == (1, pytest.approx(2), 2)
    assert (seven.tokens, seven.measured) == (7, loads[-1].distinct)


def test_executions_are_timed_side_by_side():
    times = moe_measure.time_executions(small_layer(), 8, rounds=3)
    assert set(times.seconds) == set(EXECUTIONS)
    assert times.speedup > 0


# --- offloading ---


def ascending(self, chosen):
    return sorted(chosen)


@torch.inference_mode()
@settings(max_examples=25, deadline=None)
@given(
    slots=st.integers(1, 12),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    execution=st.sampled_from(EXECUTIONS),
)
def test_offloaded_experts_compute_the_same_and_are_kept_by_two_rules(slots, sizes, execution):
    layers = nn.ModuleList([small_layer(seed=i) for i in range(2)])
    for i, layer in enumerate(layers):
        layer.layer, layer.execution = i, execution
    want = [[layer(rows(n, seed=n)) for layer in layers] for n in sizes]
    cache = offload_experts(layers, slots)
    lru, hits, misses, share = OrderedDict(), 0, 0, max(slots // 2, 1)
    for n, results in zip(sizes, want, strict=True):
        for i, layer in enumerate(layers):
            assert torch.equal(layer(rows(n, seed=n)), results[i])  # bit for bit, in whatever order
            chosen = layer.route(rows(n, seed=n)).experts.unique().tolist()
            there = [e for e in chosen if (i, e) in lru]
            for e in there + [e for e in chosen if e not in there]:
                hits, misses = hits + ((i, e) in lru), misses + ((i, e) not in lru)
                if (i, e) not in lru and len(lru) == slots:
                    holds = [sum(owner == j for owner, _ in lru) + (i == j) for j in range(2)]
                    del lru[next((key for key in lru if holds[key[0]] > share), next(iter(lru)))]
                lru[i, e] = True
                lru.move_to_end((i, e))
    assert (cache.counts.hits, cache.counts.misses) == (hits, misses)
    assert cache.resident == list(lru)
    one = layers[0].experts.host[0].weight_size
    assert cache.counts.copied_bytes == misses * one
    assert cache.device_bytes == len(lru) * one
    assert cache.counts.evictions == misses - len(lru)


@torch.inference_mode()
@pytest.mark.parametrize("number", [1, 3])
def test_a_batch_finds_the_share_that_fits_where_a_plain_lru_finds_nothing(number, monkeypatch):
    """16 tokens choose 4 of 32 experts, nearly all of them in each step; half as many fit. Even, random routing."""

    def hit_rate(**patches):
        layers = nn.ModuleList([small_layer(32, 4, seed=i) for i in range(number)])
        for i, layer in enumerate(layers):
            layer.layer = i
        with monkeypatch.context() as patch:
            for name, value in patches.items():
                patch.setattr(OffloadedExperts, name, value)
            cache = offload_experts(layers, 16 * number)
            if patches:  # and no shares
                cache.share = 0
            for step in range(25):
                if step == 5:  # warm
                    cache.reset_counts()
                picks = [moe_measure.random_choices(16, 32, 4, seed=100 * step + i) for i in range(number)]
                for layer, pick in zip(layers, picks, strict=True):
                    routing = Routing(pick, torch.ones(pick.shape), torch.zeros(16, 32))
                    layer.compute(rows(16, seed=step), routing)
        return cache.counts.hit_rate

    assert hit_rate(order=ascending) < 0.03
    assert hit_rate() == pytest.approx(0.5, abs=0.06)  # 16 of 32


def test_what_cannot_be_offloaded_is_one_clear_error():
    with pytest.raises(EngineError, match="has no experts"):
        offload_experts(nn.Linear(2, 2), 3)
    with pytest.raises(EngineError, match="resident_experts is 0"):
        offload_experts(small_layer(), 0)
    layer = small_layer()
    offload_experts(layer, 2)
    with pytest.raises(EngineError, match="offloaded already"):
        offload_experts(layer, 2)


def test_packed_experts_are_not_offloaded():
    layer = small_layer()
    make_linear, layout = linear_maker("float16", False)
    for expert in layer.experts:
        expert.down_proj = make_linear([expert.down_proj.weight.data], None)
    assert isinstance(layer.experts[0].down_proj, PackedLinear) == (layout != "float32")
    with pytest.raises(
        EngineError, match="stored as Linear, PackedLinear cannot be offloaded; load with dtype float32"
    ):
        offload_experts(layer, 2)


def wide_layer(seed: int, schemes: dict[str, str], exact: bool = False) -> ExpertLayer:
    """Four experts of 64 x 32, each matrix in its scheme."""
    layer, generator = small_layer(4, 2, seed), torch.Generator().manual_seed(seed)
    layer.layer, layer.router.gate.weight.data = seed, torch.randn(4, 64, generator=generator)
    for expert in layer.experts:
        for name, shape in (("gate_up_proj", (64, 64)), ("down_proj", (64, 32))):
            weight = quantize_weight(torch.randn(shape, generator=generator), parse(schemes[name]))
            setattr(expert, name, QuantizedLinear(weight, None, exact))
    return layer


def numbers(layer: ExpertLayer) -> list[torch.Tensor]:
    experts = layer.experts.host if isinstance(layer.experts, OffloadedExperts) else layer.experts
    return [m.weight.dequantize() for e in experts for m in (e.gate_up_proj, e.down_proj)]


@torch.inference_mode()
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("slots", [1, 3, 20])
@pytest.mark.parametrize(
    "scheme", ["int8", "int8-dynamic", "int8-g32-asym", "int4-g32", "int4-g32-asym", "int3-g32", "fp8", "mxfp4",
               "nvfp4", "ternary"],
)  # fmt: skip
def test_quantized_experts_are_offloaded_bit_for_bit(scheme, slots, exact):
    """Few tokens and many, which other kernels multiply; every host's codes are afterwards what they were."""
    layers = [wide_layer(i, dict.fromkeys(("gate_up_proj", "down_proj"), scheme), exact) for i in range(2)]
    steps = [torch.randn(n, 64, generator=torch.Generator().manual_seed(n)) for n in (1, 3, 40, 2, 1, 17, 3)]
    want, before = [[layer(x) for layer in layers] for x in steps], [numbers(layer) for layer in layers]
    cache = offload_experts(nn.ModuleList(layers), slots)
    for x, results in zip(steps, want, strict=True):
        for layer, result in zip(layers, results, strict=True):
            assert torch.equal(layer(x), result)
    for layer, codes in zip(layers, before, strict=True):
        assert all(torch.equal(now, then) for now, then in zip(numbers(layer), codes, strict=True))
        for e, expert in enumerate(layer.experts):  # and their kernels
            assert torch.equal(expert(steps[2]), layer.experts[e](steps[2]))
    assert (cache.counts.evictions > 0) == (slots < 8)
    assert cache.counts.copied_bytes % cache.counts.misses == 0


@torch.inference_mode()
def test_experts_of_several_forms_share_a_cache():
    """A file may keep some layers in more bits: a slot of one form is not written over with another."""
    pairs = [("int8", "int8"), ("int8-dynamic", "int8"), ("int4-g32", "int8"), ("int4-g32", "int4-g32")]
    forms = [{"gate_up_proj": first, "down_proj": second} for first, second in pairs]
    layers = [wide_layer(i, form) for i, form in enumerate(forms)] + [wide_layer(4, forms[0], exact=True)]
    steps = [torch.randn(n, 64, generator=torch.Generator().manual_seed(n)) for n in (1, 9, 2, 4)]
    want = [[layer(x) for layer in layers] for x in steps]
    offload_experts(nn.ModuleList(layers), 2)
    for x, results in zip(steps, want, strict=True):
        for layer, result in zip(layers, results, strict=True):
            assert torch.equal(layer(x), result)


def test_quantized_experts_are_not_for_a_device_without_kernels():
    layer = wide_layer(0, dict.fromkeys(("gate_up_proj", "down_proj"), "int8"))
    with pytest.raises(EngineError, match="quantized experts are computed on the CPU here, not on meta"):
        offload_experts(layer, 2, "meta")


# --- threads ---


@pytest.mark.parametrize("quantized", [False, True])
def test_a_slot_is_not_written_over_while_another_thread_multiplies_by_it(quantized, monkeypatch):
    """Two threads, one slot. The first waits inside its expert until the second has its own, or has waited long."""
    layers = [wide_layer(i, dict.fromkeys(("gate_up_proj", "down_proj"), "int8")) for i in range(2)]
    if not quantized:
        for layer in layers:
            for expert in layer.experts:
                expert.gate_up_proj, expert.down_proj = (
                    Linear(m.weight.dequantize()) for m in (expert.gate_up_proj, expert.down_proj)
                )
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    want = [layer.experts[1](x) for layer in layers]
    cache = offload_experts(nn.ModuleList(layers), 1)
    inside, other_is_there, forward = threading.Event(), threading.Event(), Expert.forward
    first, found = threading.local(), [None, None]

    def slow(self, x):
        if getattr(first, "here", False):
            inside.set()
            other_is_there.wait(0.3)  # without turns the second thread comes through, and this slot is no longer ours
        else:
            other_is_there.set()
        return forward(self, x)

    def use(i):
        first.here = i == 0
        if i == 1:
            inside.wait(5)
        with torch.inference_mode():
            found[i] = layers[i].experts[1](x)

    monkeypatch.setattr(Expert, "forward", slow)
    threads = [threading.Thread(target=use, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert all(torch.equal(mine, exact) for mine, exact in zip(found, want, strict=True))
    assert (cache.counts.misses, cache.counts.evictions) == (2, 1)


@torch.inference_mode()
def test_a_copied_model_has_a_cache_of_its_own():
    layers = nn.ModuleList([small_layer(seed=i) for i in range(2)])
    layers[1].layer = 1
    want = [layer(rows()) for layer in layers]
    cache = offload_experts(layers, 4)
    layers[0](rows())
    other = copy.deepcopy(layers)
    copied = other[0].experts.cache
    assert copied is other[1].experts.cache is other.expert_cache is not cache
    assert (copied.slots, copied.share, copied.resident) == (4, 2, [])
    for layer, result in zip(other, want, strict=True):
        assert torch.equal(layer(rows()), result)


@torch.inference_mode()
def test_a_copy_that_was_interrupted_is_made_again(monkeypatch):
    layer = wide_layer(0, dict.fromkeys(("gate_up_proj", "down_proj"), "int8"))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    want = [expert(x) for expert in layer.experts]
    cache = offload_experts(layer, 1)
    assert torch.equal(layer.experts[0](x), want[0])

    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(QuantizedLinear, "take", stopped)
        with pytest.raises(KeyboardInterrupt):
            layer.experts[1](x)
    assert cache.resident == []
    for e in (1, 0):
        assert torch.equal(layer.experts[e](x), want[e])


# --- bad input ---


def test_options_that_cannot_be_are_refused():
    layer = small_layer()
    with pytest.raises(ConfigError, match="execution 'fast' is not known; choose one of loop, grouped, fixed"):
        with_experts(layer, "fast")
    for factor in (0, -1, math.nan, math.inf):
        with pytest.raises(ConfigError, match="capacity_factor is"):
            with_experts(layer, capacity_factor=factor)
    with pytest.raises(EngineError, match="drop tokens by who else is there"):
        with_experts(with_experts(layer, capacity_factor=1.0), "fixed")
