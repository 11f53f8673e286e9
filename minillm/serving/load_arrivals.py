"""When requests arrive: the open-loop half of a load.

In an open loop arrivals do not wait for answers, as users who do not know of each other do not: a server that falls
behind gets a queue. In a closed loop a fixed number of clients each wait for an answer before they ask again, so a
slow server is asked less and its queue never shows. The times here are for open loops; a closed loop needs only a
number of clients (`load_run.run_load(concurrency=...)`).
"""

from __future__ import annotations

import math

import numpy as np

from .load_record import MOST_REQUESTS, LoadError, check_seed

ARRIVALS = ("poisson", "constant", "bursty", "batch")


def arrival_times(
    kind: str = "poisson",
    rate: float = 1.0,
    count: int | None = None,
    duration_s: float | None = None,
    seed: int = 0,
    cv: float = 2.0,
) -> list[float]:
    """Seconds from the start of the run, ascending; as many as `count` and none from `duration_s` on.

    kind: "poisson" has exponential gaps, the arrivals of many independent users; "constant" has equal gaps, and is
    kinder than any real load; "bursty" has gamma gaps with the coefficient of variation `cv` (standard deviation over
    mean: 1 is Poisson, 2 to 4 comes in bursts), the model of AlpaServe (Li et al., OSDI 2023, section 6) and of
    `vllm bench serve --burstiness`, whose value is the gamma's shape, 1 / cv²; "batch" has all at 0, as an offline
    job does. rate: requests a second, on average; "batch" ignores it. The same seed gives the same times. Raises
    LoadError.
    """
    check_seed(seed)
    _check(kind, rate, count, duration_s, cv)
    if kind == "batch":
        return [0.0] * (count if count is not None else 0)
    room = count if count is not None else math.ceil(2 * rate * duration_s + 100)
    rng, times = np.random.default_rng(seed), np.empty(0)
    while times.size == 0 or (count is None and times[-1] < duration_s):
        times = np.concatenate([times, _more(rng, kind, rate, room, cv, times)])
    return [float(t) for t in times[:count] if duration_s is None or t < duration_s]


def _more(rng: np.random.Generator, kind: str, rate: float, count: int, cv: float, before: np.ndarray) -> np.ndarray:
    """The next `count` times."""
    if kind == "constant":
        return (len(before) + np.arange(count)) / rate
    if kind == "poisson":
        gaps = rng.exponential(1 / rate, count)
    else:
        gaps = rng.gamma(1 / cv**2, cv**2 / rate, count)  # mean shape · scale = 1 / rate, deviation cv / rate
    return (before[-1] if before.size else 0.0) + np.cumsum(gaps)


def _check(kind: str, rate: float, count: int | None, duration_s: float | None, cv: float) -> None:
    if kind not in ARRIVALS:
        raise LoadError(f"arrivals {kind!r} are unknown; choose among {', '.join(ARRIVALS)}")
    if kind != "batch" and not (0 < rate < math.inf):
        raise LoadError(f"rate is {rate}; it must be a number of requests a second above 0")
    if kind == "bursty" and not (0 < cv < math.inf):
        raise LoadError(f"cv is {cv}; it must be a number above 0, and 1 is Poisson")
    if count is None and (duration_s is None or kind == "batch"):
        raise LoadError("nothing says how many requests; give a count" + (" or a duration" if kind != "batch" else ""))
    if count is not None and count < 1:
        raise LoadError(f"the number of requests is {count}; it must be 1 or more")
    if duration_s is not None and not (0 < duration_s < math.inf):
        raise LoadError(f"duration is {duration_s} s; it must be a number above 0")
    expected = count if count is not None else rate * duration_s
    if expected > MOST_REQUESTS:
        raise LoadError(f"the load would have more than {MOST_REQUESTS} requests; lower the count, rate or duration")
