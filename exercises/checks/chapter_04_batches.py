"""Chapter 04's second and third exercise: batches. The right answers come from trying every one, in exact fractions."""

from __future__ import annotations

import random
from fractions import Fraction

from exercises import Exercise, Judge, Mistake

# --- turning_batch


def tried(flops: float, weights: float, kv: float, peak: float, bandwidth: float, most: int = 3000) -> int | None:
    """Every batch up to `most`, in exact arithmetic."""
    flops, weights, kv, peak, bandwidth = map(Fraction, (flops, weights, kv, peak, bandwidth))
    return next((b for b in range(1, most) if b * flops / peak > (weights + b * kv) / bandwidth), None)


def without_caches(turning_batch, judge: Judge) -> None:
    hint = "Likely mistake: the ridge (peak / bandwidth) upside down, or bytes and FLOPs exchanged."
    judge.equal(turning_batch(8, 18, 0, 4, 2), 5, hint)
    judge.type(turning_batch(8, 18, 0, 4, 2), int)
    judge.equal(turning_batch(269e6, 538e6, 0, 90.1e9, 18e9), 11, hint)


def a_tie_has_not_turned(turning_batch, judge: Judge) -> None:
    for flops, weights, peak, bandwidth, want in ((8, 16, 4, 2, 5), (2, 4, 64, 2, 65), (1, 1, 1, 1, 2)):
        judge.equal(
            turning_batch(flops, weights, 0, peak, bandwidth),
            want,
            "Both sides take equally long one sequence earlier. Likely mistake: rounding up, which leaves a whole "
            "number where it is.",
        )
    judge.equal(
        turning_batch(2**31, 2**31 - 1, 0, 1, 1),
        1,
        "Reading takes a hair less than the arithmetic of one sequence. Likely mistake: a small number added before "
        "rounding up.",
    )


def at_least_one(turning_batch, judge: Judge) -> None:
    judge.equal(
        turning_batch(1000, 1, 0, 1, 1),
        1,
        "One sequence is compute-bound already. Likely mistake: starting above 1, or returning 0.",
    )


def caches_move_the_turn(turning_batch, judge: Judge) -> None:
    hint = "Likely mistake: the caches left out, or read once instead of once for each sequence."
    judge.equal(turning_batch(8, 18, 2, 4, 2), 10, hint)
    judge.equal(turning_batch(8, 18, 3, 4, 2), 19, hint)


def some_never_turn(turning_batch, judge: Judge) -> None:
    for kv in (4, 5, 1e6):
        got = turning_batch(8, 16, kv, 4, 2)
        judge.true(
            got is None,
            f"each sequence brings {kv:g} bytes, no less reading than arithmetic, so no batch turns; got {got!r}. "
            "Likely mistake: a negative or infinite quotient taken for an answer.",
        )


def equals_brute_force(turning_batch, judge: Judge) -> None:
    draw = random.Random(4)
    for _ in range(200):
        numbers = [
            draw.randint(1, 60),
            draw.randint(1, 900),
            draw.randint(0, 9),
            2 ** draw.randint(0, 4),
            2 ** draw.randint(0, 4),
        ]
        want = tried(*numbers)
        if want is None and numbers[0] * numbers[4] > numbers[2] * numbers[3]:
            continue  # it turns, but beyond what was tried
        got = turning_batch(*numbers)
        judge.true(
            type(got) is type(want) and got == want,
            f"turning_batch{tuple(numbers)} is {got!r}, expected {want!r}. Likely mistake: an edge of the inequality.",
        )


def a_million_is_no_end(turning_batch, judge: Judge) -> None:
    judge.equal(
        turning_batch(1, 1e6, 0, 1, 1),
        1_000_001,
        "It turns, late. Likely mistake: counting that gives up at some largest batch; decide first whether it turns.",
    )


GIVES_UP = """
def turning_batch(flops_per_token, weight_bytes, kv_bytes_per_sequence, peak, bandwidth):
    for batch in range(1, {most} + 1):
        if batch * flops_per_token / peak > (weight_bytes + batch * kv_bytes_per_sequence) / bandwidth:
            return batch
    return None
"""

TURN = Exercise(
    name="turning_batch",
    title="Where decode turns",
    chapter="04",
    difficulty=3,
    minutes=20,
    checks=[
        without_caches,
        at_least_one,
        a_tie_has_not_turned,
        caches_move_the_turn,
        some_never_turn,
        equals_brute_force,
        a_million_is_no_end,
    ],
    mistakes=[
        Mistake("one rate for both", "without_caches", edit=("flops_per_token / peak", "flops_per_token / bandwidth")),
        Mistake("rounds down", "without_caches", edit=("math.floor(equal) + 1", "max(1, math.floor(equal))")),
        Mistake("rounds up", "a_tie_has_not_turned", edit=("math.floor(equal) + 1", "math.ceil(equal)")),
        Mistake(
            "a hair more, rounded up",
            "a_tie_has_not_turned",
            edit=("math.floor(equal) + 1", "math.ceil(equal + 1e-9)"),
        ),
        Mistake("one too many", "without_caches", edit=("math.floor(equal) + 1", "math.floor(equal) + 2")),
        Mistake("starts at two", "at_least_one", edit=("math.floor(equal) + 1", "max(2, math.floor(equal) + 1)")),
        Mistake("caches are free", "caches_move_the_turn", edit=("kv_bytes_per_sequence / bandwidth", "0")),
        Mistake(
            "one cache for all",
            "caches_move_the_turn",
            edit=(
                "weight_bytes / bandwidth / (arithmetic - reading)",
                "(weight_bytes / bandwidth + reading) / arithmetic",
            ),
        ),
        Mistake("a negative answer", "some_never_turn", edit=("arithmetic <= reading", "arithmetic == reading")),
        Mistake("zero for never", "some_never_turn", edit=("return None", "return 0")),
        Mistake("gives up at a hundred", "equals_brute_force", source=GIVES_UP.format(most=100)),
        Mistake("gives up at ten thousand", "a_million_is_no_end", source=GIVES_UP.format(most=10_000)),
    ],
    forbids=("minillm.analysis",),
)


