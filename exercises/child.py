"""The child process of `sandbox`: `python -m exercises.child jobs.json results.jsonl`."""

from __future__ import annotations

import json
import linecache
import re
import sys
import types
from pathlib import Path

from . import registry
from .core import FAILED, Exercise, Outcome
from .files import defining_cell
from .grade import explain, grade

MODULE = "learner_notebook"
MEMORY_LIMIT = 4 << 30  # bytes; a list that grows for ever must not take the machine with it
_HARMLESS = re.compile(r"^%%(time|timeit|capture)\b.*\n")
_MAGIC = re.compile(r"^(\s*)[%!].*$", re.MULTILINE)


def as_python(cell: str) -> str:
    """A cell without IPython's own syntax; a cell in another language becomes empty."""
    cell = _HARMLESS.sub("", cell)
    if cell.lstrip().startswith("%%"):
        return ""
    try:
        compile(cell, "<cell>", "exec")
    except SyntaxError:
        return _MAGIC.sub(r"\1pass", cell)
    return cell


def execute(cells: list[str]) -> tuple[dict, dict[int, str]]:
    """Run the cells in one fresh module -> (its namespace, what went wrong by cell). A failing cell stops no other."""
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    namespace, errors = module.__dict__, {}
    for i, cell in enumerate(cells):
        text, filename = as_python(cell), f"<code cell {i + 1}>"
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        try:
            exec(compile(text, filename, "exec"), namespace)
        except SyntaxError as error:
            errors[i] = f"Code cell {i + 1} has a syntax error in line {error.lineno}: {error.msg}."
        except BaseException as error:
            errors[i] = f"Code cell {i + 1} failed. {explain(error, namespace)}"
    return namespace, errors


def attempt(exercise: Exercise, cells: list[str], note) -> Outcome:
    """Define, then grade."""
    note({"stage": "cells"})
    namespace, errors = execute(cells)
    note({"stage": "checks"})
    if exercise.entry in namespace:
        return grade(exercise, namespace[exercise.entry])
    at = defining_cell(cells, exercise.entry)
    message = errors.get(at, f"The notebook defines nothing called {exercise.entry}.")
    return Outcome(exercise.chapter, exercise.name, FAILED, message, "definition")


def limit_memory(size: int = MEMORY_LIMIT) -> None:
    """Python raises MemoryError beyond `size` bytes, where the system can be asked for that (Linux)."""
    if sys.platform == "linux":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        size = size if most == resource.RLIM_INFINITY else min(size, most)
        resource.setrlimit(resource.RLIMIT_DATA, (size, most))


def main(jobs: str, results: str) -> None:
    limit_memory()
    with Path(results).open("a", encoding="utf-8") as file:

        def note(event: dict) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()

        for job in json.loads(Path(jobs).read_text(encoding="utf-8")):
            outcome = attempt(registry.find(job["chapter"], job["name"]), job["cells"], note)
            note({"stage": "done", "outcome": outcome.to_dict()})


if __name__ == "__main__":
    main(*sys.argv[1:3])
