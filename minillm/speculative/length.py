"""How many drafts are worth their rows: from what a sequence had accepted, and what rows and drafts cost here.

A step of R rows takes step(R) seconds: measured for R, or else by a line, fixed + row · R. If n sequences share it and
each drafts γ tokens, one of which is accepted with probability α if all before it were, then a sequence pays

    step(n · (1 + γ)) / n + draft · γ  seconds          and gets          (1 - α^(γ+1)) / (1 - α)  tokens

and the best γ has the most tokens a second. One sequence alone leaves most of a step's time to the weights, so rows are
nearly free; with many, the weights are shared already, each row costs its arithmetic, and γ becomes 0 by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..analysis.speculation import expected_tokens
from ..pace import Rate, StepLine

_KEPT = 0.8  # of a sequence's past, for each verification
_PROBE = 16  # steps without drafts, after which one is tried: what was bad may have become better
_HICCUP = 4.0  # times what the line says, to which a step is cut that something else held up
_ROWS = 16  # the scale on which small steps differ in rows


@dataclass
class Trust:
    """Of one sequence. It begins as if 2 of 3 drafts had been kept."""

    kept: float = 2.0
    judged: float = 3.0
    idle: int = 0

    @property
    def alpha(self) -> float:
        return self.kept / self.judged

    def observe(self, drafted: int, accepted: int) -> None:
        if drafted:
            self.kept = self.kept * _KEPT + accepted
            self.judged = self.judged * _KEPT + min(drafted, accepted + 1)


class Price:
    """What rows and drafts cost, measured on steps without prompts in them."""

    def __init__(self) -> None:
        self.step, self.draft = StepLine(_ROWS), Rate()
        self.by_rows: dict[int, Rate] = {}  # a kernel for few rows ends somewhere, and no line bends there

    def observe(self, seconds: float, rows: int) -> None:
        self.step.observe(rows, seconds)
        self.by_rows.setdefault(rows, Rate()).observe(min(seconds, _HICCUP * self.step.predict(rows)), 1)

    def seconds(self, rows: int) -> float:
        """Of a step of so many rows."""
        measured = self.by_rows.get(rows)
        return self.step.predict(rows) if measured is None else measured.value

    def observe_drafts(self, seconds: float, drafts: int) -> None:
        if drafts:
            self.draft.observe(seconds, drafts)

    def best(self, alpha: float, most: int, sequences: int = 1) -> int:
        """γ from 0 to `most`. At most doubles the rows that were measured: what is dear is found out cheaply."""
        widest = max(self.by_rows, default=sequences)
        most = min(most, max(0, 2 * widest // sequences - 1))
        if not self.step.weight:
            return most
        draft = self.draft.value or 0.0

        def pace(count: int) -> float:
            return expected_tokens(alpha, count) / (self.seconds(sequences * (1 + count)) / sequences + draft * count)

        return max(range(most + 1), key=pace)


def choose(trust: Trust, price: Price, most: int, sequences: int = 1) -> int:
    """The best length, and now and then one draft where that is none."""
    count = price.best(trust.alpha, most, sequences)
    trust.idle = 0 if count else trust.idle + 1
    if trust.idle < _PROBE:
        return count
    trust.idle = 0
    return min(1, most)
