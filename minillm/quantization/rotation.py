"""Rotations: outliers in a few channels spread over all of them, and the model computes the same.

RMSNorm without its gain commutes with any rotation Q of the residual stream: |Qx| = |x|. So gains move into the
matrices that follow, every matrix that reads the stream takes Q^T on its input side, every one that writes it takes Q
on its output side, and the function is unchanged while each channel is now a mixture of all. Values are rotated within
their heads in the same way, since attention is linear in them.
Source: Ashkboos et al. 2024, QuaRot (arXiv 2404.00456), sections 4.1-4.2, without its online rotations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import Attention
from ..errors import QuantizationError
from ..layers import Linear, RMSNorm, SwiGLU
from ..transformer import Transformer
from .whole import refuse_views, whole_or_not


def hadamard(size: int) -> Tensor:
    """Sylvester's matrix of +-1 / sqrt(size), size a power of two: orthogonal, and as flat as a rotation can be."""
    if size < 1 or size & (size - 1):
        raise QuantizationError(f"size {size} is no power of two, for which this construction has no Hadamard matrix")
    H = torch.ones(1, 1, dtype=torch.float64)
    while len(H) < size:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return H / size**0.5


def rotation(size: int, seed: int = 0) -> Tensor:
    """(size, size) float64 orthogonal: Hadamard of the largest power of two that divides it, times (Kronecker) a random
    rotation of the odd rest, times random signs. 576 = 64 · 9."""
    generator = torch.Generator().manual_seed(seed)
    power = size & -size
    odd = torch.linalg.qr(torch.randn(size // power, size // power, dtype=torch.float64, generator=generator)).Q
    signs = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1
    return torch.kron(odd.contiguous(), hadamard(power)) * signs


@torch.inference_mode()
def rotate_(model: Transformer, seed: int = 0) -> None:
    """Rotates a dense model in place; its logits stay the same up to rounding. The head is no longer tied. An error or
    Ctrl-C on the way leaves the model as it was.

    Raises QuantizationError for a model with other blocks, or one that is sparse, compiled, quantized or packed.
    """
    refuse_views(model, QuantizationError)
    for block in model.blocks:
        dense = isinstance(block.attention, Attention) and isinstance(block.mlp, SwiGLU)
        if not dense or not isinstance(block.mlp.down_proj, Linear):
            raise QuantizationError("only dense models with float32 matrices can be rotated; leave out hadamard-")
    if (width := model.config.head_dim) & (width - 1):
        raise QuantizationError(
            f"heads of {width} numbers are no power of two, which rotating asks; leave out hadamard-"
        )
    if (zeros := getattr(model, "sparsity", None)) is not None:
        raise QuantizationError(f"a rotation would fill the zeros of {zeros.name}; rotate a dense model")
    Q = rotation(model.config.hidden_size, seed)
    with whole_or_not(model):
        _rotate(model, Q)


def _rotate(model: Transformer, Q: Tensor) -> None:
    # the head may be the embedding itself; from here on they differ
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.data.clone(), requires_grad=False)
    model.embedding.data = _times(model.embedding, Q)
    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        _fold_gain(block.attn_norm, attention.qkv_proj)
        _fold_gain(block.ffn_norm, mlp.gate_up_proj)
        for reads in (attention.qkv_proj, mlp.gate_up_proj):
            reads.weight.data = _times(reads.weight, Q)
        for writes in (attention.o_proj, mlp.down_proj):
            writes.weight.data = (Q.t() @ writes.weight.double()).to(writes.weight.dtype)
            if writes.bias is not None:
                writes.bias.data = (Q.t() @ writes.bias.double()).to(writes.bias.dtype)
        _rotate_values(attention)
    _fold_gain(model.final_norm, model.lm_head)
    model.lm_head.weight.data = _times(model.lm_head.weight, Q)


def _times(weight: Tensor, Q: Tensor) -> Tensor:
    return (weight.double() @ Q).to(weight.dtype)


def _fold_gain(norm: RMSNorm, reads: Linear) -> None:
    reads.weight.data = reads.weight.data * norm.weight.data
    norm.weight.data = torch.ones_like(norm.weight.data)
    norm.gain = torch.full_like(norm.gain, len(norm.gain) ** 0.5)  # of RMSNorm with a weight of one


def _rotate_values(attention: Attention) -> None:
    """v_proj's rows and o_proj's columns, head by head."""
    D, H, kv = attention.head_dim, attention.heads, attention.kv_heads
    R = hadamard(D)
    weight, first = attention.qkv_proj.weight.data, (H + kv) * D
    values = weight[first:].view(kv, D, -1).double()
    weight[first:] = (R @ values).reshape(kv * D, -1).to(weight.dtype)
    if attention.qkv_proj.bias is not None:
        bias = attention.qkv_proj.bias.data = attention.qkv_proj.bias.data.clone()
        bias[first:] = (R @ bias[first:].view(kv, D, 1).double()).reshape(-1).to(bias.dtype)
    out = attention.o_proj.weight.data
    attention.o_proj.weight.data = (out.view(-1, H, D).double() @ R.t()).reshape(out.shape).to(out.dtype)
