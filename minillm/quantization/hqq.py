"""HQQ: zero points chosen so that most weights come out right, without looking at any input.

Minimises a norm below 1 of W - (codes - zero) · scale, which forgives a few large errors, by alternating between the
errors it would forgive (a shrinkage with a closed form) and the zero point (a mean). Scales stay those of rounding to
nearest. Source: Badri and Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models", equations 5-7.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .scheme import Scheme
from .weight import SCALE_DTYPE, QuantizedWeight, check_weight, integer_range, integer_scales, pack_integers

STEPS, NORM, BETA, GROWTH = 20, 0.7, 10.0, 1.01


def hqq(weight: Tensor, scheme: Scheme) -> QuantizedWeight:
    """weight (N, K) -> codes with a fractional zero point for each group, kept in bfloat16."""
    scheme = replace(scheme, symmetric=False)
    check_weight(weight, scheme)
    weight = weight.to(torch.float32)
    scale, zero = integer_scales(weight, scheme)
    grouped = weight.view(*scale.shape, -1)
    step, low, high = scale.to(torch.float32)[..., None], *integer_range(scheme)
    zero, beta = zero.to(torch.float32)[..., None], BETA
    best, best_error = zero, torch.inf
    for _ in range(STEPS):
        zero = zero.to(SCALE_DTYPE).to(torch.float32)
        codes = (grouped / step + zero).round().clamp(low, high)
        error = grouped - (codes - zero) * step
        if (size := error.abs().pow(NORM).mean().item()) < best_error:
            best, best_error = zero, size
        forgiven = error.sign() * (error.abs() - error.abs().clamp(min=1e-8).pow(NORM - 1) / beta).clamp(min=0)
        zero = (codes - (grouped - forgiven) / step).mean(-1, keepdim=True)
        beta *= GROWTH
    codes = (grouped / step + best).round().clamp(low, high)
    return pack_integers(codes.view_as(weight), scale, best[..., 0].to(SCALE_DTYPE), scheme)
