"""Chapter 12, serving: latencies of a request, goodput of a run, a queue in an open loop, admission by predicted wait.

The right answers are worked out by hand, in whole numbers, or by walking a clock in small ticks. Times are multiples of
1/8 where a limit may be met exactly, so that floating point has no say in it.
"""

from __future__ import annotations

from fractions import Fraction

from exercises import Exercise, Judge, Mistake

from .chapter_12_door import ADMIT
from .chapter_12_queue import QUEUE

# --- latencies

WORDS = {"ttft", "tpot", "itl", "e2el"}


def measured(latencies, intended, sent, tokens, judge: Judge) -> dict:
    got = latencies(intended, sent, tokens)
    judge.type(got, dict)
    judge.true(set(got) == WORDS, f"the keys are {sorted(map(str, got))}, must be {sorted(WORDS)}.")
    return got


def from_the_intended_arrival(latencies, judge: Judge) -> None:
    got = measured(latencies, 1.0, 1.5, [2.0, 2.25, 3.0], judge)
    hint = "Likely mistake: counted from the send; what waits in the client is left out, which is coordinated omission."
    judge.close(got["ttft"], 1.0, f"for ttft. {hint}")
    judge.close(got["e2el"], 2.0, f"for e2el. {hint}")


def intervals_not_tokens(latencies, judge: Judge) -> None:
    got = measured(latencies, 0.0, 0.0, [8.0, 9.0, 10.0, 12.0, 16.0], judge)
    judge.close(
        got["tpot"],
        2.0,
        "five tokens have four gaps, of 8 seconds together. Likely mistake: divided by n, or the wait for the first "
        "token counted in.",
    )
    two = measured(latencies, 0.0, 0.0, [5.0, 6.5], judge)
    judge.true(two["tpot"] is not None, "tpot is None for two tokens, which have one gap.")
    judge.close(two["tpot"], 1.5, "for tpot of two tokens, at 5.0 and 6.5.")


def gaps_between_tokens(latencies, judge: Judge) -> None:
    got = measured(latencies, 0.0, 0.0, [5.0, 6.0, 6.5, 9.5], judge)
    judge.type(got["itl"], (list, tuple), "itl")
    judge.close(
        list(got["itl"]),
        [1.0, 0.5, 3.0],
        "for itl. Likely mistake: TTFT taken for a gap, the last gap lost, or the mean instead of the list.",
    )


def what_is_not_there(latencies, judge: Judge) -> None:
    one = measured(latencies, 2.0, 2.0, [5.0], judge)
    judge.true(one["tpot"] is None, f"tpot of one token is {one['tpot']!r}, must be None: there is no gap.")
    judge.equal(list(one["itl"]), [], "for itl of one token.")
    judge.close([one["ttft"], one["e2el"]], [3.0, 3.0], "for ttft and e2el of one token.")
    none = measured(latencies, 2.0, 2.0, [], judge)
    judge.equal(
        [none["ttft"], none["tpot"], list(none["itl"]), none["e2el"]],
        [None, None, [], None],
        "without a token. Likely mistake: zero for what does not exist; a mean over requests would count it.",
    )


LATENCIES = Exercise(
    name="latencies",
    title="Four latencies",
    chapter="12",
    difficulty=1,
    minutes=15,
    checks=[from_the_intended_arrival, intervals_not_tokens, gaps_between_tokens, what_is_not_there],
    mistakes=[
        Mistake(
            "from the send",
            "from_the_intended_arrival",
            edit=("tokens[0] - intended", "tokens[0] - sent"),
        ),
        Mistake("E2EL from the send", "from_the_intended_arrival", edit=("tokens[-1] - intended", "tokens[-1] - sent")),
        Mistake("divided by n", "intervals_not_tokens", edit=("/ (count - 1)", "/ count")),
        Mistake("two tokens have no pace", "intervals_not_tokens", edit=("if count > 1", "if count > 2")),
        Mistake(
            "first token included",
            "intervals_not_tokens",
            edit=("(tokens[-1] - tokens[0]) / (count - 1)", "(tokens[-1] - intended) / count"),
        ),
        Mistake(
            "TTFT is a gap",
            "gaps_between_tokens",
            edit=("zip(tokens, tokens[1:])", "zip([intended, *tokens], tokens)"),
        ),
        Mistake(
            "the last gap lost", "gaps_between_tokens", edit=("zip(tokens, tokens[1:])", "zip(tokens, tokens[1:-1])")
        ),
        Mistake(
            "zero for nothing",
            "what_is_not_there",
            edit=("if count > 1 else None", "if count > 1 else 0.0"),
        ),
    ],
    forbids=("minillm.serving", "minillm.analysis"),
)


