"""Which weights may stay: a share of all, or N in every M columns. "wanda-2:4" is a method and a pattern."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import SparsityError, short

METHODS = ("magnitude", "wanda", "sparsegpt")
PATTERNS = {"2:4": (2, 4), "4:8": (4, 8)}
EXAMPLES = "magnitude-0.5, wanda-0.6, sparsegpt-0.5, magnitude-2:4, wanda-2:4, sparsegpt-2:4, wanda-4:8"
_NAME = re.compile(rf"(?P<method>{'|'.join(METHODS)})-(?:(?P<pattern>\d+:\d+)|(?P<fraction>\d*\.?\d+))")


@dataclass(frozen=True)
class Sparsity:
    """A method and what it has to leave: `fraction` of the weights become zero, under `pattern` half of every group."""

    method: str
    fraction: float = 0.5
    pattern: str | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise SparsityError(f"method {short(repr(self.method))} is not known; choose one of {', '.join(METHODS)}")
        if self.pattern is not None and self.pattern not in PATTERNS:
            raise SparsityError(f"pattern {short(repr(self.pattern))} is not known; choose 2:4 or 4:8")
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, int | float) or not 0 <= self.fraction <= 1:
            raise SparsityError(f"sparsity is {short(repr(self.fraction))}; give the share of zeros, from 0 to 1")

    @property
    def name(self) -> str:
        return f"{self.method}-{self.pattern or format(self.fraction, 'g')}"

    @property
    def needs_calibration(self) -> bool:
        return self.method != "magnitude"

    @property
    def group(self) -> int:
        """Columns that are decided together and must divide a matrix's; 1 where there is no pattern."""
        return PATTERNS[self.pattern][1] if self.pattern else 1


def parse(name: str | Sparsity) -> Sparsity:
    """Raises SparsityError for a name that says nothing."""
    if isinstance(name, Sparsity):
        return name
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise SparsityError(f"sparsity {short(repr(name))} is not known; write one like {EXAMPLES}")
    if match["pattern"]:
        return Sparsity(match["method"], pattern=match["pattern"])
    return Sparsity(match["method"], float(match["fraction"]))


def smallest(scores: Tensor, count: int) -> Tensor:
    """scores (R, C) -> bool (R, C), True at exactly the `count` lowest of each row; of equals, those to the left."""
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = scores.kthvalue(count, dim=1, keepdim=True).values
    below, ties = scores < threshold, scores == threshold
    missing = count - below.sum(1, keepdim=True)
    return below | (ties & (ties.cumsum(1) <= missing))


def smallest_in_groups(scores: Tensor, pattern: str) -> Tensor:
    """The same for a pattern: of every M columns of a row, the M - N with the lowest scores."""
    keep, size = PATTERNS[pattern]
    return smallest(scores.reshape(-1, size), size - keep).view(scores.shape)
