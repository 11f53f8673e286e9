"""Chapter 12's last exercise: admission by predicted wait. The right answer works through the prompts token by token;
rates and times are such that nothing is rounded."""

from __future__ import annotations

import random
from fractions import Fraction

from exercises import Exercise, Judge, Mistake


def token_by_token(arrivals, tokens, rate, limit) -> list[bool]:
    """The server as a list of unit tokens with the exact times at which each will be done."""
    done: list[Fraction] = []  # ascending
    answers = []
    for arrival, prompt in zip(arrivals, tokens, strict=True):
        now, step = Fraction(arrival), 1 / Fraction(rate)
        begin = max(now, done[-1]) if done else now
        own = [begin + step * (i + 1) for i in range(prompt)]
        answers.append(own[-1] - now <= Fraction(limit))
        if answers[-1]:
            done += own
    return answers


def compare(admit, arrivals, tokens, rate, limit, judge: Judge, hint: str) -> None:
    got = admit(arrivals, tokens, rate, limit)
    judge.type(got, (list, tuple))
    told = f"for arrivals {arrivals}, prompts {tokens}, {rate} tokens/s, limit {limit} s. {hint}"
    judge.equal([bool(x) if type(x).__name__ in ("bool", "bool_") else x for x in got],
                token_by_token(arrivals, tokens, rate, limit), told)  # fmt: skip


def its_own_prompt_counts(admit, judge: Judge) -> None:
    hint = "Likely mistake: the request's own prompt left out; its first token comes after it."
    compare(admit, [0, 10], [300, 100], 100, 2.0, judge, hint)


def the_queue_counts(admit, judge: Judge) -> None:
    hint = "Likely mistake: each request is looked at as if it were alone."
    compare(admit, [0, 0, 0], [100, 60, 60], 100, 2.0, judge, hint)


def exactly_is_in_time(admit, judge: Judge) -> None:
    compare(admit, [0, 0], [150, 50], 100, 2.0, judge, "It comes exactly at the limit. Likely mistake: < for at most.")


def the_refused_leave_nothing(admit, judge: Judge) -> None:
    hint = "Likely mistake: a refused request's tokens stay in the work to do; then one giant closes the door for all."
    compare(admit, [0, 0, 0], [100, 1000, 100], 100, 2.0, judge, hint)


def work_gets_done(admit, judge: Judge) -> None:
    hint = "Likely mistake: work never gets less, or not at the rate given."
    compare(admit, [0, 1, 2, 3], [200, 100, 100, 100], 100, 2.0, judge, hint)
    compare(admit, [0, 2, 3, 5], [40, 40, 20, 40], 20, 2.0, judge, hint)


def idle_works_nothing_ahead(admit, judge: Judge) -> None:
    hint = "Likely mistake: the work left fell below zero while the server was idle, and counts as credit later."
    compare(admit, [5, 30, 30, 30], [100, 150, 100, 50], 100, 2.0, judge, hint)


def busy_while_refusing(admit, judge: Judge) -> None:
    hint = "Likely mistake: the clock moves at admissions only, or twice for the same time."
    compare(admit, [0, 1, 2, 3, 4], [400, 300, 300, 300, 100], 100, 4.0, judge, hint)
    rng = random.Random(12)
    arrivals = sorted(rng.randint(0, 64) / 8 for _ in range(40))
    compare(admit, arrivals, [rng.randint(1, 9) * 8 for _ in arrivals], 64, 1.5, judge, hint)


_DRAIN = "work = max(0.0, work - (arrival - last) * rate)"

ADMIT = Exercise(
    name="admit",
    title="A rule at the door",
    chapter="12",
    difficulty=3,
    minutes=25,
    checks=[
        its_own_prompt_counts,
        the_queue_counts,
        exactly_is_in_time,
        the_refused_leave_nothing,
        work_gets_done,
        idle_works_nothing_ahead,
        busy_while_refusing,
    ],
    mistakes=[
        Mistake("own prompt left out", "its_own_prompt_counts", edit=("work + prompt <= limit", "work <= limit")),
        Mistake("each alone", "the_queue_counts", edit=("            work += prompt", "            work = 0.0")),
        Mistake("strictly below", "exactly_is_in_time", edit=("<= limit * rate", "< limit * rate")),
        Mistake(
            "the refused stay",
            "the_refused_leave_nothing",
            edit=("        if fits:\n            work += prompt", "        work += prompt"),
        ),
        Mistake("work never ends", "work_gets_done", edit=(_DRAIN, "work = max(0.0, work)")),
        Mistake("a token a second", "work_gets_done", edit=("(arrival - last) * rate)", "(arrival - last))")),
        Mistake(
            "credit for idleness", "idle_works_nothing_ahead", edit=(_DRAIN, "work = work - (arrival - last) * rate")
        ),
        Mistake(
            "clock at admissions, drained at each",
            "busy_while_refusing",
            edit=("        last = arrival\n", "        last = arrival if work + prompt <= limit * rate else last\n"),
        ),
    ],
    forbids=("minillm.pace", "minillm.engine", "minillm.serving", "minillm.batching"),
)
