"""Promise: a model with experts is a model like any other: to load, to serve, to measure."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from minillm import checkpoint
from minillm.analysis import Precision, Step, distinct_experts, find_hardware, parameter_count, profile_step, step_costs
from minillm.errors import EngineError
from minillm.kv_cache import ContiguousCache, NoCache
from minillm.moe import expert_layers, recorded_loads, with_experts
from minillm.moe_offload import offload_experts
from minillm.quantization import quantize_
from minillm.sampling import SamplingParams
from tests import tiny
from tests.moe_layers import relative
from tests.serving import answers, expected, make_engine, make_tiny, run

FAMILIES = ["mixtral", "qwen3-moe", "qwen3-moe-some", "deepseek-experts", "qwen3-next-experts"]
GREEDY = {"temperature": 0, "ignore_eos": True}
PROMPTS = [list(range(10, 30)), [40, 41, 42], list(range(60, 71))]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    return make_tiny(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return make_tiny("mixtral", tmp_path_factory)


@torch.inference_mode()
def hidden(model, tokens: int = 40):
    ids = torch.arange(tokens) % 64 + 3
    return model(ids, torch.arange(tokens), NoCache(model.config))


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_files_load_as_those_of_single_experts(family, tmp_path):
    """transformers 5 writes either, as it is asked."""
    theirs = tiny.make(family)
    for name, original in (("single", True), ("fused", False)):
        theirs.save_pretrained(tmp_path / name, save_original_format=original)
    single, fused = (checkpoint.load_model(tmp_path / name) for name in ("single", "fused"))
    assert torch.equal(hidden(single), hidden(fused))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_experts_go_through_the_ordinary_layouts(dtype, tmp_path):
    tiny.save("deepseek-experts", tmp_path)
    exact, rounded = checkpoint.load_model(tmp_path), checkpoint.load_model(tmp_path, dtype)
    x = torch.randn(20, 48, generator=torch.Generator().manual_seed(0))
    for layer, other in zip(expert_layers(exact), expert_layers(rounded), strict=True):
        routing = layer.router(x)
        assert torch.equal(other.router(x).experts, routing.experts)  # routers stay float32
        found, want = other.compute(x, routing), layer.compute(x, routing)
        assert 0 < relative(found, want) < (2e-3 if dtype == "float16" else 2e-2)


@pytest.mark.parametrize("execution", ["loop", "fixed"])
def test_executions_of_a_whole_model_agree_and_share_its_weights(pair, execution):
    model, _ = pair
    other = with_experts(model, execution)
    assert [p.data_ptr() for p in other.parameters()] == [p.data_ptr() for p in model.parameters()]
    assert {layer.execution for layer in expert_layers(model)} == {"grouped"}
    assert relative(hidden(other), hidden(model)) < 1e-5


def test_a_dense_model_is_left_as_it_is(tmp_path_factory):
    model, _ = make_tiny("qwen3", tmp_path_factory)
    assert with_experts(model, "fixed") is model


def test_quantizing_takes_the_experts_and_leaves_the_routers(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    tiny.save("qwen3-next-experts", tmp_path, **sizes, shared_expert_intermediate_size=32)
    exact, model = (checkpoint.load_model(tmp_path) for _ in range(2))
    quantize_(model, "int8")
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    for layer, other in zip(expert_layers(exact), expert_layers(model), strict=True):
        assert torch.equal(other.router.gate.weight, layer.router.gate.weight)
        assert torch.equal(other.shared.gate.weight, layer.shared.gate.weight)
        assert 0 < relative(other(x), layer(x)) < 0.02
    assert model.decode_bytes() < exact.decode_bytes() * 0.6


# --- in the engine; any schedule, and bits in exact mode, are in test_engine.py ---


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("resident", [1, 5, 100])
def test_offloaded_experts_answer_as_resident_ones(tmp_path, resident, batch_invariant):
    tiny.save("mixtral", tmp_path)
    whole, offloaded = (checkpoint.load(tmp_path, "float32") for _ in range(2))
    cache = offload_experts(offloaded[0], resident)
    engine = make_engine(offloaded, batch_invariant)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, SamplingParams(max_tokens=8, **GREEDY))
    done = run(engine)
    for i, prompt in enumerate(PROMPTS):
        assert answers(done[str(i)]) == expected(whole, prompt, SamplingParams(max_tokens=8, **GREEDY))
    assert cache.counts.misses > 0
    assert (cache.counts.evictions > 0) == (resident < 18)
    assert (cache.counts.hits > cache.counts.misses) == (resident >= 18)


@pytest.mark.parametrize("scheme", [None, "int8"])
def test_two_engines_in_two_threads_share_one_cache(tmp_path, scheme):
    """Two servers on one model: answers are those of the model that has all its experts on the device."""
    tiny.save("mixtral", tmp_path)
    whole, shared = (checkpoint.load(tmp_path, "float32") for _ in range(2))
    if scheme is not None:
        for model, _ in (whole, shared):
            quantize_(model, scheme)
    cache = offload_experts(shared[0], 2)
    params, found = SamplingParams(max_tokens=12, **GREEDY), [{}, {}]

    def serve(i):
        engine = make_engine(shared, batch_invariant=True)
        for j, prompt in enumerate(PROMPTS[i::2] * 2):
            engine.add_request(str(j), prompt, params)
        found[i] = run(engine)

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for i, done in enumerate(found):
        for j, prompt in enumerate(PROMPTS[i::2] * 2):
            assert answers(done[str(j)]) == expected(whole, prompt, params)
    assert cache.counts.evictions > 10


def test_a_capacity_is_served_but_not_in_exact_mode(mixtral):
    model, tokenizer = mixtral
    tight = with_experts(model, capacity_factor=0.5)
    engine = make_engine((tight, tokenizer))
    engine.add_request("a", PROMPTS[0], SamplingParams(max_tokens=4, **GREEDY))
    with recorded_loads(model) as loads:
        assert len(run(engine)["a"].outputs[0].token_ids) == 4
    assert sum(load.dropped for load in loads) > 0
    with pytest.raises(EngineError, match="drop tokens by who else is there; give batch_invariant=False"):
        make_engine((tight, tokenizer), batch_invariant=True)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_nan_of_one_request_ends_that_request_alone(pair, batch_invariant):
    """Router logits that are NaN choose some expert, with weights that are NaN for that token alone."""
    model, _ = pair
    row = model.embedding.data[270].clone()
    model.embedding.data[270] = math.nan
    try:
        engine = make_engine(pair, batch_invariant)
        engine.add_request("bad", [5, 270, 6], SamplingParams(max_tokens=6, **GREEDY))
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), prompt, SamplingParams(max_tokens=6, **GREEDY))
        done = run(engine)
    finally:
        model.embedding.data[270] = row
    assert "NaN" in done["bad"].error
    for i, prompt in enumerate(PROMPTS):
        assert answers(done[str(i)]) == expected(pair, prompt, SamplingParams(max_tokens=6, **GREEDY))


# --- measured ---


@pytest.mark.parametrize("tokens", [1, 2, 7, 64])
def test_decode_bytes_are_those_of_the_cost_model(pair, tokens):
    """Two counts of one step's weights: by the modules that hold them, and by the config."""
    model, _ = pair
    costs = step_costs(model.config, Step.decode(10, tokens), Precision("float32", "float32", "float32"), absorbed=True)
    row = model.config.hidden_size * 4
    assert model.decode_bytes(tokens) == pytest.approx(sum(op.weight_bytes for op in costs), abs=tokens * row + 1)