# --- goodput


def in_fractions(records, ttft, tpot) -> list[Fraction]:
    """[good a second, good over all], exactly."""
    good = []
    for intended, _, ok, tokens in records:
        times = [Fraction(t) for t in tokens]
        fine = ok and len(times) > 0 and times[0] <= Fraction(intended) + Fraction(ttft)
        if fine and tpot is not None and len(times) > 1:
            fine = times[-1] <= times[0] + (len(times) - 1) * Fraction(tpot)
        good.append(fine)
    window = max(Fraction(r[1]) for r in records) - min(Fraction(r[0]) for r in records)
    return [Fraction(sum(good)) / window, Fraction(sum(good), len(records))]


def compare(goodput, records, ttft, tpot, judge: Judge, hint: str) -> None:
    got = goodput(records, ttft, tpot)
    judge.type(got, (tuple, list))
    judge.equal(len(got), 2, "numbers in the result: good a second, good over all.")
    want = [float(value) for value in in_fractions(records, ttft, tpot)]
    judge.close(got[0], want[0], f"good requests a second. {hint}")
    judge.close(got[1], want[1], f"good over all. {hint}")


def each_request_alone(goodput, judge: Judge) -> None:
    records = [(0, 2, True, [0.5, 1.0, 2.0]), (1, 3, True, [1.5, 2.0, 3.0]), (2, 9, True, [8.0, 8.5, 9.0])]
    compare(goodput, records, 1.0, 1.0, judge, "Likely mistake: the mean judged instead of each request.")


def refused_is_a_miss(goodput, judge: Judge) -> None:
    records = [(0, 1, True, [0.5, 1.0]), (0.5, 0.5, False, []), (0.5, 2.5, False, [2.0]), (1, 3, True, [2.0, 3.0])]
    hint = "Two of four ended well. Likely mistake: refused or cut requests left out of the whole, or taken for good."
    compare(goodput, records, 5.0, 5.0, judge, hint)


def both_limits(goodput, judge: Judge) -> None:
    records = [(0, 4, True, [1.0, 4.0]), (0, 4, True, [3.0, 4.0]), (0, 4, True, [1.0, 2.0, 3.0, 4.0])]
    compare(
        goodput, records, 2.0, 1.25, judge, "Likely mistake: one of the limits is not looked at, or either will do."
    )
    compare(goodput, records, 2.0, None, judge, "tpot is None, no limit.")


def a_limit_is_met_exactly(goodput, judge: Judge) -> None:
    records = [(0, 2.5, True, [1.5, 2.0, 2.5]), (1, 3, True, [2.75, 3.0])]
    compare(goodput, records, 1.5, 0.5, judge, "Likely mistake: < where at most is meant, or TPOT divided by n.")


def the_pace_is_a_mean(goodput, judge: Judge) -> None:
    records = [
        (0, 9, True, [1.0, 1.5, 2.0, 6.0]),
        (0, 9, True, [1.0, 1.5, 2.0, 8.5]),
        (0, 9, True, [1.0, 3.0, 3.5, 4.0]),
    ]
    hint = (
        "Likely mistake: the first gap or the largest judged, or divided by the tokens; TPOT is a mean over the gaps."
    )
    compare(goodput, records, 2.0, 2.0, judge, hint)


