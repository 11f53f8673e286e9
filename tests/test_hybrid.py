"""Promise: a model with a state of constant size is served like any other, and its state is never another's.

What every family promises (logits, chunks, schedules) is in test_models.py and test_engine.py, over these shapes too.
"""

from __future__ import annotations

import json
import math

import pytest
import torch

from minillm import LLM, checkpoint
from minillm.analysis.kv_size import kv_bytes, kv_bytes_per_token, state_bytes
from minillm.batching import Scheduler, SchedulerConfig
from minillm.block_pool import BlockError
from minillm.config import ModelConfig
from minillm.delta_state import DeltaStates
from minillm.engine import Engine
from minillm.errors import CheckpointError, ConfigError, EngineError, RequestError
from minillm.generate import next_logits
from minillm.kv_cache import ContiguousCache, NoCache, WindowCache
from minillm.paging import PagedCache, SequenceStep, StepMetadata
from minillm.sampling import SamplingParams
from minillm.state_slots import StateCopies
from tests import tiny
from tests.serving import answers, expected, make_engine, make_tiny, run

FAMILIES = ["qwen3-next", "qwen3-next-bias"]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    return make_tiny(request.param, tmp_path_factory)


# --- the config ---


def raw_config(**changes) -> dict:
    return {**tiny.SHAPE, **tiny.LINEAR, "model_type": "qwen3_next", "num_experts": 0, **changes}


def test_every_fourth_layer_is_full_attention_unless_the_file_says():
    c = ModelConfig.from_dict(raw_config(num_hidden_layers=8))
    assert (c.kv_layers, c.linear_layers) == ([3, 7], [0, 1, 2, 4, 5, 6])
    c = ModelConfig.from_dict(raw_config(full_attention_interval=2))
    assert c.kv_layers == [1, 3]
    kinds = ["full_attention", *["linear_attention"] * 3]
    assert ModelConfig.from_dict(raw_config(layer_types=kinds)).layer_types == tuple(kinds)


