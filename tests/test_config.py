"""Promise: a config means what transformers takes it to mean, or is refused by the name of the key."""

from __future__ import annotations

import pytest
import torch

from minillm import checkpoint
from minillm.config import ModelConfig
from minillm.errors import ConfigError
from minillm.kv_cache import NoCache
from tests import tiny

# keys that a family ignores, or that mean what they mean whatever the file says
IGNORED = [
    ("llama", {"sliding_window": 3}),
    ("mistral-window", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    ("mistral-no-window", {"attention_bias": True}),
    ("qwen2", {"attention_bias": False}),
    ("qwen2", {"attention_bias": None}),
    ("qwen3", {"mlp_bias": True}),
    ("llama", {"hidden_act": "swish"}),
]


def test_an_eagle_head_is_no_model():
    with pytest.raises(ConfigError, match="--speculate eagle --draft FOLDER"):
        ModelConfig.from_dict({"model_type": "eagle", "hidden_size": 64}, "head/config.json")


@torch.inference_mode()
@pytest.mark.parametrize(("family", "changes"), IGNORED, ids=lambda v: str(v)[:40])
def test_logits_equal_transformers_whatever_the_file_says_besides(tmp_path, family, changes):
    theirs = tiny.save(family, tmp_path, **changes)
    ours, tokens = checkpoint.load_model(tmp_path), torch.arange(40)
    expected = theirs(tokens[None]).logits[0]
    logits = ours.logits(ours(tokens, tokens, NoCache(ours.config)))
    assert (logits - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("activation", ["gelu", "relu", "gelu_pytorch_tanh", 3])
def test_another_activation_is_refused(activation):
    with pytest.raises(ConfigError, match=r"hidden_act is .*; minillm computes silu alone"):
        ModelConfig.from_dict({**tiny.SHAPE, "model_type": "llama", "hidden_act": activation})


MLA = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "q_lora_rank": 12}
MOE = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}


@pytest.mark.parametrize("name", [*MLA, *MOE, "first_k_dense_replace"])
@pytest.mark.parametrize("value", [-1, -1_000_000, 1 << 40])
def test_impossible_sizes_of_experts_and_latents_are_refused(name, value):
    raw = {**tiny.SHAPE, "model_type": "deepseek_v3", **MLA, **MOE, name: value}
    with pytest.raises(ConfigError, match=r"num_experts" if name == "n_routed_experts" else name):
        ModelConfig.from_dict(raw)


def test_a_number_of_many_digits_is_one_error(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": ' + "9" * 5000 + "}")
    with pytest.raises(ConfigError, match="not a readable JSON file"):
        ModelConfig.from_file(tmp_path)


@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta"])
def test_a_whole_number_beyond_floats_is_one_error(name):
    with pytest.raises(ConfigError, match=f"{name} is 1000"):
        ModelConfig.from_dict({**tiny.SHAPE, "model_type": "llama", name: 10**400})
