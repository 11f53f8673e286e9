"""A model's layers on the Triton kernels. Each is the torch layer with the same state and another `forward`.

What is fused: a block adds what its attention found to the residual stream and normalises the sum in one pass over
the row, and so does the next block with what the feed-forward layer found. Rotary, SwiGLU and the embedding are one
kernel each; matrices stay with cuBLAS, which is hard to beat at 16 bits.
"""

from __future__ import annotations

from torch import Tensor

from kernels.embedding import embedding
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.swiglu import swiglu

from .attention import Attention
from .layers import RMSNorm, SwiGLU, region
from .mla import LatentAttention
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
    LatentAttention: TritonLatentAttention,
    Block: TritonBlock,
    Transformer: TritonTransformer,
}
