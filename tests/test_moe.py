"""Promise: an expert layer computes transformers' sum whichever way it is computed; each likely mistake is caught."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from minillm import moe, moe_router
from minillm.config import ModelConfig
from minillm.errors import CheckpointError, ConfigError
from minillm.moe import EXECUTIONS, with_experts
from minillm.moe_loading import experts_from
from minillm.moe_router import DROPPED, RouterSettings, choose
from minillm.packing import linear_maker
from minillm.transformer import _Taken
from tests.moe_layers import (
    DEEPSEEK,
    D,
    E,
    F,
    K,
    deepseek,
    ours_from,
    randomised,
    relative,
    rows,
    small_layer,
    tensors_of,
)

# --- equal to transformers ---


@torch.inference_mode()
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize(
    "changes",
    [{}, {"norm_topk_prob": False}, {"n_group": 1, "topk_group": 1}, {"n_shared_experts": 1}, {"topk_group": 4}],
)
def test_deepseek_v3_layer_equals_transformers(fused, execution, changes):
    theirs, ours = deepseek(fused, **changes)
    x = rows()
    assert relative(with_experts(ours, execution)(x), theirs(x[None])[0]) < 1e-5


@torch.inference_mode()
def test_a_gated_shared_expert_equals_transformers():
    """Qwen2-MoE's layer, which Qwen3-Next has too."""
    theirs = randomised(
        Qwen2MoeSparseMoeBlock(
            Qwen2MoeConfig(hidden_size=D, num_experts=E, num_experts_per_tok=K, moe_intermediate_size=F,
                           shared_expert_intermediate_size=20, norm_topk_prob=True)
        )
    )  # fmt: skip
    tensors = tensors_of(theirs, "model.layers.1.mlp.", fused=False)
    raw = {**DEEPSEEK, "model_type": "mixtral", "n_group": 1, "topk_group": 1, "num_experts": E}
    config = ModelConfig.from_dict({k: v for k, v in raw.items() if k not in {"kv_lora_rank", "n_routed_experts"}})
    config = replace(config, shared_expert_intermediate_size=20)
    ours = experts_from(config, 1, _Taken(tensors, config), linear_maker("float32", False)[0])
    x = rows()
    assert relative(ours(x), theirs(x[None])[0]) < 1e-5


# --- mistakes that are easy to make, each of which the comparison above must see ---


def weights_twice(layer, patch):
    once = moe.combine
    patch.setattr(moe, "combine", lambda y, w: once(y * w[..., None], w))


def correction_in_the_weights(layer, patch):
    def wrong(logits, s, correction=None):
        right = choose(logits, replace(s, renormalize=False, scale=1.0), correction)
        weights = (right.scores + correction).gather(1, right.experts)
        return right._replace(weights=weights / weights.sum(-1, keepdim=True) * s.scale)

    patch.setattr(moe_router, "choose", wrong)


def groups_by_their_best_expert(layer, patch):
    def wrong(ranked, groups, top_groups):
        grouped = ranked.unflatten(-1, (groups, -1))
        best = grouped.max(-1).values
        chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(top_groups).indices, True)
        return grouped.masked_fill(~chosen[..., None], -math.inf).flatten(1)

    patch.setattr(moe_router, "mask_groups", wrong)


def settings_with(**changes):
    def mistake(layer, patch):
        patch.setattr(layer.router, "settings", replace(layer.router.settings, **changes))

    return mistake


def gate_and_up_exchanged(layer, patch):
    for expert in layer.experts:
        expert.gate_up_proj.weight.data = torch.cat(expert.gate_up_proj.weight.chunk(2)[::-1])


MISTAKES = {
    "router weights applied twice": weights_twice,
    "correction bias in the weights": correction_in_the_weights,
    "correction bias forgotten": lambda layer, patch: patch.setattr(layer.router, "correction", None),
    "renormalisation forgotten": settings_with(renormalize=False),
    "scaling factor forgotten": settings_with(scale=1.0),
    "softmax for sigmoid": settings_with(scoring="softmax"),
    "groups ignored": settings_with(groups=1, top_groups=1),
    "one group too many": settings_with(top_groups=3),
    "one expert too few": settings_with(top_k=K - 1),
    "groups ranked by their best expert alone": groups_by_their_best_expert,
    "shared experts dropped": lambda layer, patch: patch.setattr(layer, "shared", None),
    "gate and up exchanged": gate_and_up_exchanged,
}


@torch.inference_mode()
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen(name, monkeypatch):
    theirs, ours = deepseek()
    MISTAKES[name](ours, monkeypatch)
    assert relative(ours(rows()), theirs(rows()[None])[0]) > 1e-3


# --- three ways, one sum ---


