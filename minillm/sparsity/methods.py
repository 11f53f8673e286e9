"""Three ways to say which weights to lose.

magnitude   the smallest |w|. Asks nothing of the inputs.
wanda       the smallest |w| · ||x||, compared within an output row: a small weight on a loud input is worth more than
            a large one on a quiet input. The others stay as they are. Sun et al. 2023 (arXiv 2306.11695), section 3.
sparsegpt   the smallest loss w² / [H^-1]_jj, and every weight that stays makes up for those that go: GPTQ's walk over
            the columns, with zero in place of a rounded value. Frantar and Alistarh 2023 (arXiv 2301.00774), section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import SparsityError
from ..quantization.gptq import DAMPING, inverse_factor, settle_columns
from .pattern import Sparsity, smallest, smallest_in_groups

MASK_BLOCK = 128  # columns whose zeros are chosen together where there is no pattern (SparseGPT, section 3.3)


def magnitude(weight: Tensor, wanted: Sparsity) -> Tensor:
    """weight (N, K) -> the same with its smallest numbers zero: of the matrix, or of each group of a pattern."""
    size = weight.abs()
    if wanted.pattern:
        lost = smallest_in_groups(size, wanted.pattern)
    else:
        lost = smallest(size.view(1, -1), round(wanted.fraction * size.numel())).view(size.shape)
    return weight.masked_fill(lost, 0)


def wanda(weight: Tensor, moments: Tensor, wanted: Sparsity) -> Tensor:
    """weight (N, K), moments X^T X (K, K) of its inputs -> the same with the lowest |w| · ||x|| of each row zero."""
    scores = weight.abs() * moments.diagonal().sqrt()
    if wanted.pattern:
        return weight.masked_fill(smallest_in_groups(scores, wanted.pattern), 0)
    return weight.masked_fill(smallest(scores, round(wanted.fraction * weight.shape[1])), 0)


def sparsegpt(weight: Tensor, moments: Tensor, wanted: Sparsity, damping: float = DAMPING) -> Tensor:
    """weight (N, K), moments X^T X (K, K) -> a sparse matrix whose product with such inputs is near WX.

    Zeros are chosen from weights that have already taken over the errors to their left: for each group of a pattern
    when its first column comes up, else for 128 columns at a time, over all rows together.
    Raises SparsityError for moments that are not finite or not of K columns.
    """
    K = weight.shape[1]
    if moments.shape != (K, K) or not moments.isfinite().all():
        raise SparsityError(f"moments have shape {tuple(moments.shape)} or hold NaN; ({K}, {K}) finite is needed")
    work, H = weight.to(torch.float64, copy=True), moments.to(torch.float64, copy=True)
    dead = H.diagonal() == 0  # inputs that never come: their weights cannot matter, and are the first to go
    H[dead, dead] = 1
    work[:, dead] = 0
    upper = inverse_factor(H, damping)
    lost = torch.zeros_like(work, dtype=torch.bool)
    width = wanted.group if wanted.pattern else MASK_BLOCK

    def settle(j: int) -> Tensor:
        if j % width == 0:
            columns = slice(j, min(j + width, K))
            lost[:, columns] = _cheapest(work[:, columns] ** 2 / upper.diagonal()[columns] ** 2, wanted)
        return work[:, j].masked_fill(lost[:, j], 0)

    return settle_columns(work, upper, settle).to(weight.dtype)


def _cheapest(loss: Tensor, wanted: Sparsity) -> Tensor:
    """loss (N, width) -> bool, True where a weight goes."""
    if wanted.pattern:
        return smallest_in_groups(loss, wanted.pattern)
    return smallest(loss.reshape(1, -1), round(wanted.fraction * loss.numel())).view(loss.shape)
