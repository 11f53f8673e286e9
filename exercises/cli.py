"""`python -m exercises`: list, start, check, build, prove. Exit code 0: all is well; 1: not yet; 2: bad input."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from . import registry
from .core import Exercise, ExerciseError, Outcome
from .files import build, built, code_cells, read_notebook, start
from .prove import prove
from .sandbox import Attempt, run

EXAMPLES = """examples:
  python -m exercises list
  python -m exercises start 01                     copy chapter 01's notebook to exercises/mine/
  python -m exercises check 01                     check your copy
  python -m exercises check 01 train_merges --json
  python -m exercises prove 01                     test the checks themselves
"""


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        "python -m exercises", description="The exercises.", epilog=EXAMPLES, formatter_class=raw
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    one = commands.add_parser("list", help="every exercise, with its difficulty and minutes")
    one.add_argument("--json", action="store_true")
    one = commands.add_parser("start", help="make your own copy of a chapter's notebook")
    one.add_argument("chapter")
    one.add_argument("--fresh", action="store_true", help="start over; your old notebook becomes a dated backup")
    one.add_argument("--directory", type=Path, default=registry.MINE, help="where to put it (exercises/mine)")
    one = commands.add_parser("check", help="check your answers")
    one.add_argument("chapter")
    one.add_argument("exercise", nargs="?", help="only this one")
    one.add_argument("--notebook", type=Path, help="your notebook, if it is not in exercises/mine")
    one.add_argument("--json", action="store_true")
    one = commands.add_parser("build", help="make the student notebooks from the solutions")
    one.add_argument("chapter", nargs="?")
    one.add_argument("--verify", action="store_true", help="write nothing; exit 1 if one is out of date")
    one = commands.add_parser("prove", help="test the checks: stub fails, solution passes, planted mistakes are caught")
    one.add_argument("chapter", nargs="?")
    return top


def main(argv: list[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a console without the character shows a question mark
    options = parser().parse_args(argv)
    try:
        return COMMANDS[options.command](options)
    except ExerciseError as error:
        print(f"exercises: {error}", file=sys.stderr)
        return 2


def list_command(options: argparse.Namespace) -> int:
    found = [exercise for chapter in registry.chapters() for exercise in registry.exercises(chapter)]
    if options.json:
        keys = ("chapter", "name", "title", "difficulty", "minutes")
        print(json.dumps([{key: getattr(exercise, key) for key in keys} for exercise in found], indent=1))
        return 0
    for e in found:
        level = "*" * e.difficulty + "." * (5 - e.difficulty)
        print(f"{e.chapter}  {e.name:<24} {level}  {e.minutes:>3} min  {e.title}")
    return 0


def start_command(options: argparse.Namespace) -> int:
    path, backup = start(options.chapter, options.directory, options.fresh)
    if backup:
        print(f"Your old notebook is now {backup}")
    print(f"Your notebook: {path}\nWhen you have written something: python -m exercises check {options.chapter}")
    return 0


def check_command(options: argparse.Namespace) -> int:
    chosen = registry.exercises(options.chapter)
    if options.exercise:
        chosen = [registry.find(options.chapter, options.exercise)]
    path = options.notebook or registry.work_path(options.chapter)
    if not options.notebook and not path.exists():
        path = registry.student_path(options.chapter)
    cells = code_cells(read_notebook(path))
    outcomes = run([Attempt(exercise, cells) for exercise in chosen])
    passed = all(outcome.passed for outcome in outcomes)
    if options.json:
        report = {"notebook": str(path), "passed": passed, "exercises": [outcome.to_dict() for outcome in outcomes]}
        print(json.dumps(report, indent=1))
    else:
        print(f"{path}\n" + "\n".join(line_for(e, o) for e, o in zip(chosen, outcomes, strict=True)))
        if not options.notebook and path == registry.student_path(options.chapter):
            print(f"You have no copy of your own yet; make one: python -m exercises start {options.chapter}")
    return 0 if passed else 1


def line_for(exercise: Exercise, outcome: Outcome) -> str:
    message = " ".join(outcome.message.split())
    return f"  {outcome.status:<11}  {exercise.name}" + (f"  {message}" if message else "")


def build_command(options: argparse.Namespace) -> int:
    stale = 0
    for chapter in [options.chapter] if options.chapter else registry.chapters():
        path = registry.student_path(chapter)
        if options.verify:
            changed = not path.exists() or path.read_text(encoding="utf-8") != built(chapter)
            word = "out of date; run `python -m exercises build`" if changed else "in step with its solution"
        else:
            changed = build(chapter)
            word = "written" if changed else "already in step with its solution"
        stale += changed
        print(f"{path.name}: {word}")
    return 1 if options.verify and stale else 0


def prove_command(options: argparse.Namespace) -> int:
    failures = 0
    for chapter in [options.chapter] if options.chapter else registry.chapters():
        for proof in prove(chapter):
            exercise = proof.exercise
            failures += bool(proof.problems)
            print(f"{exercise.chapter} {exercise.name}: {'NOT proved' if proof.problems else 'proved'}")
            for variant, outcome in proof.outcomes.items():
                print(f"    {variant:<44} {outcome.status:<11} {outcome.check}")
            for problem in proof.problems:
                print(f"    problem: {problem}")
    return 1 if failures else 0


COMMANDS = {
    "list": list_command,
    "start": start_command,
    "check": check_command,
    "build": build_command,
    "prove": prove_command,
}
