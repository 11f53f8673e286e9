"""SmoothQuant: activations have channels a hundred times the others, weights do not; share the difficulty.

s = max|x|^α / max|w|^(1-α) by input channel, folded into the norm before: the input's outliers shrink by s, the
weight's columns grow by it, and both sides then fit eight bits. Source: Xiao et al. 2022 (arXiv 2211.10438),
equation 4; as there, only layers that follow a norm are smoothed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .calibration import InputStatistics
from .folding import folds

ALPHA = 0.5


def smoothing(weight: Tensor, largest_input: Tensor, alpha: float = ALPHA) -> Tensor:
    """s (K,) for weight (N, K) and max|x| (K,) of its inputs. A channel that is never used keeps 1."""
    ours = weight.abs().amax(0)
    s = largest_input.pow(alpha) / ours.clamp(min=1e-5).pow(1 - alpha)
    return torch.where((largest_input > 0) & (ours > 0), s, 1).clamp(min=1e-5)


def smooth_block(block: nn.Module, statistics: dict[str, InputStatistics], alpha: float = ALPHA) -> None:
    """Folds the factors into a dense block."""
    for fold in folds(block):
        if fold.name != "mlp.down_proj":
            fold.apply(smoothing(fold.layer.weight, statistics[fold.name].largest, alpha))
