"""Run an exercise's checks on one function, in this process, and say in one message what went wrong.

Time limits belong to the callers: `sandbox` (a child process that can be killed) and `notebook` (a thread).
"""

from __future__ import annotations

import linecache
import sys
import time
import traceback
import types
from collections.abc import Callable
from typing import Any

from .core import FAILED, NOT_STARTED, PASSED, Exercise, Failed, Outcome
from .judge import Guarded, Judge


def grade(exercise: Exercise, entry: Any) -> Outcome:
    """Every check in order until one fails. Any exception of the learner's becomes part of the message."""
    started = time.perf_counter()
    outcome = Outcome(exercise.chapter, exercise.name, PASSED)
    try:
        must_be_own_work(exercise, entry)
    except Failed as verdict:
        outcome.status, outcome.check, outcome.message = FAILED, "own work", str(verdict)
    else:
        guarded = Guarded(entry, exercise.entry, exercise.mutates)
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
        return FAILED, str(verdict)
    except NotImplementedError:
        return NOT_STARTED, "It still raises NotImplementedError; write it, then run the check again."
    except BaseException as error:  # SystemExit and KeyboardInterrupt of the learner's code are verdicts too
        return FAILED, explain(error, namespace_of(entry))
    return PASSED, ""


def explain(error: BaseException, namespace: dict | None) -> str:
    """`KeyError: 3, in "ids[pair]" (line 7 of train_merges)`: the deepest line that is the learner's own."""
    own = [
        frame
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if namespace is not None and frame.f_globals is namespace
    ]
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if not own:
        return f"What came back could not be used: {what}. Likely mistake: a result of the wrong type or shape."
    trace = error.__traceback__
    deepest = [(tb.tb_frame, tb.tb_lineno) for tb in _links(trace) if tb.tb_frame.f_globals is namespace][-1]
    frame, number = deepest
    line = linecache.getline(frame.f_code.co_filename, number).strip()
    shown = f', at "{line}"' if line else ""
    return f"It raised {what}{shown} (line {number} of its cell, in {frame.f_code.co_name})."


def _links(trace: types.TracebackType | None):
    while trace is not None:
        yield trace
        trace = trace.tb_next


def namespace_of(entry: Any) -> dict | None:
    """The globals that the learner's code runs in, of a function or of a class's methods."""
    for candidate in (entry, *vars(entry).values()) if isinstance(entry, type) else (entry,):
        function = getattr(candidate, "__func__", candidate)
        if isinstance(function, types.FunctionType):
            return function.__globals__
    return None


def must_be_own_work(exercise: Exercise, entry: Any) -> None:
    """Raises Failed when the entry is not a function or class, or leans on a module the exercise forbids.

    Follows every function of the learner's own that the entry mentions. It catches the honest shortcut, not a
    determined fraud: whoever grades strangers should also read what they wrote.
    """
    if not callable(entry):
        raise Failed(f"{exercise.entry} is {type(entry).__name__}, not a function or class.")
    if _forbidden(getattr(entry, "__module__", None), exercise.forbids):
        raise Failed(f"{exercise.entry} comes from {entry.__module__}; the exercise is to write it here.")
    namespace = namespace_of(entry) or {}
    seen, todo = set(), list(_code_of(entry))
    while todo:
        code = todo.pop()
        if code in seen:
            continue
        seen.add(code)
        todo += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        for name in code.co_names:
            value = namespace.get(name)
            origin = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
            for module in (name if name in sys.modules else None, origin):
                if _forbidden(module, exercise.forbids):
                    raise Failed(f"{exercise.entry} uses {module}; the exercise is to do without it.")
            if namespace_of(value) is namespace:
                todo += _code_of(value)


def _forbidden(module: Any, prefixes: tuple[str, ...]) -> bool:
    return isinstance(module, str) and any(module == p or module.startswith(p + ".") for p in prefixes)


def _code_of(entry: Any) -> list[types.CodeType]:
    members = vars(entry).values() if isinstance(entry, type) else (entry,)
    functions = [getattr(member, "__func__", getattr(member, "fget", None) or member) for member in members]
    return [function.__code__ for function in functions if isinstance(function, types.FunctionType)]
