"""FLOPs against torch's own counter on transformers models; bytes against tensors; exact formulas and properties."""

import pytest
import torch
from hf_shapes import HF_CONFIGS, build, ours
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from minillm.analysis import (
    MODELS,
    OPERATORS,
    OpCost,
    Precision,
    Step,
    distinct_experts,
    model_config,
    step_costs,
    total,
    visible_pairs,
    weight_bytes,
)
from minillm.errors import RequestError

ELEMENTWISE = {
    "embed",
    "attn_norm",
    "residual",
    "ffn_norm",
    "final_norm",
    "qk_norm",
    "q_a_norm",
    "kv_a_norm",
    "rotary",
    "swiglu",
}
FLOAT32 = Precision("float32", "float32", "float32")


def by_name(config, step, **options) -> dict[str, OpCost]:
    return {op.name: op for op in step_costs(config, step, **options)}


def _counted(name: str, new: int, cached: int) -> dict[str, int]:
    """FLOPs by torch's counter of one step of the transformers model: in all, and of attention's scores and sums."""
    torch.manual_seed(0)
    hf = HF_CONFIGS[name]
    model = build(name, attn_implementation="eager", experts_implementation="eager")
    tokens = torch.randint(0, hf.vocab_size, (1, new + cached))
    with torch.no_grad():
        cache = model(tokens[:, :cached], use_cache=True).past_key_values if cached else None
        with FlopCounterMode(display=False) as counter:
            model(tokens[:, cached:], past_key_values=cache, use_cache=True)
    root = type(model).__name__
    modules = [f"{root}.model.layers.{layer}.self_attn" for layer in range(hf.num_hidden_layers)]
    attention = sum(counter.flop_counts[module].get(torch.ops.aten.bmm, 0) for module in modules)
    return {"total": counter.get_total_flops(), "attention": attention}