# --- largest_batch


def seconds(batch: int, flops: float, weights: float, kv: float, peak: float, bandwidth: float) -> Fraction:
    flops, weights, kv, peak, bandwidth = map(Fraction, (flops, weights, kv, peak, bandwidth))
    return batch * kv / bandwidth + max(batch * flops / peak, weights / bandwidth)


def one_sequence_or_none(largest_batch, judge: Judge) -> None:
    hint = "A step of one takes 1 + max(2, 8) = 9 s, too long for 8. Likely mistake: 1 where 0 is right."
    judge.equal(largest_batch(8, 8, 16, 2, 4, 2), 0, hint)
    got = largest_batch(5, 16, 2, 2, 4, 2)
    judge.type(got, int)
    judge.equal(
        got,
        1,
        "A step of one takes 1 + max(4, 1) = 5 s, and exactly the limit is in time; a step of two takes 10. Likely "
        "mistake: an edge of the comparison, or arithmetic and the reading of weights added.",
    )


def memory_bound_side(largest_batch, judge: Judge) -> None:
    judge.equal(
        largest_batch(12.5, 8, 16, 2, 4, 2),
        4,
        "Four sequences take 4 + max(8, 8) = 12 s, five take 15. Likely mistake: the cache read once for all of them.",
    )


def compute_bound_side(largest_batch, judge: Judge) -> None:
    judge.equal(
        largest_batch(15, 8, 16, 2, 4, 2),
        5,
        "Five sequences take 5 + max(10, 8) = 15 s. Likely mistake: the caches inside the maximum, as if their reading "
        "could hide behind arithmetic, or the arithmetic forgotten.",
    )


def empty_caches(largest_batch, judge: Judge) -> None:
    hint = "With no cache. Likely mistake: a division by the bytes of the cache."
    judge.equal(largest_batch(8, 8, 16, 0, 4, 2), 4, hint)
    judge.equal(largest_batch(7.5, 8, 16, 0, 4, 2), 0, hint)


def many_fit(largest_batch, judge: Judge) -> None:
    judge.equal(
        largest_batch(2**20, 1, 1, 1, 2, 2),
        2**20,
        "A million sequences are in time. Likely mistake: a search that stops at some largest batch.",
    )


def equals_trying(largest_batch, judge: Judge) -> None:
    draw = random.Random(5)
    for _ in range(200):
        rest = [
            draw.randint(1, 40),
            draw.randint(1, 300),
            draw.randint(0, 9),
            2 ** draw.randint(0, 3),
            2 ** draw.randint(0, 3),
        ]
        limit = draw.randint(1, 400) / 4
        want = next(b for b in range(10_000) if seconds(b + 1, *rest) > limit)
        judge.equal(
            largest_batch(limit, *rest), want, f"For largest_batch{(limit, *rest)}. Likely mistake: off by one."
        )


CLOSED_FORM = """
def largest_batch(limit, flops_per_token, weight_bytes, kv_bytes_per_sequence, peak, bandwidth):
    reading, kv = weight_bytes / bandwidth, kv_bytes_per_sequence / bandwidth
    if kv + max(flops_per_token / peak, reading) > limit:
        return 0
    compute = {rounded}(limit / (flops_per_token / peak + kv))
    memory = {rounded}((limit - reading) / kv){otherwise}
    return min(compute, memory)
"""

PROMISE = Exercise(
    name="largest_batch",
    title="The largest batch that keeps a promise",
    chapter="04",
    difficulty=3,
    minutes=20,
    checks=[one_sequence_or_none, memory_bound_side, compute_bound_side, empty_caches, many_fit, equals_trying],
    mistakes=[
        Mistake("never refuses", "one_sequence_or_none", edit=("return 0", "return 1")),
        Mistake(
            "at the limit is late", "one_sequence_or_none", edit=("step_seconds(1) > limit", "step_seconds(1) >= limit")
        ),
        Mistake(
            "adds arithmetic and weights",
            "one_sequence_or_none",
            edit=(
                "max(batch * flops_per_token / peak, weight_bytes / bandwidth)",
                "batch * flops_per_token / peak + weight_bytes / bandwidth",
            ),
        ),
        Mistake("returns the first that breaks", "one_sequence_or_none", edit=("return kept", "return broken")),
        Mistake(
            "one cache for all",
            "memory_bound_side",
            edit=("batch * kv_bytes_per_sequence / bandwidth", "kv_bytes_per_sequence / bandwidth"),
        ),
        Mistake(
            "caches behind arithmetic",
            "compute_bound_side",
            edit=(
                "kv + max(batch * flops_per_token / peak, weight_bytes / bandwidth)",
                "max(batch * flops_per_token / peak, kv + weight_bytes / bandwidth)",
            ),
        ),
        Mistake("divides by the cache", "empty_caches", source=CLOSED_FORM.format(rounded="int", otherwise="")),
        Mistake("stops at 256", "many_fit", edit=("return kept", "return min(kept, 256)")),
        Mistake(
            "rounds to the nearest",
            "equals_trying",
            source=CLOSED_FORM.format(rounded="round", otherwise=" if kv_bytes_per_sequence else compute"),
        ),
    ],
    forbids=("minillm.analysis",),
)