def test_a_file_of_transformers_4_means_the_same():
    old = raw_config(rope_theta=1e4, partial_rotary_factor=0.5)
    del old["rope_parameters"]
    new = raw_config(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})
    assert ModelConfig.from_dict(old).rotary_dim == ModelConfig.from_dict(new).rotary_dim == 8


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not a multiple"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim is 0"),
        ({"linear_conv_kernel_dim": -1}, "linear_conv_kernel_dim is -1"),
        ({"layer_types": ["linear_attention"] * 4}, "needs a full_attention layer"),
        ({"layer_types": ["mamba"] * 4}, "known: full_attention, sliding_attention, linear_attention"),
        ({"rope_parameters": {"partial_rotary_factor": 0.01}}, "turns 0 numbers"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers is 'all'"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    ],
)
def test_what_makes_no_hybrid_is_one_error(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        ModelConfig.from_dict(raw_config(**changes))


def test_linear_layers_belong_to_hybrids_alone():
    with pytest.raises(ConfigError, match="known: full_attention, sliding_attention"):
        ModelConfig.from_dict({**tiny.SHAPE, "model_type": "qwen3", "layer_types": ["linear_attention"] * 3})


@pytest.mark.parametrize("name", ["A_log", "dt_bias", "conv1d.weight", "in_proj_ba.weight"])
def test_a_missing_tensor_is_named(tmp_path, name):
    tiny.make("qwen3-next").save_pretrained(tmp_path, max_shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    parts = json.loads(index.read_text())
    del parts["weight_map"][f"model.layers.0.linear_attn.{name}"]
    index.write_text(json.dumps(parts))
    with pytest.raises(CheckpointError, match=f"layers.0.linear_attn.{name} is missing"):
        checkpoint.load_model(tmp_path)


# --- bytes ---


@pytest.mark.parametrize("tokens", [1, 40])
def test_predicted_bytes_are_the_allocated_ones(pair, tokens):
    """Rows of the full layers alone, and a state that no length changes."""
    config = pair[0].config
    cache = ContiguousCache(config, tokens)
    assert cache.allocated_bytes == kv_bytes(config, tokens, "float32")
    assert kv_bytes(config, tokens) == tokens * kv_bytes_per_token(config) + state_bytes(config)
    assert DeltaStates.bytes_of_slot(config) == state_bytes(config) == cache.states.nbytes
    row = 2 * config.num_key_value_heads * config.head_dim
    assert kv_bytes_per_token(config) == 2 * row * len(config.kv_layers)


def test_ranks_share_heads_of_the_state():
    config = ModelConfig.from_dict(raw_config(linear_num_key_heads=4, linear_num_value_heads=8))
    assert 2 * state_bytes(config, 2) == 4 * state_bytes(config, 4) == state_bytes(config)
    assert state_bytes(config, 8) == state_bytes(config, 4)


# --- one sequence ---


@torch.inference_mode()
def test_a_reset_cache_is_a_new_one(pair):
    model, _ = pair
    first, other = list(range(40, 60)), list(range(90, 107))
    cache = ContiguousCache(model.config, 40)
    next_logits(model, first, cache)
    cache.reset()
    expected = next_logits(model, other, ContiguousCache(model.config, 40))
    assert torch.equal(next_logits(model, other, cache), expected)
    cache.truncate(0)
    assert torch.equal(next_logits(model, other, cache), expected)


@torch.inference_mode()
@pytest.mark.parametrize("kind", [ContiguousCache, WindowCache])
def test_every_cache_of_one_sequence_holds_the_state(pair, kind):
    model, _ = pair
    ids = list(range(40, 75))
    expected = next_logits(model, ids, NoCache(model.config))
    cache = kind(model.config, 40)
    for _ in range(2):
        torch.testing.assert_close(next_logits(model, ids, cache, chunk=8), expected, rtol=1e-4, atol=1e-4)
        assert cache.allocated_bytes == kv_bytes(model.config, 40, "float32")
        cache.reset()


@torch.inference_mode()
def test_a_state_cannot_go_back(pair):
    model, _ = pair
    cache = ContiguousCache(model.config, 40)
    next_logits(model, list(range(20)), cache)
    cache.truncate(20)
    with pytest.raises(RequestError, match="keep one state"):
        cache.truncate(19)
    assert cache.length == 20


# --- the engine ---

GREEDY = {"temperature": 0, "ignore_eos": True}
PROMPTS = {"a": range(3, 20), "b": range(40, 81), "c": range(90, 94), "d": range(100, 130)}


def serve(pair, params=None, prompts=PROMPTS, **options):
    """Answers of all prompts, each as generate.py gives it alone, or the assertion fails. Returns the engine."""
    engine = make_engine(pair, **options)
    params = params or SamplingParams(max_tokens=12, **GREEDY)
    for name, prompt in prompts.items():
        engine.add_request(name, list(prompt), params)
    done = run(engine)
    for name, prompt in prompts.items():
        assert answers(done[name]) == expected(pair, prompt, params)
    engine.scheduler.states.check([], [])
    return engine


def test_a_slot_is_handed_on_without_its_state(pair):
    """One slot, four requests one after another; before them, a state of infinities."""
    engine = make_engine(pair, num_state_slots=1)
    engine.runner.cache.states.conv[:] = engine.runner.cache.states.delta[:] = math.inf
    params = SamplingParams(max_tokens=5, **GREEDY)
    for name, prompt in PROMPTS.items():
        engine.add_request(name, list(prompt), params)
    seen = []
    done = {}
    while engine.has_unfinished_requests():
        done |= {o.request_id: o for o in engine.step() if o.finished}
        seen.append(len(engine.scheduler.running))
    assert max(seen) == 1
    for name, prompt in PROMPTS.items():
        assert answers(done[name]) == expected(pair, prompt, params)


def test_admission_waits_for_a_slot(pair):
    engine = serve(pair, num_state_slots=2)
    scheduled = [e.data["requests"] for e in engine.events.of("scheduled")]
    assert max(map(len, scheduled)) == 2
    assert not engine.events.of("preempted")


def test_more_answers_than_slots_are_refused(pair):
    engine = make_engine(pair, num_state_slots=2)
    with pytest.raises(RequestError, match=r"n is 3 and at most 2 .* raise num_state_slots"):
        engine.add_request("a", [5, 6], SamplingParams(n=3))


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("budget", [5, 32])
def test_preempted_equals_never_preempted(pair, preemption, budget):
    """Twenty blocks of four for 92 tokens and their answers: some give way, computed again from zero or moved."""
    options = {"preemption": preemption, "num_host_blocks": 40, "max_num_batched_tokens": budget, "watermark": 0}
    engine = serve(pair, SamplingParams(max_tokens=24, **GREEDY), num_blocks=20, **options)
    assert {e.data["how"] for e in engine.events.of("preempted")} == {preemption}


def test_a_fork_takes_a_copy_of_the_state(pair):
    """n = 3, whose sequences part at once, among others; with a pool so small that forks are preempted too."""
    params = SamplingParams(temperature=2.0, seed=4, n=3, max_tokens=16, ignore_eos=True)
    for preemption in ("recompute", "swap"):
        options = {"preemption": preemption, "num_host_blocks": 40, "num_blocks": 18, "watermark": 0}
        prompts = {"a": range(3, 20), "b": range(40, 60)}
        engine = serve(pair, params, prompts, **options)
        assert engine.events.of("forked")
        assert any("/" in e.request for e in engine.events.of("preempted"))


def test_a_failed_step_takes_the_forks_with_it_whose_copies_it_owed(pair):
    """Two requests fork at once and the next step has room for the first alone. It fails before a copy is made: the
    second, though it was not in that step, has a sequence without a state."""
    engine = make_engine(pair, max_num_batched_tokens=2)
    params = SamplingParams(temperature=2.0, seed=4, n=2, max_tokens=6, ignore_eos=True)
    for name, token in (("a", 30), ("b", 31)):
        engine.add_request(name, [token], params)
    engine.step()
    run_model = engine.runner.run

    def failing(output):
        engine.runner.run = run_model
        raise RuntimeError("no memory")

    engine.runner.run = failing
    assert {o.request_id for o in engine.step() if o.error} == {"a", "b"}
    assert not engine.has_unfinished_requests()
    engine.scheduler.states.check([], [])
    engine.add_request("b", [31], params)
    assert answers(run(engine)["b"]) == expected(pair, [31], params)


def test_forks_are_copied_before_anything_is_swapped(pair):
    """A fork may be swapped out by the very next step, and its slot taken by what comes back."""
    runner = make_engine(pair, preemption="swap", num_host_blocks=8, num_state_slots=3).runner
    runner.cache.states.delta[:] = torch.arange(4.0)[:, None, None, None]
    runner.host.states.delta[:] = 10 * torch.arange(4.0)[:, None, None, None]
    runner._move_states(StateCopies([(1, 2), (3, 1)], [(2, 1)], [(3, 2)]))
    assert runner.cache.states.delta[0, :, 0, 0, 0].tolist() == [0, 3, 30, 3]
    assert runner.host.states.delta[0, :, 0, 0, 0].tolist() == [0, 1, 20, 30]


def test_without_host_memory_for_states_a_request_computes_again(pair):
    engine = make_engine(pair, preemption="swap", num_host_blocks=60, num_blocks=20, watermark=0)
    engine.scheduler.states.host_free.clear()
    engine.scheduler.states.check = lambda *_: None  # which would miss those taken away
    params = SamplingParams(max_tokens=24, **GREEDY)
    for name, prompt in PROMPTS.items():
        engine.add_request(name, list(prompt), params)
    done = run(engine)
    assert {e.data["how"] for e in engine.events.of("preempted")} == {"recompute"}
    for name, prompt in PROMPTS.items():
        assert answers(done[name]) == expected(pair, prompt, params)


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_no_prefix_is_taken_from_a_cache(pair, kind):
    """A hit would skip tokens that the state never saw. The engine turns the cache off, and says so in its config."""
    engine = make_engine(pair, prefix_cache=kind, num_host_blocks=30, host_reuse="always")
    assert engine.config.prefix_cache == "off"
    prompt, params = list(range(60, 77)), SamplingParams(max_tokens=8, **GREEDY)
    for name in ("first", "second"):
        engine.add_request(name, prompt, params)
        output = run(engine)[name]
        assert output.num_cached_tokens == 0
        assert answers(output) == expected(pair, prompt, params)
    assert not any(engine.scheduler.pool.published)
    with pytest.raises(EngineError, match="set prefix_cache to 'off'"):
        Scheduler(SchedulerConfig(num_state_slots=4, prefix_cache=kind))


def test_a_model_without_states_has_no_slots(tmp_path_factory):
    engine = make_engine(make_tiny("qwen3", tmp_path_factory), num_state_slots=1)
    assert engine.config.num_state_slots is None
    assert engine.runner.cache.states is None
    engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=3, n=3, **GREEDY))
    assert len(run(engine)["a"].outputs) == 3