def _matrix_flops(ops: dict[str, OpCost]) -> int:
    return sum(op.flops for name, op in ops.items() if name not in ELEMENTWISE)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["llama", "llama biased", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize(("new", "cached"), [(13, 0), (1, 9), (5, 8)])
def test_flops_are_those_of_torchs_counter(name, new, cached):
    """Exactly equal, once one thing is reconciled: eager attention multiplies the whole rectangle of scores, where
    the causal count has only what a query may see."""
    config = ours(HF_CONFIGS[name])
    counted = _counted(name, new, cached)
    ops = by_name(config, Step((new,), (cached,), logit_rows=new))
    per_pair = 4 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    unseen = new * (new + cached) - visible_pairs(new, cached)
    assert counted["attention"] == ops["attention"].flops + per_pair * unseen
    assert counted["total"] == _matrix_flops(ops) + per_pair * unseen


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3 without query rank"])
def test_flops_of_expanded_mla_are_those_of_torchs_counter(name):
    config, new = ours(HF_CONFIGS[name]), 13
    counted = _counted(name, new, 0)
    ops = by_name(config, Step((new,), logit_rows=new), absorbed=False)
    width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    unseen = 2 * config.num_attention_heads * width * config.num_hidden_layers * (new**2 - visible_pairs(new))
    assert counted["total"] == _matrix_flops(ops) + unseen


def test_a_matrix_product_is_two_flops_a_parameter_and_token():
    for name in ("Llama-3-8B", "Mixtral-8x7B"):
        config = model_config(name)
        ops = by_name(config, Step.decode(0))
        d, f, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
        if config.is_moe:  # 6·d·f·k·T + 2·d·E·T a layer
            assert ops["experts"].flops == 6 * d * f * 2 * layers
            assert ops["router"].flops == 2 * d * 8 * layers
        else:
            assert ops["gate_up_proj"].flops + ops["down_proj"].flops == 6 * d * f * layers


def test_linear_bytes_are_the_weights_once_and_the_activations_in_and_out():
    config, tokens = model_config("Llama-3-8B"), 40
    op = by_name(config, Step.prefill(tokens))["o_proj"]
    assert op.weight_bytes == 2 * 4096 * 4096 * 32
    assert op.activation_bytes == 2 * tokens * (4096 + 4096) * 32
    assert op.bytes == op.weight_bytes + op.activation_bytes


@pytest.mark.parametrize("name", ["Llama-3-8B", "Qwen3-0.6B", "Gemma-3-27B", "Qwen2.5-32B"])
def test_a_dense_step_reads_every_weight_once(name):
    config = model_config(name)
    ops = by_name(config, Step.decode(100))
    read = total(ops.values()).weight_bytes - ops["embed"].weight_bytes
    untied_table = 0 if config.tie_word_embeddings else 2 * config.vocab_size * config.hidden_size
    assert read == weight_bytes(config) - untied_table
    assert ops["embed"].weight_bytes == 2 * config.hidden_size


def test_step_weight_bytes_are_those_of_a_real_models_tensors():
    hf, model = HF_CONFIGS["llama"], build("llama")
    ops = by_name(ours(hf), Step.decode(5), precision=FLOAT32)
    stored = sum(p.nbytes for n, p in model.named_parameters() if "embed" not in n)
    assert total(ops.values()).weight_bytes == stored + 4 * hf.hidden_size


def test_only_the_sampled_rows_reach_the_head():
    config = model_config("SmolLM2-135M")
    one, all_rows = by_name(config, Step.prefill(512)), by_name(config, Step.prefill(512, logit_rows=512))
    assert one["lm_head"].flops * 512 == all_rows["lm_head"].flops
    assert by_name(config, Step.prefill(512, logit_rows=0))["lm_head"].bytes == 0
    assert by_name(config, Step((5, 6, 7)))["lm_head"].flops == 3 * one["lm_head"].flops


def test_attention_exact_causal_count():
    config = model_config("Llama-3-8B")
    op = by_name(config, Step((7, 1, 4), (0, 20, 9)))["attention"]
    pairs = 7 * (0 + 8 / 2) + 1 * (20 + 2 / 2) + 4 * (9 + 5 / 2)
    assert op.flops == 4 * 32 * 128 * pairs * 32
    assert op.kv_bytes == 2 * 8 * 128 * 2 * (7 + 21 + 13) * 32


@pytest.mark.parametrize(("kv", "intensity"), [("bfloat16", 8), ("int8", 16), ("float32", 4)])
def test_decode_attention_intensity_of_llama_3_70b(kv, intensity):
    op = by_name(model_config("Llama-3-70B"), Step.decode(5000), precision=Precision(kv=kv))["attention"]
    expected = 2 * 8 / {"bfloat16": 2, "int8": 1, "float32": 4}[kv]
    assert op.flops / op.kv_bytes == expected == intensity


def test_mla_flops_a_pair_and_intensity_of_deepseek_v3():
    config, context = model_config("DeepSeek-V3"), 4095
    step, layers = Step.decode(context), 61
    expanded, absorbed = by_name(config, step, absorbed=False), by_name(config, step, absorbed=True)
    assert expanded["attention"].flops == 81_920 * 4096 * layers
    assert absorbed["attention"].flops == 278_528 * 4096 * layers
    assert absorbed["attention"].kv_bytes == 576 * 2 * 4096 * layers
    assert absorbed["attention"].flops / absorbed["attention"].kv_bytes == pytest.approx(242, abs=0.5)
    assert expanded["kv_b_proj"].flops == 2 * 512 * 128 * (128 + 128) * 4096 * layers
    assert absorbed["q_absorb"].flops == 2 * 128 * 128 * 512 * layers
    read = absorbed["q_absorb"].weight_bytes + absorbed["v_absorb"].weight_bytes
    assert read == expanded["kv_b_proj"].weight_bytes


def test_mla_takes_the_form_with_fewer_flops():
    config = model_config("DeepSeek-V3")
    assert "q_absorb" in by_name(config, Step.decode(4096))
    assert "kv_b_proj" in by_name(config, Step.prefill(4096))


@pytest.mark.parametrize(
    ("experts", "chosen", "expected"),
    [(8, 2, (2, 5.5, 7.9, 8, 8)), (128, 8, (8, 29, 82, 126, 128)), (128, 4, (4, 15, 51, 111, 128)),
     (256, 8, (8, 31, 102, 222, 256)), (384, 8, (8, 31, 110, 284, 382))],
)  # fmt: skip
def test_distinct_experts_of_the_published_shapes(experts, chosen, expected):
    for tokens, value in zip((1, 4, 16, 64, 256), expected, strict=True):
        digits = 1 if value != int(value) else 0
        assert round(distinct_experts(experts, chosen, tokens), digits) == value


def test_distinct_experts_against_random_draws():
    generator = torch.Generator().manual_seed(1)
    seen = []
    for _ in range(2000):
        scores = torch.rand(6, 16, generator=generator)
        seen.append(scores.topk(3, dim=1).indices.unique().numel())
    mean = sum(seen) / len(seen)
    spread = torch.tensor(seen, dtype=torch.float64).std().item() / len(seen) ** 0.5
    assert abs(mean - distinct_experts(16, 3, 6)) < 4 * spread


def test_a_step_of_experts_reads_the_chosen_ones_and_then_all():
    config = model_config("Mixtral-8x7B")
    one, many = by_name(config, Step.decode(0)), by_name(config, Step.decode(0, 512))
    everything = 3 * 4096 * 14336 * 8 * 32 * 2
    assert one["experts"].weight_bytes == pytest.approx(everything / 4)
    assert many["experts"].weight_bytes == pytest.approx(everything)
    assert "gate_up_proj" not in one


def test_activations_of_experts_are_those_of_every_copy_and_their_sum():
    ops, d, f, copies = by_name(model_config("Mixtral-8x7B"), Step.prefill(5)), 4096, 14336, 5 * 2
    products = (d + 2 * f) + (f + d)  # in and out of the two matrix products of one copy
    assert ops["experts"].activation_bytes == 2 * 32 * (copies * (products + d) + 5 * d)
    assert ops["swiglu"].activation_bytes == 2 * 32 * copies * 3 * f
    assert ops["router"].activation_bytes == 2 * 32 * 5 * (d + 8)


def test_dense_first_layers_and_shared_experts_of_deepseek_v3():
    config = model_config("DeepSeek-V3")
    ops = by_name(config, Step.decode(0))
    assert (ops["gate_up_proj"].count, ops["experts"].count, ops["swiglu"].count) == (3, 58, 61)
    assert ops["shared_experts"].flops == 6 * 7168 * 2048 * 58
    assert ops["experts"].flops == 8 * ops["shared_experts"].flops
    assert ops["gate_up_proj"].flops == 2 * 7168 * 2 * 18432 * 3


def test_fp8_weights_and_kv_halve_their_bytes_and_leave_the_activations():
    config = model_config("Llama-3-70B")
    bf16 = by_name(config, Step.decode(1000))
    fp8 = by_name(config, Step.decode(1000), precision=Precision("fp8", kv="fp8"))
    assert fp8["down_proj"].weight_bytes * 2 == bf16["down_proj"].weight_bytes
    assert fp8["attention"].kv_bytes * 2 == bf16["attention"].kv_bytes
    assert fp8["down_proj"].activation_bytes == bf16["down_proj"].activation_bytes
    assert fp8["lm_head"].bytes == bf16["lm_head"].bytes


def test_every_real_model_has_known_operators_in_running_order():
    for name, entry in MODELS.items():
        names = [op.name for op in step_costs(entry.config, Step((5, 1), (3, 9)))]
        assert names == sorted(set(names), key=OPERATORS.index), name
        for op in step_costs(entry.config, Step.decode(7)):
            assert op.bytes > 0, (name, op.name)
            assert op.intensity == op.flops / op.bytes


def test_norms_and_residual_additions():
    ops = by_name(model_config("SmolLM2-135M"), Step.prefill(10))
    d, layers = 576, 30
    assert ops["attn_norm"].flops == ops["ffn_norm"].flops == 4 * 10 * d * layers
    assert ops["residual"].flops == 2 * 10 * d * layers
    assert ops["residual"].activation_bytes == 2 * 6 * 10 * d * layers
    assert ops["final_norm"].flops == 4 * d


# Properties

lengths = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=4)
ATTENTION = ("attention", "kv_write", "qkv_proj", "o_proj", "rotary")


