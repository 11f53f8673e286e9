"""Notebooks as files: read, cut the solutions out, write, and hand a copy to the learner without ever losing theirs."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path

from . import registry
from .core import ExerciseError

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
STUB = ("# Your code here.", "raise NotImplementedError")


def source(cell: dict) -> str:
    """nbformat allows a string or a list of lines."""
    text = cell.get("source", "")
    return text if isinstance(text, str) else "".join(text)


def read_notebook(path: Path) -> dict:
    """Raises ExerciseError when the file is missing or is not a notebook."""
    try:
        notebook = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ExerciseError(f"{path}: no such notebook; make one with `python -m exercises start NN`") from None
    except OSError as error:
        raise ExerciseError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        raise ExerciseError(
            f"{path}: not a notebook (no JSON in it); was it saved half, or under a wrong name?"
        ) from None
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise ExerciseError(f"{path}: not a notebook (it has no list of cells)")
    if not all(isinstance(cell, dict) and "cell_type" in cell for cell in notebook["cells"]):
        raise ExerciseError(f"{path}: not a notebook (a cell has no type)")
    return notebook


def code_cells(notebook: dict) -> list[str]:
    return [source(cell) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def strip_solution(text: str) -> str:
    """Each marked region becomes a stub at the mark's indentation. Raises ExerciseError on unpaired marks."""
    kept, inside = [], False
    for line in text.split("\n"):
        mark = line.strip()
        if mark not in (BEGIN, END):
            if not inside:
                kept.append(line)
            continue
        if inside == (mark == BEGIN):
            raise ExerciseError(f"unpaired {mark!r}")
        inside = mark == BEGIN
        if inside:
            indent = line[: len(line) - len(line.lstrip())]
            kept += [indent + stub for stub in STUB]
    if inside:
        raise ExerciseError(f"unpaired {BEGIN!r}")
    return "\n".join(kept)


def without_marks(text: str) -> str:
    """The solution's code as one would write it."""
    return "\n".join(line for line in text.split("\n") if line.strip() not in (BEGIN, END))


def student_notebook(solution: dict) -> dict:
    """The notebook a learner gets: no solutions, no outputs, the same cell ids."""
    cells = []
    for cell in solution["cells"]:
        cell = {**cell, "metadata": cell.get("metadata", {}), "source": source(cell)}
        if cell["cell_type"] == "code":
            cell.update(source=strip_solution(cell["source"]), outputs=[], execution_count=None)
        cell["source"] = cell["source"].splitlines(keepends=True)
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def dumps(notebook: dict) -> str:
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def built(chapter: str) -> str:
    """The text that the committed student notebook must have."""
    path = registry.solution_path(chapter)
    try:
        return dumps(student_notebook(read_notebook(path)))
    except ExerciseError as error:
        raise ExerciseError(f"{path.name}: {error}") from None


def build(chapter: str) -> bool:
    """Write the committed student notebook; True when it changed."""
    path, text = registry.student_path(chapter), built(chapter)
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8", newline="\n")
    return True


def start(chapter: str, directory: Path = registry.MINE, fresh: bool = False) -> tuple[Path, Path | None]:
    """Copy the student notebook for the learner -> (its path, the backup if one was made).

    Raises ExerciseError when the learner already has one and `fresh` is False. Opened with "x", so that even two
    calls at once cannot overwrite anything.
    """
    target = registry.work_path(chapter, directory)
    text = registry.student_path(chapter).read_text(encoding="utf-8")
    target.parent.mkdir(parents=True, exist_ok=True)
    backup = _set_aside(target) if fresh and target.exists() else None
    try:
        with target.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except FileExistsError:
        raise ExerciseError(
            f"{target}: your notebook is already there and was left as it is; --fresh keeps it as a dated backup"
        ) from None
    return target, backup


def _set_aside(path: Path) -> Path:
    stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H%M%S")
    backup, count = path.with_name(f"{path.stem}.{stamp}.ipynb"), 1
    while backup.exists():
        count += 1
        backup = path.with_name(f"{path.stem}.{stamp}_{count}.ipynb")
    path.rename(backup)
    return backup


def defining_cell(cells: list[str], entry: str) -> int | None:
    """Index of the last code cell with `def entry` or `class entry` at its top level."""
    pattern = re.compile(rf"^(async\s+def|def|class)\s+{re.escape(entry)}\b", re.MULTILINE)
    found = [i for i, text in enumerate(cells) if pattern.search(text)]
    return found[-1] if found else None