@torch.inference_mode()
@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 40), num_experts=st.integers(1, 9), k=st.integers(1, 9), seed=st.integers(0, 99),
    dropped=st.sampled_from([0.0, 0.3, 1.0]),
)  # fmt: skip
def test_loop_grouped_and_fixed_are_the_definition(tokens, num_experts, k, seed, dropped):
    """Against a sum over tokens and choices, experts without tokens and dropped choices included."""
    layer, k = small_layer(num_experts, min(k, num_experts), seed), min(k, num_experts)
    x = torch.randn(tokens, D, generator=torch.Generator().manual_seed(seed))
    routing = layer.route(x)
    lost = torch.rand(tokens, k, generator=torch.Generator().manual_seed(seed)) < dropped
    routing = routing._replace(experts=torch.where(lost, DROPPED, routing.experts))
    want = torch.zeros(tokens, D, dtype=torch.float64)
    for t in range(tokens):
        for e, weight in zip(routing.experts[t].tolist(), routing.weights[t].double(), strict=True):
            if e != DROPPED:
                gate, up = (layer.experts[e].gate_up_proj.weight.double() @ x[t].double()).chunk(2)
                want[t] += weight * (layer.experts[e].down_proj.weight.double() @ (gate * gate.sigmoid() * up))
    for execution in EXECUTIONS:
        found = with_experts(layer, execution).compute(x, routing)
        assert torch.allclose(found.double(), want, atol=1e-5)


@torch.inference_mode()
def test_in_fixed_execution_a_row_keeps_its_bits_whoever_shares_the_step():
    layer = with_experts(small_layer(), "fixed")
    x, reference = rows(16), None
    for seed in range(20):
        others = rows(16, seed=100 + seed)
        others[5] = x[5]
        found = layer(others)[5]
        reference = found if reference is None else reference
        assert torch.equal(found, reference)


@torch.inference_mode()
def test_a_row_of_nan_stays_with_its_token():
    """The sampler can then say which request it was; an error here would end the whole step."""
    for ours in (deepseek()[1], small_layer()):
        x = rows(8)
        want = ours(x)
        x[3] = math.nan
        for execution in EXECUTIONS:
            found = with_experts(ours, execution)(x)
            assert found[3].isnan().all()
            others = [t for t in range(8) if t != 3]
            assert relative(found[others], want[others]) < 1e-5


# --- bad input ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 9}, "top_k 9 must lie between 1 and the 8 experts"),
        ({"top_k": 0}, "top_k 0 must lie between 1"),
        ({"groups": 3}, "8 experts cannot be divided into 3 groups"),
        ({"groups": 4, "top_groups": 5}, "top_groups 5 must lie between 1 and the 4 groups"),
        ({"groups": 4, "top_groups": 1, "top_k": 3}, "top_k 3 exceeds the 2 experts of 1 groups"),
        ({"scoring": "relu"}, "scoring 'relu' is not known"),
        ({"scale": math.nan}, "routed_scaling_factor is nan"),
    ],
)
def test_settings_that_choose_nothing_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        RouterSettings(**{"num_experts": 8, "top_k": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 13}, "num_experts_per_tok 13 must lie between 1 and 12"),
        ({"n_group": 5}, "12 experts cannot be divided into n_group 5"),
        ({"topk_group": 5}, "topk_group is 5; it must lie between 1 and 4"),
        ({"topk_group": 1}, "num_experts_per_tok 4 exceeds the 3 experts that topk_group 1"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; deepseek_v3 chooses its experts by sigmoid"),
        ({"routed_scaling_factor": "much"}, "routed_scaling_factor is 'much'; it must be a finite number"),
    ],
)
def test_configs_that_choose_nothing_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict({**DEEPSEEK, **changes})


@pytest.mark.parametrize("value", [3, [True], ["1"], {"a": 1}])
def test_mlp_only_layers_that_are_no_list_of_layers_are_refused(value):
    raw = {**DEEPSEEK, "model_type": "qwen3_moe", "num_experts": 8, "mlp_only_layers": value}
    del raw["kv_lora_rank"]
    with pytest.raises(ConfigError, match=r"mlp_only_layers is .*; it must be a list of layer numbers"):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    "name",
    ["gate.weight", "gate.e_score_correction_bias", "experts.7.up_proj.weight", "shared_experts.down_proj.weight"],
)
def test_a_missing_or_misshapen_tensor_is_named(name):
    theirs, _ = deepseek()
    tensors = tensors_of(theirs, "model.layers.1.mlp.", False)
    full = f"model.layers.1.mlp.{name}"
    with pytest.raises(CheckpointError, match=f"tensor {full} has shape"):
        ours_from(DEEPSEEK, {**tensors, full: tensors[full][:-1]})
    del tensors[full]
    with pytest.raises(CheckpointError, match=f"tensor {full} is missing"):
        ours_from(DEEPSEEK, tensors)


@pytest.mark.parametrize("name", ["gate.weight", "gate.e_score_correction_bias"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_router_that_is_not_finite_is_refused(name, value):
    theirs, _ = deepseek()
    tensors = tensors_of(theirs, "model.layers.1.mlp.", False)
    tensors[f"model.layers.1.mlp.{name}"].view(-1)[2] = value
    with pytest.raises(CheckpointError, match=r"router's .* holds NaN or infinity; download the model again"):
        ours_from(DEEPSEEK, tensors)