@settings(deadline=None)
@given(new=st.integers(0, 60), cached=st.integers(0, 60), window=st.one_of(st.none(), st.integers(1, 80)))
def test_pairs_equal_the_mask_counted_one_by_one(new, cached, window):
    expected = 0
    for query in range(cached, cached + new):
        expected += sum(1 for key in range(query + 1) if window is None or key > query - window)
    assert visible_pairs(new, cached, window) == expected


@settings(deadline=None)
@given(sequences=lengths, window=st.one_of(st.none(), st.integers(1, 80)))
def test_keys_are_the_cache_rows_that_some_query_sees(sequences, window):
    step = Step(tuple(new for new, _ in sequences), tuple(cached for _, cached in sequences))
    expected = 0
    for new, cached in sequences:
        queries = range(cached, cached + new)
        expected += len({k for q in queries for k in range(q + 1) if window is None or k > q - window})
    assert step.keys(window) == expected


@settings(deadline=None)
@given(parts=st.lists(st.integers(1, 30), min_size=1, max_size=5), cached=st.integers(0, 40))
def test_chunked_prefill_has_the_attention_flops_of_the_whole(parts, cached):
    for name in ("SmolLM2-135M", "Gemma-3-27B", "gpt-oss-120b"):
        config = model_config(name)
        done, flops, linear = cached, 0, 0
        for part in parts:
            ops = by_name(config, Step((part,), (done,)))
            flops, linear = flops + ops["attention"].flops, linear + ops["qkv_proj"].flops
            done += part
        whole = by_name(config, Step((sum(parts),), (cached,)))
        assert (flops, linear) == (whole["attention"].flops, whole["qkv_proj"].flops)