# --- the engine's bytes ---


def test_paged_bytes_are_the_predicted_ones(pair):
    """Blocks of the full layers, and a state for each slot and for the one of padding."""
    config = pair[0].config
    cache = make_engine(pair, num_blocks=20, block_size=4, num_state_slots=3).runner.cache
    blocks = 20 * 4 * kv_bytes_per_token(config, "float32")
    assert cache.allocated_bytes == blocks + 4 * state_bytes(config)
    assert cache.block_bytes == PagedCache.bytes_of_block(config, 4, torch.float32) == blocks / 20
    tensors = (cache.storage, cache.states.conv, cache.states.delta)
    assert cache.allocated_bytes == sum(t.untyped_storage().nbytes() for t in tensors)


def test_states_stay_float32_beside_keys_and_values_of_fewer_bits(pair):
    engine = Engine(*pair, SchedulerConfig(num_blocks=20), kv_cache_dtype="bfloat16")
    assert engine.runner.cache.storage.dtype is torch.bfloat16
    assert engine.runner.cache.states.delta.dtype is engine.runner.cache.states.conv.dtype is torch.float32


@pytest.mark.parametrize("budget", [100_000, 1 << 20])
def test_memory_is_shared_by_states_and_blocks(pair, budget):
    llm = LLM(*pair, kv_cache_bytes=budget, max_num_seqs=300, block_size=4)
    cache, config = llm.engine.runner.cache, llm.engine.config
    assert cache.allocated_bytes <= budget + cache.block_bytes  # and the null block
    assert 1 <= config.num_state_slots == config.max_running <= 300
    assert cache.states.nbytes <= budget // 2
    fixed = LLM(*pair, kv_cache_bytes=budget, num_state_slots=2, block_size=4)
    assert fixed.engine.config.num_state_slots == 2
    params = SamplingParams(max_tokens=5, **GREEDY)
    for one, (name, prompt) in zip(fixed.generate([list(p) for p in PROMPTS.values()], params), PROMPTS.items(),
                                   strict=True):  # fmt: skip
        assert answers(one) == expected(pair, prompt, params), name


