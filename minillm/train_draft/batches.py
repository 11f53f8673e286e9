"""From texts to batches: sequences of like length together, so that little is padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from .sampling_stage import Texts

WINDOW = 512  # sequences that are sorted by length together; batches of them are shuffled again


class Example(NamedTuple):
    """One text: tokens (T,) int32, and for each position from `first` on its candidates' ids (A, k) int32 and
    log-probabilities. The first position that counts is the one whose next token begins the answer: nobody speculates
    on a prompt."""

    tokens: Tensor
    first: int
    ids: Tensor
    logprobs: Tensor


class Batch(NamedTuple):
    """B texts. tokens (B, S) int64, zeros behind the end of each; real (B · S,) booleans, True for the N positions
    that count; ids (N, k) int64 and probs (N, k) float32, which sum to one: candidates after each of them."""

    tokens: Tensor
    real: Tensor
    ids: Tensor
    probs: Tensor


def split(texts: Texts) -> list[Example]:
    lengths = texts.lengths.tolist()
    columns = (column.split(lengths) for column in (texts.tokens, texts.top_ids, texts.top_logprobs))
    firsts = (texts.starts - 1).tolist()
    return [
        Example(tokens, first, ids[first:], logprobs[first:])
        for tokens, ids, logprobs, first in zip(*columns, firsts, strict=True)
    ]


def collate(examples: Sequence[Example]) -> Batch:
    tokens = torch.nn.utils.rnn.pad_sequence([e.tokens.long() for e in examples], batch_first=True)  # (B, S)
    lengths, firsts = (
        torch.tensor(n)[:, None] for n in ([len(e.tokens) for e in examples], [e.first for e in examples])
    )
    at = torch.arange(tokens.shape[1])
    real = (at >= firsts) & (at < lengths)
    probs = (
        torch.cat([e.logprobs for e in examples]).float().softmax(-1)
    )  # what lies outside the candidates is left out
    return Batch(tokens, real.flatten(), torch.cat([e.ids for e in examples]).long(), probs)


def order(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of each batch of one epoch, every text once; a function of its arguments alone."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    shuffled = torch.randperm(len(lengths), generator=generator).tolist()
    found = []
    for start in range(0, len(shuffled), WINDOW):
        found += _cut(sorted(shuffled[start : start + WINDOW], key=lengths.__getitem__), lengths, batch_tokens)
    return [found[i] for i in torch.randperm(len(found), generator=generator).tolist()]


def _cut(indices: Iterable[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """A batch ends with the text that brings it to `batch_tokens`."""
    found, batch, held = [], [], 0
    for i in indices:
        batch.append(i)
        held += lengths[i]
        if held >= batch_tokens:
            found.append(batch)
            batch, held = [], 0
    return [*found, batch] if batch else found


def batches(examples: Sequence[Example], batch_tokens: int, seed: int) -> Iterator[list[int]]:
    """Epoch after epoch, without end."""
    lengths = [len(example.tokens) for example in examples]
    for epoch in count():
        yield from order(lengths, batch_tokens, seed, epoch)
