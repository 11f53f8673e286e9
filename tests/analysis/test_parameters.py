"""Parameter counts against transformers' own models and published totals; weight bytes against real tensors."""

import pytest
import torch
from hf_shapes import HF_CONFIGS, build, ours

from minillm.analysis import MODELS, format_of, model_config, parameter_count, weight_bytes, weight_table
from minillm.errors import ConfigError


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_counts_are_those_of_the_transformers_model(name):
    with torch.device("meta"):
        model = build(name)
    config = ours(HF_CONFIGS[name])
    count = parameter_count(config)
    assert count.total == sum(p.numel() for p in model.parameters())
    assert sum(count.parts().values()) == count.total
    named = {n: p.numel() for n, p in model.named_parameters()}
    assert count.embedding == named["model.embed_tokens.weight"]
    assert count.attention == sum(size for n, size in named.items() if "_attn" in n and "norm" not in n)
    assert count.norms == sum(size for n, size in named.items() if "norm" in n)


@pytest.mark.parametrize("name", ["llama biased", "qwen3", "gemma3_text"])
def test_weight_bytes_are_those_of_the_tensors(name):
    model = build(name, dtype=torch.bfloat16)
    assert weight_bytes(ours(HF_CONFIGS[name])) == sum(p.nbytes for p in model.parameters())
    assert weight_bytes(ours(HF_CONFIGS[name]), "float32") == sum(p.nbytes for p in model.float().parameters())


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("SmolLM2-135M", 134_515_008),
        ("Llama-2-7B", 6_738_415_616),
        ("Llama-2-13B", 13_015_864_320),
        ("Llama-3-8B", 8_030_261_248),
        ("Llama-3-70B", 70_553_706_496),
        ("Llama-3.1-405B", 405_853_388_800),
        ("Mistral-7B-v0.1", 7_241_732_096),
        ("Mixtral-8x7B", 46_702_792_704),
        ("Qwen3-8B", 8_190_735_360),
        ("Qwen3-30B-A3B", 30_532_122_624),
    ],
)
def test_published_totals_to_the_last_parameter(name, total):
    assert parameter_count(model_config(name)).total == total


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("Mixtral-8x7B", 46.7, 12.9), ("DeepSeek-V3", 671.0, 37.6), ("Qwen3-30B-A3B", 30.5, 3.4),
     ("Qwen3-235B-A22B", 235.1, 22.2), ("gpt-oss-120b", 116.8, 5.7), ("Kimi-K2", 1026.4, 32.9)],
)  # fmt: skip
def test_mixture_of_experts_total_and_active(name, total, active):
    count = parameter_count(model_config(name))
    assert round(count.total / 1e9, 1) == total
    assert round(count.active / 1e9, 1) == active


def test_gpt_oss_card_counts_active_parameters_without_the_embedding():
    count = parameter_count(model_config("gpt-oss-120b"))
    assert round((count.active - count.embedding) / 1e9, 2) == 5.13


def test_the_embedding_is_a_fifth_of_smollm2():
    count = parameter_count(model_config("SmolLM2-135M"))
    assert count.tied
    assert count.head == 0
    assert round(count.embedding / count.total, 2) == 0.21


def test_dense_models_use_every_parameter_and_sparse_ones_do_not():
    for name, entry in MODELS.items():
        count = parameter_count(entry.config)
        assert (count.active == count.total) != entry.config.is_moe, name


@pytest.mark.parametrize(
    ("name", "bits"),
    [("float32", 32), ("bf16", 16), ("int4-g32", 5.0), ("int4", 4.25), ("int4-g128-sym", 4.125), ("mxfp4", 4.25),
     ("nvfp4", 4.5), ("q4_1", 5.0), ("q8_0", 8.5), (torch.float16, 16), (0.5, 4), (torch.float8_e4m3fn, 8)],
)  # fmt: skip
def test_bits_of_a_number_with_its_metadata(name, bits):
    assert format_of(name).bits_per_weight == bits


@pytest.mark.parametrize(
    "name",
    ["int9", "int4-g0", "int1", "", "bf17", None, -1, True, float("nan"), float("inf"), "int4-g٣",
     pytest.param("x" * 5000, id="long"), pytest.param("int4-g" + "9" * 5000, id="long group"),
     pytest.param(10**5000, id="long number")],
)  # fmt: skip
def test_unknown_formats_are_refused(name):
    with pytest.raises(ConfigError, match="format") as caught:
        format_of(name)
    assert len(str(caught.value)) < 400


def test_quantized_bytes_of_real_packed_tensors():
    """Packed the way a quantizer would: two numbers a byte, a bf16 scale and zero point for each group of a row."""
    rows, columns, group = 24, 80, 32
    groups = -(-columns // group)
    packed = torch.zeros(rows, columns // 2, dtype=torch.uint8)
    scales = torch.zeros(rows, groups, 2, dtype=torch.bfloat16)
    assert format_of("int4-g32").tensor_bytes(rows, columns) == packed.nbytes + scales.nbytes
    per_row = torch.zeros(rows, 1, dtype=torch.bfloat16)
    assert format_of("int8").tensor_bytes(rows, columns) == rows * columns + per_row.nbytes


def test_int8_halves_and_int4_quarters_the_quantized_part_only():
    config = model_config("Llama-3-70B")
    full = weight_bytes(config)
    linear = 2 * sum(w.parameters for w in weight_table(config) if w.quantizable())
    int8, int4 = weight_bytes(config, "int8"), weight_bytes(config, "int4-g32")
    assert int8 - (full - linear) == pytest.approx(linear / 2, rel=1e-3)
    assert linear / (int4 - (full - linear)) == pytest.approx(3.2, rel=1e-3)
    assert weight_bytes(config, "int4-g32", keep=("embedding",)) < int4


def test_keep_and_kept_say_what_stays():
    config = model_config("gpt-oss-120b")
    # the released file: experts in MXFP4, all else in bf16, about 60.8 GiB
    released = weight_bytes(config, "mxfp4", keep=("embedding", "head", "attention"))
    assert released / 2**30 == pytest.approx(60.8, abs=0.1)
    assert weight_bytes(config, "mxfp4", kept="float32") > released
    with pytest.raises(ConfigError, match="wings"):
        weight_bytes(config, keep=("wings",))


def test_ranks_hold_whole_kv_heads_and_copies_of_what_cannot_be_split():
    config = model_config("Llama-3-70B")
    norms = parameter_count(config).norms * 2
    assert weight_bytes(config, tensor_parallel=8) * 8 == weight_bytes(config) + 7 * norms
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * config.hidden_size * 2
    # 16 ranks, 8 KV heads: every rank keeps a whole one, so the K and V projections exist twice
    assert weight_bytes(config, tensor_parallel=16) * 16 == weight_bytes(config) + 15 * norms + kv
