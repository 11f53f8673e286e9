"""What linear layers remember of a sequence: two tensors of constant size, in a slot.

    conv   (layers, slots, K - 1, channels)    the last inputs of the short convolution
    delta  (layers, slots, Hv, Dk, Dv)         the state of the gated delta rule

Both in float32, whatever the keys and values of other layers are stored in: a state is not written once and read, but
rounded again with every token, and a sequence cut into chunks must go on from the very numbers it stopped at.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .config import ModelConfig
from .delta_rule import causal_conv, delta_step, gated_delta_rule

STATE_BYTES = 4


class DeltaStates:
    """`slots` states of every linear layer; a sequence owns one slot. Zero is the state before the first token."""

    def __init__(self, config: ModelConfig, slots: int, device="cpu") -> None:
        layers, shapes = config.linear_layers, _shapes(config)
        self.conv, self.delta = (torch.zeros(len(layers), slots, *shape, device=device) for shape in shapes)
        self.layers = {layer: (self.conv[i], self.delta[i]) for i, layer in enumerate(layers)}

    @staticmethod
    def bytes_of_slot(config: ModelConfig) -> int:
        """All layers: what one more sequence costs, however long it grows."""
        sizes = sum(torch.Size(shape).numel() for shape in _shapes(config))
        return len(config.linear_layers) * sizes * STATE_BYTES

    @property
    def nbytes(self) -> int:
        return self.conv.nbytes + self.delta.nbytes

    def clear(self, slots: Sequence[int]) -> None:
        self.conv[:, slots] = 0
        self.delta[:, slots] = 0

    def convolve(self, layer: int, slot: int, x: Tensor, weight: Tensor) -> Tensor:
        """x (T, channels), the next inputs of the slot's sequence."""
        conv = self.layers[layer][0]
        y, conv[slot] = causal_conv(x, weight, conv[slot])
        return y

    def convolve_each(self, layer: int, slots: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """x (B, channels), one input of each slot."""
        conv = self.layers[layer][0]
        y, states = causal_conv(x[:, None], weight, conv[slots])
        conv[slots] = states
        return y[:, 0]

    def apply(self, layer: int, slot: int, q, k, v, g, beta, method: str = "auto") -> Tensor:
        """The delta rule over the next T tokens of the slot's sequence -> (T, Hv, Dv)."""
        delta = self.layers[layer][1]
        out, delta[slot] = gated_delta_rule(q, k, v, g, beta, delta[slot], method=method)
        return out

    def apply_each(self, layer: int, slots: Tensor, q, k, v, g, beta) -> Tensor:
        """The delta rule over one token of each slot, (B, ...) -> (B, Hv, Dv)."""
        delta = self.layers[layer][1]
        out, delta[slots] = delta_step(q, k, v, g, beta, delta[slots])
        return out


def _shapes(config: ModelConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of one layer and slot: convolution, delta rule."""
    heads = (config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
    return (max(config.linear_conv_kernel_dim - 1, 0), config.conv_channels), heads
