"""`check(...)` as a notebook cell calls it: the same checks, here and now, on the function just defined."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from typing import Any

from . import registry
from .core import FAILED, TIME_LIMIT, Outcome
from .grade import grade

IN_CHILD = "MINILLM_EXERCISES_CHILD"  # set while a whole notebook is graded: its own check cells then do nothing


class TimeUp(BaseException):
    """Raised within the learner's code when its time is over. Not an Exception, so `except Exception` lets it pass."""


def check(chapter: str, name: str, entry: Any) -> Outcome | None:
    """Grade `entry` as exercise `name` of `chapter`. Raises ExerciseError when there is no such exercise.

    An endless loop is told to stop. One that refuses, or waits within a library, cannot be killed and goes on until the
    kernel is restarted; `python -m exercises check` uses a process and ends it.
    """
    if os.environ.get(IN_CHILD):
        return None
    exercise = registry.find(chapter, name)
    box: list[Outcome] = []

    def work() -> None:
        with contextlib.suppress(TimeUp):  # told to stop just as it was done
            box.append(grade(exercise, entry))

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(exercise.seconds)
    if not worker.is_alive() and box:
        return box[0]
    message = f"Still running after {exercise.seconds:g} s. Likely mistake: a loop that never ends."
    if not _stopped(worker):
        message += " Restart the kernel: it is still turning."
    return Outcome(exercise.chapter, exercise.name, FAILED, message, TIME_LIMIT, exercise.seconds)


def _stopped(worker: threading.Thread, patience: float = 1.0) -> bool:
    """Raise TimeUp in the thread -> whether that ended it. Python delivers it before the thread's next instruction."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident), ctypes.py_object(TimeUp))
    worker.join(patience)
    return not worker.is_alive()
