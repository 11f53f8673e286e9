"""What the engine did, in order: one log that figures, metrics and tests read.

Kinds and what they carry beside step, time and request:

refused      predicted_ttft_s                     its first token would have come too late
added        tokens, priority                     the request is in the queue
admitted     cached, tokens                       it runs; so many of its tokens came from the prefix cache
scheduled    requests, tokens, held, cached, free  one event a step: who computes how many tokens; blocks by state
preempted    how, lost                            "recompute" or "swap"; tokens to compute again
resumed      how, cached, tokens                  as admitted, after a preemption
forked       children                             n > 1: sequences that now share the prompt's blocks
allocated    blocks                               block ids, until now nobody's
shared       blocks                               one holder more for each: a prefix hit, or a fork
published    block                                it is full and written; when released it is kept, not freed
withdrawn    block                                it is kept no longer
copied       pairs                                copy-on-write, (source, target)
evicted      block                                a cached block's contents were given up
offloaded    pairs                                copies of evicted blocks go to host memory, (block, host block)
reloaded     tokens                               so many of its tokens are copied back from there
released     blocks                               the sequence let go of them; another may still hold them
verified     requests, drafted, kept              one event a step with drafts: how many, and how many were accepted
sampled      requests, tokens                     one event a step: who drew which token, once for each token
finished     reason, tokens                       stop, length, abort or error

A request is named by its id; of n sequences the further ones are "id/1", "id/2" and so on.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Event(NamedTuple):
    """`time` is seconds of the log's clock; `data` depends on the kind."""

    step: int
    time: float
    kind: str
    request: str | None
    data: dict[str, Any]


class EventLog:
    """Keeps the newest `keep` events (None: all of them, 0: none) and hands each to the listeners as it happens.

    A listener only watches: one that raises is taken off, with a warning, and the engine goes on.
    """

    def __init__(self, keep: int | None = 20_000, clock: Callable[[], float] = time.perf_counter) -> None:
        self.step, self.clock = 0, clock
        self.listeners: list[Callable[[Event], None]] = []
        self._events: deque[Event] = deque(maxlen=keep)

    def append(self, kind: str, request: str | None = None, **data: Any) -> None:
        event = Event(self.step, self.clock(), kind, request, data)
        self._events.append(event)
        for listener in tuple(self.listeners):
            try:
                listener(event)
            except Exception as error:
                self.listeners.remove(listener)
                warnings.warn(f"a listener of the event log failed and was taken off: {error!r}", stacklevel=2)

    def of(self, *kinds: str, request: str | None = None) -> list[Event]:
        """The kept events of these kinds (all kinds if none is named), of one request or of all."""
        return [e for e in self._events if (not kinds or e.kind in kinds) and request in (None, e.request)]

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def __len__(self) -> int:
        return len(self._events)
