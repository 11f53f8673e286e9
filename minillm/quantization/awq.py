"""AWQ: the few weights that meet large inputs matter most; give their columns more of the grid.

A column times s is rounded with a relative error smaller by about s, as long as the group's scale does not grow, and
its input is divided by s where it is made. s = mean|x|^r by channel, with one r a layer from a grid of 20 that
includes "none"; then each group's range is narrowed where clipping its extremes costs less than it saves.
Source: Lin et al. 2023 (arXiv 2306.00978), sections 3.2 and appendix.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .calibration import InputStatistics
from .folding import folds
from .scheme import Scheme
from .weight import QuantizedWeight, check_weight, integer_codes, integer_scales, pack_integers, quantize_weight

GRID = 20
SHRINKS = tuple(1 - 0.05 * i for i in range(10))  # 1.0 down to 0.55 of the range


def output_error(difference: Tensor, moments: Tensor) -> float:
    """||D X||^2 over all calibration inputs, from their moments X^T X: D (N, K)."""
    return ((difference @ moments) * difference).sum().item()


def scale_block(block: nn.Module, statistics: dict[str, InputStatistics], scheme: Scheme) -> dict[str, float]:
    """Folds the best factors into a dense block and returns the exponent r chosen for each layer.

    `statistics` are rescaled to what the layers' inputs now are.
    """
    chosen = {}
    for fold in folds(block):
        found = statistics[fold.name]
        s, chosen[fold.name] = search_scale(fold.layer.weight, found, scheme)
        fold.apply(s)
        found.moments /= s[:, None] * s
        found.total, found.largest = found.total / s, found.largest / s
    return chosen


def search_scale(weight: Tensor, found: InputStatistics, scheme: Scheme) -> tuple[Tensor, float]:
    """(s (K,), r): the factors whose rounded product with the inputs is nearest to the exact one."""
    check_weight(weight, scheme)
    best, best_r, least = torch.ones(weight.shape[1]), 0.0, torch.inf
    for r in (i / GRID for i in range(GRID)):
        s = found.mean.clamp(min=1e-4).pow(r)
        s = s / (s.max() * s.min()).sqrt()
        rounded = quantize_weight(weight * s, scheme).dequantize() / s
        if (error := output_error(rounded - weight, found.moments)) < least:
            best, best_r, least = s, r, error
    return best, best_r


def clipped(weight: Tensor, moments: Tensor, scheme: Scheme) -> QuantizedWeight:
    """weight (N, K) rounded with the range of each group narrowed where that brings its product with the inputs
    nearer; a group is judged by its own columns' moments."""
    check_weight(weight, scheme)
    N, K = weight.shape
    size = scheme.group or K
    blocks = torch.stack([moments[i : i + size, i : i + size] for i in range(0, K, size)])  # (groups, size, size)
    least, best = torch.full((N, K // size), torch.inf), torch.ones(N, K // size)
    for shrink in SHRINKS:
        scale, zero = integer_scales(weight, scheme, shrink)
        rounded = pack_integers(integer_codes(weight, scale, zero, scheme), scale, zero, scheme).dequantize()
        difference = (rounded - weight).view(N, -1, size).transpose(0, 1)  # (groups, N, size)
        error = ((difference @ blocks) * difference).sum(-1).t()
        better = error < least
        least, best = torch.where(better, error, least), torch.where(better, shrink, best)
    scale, zero = integer_scales(weight, scheme, best)
    return pack_integers(integer_codes(weight, scale, zero, scheme), scale, zero, scheme)
