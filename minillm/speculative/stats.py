"""What speculation did: counted as it happens, so that every ratio can be read off."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SpeculationStats:
    """Counts over verifications with drafts. `offered[i]` and `kept[i]` are of place i in a chain: the drafts that were
    judged there (all before them were kept), and those kept."""

    steps: int = 0
    plain_steps: int = 0  # of sequences for which nothing was drafted, the one that ends the prompt among them
    drafted: int = 0
    accepted: int = 0
    offered: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    def record(self, drafted: int, accepted: int) -> None:
        """One sequence's part of a step."""
        if not drafted:
            self.plain_steps += 1
            return
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        places = min(drafted, accepted + 1)
        for counts in (self.offered, self.kept):
            counts += [0] * (places - len(counts))
        for place in range(places):
            self.offered[place] += 1
            self.kept[place] += place < accepted

    @property
    def acceptance(self) -> float | None:
        """α: the share kept among drafts that were judged. What lies behind a rejection was not judged."""
        judged = sum(self.offered)
        return self.accepted / judged if judged else None

    @property
    def tokens_per_step(self) -> float | None:
        """Accepted and one more, over steps with drafts."""
        return (self.accepted + self.steps) / self.steps if self.steps else None

    @property
    def per_position(self) -> list[float]:
        """The share kept at each place, of those judged there."""
        return [kept / offered for kept, offered in zip(self.kept, self.offered, strict=True)]
