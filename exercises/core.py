"""What an exercise is, and what can be said about an attempt at it."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from minillm.errors import MinillmError

PASSED, FAILED, NOT_STARTED = "passed", "not yet", "not started"
OWN_WORK, TIME_LIMIT = "own work", "time limit"  # what may fail besides an exercise's own checks


class ExerciseError(MinillmError):
    """An exercise, chapter or notebook that does not exist or cannot be read."""


class Failed(Exception):
    """A check's verdict. The message says what went wrong and names the likely mistake."""


@dataclass(frozen=True)
class Mistake:
    """A wrong answer that a learner could plausibly give, and the check that must catch it.

    Either `source`, the whole definition, or `edit=(old, new)`, applied to the solution's code, where `old` must
    occur exactly once. An edit is shorter and breaks loudly when the solution changes.
    """

    name: str
    caught_by: str
    source: str = ""
    edit: tuple[str, str] | None = None

    def apply(self, solution: str) -> str:
        """The mistaken cell. Raises ExerciseError when the edit does not fit the solution."""
        if (self.edit is None) == (not self.source):
            raise ExerciseError(f"mistake {self.name!r}: give either source or edit")
        if self.edit is None:
            return self.source
        old, new = self.edit
        if solution.count(old) != 1:
            raise ExerciseError(f"mistake {self.name!r}: {old!r} occurs {solution.count(old)} times, must be once")
        return solution.replace(old, new)


@dataclass(frozen=True)
class Exercise:
    """One exercise of one chapter. The statement and the hints are in the notebook, the verdict is here.

    name: what the learner calls it by, as in `check("01", name, ...)`.
    entry: the function or class that the learner defines; `name` when left empty.
    checks: functions `(learner's function, Judge)` that raise Failed, easiest first; a check is known by its name.
    forbids: module prefixes whose contents the answer may not use, such as the one that holds the shipped version.
    mutates: True where changing an argument in place is the task.
    fresh: True where the statement asks for new tensors, so that a view of an argument is no answer.
    seconds: the time one run of all the checks may take.
    """

    name: str
    title: str
    chapter: str
    difficulty: int
    minutes: int
    checks: list[Callable]
    mistakes: list[Mistake]
    entry: str = ""
    forbids: tuple[str, ...] = ()
    mutates: bool = False
    fresh: bool = False
    seconds: float = 20.0

    def __post_init__(self) -> None:
        if not self.entry:
            object.__setattr__(self, "entry", self.name)
        if not 1 <= self.difficulty <= 5:
            raise ExerciseError(f"exercise {self.name}: difficulty {self.difficulty} is outside 1 to 5")


@dataclass
class Outcome:
    """The verdict on one attempt. `check` names the first check that failed; shows itself in a notebook."""

    chapter: str
    exercise: str
    status: str
    message: str = ""
    check: str = ""
    seconds: float = field(default=0.0)

    @property
    def passed(self) -> bool:
        return self.status == PASSED

    def to_dict(self) -> dict:
        return asdict(self)

    def __str__(self) -> str:
        line = f"{self.exercise}: {self.status}"
        return f"{line}. {self.message}" if self.message else line

    __repr__ = __str__

    def _repr_html_(self) -> str:
        colour = {PASSED: "#1b7f5c", FAILED: "#b34a00"}.get(self.status, "#5f6b7a")
        head = f'<b style="color:{colour}">{html.escape(self.status)}</b> <code>{html.escape(self.exercise)}</code>'
        return f'<div style="border-left:4px solid {colour};padding:2px 10px">{head} {html.escape(self.message)}</div>'
