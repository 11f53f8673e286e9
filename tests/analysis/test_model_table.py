"""The built-in table of real models: lookups, and the shapes that its cost depends on."""

import pytest
from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig

from minillm.analysis import MODELS, find_model, model_config
from minillm.config import ModelConfig
from minillm.errors import ConfigError

FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "layer_types", "num_experts", "num_experts_per_tok", "n_shared_experts", "moe_intermediate_size",
    "first_k_dense_replace", "kv_lora_rank", "q_lora_rank", "sliding_window", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "tie_word_embeddings", "attention_bias",
)  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_every_entry_is_a_whole_config_with_a_source(name):
    entry = MODELS[name]
    assert entry.config == model_config(name.upper()) == model_config(f" {name.lower()} ")
    assert "/" in entry.source
    assert entry.config.raw["model_type"] == entry.raw["model_type"]


@pytest.mark.parametrize(
    ("wrong", "right"), [("llama3-8b", "Llama-3-8B"), ("qwen3-8", "Qwen3-8B"), ("deepseek", "DeepSeek-V3")]
)
def test_an_unknown_name_gets_the_close_ones(wrong, right):
    with pytest.raises(ConfigError, match=f"{wrong}.*{right}"):
        find_model(wrong)


def test_a_name_unlike_any_gets_the_whole_list():
    with pytest.raises(ConfigError, match=r"SmolLM2-135M.*Gemma-3-27B"):
        find_model("0000")


@pytest.mark.parametrize(
    ("name", "hf"),
    [("DeepSeek-V3", DeepseekV3Config()), ("gpt-oss-120b", GptOssConfig()), ("Mixtral-8x7B", MixtralConfig())],
)
def test_shapes_equal_the_defaults_that_transformers_documents_for_the_model(name, hf):
    ours, theirs = model_config(name), ModelConfig.from_dict(hf.to_dict(), name)
    for field in FIELDS:
        assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.is_mla or ours.head_dim == theirs.head_dim


def test_layers_that_slide():
    assert model_config("gpt-oss-120b").layer_types.count("sliding_attention") == 18
    assert model_config("Gemma-3-27B").layer_types.count("sliding_attention") == 52
    assert set(model_config("Mistral-7B-v0.1").layer_types) == {"sliding_attention"}
    assert set(model_config("Mistral-7B").layer_types) == {"full_attention"}


@pytest.mark.parametrize("name", [5, None, b"Llama-3-8B", ["x"]])
def test_a_name_that_is_no_text_is_refused(name):
    with pytest.raises(ConfigError, match="a model's name is"):
        find_model(name)


def test_a_long_name_is_told_in_short():
    with pytest.raises(ConfigError) as caught:
        find_model("x" * 100_000)
    assert len(str(caught.value)) < 150 + len(", ".join(MODELS))
