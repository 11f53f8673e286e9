"""Grade notebooks in a child process that can be killed: an endless loop, an exit or a crash is a verdict like another.

A plain subprocess and a file of JSON lines, so it works alike where there is no fork and no alarm signal.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from . import registry
from .core import FAILED, TIME_LIMIT, Exercise, Outcome
from .notebook import IN_CHILD

START_LIMIT = 180.0  # seconds for the interpreter and the chapter's imports, on a busy machine
CELLS_LIMIT = 60.0  # seconds for the notebook's own cells
SLACK = 1.0


@dataclass(frozen=True)
class Attempt:
    """Code cells to run, then the exercise to grade in what they defined."""

    exercise: Exercise
    cells: list[str]


def run(attempts: list[Attempt]) -> list[Outcome]:
    """One outcome for each attempt, in order. A child that is lost costs one attempt; a new one goes on after it."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(attempts):
        outcomes += _run_child(attempts[len(outcomes) :])
    return outcomes


def _run_child(attempts: list[Attempt]) -> list[Outcome]:
    """Outcomes up to and including the first attempt that did not come back."""
    with tempfile.TemporaryDirectory(prefix="minillm-check-", ignore_cleanup_errors=True) as folder:
        jobs, results = Path(folder) / "jobs.json", Path(folder) / "results.jsonl"
        wanted = [{"chapter": a.exercise.chapter, "name": a.exercise.name, "cells": a.cells} for a in attempts]
        jobs.write_text(json.dumps(wanted), encoding="utf-8")
        results.touch()
        with (Path(folder) / "stderr").open("w+b") as errors:
            child = _spawn(jobs, results, errors)
            try:
                return _watch(child, attempts, results, Path(folder) / "stderr")
            finally:
                _kill(child)


def _spawn(jobs: Path, results: Path, errors) -> subprocess.Popen:
    root = str(registry.HOME.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        [sys.executable, "-m", "exercises.child", str(jobs), str(results)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8", "MPLBACKEND": "agg", IN_CHILD: "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        start_new_session=os.name == "posix",
    )


def _watch(child: subprocess.Popen, attempts: list[Attempt], results: Path, errors: Path) -> list[Outcome]:
    """Follow the child's progress file until it is complete, the child is gone, or a stage overruns."""
    outcomes: list[Outcome] = []
    stage, deadline, seen = "start", time.monotonic() + START_LIMIT, 0
    while True:
        ended = child.poll() is not None  # asked before reading, so that nothing written is missed
        lines = results.read_text(encoding="utf-8").split("\n")[:-1]
        for line in lines[seen:]:
            event = json.loads(line)
            stage = event["stage"]
            if stage == "done":
                outcomes.append(Outcome(**event["outcome"]))
            if len(outcomes) == len(attempts):
                return outcomes
            limit = attempts[len(outcomes)].exercise.seconds if stage == "checks" else CELLS_LIMIT
            deadline = time.monotonic() + limit + SLACK
        seen = len(lines)
        if ended or time.monotonic() > deadline:
            lost = attempts[len(outcomes)].exercise
            return [*outcomes, _lost(lost, stage, child.returncode if ended else None, errors)]
        time.sleep(0.02)


def _lost(exercise: Exercise, stage: str, code: int | None, errors: Path) -> Outcome:
    if code is None and stage == "checks":
        message = f"Still running after {exercise.seconds:g} s. Likely mistake: a loop that never ends."
    elif code is None:
        message = f"The notebook's cells did not finish within {CELLS_LIMIT:g} s; move what is slow elsewhere."
    else:
        tail = errors.read_text(encoding="utf-8", errors="replace").strip().split("\n")[-1][:200]
        message = f"The process ended (exit code {code}) before the check was done. {tail}".strip()
    return Outcome(exercise.chapter, exercise.name, FAILED, message, TIME_LIMIT if code is None else "process")


def _kill(child: subprocess.Popen) -> None:
    """The child and whatever it started."""
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    elif child.poll() is None:
        subprocess.run(["taskkill", "/T", "/F", "/PID", str(child.pid)], capture_output=True, check=False)
    child.wait()
