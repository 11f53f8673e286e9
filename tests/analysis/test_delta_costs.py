"""Linear layers: FLOPs against torch's counter, bytes against tensors, and the model they make against its table."""

import pytest
import torch
from hf_shapes import HF_CONFIGS, build, ours
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from minillm.analysis import (
    Hardware,
    Step,
    delta_costs,
    kv_bytes,
    model_config,
    parameter_count,
    profile_step,
    step_costs,
    total,
)
from minillm.analysis.delta_costs import delta_flops
from minillm.analysis.kv_size import kv_bytes_per_token, state_bytes
from minillm.analysis.parameters import weight_bytes
from minillm.config import ModelConfig
from minillm.delta_rule import CHUNK, chunked, recurrent
from minillm.kv_cache import ContiguousCache
from minillm.transformer import from_tensors

LINEAR = ("qkv_proj", "o_proj", "delta_in_proj", "delta_o_proj", "router", "experts", "shared_experts", "gate_up_proj",
          "down_proj", "lm_head")  # fmt: skip


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("new", "cached"), [(13, 0), (1, 9), (5, 8)])
def test_flops_of_matrices_are_those_of_torchs_counter(new, cached):
    """Every product with a weight matrix of the transformers model; the delta rule itself is counted below."""
    torch.manual_seed(0)
    model = build("qwen3_next", attn_implementation="eager", experts_implementation="eager")
    tokens = torch.randint(0, 97, (1, new + cached))
    with torch.no_grad():
        cache = model(tokens[:, :cached], use_cache=True).past_key_values if cached else None
        with FlopCounterMode(display=False) as counter:
            model(tokens[:, cached:], past_key_values=cache, use_cache=True)
    counts = counter.get_flop_counts()["Global"]
    counted = counts[torch.ops.aten.mm] + counts.get(torch.ops.aten.addmm, 0)
    ops = step_costs(ours(HF_CONFIGS["qwen3_next"]), Step((new,), (cached,), logit_rows=new))
    assert counted == sum(op.flops for op in ops if op.name in LINEAR)


def rule_inputs(config: ModelConfig, tokens: int) -> list[torch.Tensor]:
    heads, dk, dv = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    q, k = torch.randn(2, tokens, heads, dk)
    return [q, k, torch.randn(tokens, heads, dv), -torch.rand(tokens, heads), torch.rand(tokens, heads)]


@pytest.mark.parametrize("chunks", [1, 3])
def test_flops_of_the_rule_are_those_of_torchs_counter(chunks):
    """Which knows matrix products alone: not the triangular system of a chunk, 2·C·Dv a token and head in the formula,
    and of a recurrent step not the decay and the write, three operations for each number of the state."""
    config = ours(HF_CONFIGS["qwen3_next"])
    heads, dk, dv = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    with FlopCounterMode(display=False) as counter:
        chunked(*rule_inputs(config, chunks * CHUNK))
    solved = chunks * CHUNK * heads * 2 * CHUNK * dv
    assert delta_flops(config, chunks * CHUNK) == counter.get_total_flops() + solved
    with FlopCounterMode(display=False) as counter:
        recurrent(*rule_inputs(config, 3))
    assert CHUNK == delta_costs.CHUNK
    assert delta_flops(config, 3) == counter.get_total_flops() + 3 * 3 * heads * dk * dv


def test_a_step_reads_and_writes_each_state_once_at_every_length():
    config = model_config("Qwen3-Next-80B-A3B")
    short, long = (
        {op.name: op for op in step_costs(config, Step((1, 40), (context, context)))} for context in (10, 100_000)
    )
    assert short["delta_rule"] == long["delta_rule"]
    assert short["conv"] == long["conv"]
    assert short["delta_rule"].kv_bytes + short["conv"].kv_bytes == 2 * 2 * state_bytes(config)
    assert long["attention"].kv_bytes > 1000 * short["attention"].kv_bytes


def test_a_dense_step_reads_every_weight_once():
    config = ModelConfig.from_dict({**HF_CONFIGS["qwen3_next"].to_dict(), "num_experts": 0})
    ops = step_costs(config, Step.decode(50))
    read = total(op for op in ops if op.name != "embed").weight_bytes
    assert read == weight_bytes(config) - 2 * config.vocab_size * config.hidden_size


def test_parameters_are_those_of_transformers_own_default():
    """Whose defaults are the 80B model's."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3NextConfig())
    count = parameter_count(model_config("Qwen3-Next-80B-A3B"))
    assert count.total == sum(p.numel() for p in model.parameters()) == 79_674_391_296
    assert round(count.active / 1e9, 1) == 3.9


def test_cache_bytes_are_those_that_transformers_allocates():
    """But for the convolution, of which it keeps K inputs where K - 1 are ever read again."""
    config, tokens = ours(HF_CONFIGS["qwen3_next"]), 11
    with torch.no_grad():
        cache = build("qwen3_next")(torch.randint(0, 97, (1, tokens)), use_cache=True).past_key_values
    full = sum(cache.layers[i].keys.nbytes + cache.layers[i].values.nbytes for i in config.kv_layers)
    states = sum(cache.layers[i].recurrent_states[0].nbytes for i in config.linear_layers)
    kept = sum(cache.layers[i].conv_states[0].nbytes for i in config.linear_layers)
    one_short = kept * (config.linear_conv_kernel_dim - 1) // config.linear_conv_kernel_dim
    assert kv_bytes(config, tokens, "float32") == full + states + one_short


def test_published_shape_of_the_cache():
    """A quarter of the layers of 2 heads of 256, and 79 MB that no length changes: what 3,216 tokens take."""
    config = model_config("Qwen3-Next-80B-A3B")
    assert kv_bytes_per_token(config) == 12 * 2 * 2 * 256 * 2
    assert state_bytes(config) == 36 * 4 * (32 * 128 * 128 + 3 * 8192)
    assert state_bytes(config) // kv_bytes_per_token(config) == 3216


def test_every_region_of_the_model_has_its_prediction():
    hf = build("qwen3_next")
    config = ModelConfig.from_dict({**hf.config.to_dict(), "mlp_only_layers": list(range(5))})
    tensors = {n: p for n, p in hf.state_dict().items() if ".mlp." not in n}
    for layer in range(5):
        for name, shape in (("gate_proj", (80, 48)), ("up_proj", (80, 48)), ("down_proj", (48, 80))):
            tensors[f"model.layers.{layer}.mlp.{name}.weight"] = torch.randn(*shape)
    model = from_tensors(config, tensors)

    def step():
        hidden = model(torch.arange(9), torch.arange(9), ContiguousCache(config, 9))
        model.logits(hidden[-1:])

    machine = Hardware("toy", 1, 1e9, {"float32": 1e10})
    with torch.inference_mode():
        table = profile_step(step, step_costs(config, Step.prefill(9)), machine, "float32", repeats=1)
    for row in table.rows[:-1]:
        assert row.calls, row.operator
        assert row.predicted is not None, row.operator
