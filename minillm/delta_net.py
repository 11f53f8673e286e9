"""The layer around the gated delta rule, as Qwen3-Next has it in three of four blocks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .delta_rule import l2norm, log_decay
from .layers import RMSNorm, region


class GatedDeltaNet(nn.Module):
    """Queries, keys and values through a short convolution, then the delta rule, then a norm with an output gate.

    in_proj makes everything that x is needed for, stacked by rows: q, k (Hk·Dk each), v, z (Hv·Dv each), b, a (Hv
    each): beta = sigmoid(b) is how much of a value is written, and a decides the decay. The convolution lets a key see
    its neighbours, which softmax attention does by position. The cache convolves and applies the rule, since it holds
    what went before; this layer never learns how.
    Source: Yang et al. 2024 (arXiv 2412.06464), section 3.4, with the gate of Qwen3-Next.
    """

    def __init__(
        self, config: ModelConfig, layer: int, in_proj: nn.Module, o_proj: nn.Module, conv_weight: Tensor,
        A_log: Tensor, dt_bias: Tensor, norm: RMSNorm,
    ) -> None:  # fmt: skip
        super().__init__()
        self.layer, self.in_proj, self.o_proj, self.norm = layer, in_proj, o_proj, norm
        self.key_heads, self.heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.conv_weight, self.A_log, self.dt_bias = (
            nn.Parameter(t, requires_grad=False) for t in (conv_weight, A_log, dt_bias)
        )  # (channels, K), (Hv,), (Hv,)

    def linears(self) -> list[nn.Module]:
        return [self.in_proj, self.o_proj]

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache) -> Tensor:
        """x (T, d) -> (T, d). Order is in the state, so nothing turns."""
        T, Hk, Hv, Dk, Dv = x.shape[0], self.key_heads, self.heads, self.key_dim, self.value_dim
        with region("delta_in_proj"):
            qkv, z, b, a = self.in_proj(x).split([2 * Hk * Dk + Hv * Dv, Hv * Dv, Hv, Hv], dim=-1)
        with region("conv"):
            qkv = F.silu(cache.convolve(self.layer, qkv, self.conv_weight))
        with region("delta_gates"):
            q, k, v = qkv.split([Hk * Dk, Hk * Dk, Hv * Dv], dim=-1)
            q, k = l2norm(q.view(T, Hk, Dk)), l2norm(k.view(T, Hk, Dk))
            g, beta = log_decay(a, self.A_log, self.dt_bias), b.float().sigmoid()
        with region("delta_rule"):
            out = cache.delta_rule(self.layer, q, k, v.view(T, Hv, Dv), g, beta)  # (T, Hv, Dv)
        with region("delta_norm"):
            out = (self.norm(out) * F.silu(z.view(T, Hv, Dv).float())).to(x.dtype)
        with region("delta_o_proj"):
            return self.o_proj(out.reshape(T, Hv * Dv))