@settings(deadline=None)
@given(sequences=lengths)
def test_a_batch_costs_its_sequences_except_for_weights_read_once(sequences):
    config = model_config("Gemma-3-27B")
    batch = by_name(config, Step(tuple(n for n, _ in sequences), tuple(c for _, c in sequences)))
    alone = [by_name(config, Step((new,), (cached,))) for new, cached in sequences]
    for name, op in batch.items():
        assert op.flops == sum(ops[name].flops for ops in alone)
        assert op.kv_bytes == sum(ops[name].kv_bytes for ops in alone)
        assert op.activation_bytes == sum(ops[name].activation_bytes for ops in alone)
    assert batch["o_proj"].weight_bytes == alone[0]["o_proj"].weight_bytes


@settings(deadline=None)
@given(new=st.integers(1, 50), cached=st.integers(0, 50))
def test_a_window_as_long_as_the_sequence_is_no_window(new, cached):
    assert visible_pairs(new, cached, new + cached) == visible_pairs(new, cached)
    sliding, full = model_config("Mistral-7B-v0.1"), model_config("Llama-3-8B")
    for name in ATTENTION:
        assert by_name(sliding, Step((new,), (cached,)))[name] == by_name(full, Step((new,), (cached,)))[name]


@settings(deadline=None)
@given(context=st.integers(200, 4000))
def test_a_sliding_layer_reads_no_more_than_its_window(context):
    config = model_config("gpt-oss-120b")
    row = 2 * 8 * 64 * 2
    assert by_name(config, Step.decode(context))["attention"].kv_bytes == row * 18 * (context + 1 + 128)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((),), "at least 1 new"),
        (((0,),), "at least 1 new"),
        (((1, 2), (3,)), "2 sequences"),
        (((1,), (-1,)), "0 cached"),
        (((4,), (0,), 5), "logit_rows 5"),
        (((4,), (0,), -1), "logit_rows -1"),
        (((4,), (0,), "1"), "logit_rows is '1'"),
        ((("a",),), "new tokens of a sequence is 'a'"),
        (((1.5,),), "new tokens of a sequence is 1.5"),
        (((1,), ([2],)), "cached tokens of a sequence is \\[2\\]"),
        (((10**5000,),), "new tokens of a sequence is a number of thousands of digits"),
        ((5,), "a step has new 5 and cached"),
        (((1,), None), "a step has new .* and cached None"),
    ],
)
def test_impossible_steps_are_refused(arguments, message):
    with pytest.raises(RequestError, match=message):
        Step(*arguments)


@pytest.mark.parametrize("sequences", [0, -1, "2", 1.0, 10**12])
def test_impossible_numbers_of_sequences_are_refused(sequences):
    for make in (Step.prefill, Step.decode):
        with pytest.raises(RequestError, match="sequences is"):
            make(8, sequences=sequences)
