"""Cross-entropy against the target's likeliest tokens, over a part of the vocabulary that stands for all of it.

The head of a small model is most of its arithmetic: 49,152 rows of 128 against about a quarter of that in all layers
together. But a batch names only some thousand candidates. So the sum below the softmax takes these exactly and a
random sample of all others, each weighted for those it stands for: sampled softmax (Jean et al. 2015, arXiv
1412.2007, section 3). The loss and both gradients are made in one pass over slices of rows, in bfloat16, where a
slice's logits become probabilities and these their own gradient, in place.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

SLICE = 512  # rows at once, so that a slice's probabilities stay near the CPU


class Part(NamedTuple):
    """M tokens of the vocabulary: their ids (M,) ascending, and log of how many each stands for (M,)."""

    ids: Tensor
    log_weight: Tensor


def vocabulary_part(candidates: Tensor, vocab_size: int, others: int, seed: int) -> Part:
    """The candidates (N, k), each for itself, and `others` more, or all there are, drawn with `seed`."""
    named = torch.zeros(vocab_size, dtype=torch.bool)
    named[candidates.flatten()] = True
    rest = (~named).nonzero().squeeze(-1)
    generator = torch.Generator().manual_seed(seed)
    drawn = rest[torch.randperm(len(rest), generator=generator)[:others]]
    log_weight = torch.zeros(vocab_size)
    log_weight[drawn] = math.log(len(rest) / max(1, len(drawn))) if len(rest) else 0.0
    named[drawn] = True
    ids = named.nonzero().squeeze(-1)
    return Part(ids, log_weight[ids])


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, embedding: Tensor, ids: Tensor, probs: Tensor, part: Part) -> Tensor:
        h16, e16 = hidden.to(torch.bfloat16), embedding[part.ids].to(torch.bfloat16)
        column = torch.searchsorted(part.ids, ids)  # (N, k) of each candidate among the part's
        d_hidden, d_rows = torch.empty_like(hidden), torch.zeros(e16.shape)
        total, log_weight = hidden.new_zeros(()), part.log_weight.to(torch.bfloat16)
        for start in range(0, len(hidden), SLICE):
            rows = slice(start, start + SLICE)
            q = torch.addmm(log_weight, h16[rows], e16.t()).softmax(-1)  # (rows, M), summed in float32 inside
            found = q.gather(1, column[rows]).float().clamp_min(1e-30)
            total -= (probs[rows] * found.log()).sum()
            q.scatter_add_(1, column[rows], -probs[rows].to(torch.bfloat16))  # now the gradient of the logits
            d_hidden[rows] = q @ e16
            d_rows += (q.t() @ h16[rows]).float()
        d_embedding = torch.zeros_like(embedding).index_copy_(0, part.ids, d_rows)
        ctx.save_for_backward(d_hidden, d_embedding)
        ctx.rows = len(hidden)
        return total / len(hidden)

    @staticmethod
    def backward(ctx, d_loss: Tensor):
        d_hidden, d_embedding = ctx.saved_tensors
        scale = d_loss / ctx.rows
        return d_hidden * scale, d_embedding * scale, None, None, None


def head_loss(hidden: Tensor, embedding: Tensor, ids: Tensor, probs: Tensor, part: Part) -> Tensor:
    """Mean over N positions of -Σ p log q, q = softmax(hidden Eᵀ) estimated over `part`, which holds all of `ids`.

    hidden (N, d), embedding (V, d) float32; ids (N, k) int64 and probs (N, k) the candidates' probabilities, which sum
    to one.
    """
    return _HeadLoss.apply(hidden, embedding, ids, probs, part)
