"""Promise: an expert layer computes transformers' sum whichever way it is computed; each likely mistake is caught."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config, Qwen2MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from minillm.config import ModelConfig
from minillm.moe import EXECUTIONS, ExpertLayer, with_experts
from minillm.moe_loading import experts_from
from minillm.packing import linear_maker
from minillm.transformer import _Taken

D, F, E, K = 24, 16, 12, 4
DEEPSEEK = {
    "model_type": "deepseek_v3", "vocab_size": 64, "hidden_size": D, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": E, "num_experts_per_tok": K, "n_shared_experts": 2,
    "moe_intermediate_size": F, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}  # fmt: skip


def relative(a, b) -> float:
    return ((a - b).double().norm() / b.double().norm()).item()


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            scale = tensor.shape[-1] ** -0.5 * 2 if tensor.dim() > 1 else 0.3
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
    return module.float().eval()


def tensors_of(module: nn.Module, prefix: str, fused: bool) -> dict:
    """What a file holds of transformers' layer: per expert as on the hub, or fused as it lies in memory."""
    tensors = {f"{prefix}{name}": tensor for name, tensor in module.state_dict().items()}
    if not fused:
        gate_up, down = (tensors.pop(f"{prefix}experts.{n}") for n in ("gate_up_proj", "down_proj"))
        for e in range(len(down)):
            gate, up = gate_up[e].chunk(2)
            parts = {"gate_proj": gate, "up_proj": up, "down_proj": down[e]}
            tensors |= {f"{prefix}experts.{e}.{name}.weight": part for name, part in parts.items()}
    return tensors


def ours_from(raw: dict, tensors: dict, layer: int = 1) -> ExpertLayer:
    config = ModelConfig.from_dict(raw)
    taken = _Taken(tensors, config)
    built = experts_from(config, layer, taken, linear_maker("float32", False)[0])
    taken.finish()
    return built


def deepseek(fused: bool = False, **changes) -> tuple[nn.Module, ExpertLayer]:
    raw = {**DEEPSEEK, **changes}
    theirs = randomised(DeepseekV3MoE(DeepseekV3Config(**raw)))
    return theirs, ours_from(raw, tensors_of(theirs, "model.layers.1.mlp.", fused))


def rows(tokens: int = 50, seed: int = 1):
    return torch.randn(tokens, D, generator=torch.Generator().manual_seed(seed))


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
