"""The memory budget: exact sums, the largest batch, the fewest GPUs."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.analysis import (
    MODELS,
    Hardware,
    budget,
    find_hardware,
    kv_bytes_per_token,
    memory,
    model_config,
    weight_bytes,
)
from minillm.errors import ConfigError, RequestError

LLAMA_8B, LLAMA_70B = model_config("Llama-3-8B"), model_config("Llama-3-70B")


def test_parts_are_whole_bytes_and_add_up():
    plan = budget(LLAMA_8B, 4096, 8, "h100")
    assert all(type(part) is int for part in plan.parts().values())
    assert plan.total == sum(plan.parts().values()) == plan.gpu_bytes - plan.free
    assert plan.weights == weight_bytes(LLAMA_8B) == 16_060_522_496
    assert plan.kv == 8 * 4096 * 131_072
    assert plan.communication == 0
    assert plan.headroom == 8_000_000_000


def test_activations_are_the_residual_and_the_widest_intermediate_or_the_logits():
    chunk = budget(LLAMA_8B, 4096, 1, step_tokens=512)
    assert chunk.activations == 512 * 2 * (2 * 4096 + 3 * 14336)
    decode_heavy = budget(LLAMA_8B, 16, 256, step_tokens=256)
    assert decode_heavy.activations == 256 * 2 * 2 * 4096 + 2 * 256 * 128256 * 4


def test_blocks_round_up():
    assert budget(LLAMA_8B, 17, block_size=16).kv == 32 * 131_072
    assert budget(LLAMA_8B, 17, block_size=1).kv == 17 * 131_072


def test_ranks_divide_weights_and_whole_kv_heads():
    alone, eight, sixteen = (budget(LLAMA_70B, 4096, 4, "h200", tensor_parallel=n) for n in (1, 8, 16))
    assert eight.kv == alone.kv // 8 == sixteen.kv
    assert eight.weights == pytest.approx(alone.weights / 8, rel=1e-3)
    assert sixteen.weights > alone.weights / 16
    assert eight.communication == 2 * 8192 * 8192 * 2
    deepseek = model_config("DeepSeek-V3")
    assert budget(deepseek, 4096, tensor_parallel=8).kv == budget(deepseek, 4096).kv == 4096 * 70_272


@pytest.mark.parametrize(
    ("name", "gpu", "dtype", "needed"),
    [("Llama-3-8B", "h100", "bfloat16", 1), ("Llama-3-8B", "t4", "bfloat16", 2), ("Llama-3-8B", "t4", "int4", 1),
     ("Llama-3-70B", "h100", "bfloat16", 4), ("Llama-3-70B", "h100", "fp8", 2), ("Llama-3-70B", "h100", "int4", 1),
     ("Llama-3.1-405B", "h100", "fp8", 8), ("DeepSeek-V3", "h200", "fp8", 8), ("DeepSeek-V3", "h100", "fp8", 16)],
)  # fmt: skip
def test_gpus_that_known_models_need(name, gpu, dtype, needed):
    assert budget(model_config(name), 2048, gpu=gpu, weight_dtype=dtype, step_tokens=2048).gpus_needed == needed


def test_no_number_of_gpus_helps_when_a_single_sequence_cannot_be_split():
    assert budget(model_config("DeepSeek-V3"), 10_000_000, gpu="h200").gpus_needed is None


@settings(deadline=None)
@given(tokens=st.integers(1, 20_000), ranks=st.sampled_from([1, 2, 4]), dtype=st.sampled_from(["bfloat16", "int4"]))
def test_max_sequences_is_the_last_that_fits(tokens, ranks, dtype):
    def plan(sequences):
        return budget(LLAMA_8B, tokens, sequences, "l40s", tensor_parallel=ranks, weight_dtype=dtype)

    most = plan(1).max_sequences
    assert most > 0
    assert plan(most).fits
    assert not plan(most + 1).fits


def test_too_big_even_for_one():
    plan = budget(LLAMA_70B, 4096, gpu="h100")
    assert not plan.fits
    assert plan.free < 0
    assert plan.max_sequences == 0


def test_quantized_weights_leave_cache_and_activations_alone():
    full, quantized = budget(LLAMA_70B, 4096, 8), budget(LLAMA_70B, 4096, 8, weight_dtype="int4")
    assert quantized.weights < full.weights / 3
    assert (quantized.kv, quantized.activations) == (full.kv, full.activations)
    assert budget(LLAMA_70B, 4096, 8, kv_dtype="fp8").kv * 2 == full.kv


def test_sliding_layers_reserved_or_not():
    gemma = model_config("Gemma-3-27B")
    exact, reserved = budget(gemma, 131_072), budget(gemma, 131_072, reserved=True)
    assert reserved.kv == 131_072 * kv_bytes_per_token(gemma, reserved=True)
    assert reserved.kv / exact.kv == pytest.approx(6, abs=0.1)


def test_a_budget_turns_into_plain_values():
    import json

    plan = budget(LLAMA_8B, 100, 2, "l4", weight_dtype="int4-g32")
    told = json.loads(json.dumps(plan.to_dict()))
    assert told["bytes_per_gpu"] == plan.parts()
    assert told["weight_format"] == "int4-g32"
    assert (told["fits"], told["gpu_figures_checked"]) == (True, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"tokens": 0}, "tokens is 0"), ({"sequences": 0}, "sequences is 0"), ({"tensor_parallel": 0}, "tensor_parallel"),
     ({"block_size": -1}, "block_size"), ({"headroom": 1.0}, "headroom is 1.0"), ({"headroom": float("nan")}, "is nan"),
     ({"step_tokens": 0}, "step_tokens"), ({"workspace": -1}, "workspace"), ({"tokens": float("nan")}, "tokens is nan"),
     ({"tokens": "8"}, "tokens is '8'"), ({"sequences": 1.0}, "sequences is 1.0"), ({"headroom": "0.1"}, "headroom"),
     ({"sequences": 10**400}, "sequences is 1000"), ({"tokens": 10**5000}, "thousands of digits"),
     ({"workspace": None}, "workspace is None"), ({"config": "Llama-3-8B"}, "config is 'Llama-3-8B'"),
     ({"tensor_parallel": 3}, "tensor_parallel is 3; it must divide the model's 32 attention heads"),
     ({"tensor_parallel": 64}, "tensor_parallel is 64; it must divide")],
)  # fmt: skip
def test_impossible_plans_are_refused(options, message):
    with pytest.raises(RequestError, match=message):
        budget(**({"config": LLAMA_8B, "tokens": 10} | options))
    with pytest.raises(ConfigError, match="nonsense"):
        budget(LLAMA_8B, 10, gpu="nonsense")


def test_a_search_for_the_largest_count_ends():
    """Even for a rule that everything fits, as on a device without an end."""
    assert memory._largest(lambda count: True) == memory.MOST
    endless = Hardware("endless", 1e30, 1e12, {"float16": 1e14})
    assert budget(LLAMA_8B, 16, gpu=endless).max_sequences == memory.MOST
    assert memory._largest(lambda count: count < memory.MOST) == memory.MOST - 1


def test_every_number_of_gpus_that_is_needed_can_be_asked_for():
    for name, entry in MODELS.items():
        needed = budget(entry.config, 2048, gpu="h200", weight_dtype="fp8", kv_dtype="fp8").gpus_needed
        assert budget(
            entry.config, 2048, gpu="h200", weight_dtype="fp8", kv_dtype="fp8", tensor_parallel=needed
        ).fits, name


def test_a_device_of_ones_own():
    own = Hardware("own", 20, 1e12, {"float16": 1e14})
    assert budget(LLAMA_8B, 100, gpu=own, headroom=0.0, workspace=0).fits
    assert dataclasses.replace(find_hardware("h100"), memory_gb=20).memory_bytes == 20 * 10**9
