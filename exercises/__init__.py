"""Exercises with a check that runs on the learner's own function and names the likely mistake.

In a notebook: `from exercises import check; check("01", "train_merges", train_merges)`.
On the command line: `python -m exercises list | start 01 | check 01`. How it works and how to write one: README.md.
"""

from .core import Exercise, ExerciseError, Failed, Mistake, Outcome
from .judge import Judge
from .notebook import check

__all__ = ["Exercise", "ExerciseError", "Failed", "Judge", "Mistake", "Outcome", "check"]