def one_token_has_no_pace(goodput, judge: Judge) -> None:
    records = [(0, 4, True, [4.0]), (1, 2, True, []), (1, 5, True, [4.5, 5.0])]
    hint = "The first has one token, the second ended without any. Likely mistake: division by zero avoided by a miss."
    compare(goodput, records, 4.0, 0.5, judge, hint)


def the_whole_run(goodput, judge: Judge) -> None:
    records = [(6, 7, True, [6.5, 7.0]), (2, 12, True, [11.0, 12.0]), (4, 5, True, [4.5, 5.0]), (3, 14, False, [])]
    hint = "The run takes 12 s, from 2 to 14. Likely mistake: from 0, in the records' order, or of the good ones only."
    compare(goodput, records, 1.0, 1.0, judge, hint)


GOODPUT = Exercise(
    name="goodput",
    title="Goodput",
    chapter="12",
    difficulty=2,
    minutes=20,
    checks=[
        each_request_alone,
        refused_is_a_miss,
        both_limits,
        a_limit_is_met_exactly,
        the_pace_is_a_mean,
        one_token_has_no_pace,
        the_whole_run,
    ],
    mistakes=[
        Mistake(
            "mean TTFT judged",
            "each_request_alone",
            source="""
def goodput(records, ttft, tpot):
    done = [r for r in records if r[2] and r[3]]
    mean = sum(r[3][0] - r[0] for r in done) / len(done)
    window = max(r[1] for r in records) - min(r[0] for r in records)
    good = len(done) if mean <= ttft else 0
    return good / window, good / len(records)
""",
        ),
        Mistake(
            "refused left out",
            "refused_is_a_miss",
            edit=("good / len(records)", "good / max(1, sum(record[2] for record in records))"),
        ),
        Mistake("a cut stream is good", "refused_is_a_miss", edit=("if not ok or not tokens or", "if not tokens or")),
        Mistake("TTFT alone", "both_limits", edit=("tpot is None or pace <= tpot", "True")),
        Mistake(
            "no limit is no pass",
            "both_limits",
            edit=("tpot is None or pace <= tpot", "tpot is not None and pace <= tpot"),
        ),
        Mistake("below, not at most", "a_limit_is_met_exactly", edit=("pace <= tpot", "pace < tpot")),
        Mistake("divided by the tokens", "the_pace_is_a_mean", edit=("/ (len(tokens) - 1)", "/ len(tokens)")),
        Mistake("the first gap", "the_pace_is_a_mean", edit=("(tokens[-1] - tokens[0])", "(tokens[1] - tokens[0])")),
        Mistake(
            "the largest gap",
            "the_pace_is_a_mean",
            edit=(
                "(tokens[-1] - tokens[0]) / (len(tokens) - 1)",
                "max(b - a for a, b in zip(tokens, tokens[1:]))",
            ),
        ),
        Mistake("TTFT must be below", "a_limit_is_met_exactly", edit=("- intended > ttft", "- intended >= ttft")),
        Mistake(
            "one token is a miss",
            "one_token_has_no_pace",
            edit=("if len(tokens) > 1 else 0.0", 'if len(tokens) > 1 else float("inf")'),
        ),
        Mistake("from zero", "the_whole_run", edit=(" - min(record[0] for record in records)", "")),
        Mistake(
            "first to last record",
            "the_whole_run",
            edit=(
                "max(record[1] for record in records) - min(record[0] for record in records)",
                "records[-1][1] - records[0][0]",
            ),
        ),
        Mistake(
            "window of the good",
            "the_whole_run",
            edit=("max(record[1] for record in records)", "max(record[1] for record in records if record[2])"),
        ),
    ],
    forbids=("minillm.serving", "minillm.analysis"),
)

EXERCISES = [LATENCIES, GOODPUT, QUEUE, ADMIT]
