"""`check(...)` as a notebook cell calls it: the same checks, here and now, on the function just defined."""

from __future__ import annotations

import os
import threading
from typing import Any

from . import registry
from .core import FAILED, TIME_LIMIT, Outcome
from .grade import grade

IN_CHILD = "MINILLM_EXERCISES_CHILD"  # set while a whole notebook is graded: its own check cells then do nothing


def check(chapter: str, name: str, entry: Any) -> Outcome | None:
    """Grade `entry` as exercise `name` of `chapter`. Raises ExerciseError when there is no such exercise.

    A thread cannot be killed, so an endless loop is reported but goes on until the kernel is restarted;
    `python -m exercises check` uses a process and ends it.
    """
    if os.environ.get(IN_CHILD):
        return None
    exercise = registry.find(chapter, name)
    box: list[Outcome] = []
    worker = threading.Thread(target=lambda: box.append(grade(exercise, entry)), daemon=True)
    worker.start()
    worker.join(exercise.seconds)
    if box:
        return box[0]
    message = (
        f"Still running after {exercise.seconds:g} s. Likely mistake: a loop that never ends. "
        "Restart the kernel: it is still turning."
    )
    return Outcome(exercise.chapter, exercise.name, FAILED, message, TIME_LIMIT, exercise.seconds)