# --- the paged cache by itself ---


@torch.inference_mode()
def test_padding_rows_and_slot_zero_take_no_part(pair):
    """Rows of no sequence give zeros and change no state; a step whose sequences share a slot, or have none, is one
    error instead of a wrong answer."""
    config = pair[0].config
    cache = PagedCache(config, 8, 4, state_slots=3)
    channels, heads = config.conv_channels, config.linear_num_value_heads
    weight = torch.randn(channels, config.linear_conv_kernel_dim)
    x = torch.randn(7, channels)
    step = cache.step(StepMetadata([SequenceStep(1, 3, 0, [1], 2), SequenceStep(5, 1, 0, [2], 3)], 4, rows=7))
    y = step.convolve(0, x, weight)
    q = k = torch.randn(7, config.linear_num_key_heads, config.linear_key_head_dim)
    v = torch.randn(7, heads, config.linear_value_head_dim)
    out = step.delta_rule(0, q, k, v, torch.zeros(7, heads), torch.ones(7, heads))
    for found in (y, out):
        assert [bool(row.any()) for row in found] == [False, True, True, True, False, True, False]
    for state in (cache.states.conv, cache.states.delta):
        assert [bool(state[0, slot].any()) for slot in range(4)] == [False, False, True, True]
    for slots in ([0, 1], [2, 2]):
        sequences = [SequenceStep(i, 1, 0, [1 + i], slot) for i, slot in enumerate(slots)]
        with pytest.raises(BlockError, match="one of its own"):
            cache.step(StepMetadata(sequences, 4))
