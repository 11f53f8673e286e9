"""Moving factors between neighbouring layers without changing what they compute together.

A layer's input channel may be divided by s where it is made and its column multiplied by s where it is used. AWQ and
SmoothQuant choose such factors so that what is left is easier to round; nothing is added at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from ..attention import Attention
from ..errors import QuantizationError
from ..layers import Linear, RMSNorm, SwiGLU
from ..transformer import Block


@dataclass(frozen=True)
class Fold:
    """`divide(s)` makes the layer's input smaller by s (K,), by channel; the layer's columns then grow by s."""

    name: str  # within its block, as calibration names it
    layer: Linear
    divide: Callable[[Tensor], None]

    def apply(self, s: Tensor) -> None:
        self.divide(s)
        self.layer.weight.data = self.layer.weight.data * s


def folds(block: Block) -> Iterator[Fold]:
    """The places in a dense block where factors can move: norm -> q, k, v; norm -> gate and up; up -> down.

    Between values and the output projection they cannot where a value head serves several query heads.
    Raises QuantizationError for a block of another kind.
    """
    if not isinstance(block.attention, Attention) or not isinstance(block.mlp, SwiGLU):
        raise QuantizationError("factors are folded in dense blocks alone; use rtn, gptq or hqq for this model")
    mlp = block.mlp
    yield Fold("attention.qkv_proj", block.attention.qkv_proj, lambda s: scale_norm(block.attn_norm, 1 / s))
    yield Fold("mlp.gate_up_proj", mlp.gate_up_proj, lambda s: scale_norm(block.ffn_norm, 1 / s))
    yield Fold("mlp.down_proj", mlp.down_proj, lambda s: _divide_up(mlp.gate_up_proj, s))


def scale_norm(norm: RMSNorm, factor: Tensor) -> None:
    """The norm's output, each channel times its factor."""
    norm.weight.data = norm.weight.data * factor
    norm.gain = norm.gain * factor


def _divide_up(gate_up: Linear, s: Tensor) -> None:
    """silu(gate) · up is linear in up, so its rows carry the factor; gate's must not."""
    half = gate_up.weight.shape[0] // 2
    factor = gate_up.weight.new_ones(2 * half)
    factor[half:] = 1 / s
    gate_up.weight.data = gate_up.weight.data * factor[:, None]
    if gate_up.bias is not None:
        gate_up.bias.data = gate_up.bias.data * factor
