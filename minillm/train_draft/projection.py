"""Where the draft's embedding starts: the target's own, seen through the d directions that its predictions use most.

The target's logits are E h, with E (V, D) its tied embedding and h (D,) its final normed hidden state. Directions of h
are not alike: a change δ moves the distribution by about ½ δᵀ F δ in KL, with F = Eᵀ (diag(p) - p pᵀ) E averaged
over positions, the Fisher information. So with F = L Lᵀ, principal components are taken of Lᵀ h rather than of h.
"""

from __future__ import annotations

import torch
from torch import Tensor

LIKELIEST = 512  # tokens of a position that its Fisher information is summed over
POSITIONS = 512


def project_embedding(embedding: Tensor, hidden: Tensor, dim: int) -> Tensor:
    """embedding (V, D), hidden (N, D) after the target's final norm -> (V, dim), such that its product with some
    whitened state z (dim,) is the best approximation of the logits E h."""
    metric = fisher(embedding, hidden[:: max(1, len(hidden) // POSITIONS)])
    ridge = 1e-4 * metric.diagonal().mean() * torch.eye(len(metric))
    root = torch.linalg.cholesky((metric + ridge).double())
    seen = hidden.double() @ root
    _, values, directions = torch.linalg.svd(seen, full_matrices=False)
    scale = values[:dim] / len(hidden) ** 0.5  # root mean square of each component
    back = torch.linalg.solve_triangular(root.t(), directions[:dim].t() * scale, upper=True)  # z -> h, (D, dim)
    return (embedding.double() @ back).float()


def fisher(embedding: Tensor, hidden: Tensor) -> Tensor:
    """Mean over the rows of hidden (N, D) of Eᵀ (diag(p) - p pᵀ) E, p being the LIKELIEST tokens' -> (D, D)."""
    total = torch.zeros(embedding.shape[1], embedding.shape[1])
    for h in hidden:
        probs, ids = (embedding @ h).softmax(-1).topk(min(LIKELIEST, len(embedding)))
        rows = embedding[ids]  # (512, D)
        mean = probs @ rows
        total += (rows * probs[:, None]).t() @ rows - torch.outer(mean, mean)
    return total / len(hidden)
