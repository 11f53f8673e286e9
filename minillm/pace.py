"""What a running engine has measured of itself, for decisions that weigh one cost against another.

step        seconds ≈ fixed + per_token · tokens, a line through the steps so far
copy        seconds to copy one block from host memory back
admission   seconds between two admissions while somebody waited

From them: reload a cached prefix, or compute it again? And how long will a new request wait for its first token?
All are decayed sums, so that the last few dozen steps count most, and what is no longer seen is forgotten.
Sources: Qin et al. 2025, "Mooncake" (FAST '25), equation 2, for the first, with both sides measured in place of its
bandwidth and FLOP rate, and section 6 there for refusing early; Little 1961 for the second.
"""

from __future__ import annotations

from dataclasses import dataclass

_KEPT = 0.95  # of the past, for each new observation
_KNOWN = 5.0  # steps' weight from which on one that takes far longer than the line says is a hiccup of the machine
_HICCUP = 8.0  # times the line's prediction, to which such a step is cut


@dataclass
class Rate:
    """Seconds for one unit."""

    seconds: float = 0.0
    units: float = 0.0

    def observe(self, seconds: float, units: float) -> None:
        self.seconds = self.seconds * _KEPT + seconds
        self.units = self.units * _KEPT + units

    @property
    def value(self) -> float | None:
        """None before the first observation."""
        return self.seconds / self.units if self.units else None


@dataclass
class StepLine:
    """Least squares of seconds over tokens. `budget` is the most tokens that a step has.

    The slope is held to zero by a hundredth of budget²: small steps that all look alike say nothing about a large one,
    and a large one that lies far back says less and less. So nobody is refused for ever because of what once was slow.
    """

    budget: int
    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        if self.weight > _KNOWN:
            seconds = min(seconds, _HICCUP * self.predict(tokens))
        terms = {
            "weight": 1.0,
            "tokens": tokens,
            "seconds": seconds,
            "squares": tokens**2,
            "products": tokens * seconds,
        }
        for name, term in terms.items():
            setattr(self, name, getattr(self, name) * _KEPT + term)

    @property
    def per_token(self) -> float:
        if not self.weight:
            return 0.0
        spread = self.squares - self.tokens**2 / self.weight
        together = self.products - self.tokens * self.seconds / self.weight
        return max(0.0, together / (spread + 0.01 * self.budget**2))

    @property
    def fixed(self) -> float:
        return max(0.0, (self.seconds - self.per_token * self.tokens) / self.weight) if self.weight else 0.0

    def predict(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens


class Pace:
    """Of one engine, whose blocks hold `block_size` tokens and whose steps compute up to `budget`."""

    def __init__(self, block_size: int, budget: int = 512) -> None:
        self.block_size, self.budget = block_size, budget
        self.step, self.copy, self.admission = StepLine(budget), Rate(), Rate()

    def observe_step(self, seconds: float, tokens: int) -> None:
        self.step.observe(tokens, seconds)

    def observe_admissions(self, seconds: float, admitted: int, waiting: int) -> None:
        """Of one step: a queue that is empty says nothing about how fast it would move."""
        if waiting or admitted:
            self.admission.observe(seconds, admitted)

    def reload_pays(self, tokens: int) -> bool:
        """Is copying `tokens` cached tokens from host memory faster than computing them, at a full step's price? Yes
        while nothing is known: one side is a copy, the other all of the model's arithmetic."""
        if self.copy.value is None or not self.step.weight:
            return True
        per_token = self.step.per_token + self.step.fixed / self.budget
        return self.copy.value * tokens / self.block_size < per_token * tokens

    def predicted_ttft(self, tokens: int, turns: int, running: int = 0) -> float:
        """Seconds until the first token of a request, when `tokens` prompt tokens are to be computed up to the end of
        its own, in steps that `running` decodes share, and its admission is the `turns`-th from now: the longer of
        computing and of the queue's moving that far.

        A queue of requests that cannot start for lack of memory shows in the second alone.
        """
        steps = -(-tokens // max(1, self.budget - running))
        computing = steps * self.step.fixed + (tokens + steps * running) * self.step.per_token
        queueing = turns * (self.admission.value or 0.0)
        return max(computing, queueing)
