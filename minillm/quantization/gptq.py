"""GPTQ: rounding as least squares. Each rounded column's error is made up for by the columns not rounded yet.

What matters is not ||W' - W|| but ||W'X - WX||, the error on the inputs the layer gets; with H = 2XX^T it is
tr((W' - W) H (W' - W)^T) / 2. Rounding column j by d moves the optimum of the columns after it by
-d / [H^-1]_jj · [H^-1]_j,j+1.. , and the Cholesky factor of H^-1 gives all those rows at once.

Source: Frantar et al. 2022 (arXiv 2210.17323), algorithm 1; static groups under act-order as in later releases.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import QuantizationError
from .scheme import Scheme
from .weight import QuantizedWeight, check_weight, integer_codes, integer_scales, pack_integers

BLOCK = 32  # columns whose updates stay local before the rest of the matrix sees them
DAMPING = 0.01  # of the mean diagonal
_MOST_DAMPING = 10.0


def gptq(
    weight: Tensor, moments: Tensor, scheme: Scheme, damping: float = DAMPING, act_order: bool = True
) -> QuantizedWeight:
    """weight (N, K), moments X^T X (K, K) of its inputs -> codes whose product with such inputs is nearest to WX.

    act_order rounds the columns with the largest inputs first, while there are still others to make up for them;
    scales are then those of the unrounded groups, since a group's columns no longer come one after another.
    Raises QuantizationError for moments that are not finite or not of K columns.
    """
    check_weight(weight, scheme)
    K = weight.shape[1]
    if moments.shape != (K, K) or not moments.isfinite().all():
        raise QuantizationError(f"moments have shape {tuple(moments.shape)} or hold NaN; ({K}, {K}) finite is needed")
    work, H = weight.to(torch.float64, copy=True), moments.to(torch.float64, copy=True)
    dead = H.diagonal() == 0  # inputs that never come: their weights cannot matter
    H[dead, dead] = 1
    work[:, dead] = 0
    order = H.diagonal().argsort(descending=True) if act_order else torch.arange(K)
    upper = inverse_factor(H[order][:, order], damping)
    scale, zero = integer_scales(work.to(torch.float32), scheme)
    codes = _round_columns(work[:, order], upper, order, scale, zero, scheme, regroup=not act_order)
    codes = codes[:, order.argsort()]
    return pack_integers(codes, scale, zero, scheme)


def inverse_factor(H: Tensor, damping: float) -> Tensor:
    """Upper U with U^T U = H^-1. The damping rises tenfold until the factorisation succeeds (AutoGPTQ issue 708)."""
    eye = torch.eye(len(H), dtype=H.dtype)
    while damping <= _MOST_DAMPING:
        lower, failed = torch.linalg.cholesky_ex(H + damping * H.diagonal().mean() * eye)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return upper
        damping = 10 * max(damping, 1e-4)
    raise QuantizationError("the inputs' second moments cannot be factorised; calibrate on more, or other, text")


def settle_columns(work: Tensor, upper: Tensor, settle: Callable[[int], Tensor]) -> Tensor:
    """Fixes the columns of `work` (N, K) from left to right; each one's error moves all that are still free.

    settle(j) says what column j becomes (N,), from `work` as it is by then: optimal, given the columns before it.
    `work` is used up. upper: of `inverse_factor`. Returns the settled matrix, in the type of `work`.
    """
    N, K = work.shape
    settled = torch.empty_like(work)
    for first in range(0, K, BLOCK):
        last = min(first + BLOCK, K)
        errors = work.new_empty(N, last - first)
        for j in range(first, last):
            settled[:, j] = settle(j)
            error = (work[:, j] - settled[:, j]) / upper[j, j]
            work[:, j + 1 : last] -= error[:, None] * upper[j, j + 1 : last]
            errors[:, j - first] = error
        work[:, last:] -= errors @ upper[first:last, last:]
    return settled


def _round_columns(
    work: Tensor, upper: Tensor, order: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme, regroup: bool
) -> Tensor:
    """Codes (N, K) in the order given. `work` is used up; with `regroup`, scale and zero are set anew (in place) when
    a group begins, from columns that have taken over earlier ones' errors."""
    N, K = work.shape
    size = scheme.group or K
    codes = torch.empty(N, K)

    def settle(j: int) -> Tensor:
        group = int(order[j]) // size
        if regroup and j % size == 0:
            fresh, fresh_zero = integer_scales(work[:, j : j + size].to(torch.float32), scheme)
            scale[:, group] = fresh[:, 0]
            if zero is not None:
                zero[:, group] = fresh_zero[:, 0]
        column = slice(group, group + 1)
        offset = None if zero is None else zero[:, column]
        codes[:, j] = integer_codes(work[:, j : j + 1].to(torch.float32), scale[:, column], offset, scheme)[:, 0]
        value = codes[:, j] - (0 if zero is None else zero[:, group].to(torch.float32))
        return value * scale[:, group].to(torch.float64)

    settle_columns(work, upper, settle)
    return codes
