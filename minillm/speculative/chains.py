"""Chains of several sequences drafted together: one pass of whatever guesses for each place in them.

A draft model and an EAGLE head differ in what they read; how their caches stand side by side, how a draft is drawn and
when a chain ends is the same, and stands here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..kv_cache import ContiguousCache
from ..sampling import inverse_cdf, probabilities, uniform
from .proposal import NOTHING, Context, Proposal, Proposer
from .verification import DRAFT

FIRST = 64  # tokens that a cache has room for at first


class Together:
    """Caches of several sequences in one pass: the rows of each attend within its own."""

    def __init__(self, caches: Sequence[ContiguousCache], counts: Sequence[int]) -> None:
        self.caches, self.counts = caches, counts
        self.fresh = all(cache.fresh for cache in caches)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, scale: float | None = None, keep=None):
        found, first = [], 0
        for cache, count in zip(self.caches, self.counts, strict=True):
            rows = slice(first, first + count)
            own = [None if x is None else x[rows] for x in (q, k, v, keep)]
            found.append(cache.attend(layer, *own[:3], scale, own[3]))
            first += count
        return torch.cat(found)

    def advance(self, count: int) -> None:
        for cache, own in zip(self.caches, self.counts, strict=True):
            cache.advance(own)


def side_by_side(caches: Sequence[ContiguousCache], counts: Sequence[int]) -> ContiguousCache | Together:
    """A view for one pass, in which cache i gets the next counts[i] rows."""
    return caches[0] if len(caches) == 1 else Together(caches, counts)


def with_room(cache: ContiguousCache, tokens: int) -> ContiguousCache:
    """The cache, or a larger copy: twice as much as is needed, so that few sequences are ever copied twice."""
    return cache if cache.max_tokens >= tokens else copied(cache, 2 * tokens)


def copied(cache: ContiguousCache, max_tokens: int) -> ContiguousCache:
    new = ContiguousCache(cache.config, max_tokens, cache.storage.dtype, cache.storage.device, cache.attention)
    new.storage[:, :, : cache.length] = cache.storage[:, :, : cache.length]
    new.length = cache.length
    return new


@dataclass
class Chain:
    """A proposal being made, of at most `most` tokens; `held` is what its proposer keeps of the sequence."""

    context: Context
    held: Any
    known: list[int]
    most: int
    tokens: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)


class ChainProposer(Proposer):
    """Draws from a distribution under the request's own parameters, or takes the likeliest tokens.

    `sampled` drafts are kept more often at high temperatures: by sum min(p, q) instead of p at the draft's favourite.
    Subclasses say how a chain begins and what follows it.
    """

    def __init__(self, vocab_size: int, eos_ids: Iterable[int] = (), sampled: bool = True) -> None:
        self.vocab_size, self.eos_ids, self.sampled = vocab_size, tuple(eos_ids), sampled

    @torch.inference_mode()
    def propose(self, contexts: Sequence[Context]) -> list[Proposal]:
        chains = [self._begin(context) for context in contexts]
        while growing := [c for c in chains if c is not None and len(c.tokens) < c.most]:
            for chain, row in zip(growing, self._logits(growing), strict=True):
                self._draw(chain, row)
        for chain in chains:
            if chain is not None:
                self._end(chain)
        return [NOTHING if c is None else Proposal(c.tokens, torch.stack(c.probs) if c.probs else None) for c in chains]

    def _begin(self, context: Context) -> Chain | None:
        """None where nothing can be guessed."""
        raise NotImplementedError

    def _logits(self, chains: Sequence[Chain]) -> Tensor:
        """(B, vocab_size): of what follows all that each chain holds, in one pass."""
        raise NotImplementedError

    def _end(self, chain: Chain) -> None:
        """The proposal is made; which of its tokens are kept is not known yet."""

    def _draw(self, chain: Chain, logits: Tensor) -> None:
        context, drafted = chain.context, chain.tokens
        if context.params.is_greedy or not self.sampled:
            drafted.append(int(logits.argmax()))
            return
        output = [*context.output_ids, *drafted]
        q = probabilities(logits, context.params, context.prompt_ids, output, self.eos_ids)
        u = uniform(context.params.seed, len(context.prompt_ids) + len(output), context.sequence, DRAFT)
        drafted.append(inverse_cdf(q, u))
        chain.probs.append(q)
