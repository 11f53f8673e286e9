"""What a running engine has measured of itself, for decisions that weigh one cost against another.

Three rates, each a decayed sum of seconds over a decayed sum of units, so that the last few dozen steps count most:

prefill_token_s   step time for each token computed in a chunk, whatever else was in the step
block_copy_s      seconds to copy one block from host memory back
admission_s       seconds between two admissions while somebody waited

From them: reload a cached prefix, or compute it again? And how long will a new request wait for its first token?
Sources: Qin et al. 2025, "Mooncake" (FAST '25), equation 2, for the first, with both sides measured in place of its
bandwidth and FLOP rate, and section 6 there for refusing early; Little 1961 for the second.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_KEPT = 0.95  # of the past, for each new observation


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
class Pace:
    """Rates of one engine, whose blocks hold `block_size` tokens."""

    block_size: int
    prefill: Rate = field(default_factory=Rate)
    copy: Rate = field(default_factory=Rate)
    admission: Rate = field(default_factory=Rate)

    def observe_step(self, seconds: float, prefill_tokens: int) -> None:
        if prefill_tokens:
            self.prefill.observe(seconds, prefill_tokens)

    def observe_admissions(self, seconds: float, admitted: int, waiting: int) -> None:
        """Of one step: a queue that is empty says nothing about how fast it would move."""
        if waiting or admitted:
            self.admission.observe(seconds, admitted)

    def reload_pays(self, tokens: int) -> bool:
        """Is copying `tokens` cached tokens from host memory faster than computing them? Yes while nothing is known:
        one side is then a copy, the other all of the model's arithmetic."""
        copy, prefill = self.copy.value, self.prefill.value
        if copy is None or prefill is None:
            return True
        return copy * tokens / self.block_size < prefill * tokens

    def predicted_ttft(self, tokens: int, ahead: int) -> float:
        """Seconds until the first token of a request, when `tokens` prompt tokens are to be computed up to the end of
        its own and `ahead` requests wait before it: the longer of computing them and of the queue's moving that far.

        A queue of requests that cannot start for lack of memory shows in the second alone.
        """
        computing = tokens * (self.prefill.value or 0.0)
        queueing = ahead * (self.admission.value or 0.0)
        return max(computing, queueing)
