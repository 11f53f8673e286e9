"""Where exercises are found: `checks/chapter_NN.py` and `solutions/NN_name.ipynb`, by their names alone."""

from __future__ import annotations

import importlib
from pathlib import Path

from .core import Exercise, ExerciseError

HOME = Path(__file__).resolve().parent
SOLUTIONS = HOME / "solutions"
MINE = HOME / "mine"


def chapters() -> list[str]:
    """Two-digit numbers of the chapters that have checks, in order."""
    return sorted(path.stem.removeprefix("chapter_") for path in (HOME / "checks").glob("chapter_[0-9][0-9].py"))


def chapter_number(chapter: str) -> str:
    """ "1", "01" or "01_tokens" -> "01". Raises ExerciseError with the known chapters."""
    number = str(chapter).split("_")[0].zfill(2)
    if number not in chapters():
        raise ExerciseError(f"no exercises for chapter {chapter!r}; there are {', '.join(chapters())}")
    return number


def exercises(chapter: str) -> list[Exercise]:
    """The chapter's exercises, in the order in which they are to be done."""
    number = chapter_number(chapter)
    found = importlib.import_module(f"exercises.checks.chapter_{number}").EXERCISES
    names = [exercise.name for exercise in found]
    if len(set(names)) < len(names) or any(exercise.chapter != number for exercise in found):
        raise ExerciseError(f"checks/chapter_{number}.py: exercise names must differ and each chapter be {number!r}")
    return list(found)


def find(chapter: str, name: str) -> Exercise:
    """Raises ExerciseError, listing the chapter's exercises, when there is none of that name."""
    known = exercises(chapter)
    for exercise in known:
        if exercise.name == name:
            return exercise
    raise ExerciseError(f"chapter {chapter} has no exercise {name!r}; it has {', '.join(e.name for e in known)}")


def solution_path(chapter: str) -> Path:
    """The one `solutions/NN_*.ipynb`. Raises ExerciseError when there is none, or more than one."""
    number = chapter_number(chapter)
    paths = sorted(SOLUTIONS.glob(f"{number}_*.ipynb"))
    if len(paths) != 1:
        raise ExerciseError(f"solutions/{number}_*.ipynb: found {len(paths)} notebooks, must be one")
    return paths[0]


def student_path(chapter: str) -> Path:
    """The committed student notebook, made from the solution by `build`."""
    return HOME / solution_path(chapter).name


def work_path(chapter: str, directory: Path = MINE) -> Path:
    """The learner's own copy."""
    return Path(directory) / solution_path(chapter).name
