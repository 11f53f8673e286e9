"""The draft while it learns: the package's own Transformer with gradients, and attention over a padded batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import causal_mask
from ..config import ModelConfig
from ..layers import RMSNorm
from ..transformer import Transformer, from_tensors

UNSURE = 0.2


class TrainedNorm(nn.Module):
    """RMSNorm whose gain has a gradient; layers.RMSNorm folds a constant into it once and for all."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(norm.weight.detach().clone()), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class BatchAttention:
    """A cache that remembers nothing and attends within each of B sequences of S packed tokens, padding at the end.

    A query sees nothing behind it, so padding changes no row but its own.
    """

    def __init__(self, config: ModelConfig, batch: int, length: int) -> None:
        self.batch, self.length = batch, length
        self.window = config.window(0)
        short = self.window is None or self.window >= length
        self.mask = None if short else causal_mask(length, length, self.window)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B · S, H, D), k and v (B · S, Hkv, D) -> (B · S, H, D)."""
        q, k, v = (x.unflatten(0, (self.batch, self.length)).transpose(1, 2).to(v.dtype) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask, is_causal=self.mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).flatten(0, 1)

    def advance(self, count: int) -> None:
        """Nothing was kept, so nothing moves."""


def trainable(config: ModelConfig, tensors: dict[str, Tensor]) -> Transformer:
    """The model that `tensors` describe, float32, every parameter with a gradient."""
    model = from_tensors(config, tensors)
    for block in model.blocks:
        block.attn_norm, block.ffn_norm = TrainedNorm(block.attn_norm), TrainedNorm(block.ffn_norm)
    model.final_norm = TrainedNorm(model.final_norm)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model.train()


def fresh_tensors(config: ModelConfig, embedding: Tensor, seed: int) -> dict[str, Tensor]:
    """Weights to start from, by Hugging Face's names: the embedding given, matrices normal with variance 1 / d_in,
    those that write to the residual stream smaller by sqrt(2 · layers), norms at one, the last one less: a state that
    knows nothing yet should not be sure of anything."""
    generator = torch.Generator().manual_seed(seed)
    c = config
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    d, f = c.hidden_size, c.intermediate_size
    shapes = {
        "self_attn.q_proj": (queries, d), "self_attn.k_proj": (keys, d), "self_attn.v_proj": (keys, d),
        "self_attn.o_proj": (d, queries), "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f),
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": embedding.clone(), "model.norm.weight": torch.full((d,), UNSURE)}
    for layer in range(c.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for name, shape in shapes.items():
            scale = shape[1] ** -0.5
            if name.endswith(("o_proj", "down_proj")):
                scale *= (2 * c.num_hidden_layers) ** -0.5
            tensors[f"{prefix}{name}.weight"] = torch.randn(shape, generator=generator) * scale
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(d)
    return tensors


def exported(model: Transformer) -> dict[str, Tensor]:
    """The weights by Hugging Face's names: what `fresh_tensors` gave and from_tensors takes."""
    c = model.config
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    tensors = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.final_norm.weight}
    for layer, block in enumerate(model.blocks):
        prefix = f"model.layers.{layer}."
        q, k, v = block.attention.qkv_proj.weight.split([queries, keys, keys])
        gate, up = block.mlp.gate_up_proj.weight.chunk(2)
        parts = {
            "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
            "self_attn.o_proj": block.attention.o_proj.weight, "mlp.gate_proj": gate, "mlp.up_proj": up,
            "mlp.down_proj": block.mlp.down_proj.weight, "input_layernorm": block.attn_norm.weight,
            "post_attention_layernorm": block.ffn_norm.weight,
        }  # fmt: skip
        tensors.update({f"{prefix}{name}.weight": weight for name, weight in parts.items()})
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def hidden_states(model: Transformer, tokens: Tensor) -> Tensor:
    """tokens (B, S), padded at the end -> (B · S, d) after the final norm."""
    batch, length = tokens.shape
    positions = torch.arange(length).repeat(batch)
    hidden = model(tokens.flatten(), positions, BatchAttention(model.config, batch, length))
    return model.final_norm(hidden)