def test_a_step_of_one_token_reads_k_experts(mixtral):
    model, _ = mixtral
    layers = expert_layers(model)
    with recorded_loads(model) as loads:
        hidden(model, 1)
    one = layers[0].experts[0].weight_size
    idle = sum(one * (6 - load.distinct) for load in loads)
    assert [load.distinct for load in loads] == [2] * 3
    assert sum(layer.idle_bytes(1) for layer in layers) == pytest.approx(idle)
    assert layers[0].idle_bytes(5) == pytest.approx((6 - distinct_experts(6, 2, 5)) * one)


def test_parameters_are_those_of_the_cost_model(pair):
    model, _ = pair
    assert parameter_count(model.config).total == sum(p.numel() for p in model.parameters())


def test_loads_are_recorded_through_the_engine(pair):
    model, _ = pair
    engine = make_engine(pair)
    engine.add_request("a", PROMPTS[0], SamplingParams(max_tokens=3, **GREEDY))
    with recorded_loads(model) as loads:
        run(engine)
    layers = [i for i in range(model.config.num_hidden_layers) if model.config.is_expert_layer(i)]
    assert [(load.layer, load.tokens) for load in loads] == [(i, n) for n in (20, 1, 1) for i in layers]
    assert all(load.counts.sum() == load.tokens * model.config.num_experts_per_tok for load in loads)


def test_a_profile_tells_routers_and_experts_apart(pair):
    model, _ = pair
    cache, tokens = ContiguousCache(model.config, 400), torch.tensor([3])

    @torch.inference_mode()
    def step():
        model.logits(model(tokens, torch.tensor([cache.length]), cache))

    costs = step_costs(model.config, Step.decode(10), Precision("float32", "float32", "float32"))
    table = profile_step(step, costs, find_hardware("H100"), "bfloat16")
    layers = len(expert_layers(model))
    names = ["router", "experts"] + ["shared_experts"] * bool(model.config.shared_width)
    for name in names:
        assert table.row(name).calls == layers
        assert table.row(name).predicted > 0
    assert all(row.calls for row in table.rows if row.operator not in ("kv_write", "swiglu"))
