"""Chapter 11's last exercise: from which length on fetching a prefix beats computing it. Exact fractions decide."""

from __future__ import annotations

from fractions import Fraction

from exercises import Exercise, Judge, Mistake

# token_bytes, token_flops, pair_flops, flops_per_s, bytes_per_s, latency_s, block_size, most
PLAIN = (1000, 10**6, 0, 10**9, 10**7, 0.009, 4, 100)


def by_fractions(token_bytes, token_flops, pair_flops, flops_per_s, bytes_per_s, latency_s, block_size, most):
    """Multiplied out, so that nothing is rounded; from the longest down to the shortest, keeping the last that won."""
    f = Fraction
    best = None
    for blocks in range(most // block_size, 0, -1):
        p = blocks * block_size
        work = f(token_flops) * p + f(pair_flops) * sum(range(1, p + 1))
        if f(latency_s) * f(flops_per_s) * f(bytes_per_s) + f(p) * f(token_bytes) * f(flops_per_s) < work * f(
            bytes_per_s
        ):
            best = p
    return best


def judged(reload_from, judge: Judge, hint: str, **changes) -> None:
    names = (
        "token_bytes",
        "token_flops",
        "pair_flops",
        "flops_per_s",
        "bytes_per_s",
        "latency_s",
        "block_size",
        "most",
    )
    case = dict(zip(names, PLAIN)) | changes
    judge.equal(reload_from(*case.values()), by_fractions(**case), hint)


def the_example(reload_from, judge: Judge) -> None:
    judge.equal(
        reload_from(*PLAIN),
        12,
        "the example of the statement. Likely mistake: the two times compared the wrong way round, or a part left out.",
    )


def the_link_counts(reload_from, judge: Judge) -> None:
    for bytes_per_s in (10**8, 5 * 10**6, 2 * 10**6):
        judged(
            reload_from,
            judge,
            f"on a link of {bytes_per_s:,} bytes/s. Likely mistake: bits taken for bytes, or the bytes of one token "
            "counted once instead of for each.",
            bytes_per_s=bytes_per_s,
        )


def attention_counts(reload_from, judge: Judge) -> None:
    judged(
        reload_from,
        judge,
        "on a link that loses for short prefixes and wins for long ones. Likely mistake: the attention part, which "
        "grows with the square of the length, left out or doubled.",
        token_bytes=1500,
        pair_flops=21_000,
        bytes_per_s=10**6,
        latency_s=0,
        block_size=1,
        most=400,
    )


def latency_counts_once(reload_from, judge: Judge) -> None:
    for latency_s in (0, 0.02, 0.05):
        judged(
            reload_from,
            judge,
            f"with a latency of {latency_s} s. Likely mistake: the latency left out, or paid for every block.",
            latency_s=latency_s,
        )


def a_tie_is_not_faster(reload_from, judge: Judge) -> None:
    judged(
        reload_from,
        judge,
        "where both take 8 ms for a first block of 8 tokens. Likely mistake: <= for <; equal times are no gain.",
        token_bytes=0,
        latency_s=0.008,
        block_size=8,
    )


def none_if_it_never_pays(reload_from, judge: Judge) -> None:
    hint = "Likely mistake: the search ends too early or too late; `most` itself is tried, and nothing beyond it."
    judged(reload_from, judge, f"on a link that is always slower. {hint}", bytes_per_s=10**6)
    for most in (11, 12, 13):
        judged(reload_from, judge, f"with at most {most} tokens. {hint}", most=most)


RELOAD = Exercise(
    name="reload_from",
    title="Reload or recompute",
    chapter="11",
    difficulty=3,
    minutes=20,
    checks=[
        the_example,
        the_link_counts,
        attention_counts,
        latency_counts_once,
        a_tie_is_not_faster,
        none_if_it_never_pays,
    ],
    mistakes=[
        Mistake("the wrong way round", "the_example", edit=("if fetch_s < compute_s", "if fetch_s > compute_s")),
        Mistake("bits for bytes", "the_example", edit=("tokens * token_bytes /", "8 * tokens * token_bytes /")),
        Mistake(
            "one token's bytes", "the_link_counts", edit=("latency_s + tokens * token_bytes", "latency_s + token_bytes")
        ),
        Mistake("no attention", "attention_counts", edit=(" + pair_flops * tokens * (tokens + 1) / 2", "")),
        Mistake("every pair twice", "attention_counts", edit=("(tokens + 1) / 2", "(tokens + 1)")),
        Mistake("no latency", "the_example", edit=("latency_s + tokens", "tokens")),
        Mistake(
            "latency for every block",
            "the_example",
            edit=("latency_s + tokens", "latency_s * tokens / block_size + tokens"),
        ),
        Mistake("a tie counts", "a_tie_is_not_faster", edit=("fetch_s < compute_s", "fetch_s <= compute_s")),
        Mistake("most is left out", "none_if_it_never_pays", edit=("most + 1", "most")),
        Mistake("beyond most", "none_if_it_never_pays", edit=("most + 1", "most + block_size")),
    ],
    forbids=("minillm.analysis", "minillm.pace"),
)
