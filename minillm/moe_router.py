"""Which experts a token goes to, and with what weight: scores, groups, top-k, balance, capacity.

The choice is discrete: two experts whose scores differ by a rounding error can change places, and a token's output with
them. So logits are computed in float32 whatever the model runs in, and on a CPU each row is scored by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .errors import CheckpointError, ConfigError

DROPPED = -1  # in place of an expert: this choice of the token is computed by nobody


class Routing(NamedTuple):
    """experts (T, k) int64, DROPPED where a choice found no room; weights (T, k) float32, what each one's output is
    multiplied by, once; scores (T, E) float32, what the choice was made from, without the correction bias."""

    experts: Tensor
    weights: Tensor
    scores: Tensor


@dataclass(frozen=True)
class RouterSettings:
    """How scores become a choice. `groups` > 1 first picks `top_groups` of them and looks for experts there alone.

    softmax: Mixtral (arXiv 2401.04088, section 2.1), Qwen3-MoE. sigmoid with groups: DeepSeek-V3 (arXiv 2412.19437,
    section 2.1.2). Raises ConfigError for numbers that no choice can be made by.
    """

    num_experts: int
    top_k: int
    scoring: str = "softmax"
    groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        experts, groups = self.num_experts, self.groups
        if self.scoring not in ("softmax", "sigmoid"):
            raise ConfigError(f"scoring {self.scoring!r} is not known; choose softmax or sigmoid")
        if not 0 < self.top_k <= experts:
            raise ConfigError(f"top_k {self.top_k} must lie between 1 and the {experts} experts there are")
        if groups < 1 or experts % groups:
            raise ConfigError(f"{experts} experts cannot be divided into {groups} groups of one size")
        if not 0 < self.top_groups <= groups:
            raise ConfigError(f"top_groups {self.top_groups} must lie between 1 and the {groups} groups there are")
        if self.top_k > self.top_groups * (experts // groups):
            raise ConfigError(
                f"top_k {self.top_k} exceeds the {self.top_groups * (experts // groups)} experts "
                f"of {self.top_groups} groups"
            )
        if not math.isfinite(self.scale):
            raise ConfigError(f"routed_scaling_factor is {self.scale}; it must be a finite number")

    @classmethod
    def of(cls, config: ModelConfig) -> RouterSettings:
        return cls(
            config.num_experts,
            config.num_experts_per_tok,
            config.scoring_func,
            config.n_group,
            config.topk_group,
            config.norm_topk_prob,
            config.routed_scaling_factor,
        )


class Gate(nn.Module):
    """x (T, d) -> x · weightᵀ (T, E) in float32. weight (E, d).

    Not a Linear, so that nobody packs or quantizes it: it is a thousandth of its layer's bytes, and its rounding errors
    change which experts are chosen.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    @property
    def weight_bytes(self) -> int:
        return self.weight.nbytes

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float())


class Router(nn.Module):
    """x (T, d) -> Routing. weight (E, d); correction (E,) shifts the scores that the choice is made by, and only those.

    A NaN in a token's row makes that token's weights NaN and no other's, so the sampler can name the request.
    Raises CheckpointError for a weight or correction that is not finite.
    """

    correction: Tensor | None

    def __init__(self, settings: RouterSettings, weight: Tensor, correction: Tensor | None = None) -> None:
        super().__init__()
        for name, tensor in (("weight", weight), ("e_score_correction_bias", correction)):
            if tensor is not None and not torch.isfinite(tensor).all():
                raise CheckpointError(f"the router's {name} holds NaN or infinity; download the model again")
        self.settings = settings
        self.gate = Gate(weight)
        # a buffer: balancing moves it, gradients do not, and it stays float32 beside 16-bit weights
        self.register_buffer("correction", None if correction is None else correction.float())

    def forward(self, x: Tensor) -> Routing:
        return choose(self.gate(x), self.settings, self.correction)


def choose(logits: Tensor, settings: RouterSettings, correction: Tensor | None = None) -> Routing:
    """logits (T, E) float32 -> Routing."""
    s = settings
    scores = logits.sigmoid() if s.scoring == "sigmoid" else logits.softmax(-1)
    ranked = scores if correction is None else scores + correction
    if s.groups > 1:
        ranked = mask_groups(ranked, s.groups, s.top_groups)
    experts = ranked.topk(s.top_k, dim=-1).indices  # (T, k)
    weights = scores.gather(1, experts)  # without the correction
    if s.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(experts, weights * s.scale, scores)


def mask_groups(ranked: Tensor, groups: int, top_groups: int) -> Tensor:
    """ranked (T, E), -inf outside the `top_groups` groups whose two best experts have the largest sum.

    Experts of one group lie on one node, so this bounds the nodes that a token is sent to: DeepSeek-V3, section 2.1.2.
    """
    grouped = ranked.unflatten(-1, (groups, ranked.shape[-1] // groups))  # (T, groups, E / groups)
    best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)  # (T, groups)
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(top_groups, dim=-1).indices, True)
    return grouped.masked_fill(~chosen[..., None], -math.inf).flatten(1)


# Balance -----------------------------------------------------------------------------------------------------------


def tokens_per_expert(experts: Tensor, num_experts: int) -> Tensor:
    """experts (T, k) -> (E,) int64. Dropped choices count for nobody."""
    flat = experts.flatten()
    return torch.bincount(flat[flat >= 0], minlength=num_experts)


def balanced_correction(correction: Tensor, counts: Tensor, speed: float = 1e-3) -> Tensor:
    """The correction bias after a step that sent counts (E,) tokens to each expert: one `speed` down for the overloaded
    and up for the underloaded. No gradient, no loss term: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2."""
    return correction + speed * torch.sign(counts.float().mean() - counts.float())


def auxiliary_loss(routing: Routing) -> Tensor:
    """E · Σ f_i · P_i, with f_i the share of choices that expert i got and P_i its mean score; 1 when all are alike.

    Switch Transformer (arXiv 2101.03961), equation 4 without its factor α; for k > 1, f_i counts each of the k choices
    as 1/k, where some count 1 and get k times as much. Dropped choices count: they were made. scores must be a softmax.
    """
    num_experts = routing.scores.shape[1]
    share = torch.bincount(routing.experts.flatten(), minlength=num_experts) / routing.experts.numel()
    return num_experts * (share * routing.scores.mean(0)).sum()


def capacity(tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """Tokens an expert has room for: its even share times `factor`, rounded up. GShard (arXiv 2006.16668), 3.2."""
    if not factor > 0 or not math.isfinite(factor):
        raise ConfigError(f"capacity_factor is {factor}; it must be a finite number above 0")
    return math.ceil(tokens * top_k / num_experts * factor)


def drop_above(routing: Routing, room: int) -> Routing:
    """The routing with choices beyond `room` tokens an expert dropped: all first choices are seated before any second,
    and within these the earlier token. A dropped choice adds nothing; what is left is not scaled up."""
    tokens, k = routing.experts.shape
    num_experts = routing.scores.shape[1]
    queue = F.one_hot(routing.experts.t().flatten(), num_experts)  # (k · T, E), first choices first
    place = (queue.cumsum(0) * queue).sum(-1).view(k, tokens).t()  # 1 for the first in line
    return routing._replace(experts=torch.where(place > room, DROPPED, routing.experts))
