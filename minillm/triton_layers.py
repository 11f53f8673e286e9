"""A model's layers on the Triton kernels. Each is the torch layer with the same state and another `forward`.

What is fused: a block adds what its attention found to the residual stream and normalises the sum in one pass over
the row, and so does the next block with what the feed-forward layer found. Rotary, SwiGLU and the embedding are one
kernel each; matrices stay with cuBLAS, which is hard to beat at 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.embedding import embedding
from kernels.moe_gemm import moe_layer
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.swiglu import swiglu

from .attention import Attention
from .layers import Linear, RMSNorm, SwiGLU, region
from .mla import LatentAttention
from .moe import ExpertLayer
from .moe_router import Routing
from .transformer import Block, Transformer


class TritonRMSNorm(RMSNorm):
    """y = x / sqrt(mean(x²) + eps) · weight. `add` takes the residual stream along."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, backend="triton")

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(normalised sum, sum), both (T, d)."""
        return rms_norm(x, self.weight, self.eps, residual, backend="triton")


class TritonSwiGLU(SwiGLU):
    @staticmethod
    def activate(gate: Tensor, up: Tensor) -> Tensor:
        return swiglu(gate, up, backend="triton")


def turn(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """apply_rotary as one kernel. x (T, H, D); of cos and signed sin, both (T, 1, D), the second half is plain."""
    cos, sin = (side[:, 0, side.shape[-1] // 2 :] for side in rotation)
    return rotary(x, cos, sin, backend="triton")


class TritonAttention(Attention):
    rotate = staticmethod(turn)


class TritonLatentAttention(LatentAttention):
    rotate = staticmethod(turn)


class TritonExpertLayer(ExpertLayer):
    """All chosen experts in two grouped matmuls; other executions, and weights in other layouts, stay with torch."""

    def compute(self, x: Tensor, routing: Routing) -> Tensor:
        weights = stacked_weights(self.experts) if self.execution == "grouped" else None
        if weights is None:
            return super().compute(x, routing)
        return moe_layer(x, *weights, routing.experts, routing.weights, backend="triton")


def stacked_weights(experts: nn.Module) -> tuple[Tensor, Tensor] | None:
    """gate_up (E, 2f, d) and down (E, d, f), of which each expert's weights become views, so that they are held once.

    None for a list whose matrices are not plain ones.
    """
    if not isinstance(experts, nn.ModuleList):
        return None
    matrices = [[e.gate_up_proj for e in experts], [e.down_proj for e in experts]]
    if any(type(m) is not Linear or m.bias is not None for column in matrices for m in column):
        return None
    stacks = getattr(experts, "stacks", None)
    if stacks is None or any(s.data_ptr() != c[0].weight.data_ptr() for s, c in zip(stacks, matrices, strict=True)):
        stacks = experts.stacks = tuple(_stack(column) for column in matrices)
    return stacks


def _stack(matrices: list[Linear]) -> Tensor:
    stack = torch.stack([m.weight.data for m in matrices])
    for m, mine in zip(matrices, stack.unbind(), strict=True):
        m.weight.data = mine
    return stack


class TritonBlock(Block):
    """The block with its additions moved into the norm that follows each of them."""

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache) -> Tensor:
        x, found = self.unsummed(x, None, rotation, cache)
        return x + found

    def unsummed(
        self, x: Tensor, found: Tensor | None, rotation: tuple[Tensor, Tensor], cache
    ) -> tuple[Tensor, Tensor]:
        """x and what the block before found (T, d), not yet added -> the same pair of this block."""
        with region("attn_norm"):
            h, x = (self.attn_norm(x), x) if found is None else self.attn_norm.add(found, x)
        found = self.attention(h, rotation, cache)
        with region("ffn_norm"):
            h, x = self.ffn_norm.add(found, x)
        return x, self.mlp(h)


class TritonTransformer(Transformer):
    backend = "triton"

    def forward(self, tokens: Tensor, positions: Tensor, cache) -> Tensor:
        with region("embed"):
            x = embedding(tokens, self.embedding, backend="triton")
        rotation, found = self.rotary(positions), None
        for block in self.blocks:
            x, found = block.unsummed(x, found, rotation, cache)
        cache.advance(len(tokens))
        with region("residual"):
            return x + found


CLASSES = {
    RMSNorm: TritonRMSNorm,
    SwiGLU: TritonSwiGLU,
    Attention: TritonAttention,
    ExpertLayer: TritonExpertLayer,
    LatentAttention: TritonLatentAttention,
    Block: TritonBlock,
    Transformer: TritonTransformer,
}
