"""The proof that an exercise's checks are worth something.

The untouched stub must come out as not started; the solution must pass; functions that return nothing, or an object
equal to everything, must fail; and each planted mistake must fail first at the check that names it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from . import registry
from .core import FAILED, NOT_STARTED, OWN_WORK, TIME_LIMIT, Exercise, ExerciseError, Outcome
from .files import code_cells, defining_cell, read_notebook, source, strip_solution, without_marks
from .sandbox import Attempt, run

MIN_MISTAKES = 3

# Fakes that any set of checks must see through, whatever the exercise.
_NOTHING = """
def {name}(*args, **kwargs):
    return None
"""
_EQUAL_TO_ALL = """
class _Yes:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __hash__(self): return 0
    def __len__(self): return 0
    def __iter__(self): return iter(())
    def __call__(self, *args, **kwargs): return self
    def __getattr__(self, name): return self

def {name}(*args, **kwargs):
    return _Yes()
"""


@dataclass
class Proof:
    """What was tried on one exercise, and every way in which it fell short (none when it is proved)."""

    exercise: Exercise
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def prove(chapter: str) -> list[Proof]:
    """Run every variant of every one of the chapter's exercises, in as few child processes as can be.

    Raises ExerciseError when notebook and checks do not fit together.
    """
    notebook = read_notebook(registry.solution_path(chapter))
    cells, proofs, attempts = code_cells(notebook), [], []
    for exercise in registry.exercises(chapter):
        variants = variants_of(exercise, cells)
        proofs.append(Proof(exercise, dict.fromkeys(variants), statement_problems(exercise, notebook)))
        attempts += [Attempt(exercise, variant) for variant in variants.values()]
    outcomes = iter(run(attempts))
    for proof in proofs:
        proof.outcomes = {variant: next(outcomes) for variant in proof.outcomes}
        proof.problems += verdicts(proof.exercise, proof.outcomes)
    return proofs


def variants_of(exercise: Exercise, cells: list[str]) -> dict[str, list[str]]:
    """Name -> the notebook's code cells with one version of the exercise's own cell in them."""
    at = defining_cell(cells, exercise.entry)
    if at is None:
        raise ExerciseError(f"{exercise.name}: no cell of the solution defines {exercise.entry}")
    solved = [without_marks(cell) for cell in cells]
    versions = {
        "stub": strip_solution(cells[at]),
        "solution": solved[at],
        "returns nothing": _NOTHING.format(name=exercise.entry),
        "equals everything": _EQUAL_TO_ALL.format(name=exercise.entry),
    }
    for mistake in exercise.mistakes:
        versions[f"mistake: {mistake.name}"] = mistake.apply(solved[at])
    if len(versions) != 4 + len(exercise.mistakes):
        raise ExerciseError(f"{exercise.name}: two mistakes have one name")
    return {name: [*solved[:at], version, *solved[at + 1 :]] for name, version in versions.items()}


def verdicts(exercise: Exercise, outcomes: dict[str, Outcome]) -> list[str]:
    """Where the outcomes are not what they must be, in words."""
    problems = []
    if outcomes["stub"].status != NOT_STARTED:
        problems.append(f"the untouched stub comes out as: {outcomes['stub']}")
    if not outcomes["solution"].passed:
        problems.append(f"the solution does not pass: {outcomes['solution']}")
    for fake in ("returns nothing", "equals everything"):
        if outcomes[fake].status != FAILED:
            problems.append(f"a function that {fake} comes out as: {outcomes[fake]}")
    checks = {check.__name__ for check in exercise.checks}
    for mistake in exercise.mistakes:
        outcome = outcomes[f"mistake: {mistake.name}"]
        if mistake.caught_by not in checks | {OWN_WORK, TIME_LIMIT}:
            problems.append(f"mistake {mistake.name!r} names no check of this exercise: {mistake.caught_by!r}")
        elif outcome.status != FAILED or outcome.check != mistake.caught_by or not outcome.message:
            problems.append(
                f"mistake {mistake.name!r} must be caught by {mistake.caught_by}; {outcome.check} {outcome}"
            )
    if len(exercise.mistakes) < MIN_MISTAKES:
        problems.append(f"{len(exercise.mistakes)} planted mistakes, must be at least {MIN_MISTAKES}")
    return problems


def statement_problems(exercise: Exercise, notebook: dict) -> list[str]:
    """The text before the exercise's cell carries its title, difficulty, minutes and a hint; a check cell follows."""
    cells = notebook["cells"]
    texts = [source(cell) if cell["cell_type"] == "code" else "" for cell in cells]
    at = defining_cell(texts, exercise.entry)
    if at is None:
        return [f"no code cell defines {exercise.entry}"]
    before = next((source(c) for c in reversed(cells[:at]) if c["cell_type"] == "markdown"), "")
    wanted = [exercise.title, f"Difficulty {exercise.difficulty} of 5", f"{exercise.minutes} minutes", "<details>"]
    problems = [f"the statement does not contain {text!r}" for text in wanted if text not in before]
    call = f'check("{exercise.chapter}", "{exercise.name}", {exercise.entry})'
    if not any(call in text for text in texts[at + 1 :]):
        problems.append(f"no cell after it holds {call}")
    return problems
