"""Small expert layers: transformers' own with random weights and ours made of its tensors, or ours alone."""

from __future__ import annotations

import torch
from torch import nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from minillm.config import ModelConfig
from minillm.layers import Linear
from minillm.moe import Expert, ExpertLayer
from minillm.moe_loading import experts_from
from minillm.moe_router import Router, RouterSettings
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


def small_layer(num_experts: int = 5, top_k: int = 2, seed: int = 0, **settings) -> ExpertLayer:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    experts = [Expert(Linear(matrix(2 * F, D)), Linear(matrix(D, F))) for _ in range(num_experts)]
    router = Router(RouterSettings(num_experts, top_k, **settings), matrix(num_experts, D) * 3)
    return ExpertLayer(0, router, nn.ModuleList(experts))
