"""Run an exercise's checks on one function, in this process, and say in one message what went wrong.

Time limits belong to the callers: `sandbox` (a child process that can be killed) and `notebook` (a thread).
"""

from __future__ import annotations

import linecache
import time
import traceback
import types
from collections.abc import Callable
from typing import Any

from .core import FAILED, NOT_STARTED, OWN_WORK, PASSED, Exercise, Failed, Outcome
from .guard import Guarded
from .judge import Judge
from .own_work import must_be_own_work, namespace_of


def grade(exercise: Exercise, entry: Any) -> Outcome:
    """Every check in order until one fails. Any exception of the learner's becomes part of the message."""
    started = time.perf_counter()
    outcome = Outcome(exercise.chapter, exercise.name, PASSED)
    try:
        must_be_own_work(exercise, entry)
    except Failed as verdict:
        outcome.status, outcome.check, outcome.message = FAILED, OWN_WORK, str(verdict)
    else:
        guarded = Guarded(entry, exercise.entry, exercise.mutates, exercise.fresh)
        for check in exercise.checks:
            outcome.status, outcome.message = run_check(check, guarded, entry)
            if outcome.status != PASSED:
                outcome.check = check.__name__
                break
    outcome.seconds = round(time.perf_counter() - started, 3)
    return outcome


def run_check(check: Callable, guarded: Guarded, entry: Any) -> tuple[str, str]:
    """(status, message) of one check."""
    try:
        check(guarded, Judge())
    except Failed as verdict:
        return FAILED, str(verdict) + guarded.remembers()
    except NotImplementedError:
        return NOT_STARTED, "It still raises NotImplementedError; write it, then run the check again."
    except BaseException as error:  # SystemExit and KeyboardInterrupt of the learner's code are verdicts too
        called = f" It was called as {guarded.calling}." if guarded.calling else ""
        return FAILED, explain(error, namespace_of(entry), calling=bool(guarded.calling)) + called + guarded.remembers()
    return PASSED, ""


def explain(error: BaseException, namespace: dict | None, calling: bool = False) -> str:
    """`KeyError: 3, in "ids[pair]" (line 7 of train_merges)`: the deepest line that is the learner's own.

    calling: whether the learner's function was running. If no line of it is reached, the call itself went wrong.
    """
    own = [
        frame
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if namespace is not None and frame.f_globals is namespace
    ]
    what = named(error)
    if not own and calling:
        hint = " Likely mistake: other parameters than in the statement." if isinstance(error, TypeError) else ""
        return f"The call raised {what.removesuffix('.')}.{hint}"
    if not own:
        return f"What came back could not be used: {what}. Likely mistake: a result of the wrong type or shape."
    trace = error.__traceback__
    deepest = [(tb.tb_frame, tb.tb_lineno) for tb in _links(trace) if tb.tb_frame.f_globals is namespace][-1]
    frame, number = deepest
    line = linecache.getline(frame.f_code.co_filename, number).strip()
    shown = f', at "{line}"' if line else ""
    return f"It raised {what}{shown} (line {number} of its cell, in {frame.f_code.co_name})."


def named(error: BaseException, limit: int = 300) -> str:
    """`KeyError: 3` on one line, cut to `limit`. A learner's exception may be unable to say what it is."""
    try:
        text = " ".join(str(error).split())
    except Exception as another:
        text = f"(its text raised {type(another).__name__})"
    text = text if len(text) <= limit else f"{text[:limit]} …"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _links(trace: types.TracebackType | None):
    while trace is not None:
        yield trace
        trace = trace.tb_next
