"""The exercises' checks are proved, and the framework neither loses a learner's work nor believes a bad notebook."""

import dataclasses
import functools
import json
import re
import subprocess
import sys
import threading

import pytest
import torch

from exercises import ExerciseError, Failed, Judge, Mistake, check, registry
from exercises.child import as_python, execute
from exercises.cli import main
from exercises.core import FAILED, NOT_STARTED, PASSED, Exercise
from exercises.files import built, code_cells, read_notebook, start, strip_solution, student_notebook
from exercises.grade import grade
from exercises.guard import Guarded
from exercises.judge import plain_copy
from exercises.prove import prove, verdicts
from exercises.sandbox import Attempt, run

ALL = [exercise for chapter in registry.chapters() for exercise in registry.exercises(chapter)]


@functools.cache
def proofs(chapter):
    """Of a chapter at a time, because each child process of `prove` has to import torch."""
    return {proof.exercise.name: proof for proof in prove(chapter)}


@pytest.mark.parametrize("exercise", ALL, ids=lambda e: f"{e.chapter}-{e.name}")
def test_every_exercise_is_proved(exercise):
    assert proofs(exercise.chapter)[exercise.name].problems == []


@pytest.mark.parametrize("chapter", registry.chapters())
def test_a_solution_runs_from_top_to_bottom_and_its_own_check_cells_say_passed(chapter, monkeypatch):
    """Why `make notebooks` need not run the solutions as well: they hold plain Python, and here its verdicts count."""
    outcomes = []
    monkeypatch.setattr("exercises.check", lambda *call: outcomes.append(check(*call)))
    cells = code_cells(read_notebook(registry.solution_path(chapter)))
    assert [as_python(cell) for cell in cells] == cells, "IPython's own syntax, which nothing here would run"
    _, errors = execute(cells)
    assert errors == {}
    want = [(exercise.name, PASSED) for exercise in registry.exercises(chapter)]
    assert [(outcome.exercise, outcome.status) for outcome in outcomes] == want


@pytest.mark.parametrize("chapter", registry.chapters())
def test_student_notebook_is_in_step_with_its_solution(chapter):
    text = registry.student_path(chapter).read_text(encoding="utf-8")
    assert text == built(chapter), "run `python -m exercises build`"
    assert "SOLUTION" not in text
    assert all(not cell["outputs"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")


@functools.cache
def untouched():
    """Name -> what its check says of the notebook as it is handed out, by chapter."""
    attempts = [Attempt(e, code_cells(read_notebook(registry.student_path(e.chapter)))) for e in ALL]
    outcomes = {chapter: {} for chapter in registry.chapters()}
    for outcome in run(attempts):
        outcomes[outcome.chapter][outcome.exercise] = outcome.status
    return outcomes


@pytest.mark.parametrize("chapter", registry.chapters())
def test_untouched_student_notebook_passes_nothing(chapter):
    assert untouched()[chapter] == {e.name: NOT_STARTED for e in registry.exercises(chapter)}


def test_the_command_says_so_too(capsys):
    assert main(["check", "02", "--notebook", str(registry.student_path("02")), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert {e["exercise"]: e["status"] for e in report["exercises"]} == untouched()["02"]


# --- a small exercise to try the framework on


def doubles(double, judge):
    judge.equal(double([1, 2]), [2, 4], "Likely mistake: not doubled.")


def keeps_length(double, judge):
    judge.equal(len(double(list(range(5)))), 5, "Likely mistake: an element lost.")


def small(name="train_merges", **changes):
    values = {
        "name": name,
        "title": "Double",
        "chapter": "01",
        "difficulty": 1,
        "minutes": 5,
        "checks": [doubles, keeps_length],
        "mistakes": [],
        "entry": "double",
        **changes,
    }
    return Exercise(**values)


def double(values):
    return [2 * value for value in values]


def loses_long_ones(values):
    return [2 * value for value in values][:4]


def edits_in_place(values):
    for i in range(len(values)):
        values[i] *= 2
    return values


def not_begun(values):
    raise NotImplementedError


def crashes(values):
    return values["first"]


def leaves(values):
    sys.exit(0)


def uses_json(values):
    return json.loads(json.dumps([2 * value for value in values]))


def uses_json_through_a_helper(values):
    return uses_json(values)


def imports_json_inside(values):
    from json import dumps

    return [2 * value for value in values] if dumps else []


@pytest.mark.parametrize(
    ("attempt", "status", "failed", "message"),
    [
        (double, PASSED, "", ""),
        (loses_long_ones, FAILED, "keeps_length", "an element lost"),
        (edits_in_place, FAILED, "doubles", "changed an argument"),
        (not_begun, NOT_STARTED, "doubles", "NotImplementedError"),
        (crashes, FAILED, "doubles", 'TypeError: list indices must be integers or slices, not str, at "return values'),
        (leaves, FAILED, "doubles", "SystemExit"),
        (lambda values: None, FAILED, "doubles", "no return statement"),
        (lambda: [], FAILED, "doubles", "TypeError"),
        (7, FAILED, "own work", "int, not a function"),
        (uses_json, FAILED, "own work", "uses json"),
        (uses_json_through_a_helper, FAILED, "own work", "uses json"),
        (imports_json_inside, FAILED, "own work", "uses json"),
        (json.dumps, FAILED, "own work", "comes from json"),
    ],
)
def test_grade_says_what_is_wrong(attempt, status, failed, message):
    outcome = grade(small(forbids=("json",)), attempt)
    assert (outcome.status, outcome.check) == (status, failed)
    assert message in outcome.message


def test_in_place_is_allowed_where_it_is_the_task():
    assert grade(small(mutates=True), edits_in_place).passed


class YesToAll:
    def __eq__(self, other):
        return True

    __hash__ = None


@pytest.mark.parametrize("value", [YesToAll(), [YesToAll()], {"a": YesToAll()}, (1, [YesToAll()])])
def test_an_object_equal_to_everything_equals_nothing(value):
    assert value == value
    with pytest.raises(Failed):
        Judge().equal(value, [1])


def test_judge_close_takes_shape_and_nan_seriously():
    judge, want = Judge(), torch.tensor([[1.0, 2.0]])
    judge.close(want + 1e-7, want)
    judge.close(float("inf"), float("inf"))
    for got in (want.T, want[0], want + 1e-3, want * float("nan"), want + 0j, [[1.0, 2.0]], None, "12"):
        with pytest.raises(Failed):
            judge.close(got, want)


@pytest.mark.parametrize(
    ("otherwise", "said"),
    [
        ("for f(3). Likely mistake: x.", "got 1, expected 2, for f(3). Likely mistake: x."),
        ("(fused) for f(3).", "got 1, expected 2, (fused) for f(3)."),
        ("Likely mistake: x.", "got 1, expected 2. Likely mistake: x."),
        ("", "got 1, expected 2."),
    ],
)
def test_a_message_is_made_of_whole_sentences(otherwise, said):
    for compare in (Judge().equal, Judge().close):
        with pytest.raises(Failed) as refused:
            compare(1, 2, otherwise)
        assert str(refused.value) == said


def test_copies_reach_into_containers_and_tensors():
    original = {"a": [torch.ones(2), (1, bytearray(b"x"))]}
    copy = plain_copy(original)
    copy["a"][0].zero_()
    copy["a"][1][1][0] = 0
    assert original["a"][0].tolist() == [1, 1]
    assert original["a"][1][1] == b"x"

    def zeroes(tensor):
        return tensor.zero_()

    with pytest.raises(Failed, match="changed an argument"):
        Guarded(zeroes, "zeroes")(original["a"][0])
    assert original["a"][0].tolist() == [1, 1]


def test_an_exception_is_told_with_the_call_that_raised_it():
    def halves(x, size, names=(), **more):
        return x.view(size, -1)

    def uneven(halves, judge):
        halves(torch.ones(3, 2), 4, names=["a"], model=object())

    told = grade(small(checks=[uneven]), halves).message
    assert told.endswith("It was called as double(<(3, 2)>, 4, names=['a'], model=<object>)."), told

    def unusable(halves, judge):
        halves(torch.ones(3, 2), 3) + "a"

    assert "called as" not in grade(small(checks=[unusable]), halves).message


def test_nan_in_an_argument_is_not_taken_for_a_change():
    value = torch.tensor([float("nan"), 1.0])
    assert Guarded(lambda x, y: 3, "f")(value, [float("nan")]) == 3


# --- child processes


def attempt(*cells):
    return Attempt(registry.find("01", "train_merges"), list(cells))


RIGHT = registry.solution_path("01")


def test_a_lost_process_costs_one_exercise_and_no_more():
    solved = [cell for cell in code_cells(read_notebook(RIGHT)) if "check(" not in cell]
    leave = "import os\ndef train_merges(text, n):\n    os._exit(0)\n"
    broken = "def train_merges(text, n:\n    pass\n"
    print_all = "print('passed' * 100000)\ndef train_merges(text, n):\n    print('{}')\n    return []\n"
    outcomes = run([attempt(leave), attempt(*solved), attempt(broken), attempt(print_all), attempt("x = 1")])
    assert [outcome.status for outcome in outcomes] == [FAILED, PASSED, FAILED, FAILED, FAILED]
    assert "ended (exit code 0)" in outcomes[0].message
    assert "syntax error in line 1" in outcomes[2].message
    assert "nothing called train_merges" in outcomes[4].message


def test_an_endless_loop_meets_the_time_limit():
    exercise = dataclasses.replace(registry.find("01", "train_merges"), seconds=0.3)
    endless = Attempt(exercise, ["def train_merges(text, n):\n    while True:\n        pass\n"])
    after = Attempt(exercise, ["def train_merges(text, n):\n    raise NotImplementedError\n"])
    first, second = run([endless, after])
    assert (first.status, first.check) == (FAILED, "time limit")
    assert "never ends" in first.message
    assert second.status == NOT_STARTED


def test_cells_that_never_finish_meet_theirs(monkeypatch):
    monkeypatch.setattr("exercises.sandbox.CELLS_LIMIT", 0.3)
    (outcome,) = run([attempt("while True:\n    pass\n")])
    assert "cells did not finish" in outcome.message


def test_an_endless_loop_in_a_notebook_is_reported(monkeypatch):
    exercise, released = small(seconds=0.2), threading.Event()
    monkeypatch.setattr(registry, "find", lambda chapter, name: exercise)
    try:
        assert check("01", "double", lambda values: released.wait()).check == "time limit"
    finally:
        released.set()


def test_cells_are_read_as_a_notebook_would():
    assert as_python("%%time\nx = 1\n") == "x = 1\n"
    assert as_python("%%bash\nrm x\n") == ""
    assert as_python("if True:\n    !ls\n    %timeit f()\ny = 5\n") == "if True:\n    pass\n    pass\ny = 5\n"
    assert as_python("z = (7\n     % 4)\n") == "z = (7\n     % 4)\n"
    namespace, errors = execute(["a = 1", "b = a / 0", "c = a + 1"])
    assert namespace["c"] == 2
    assert list(errors) == [1]
    assert "ZeroDivisionError" in errors[1]


# --- the proof itself can fail


def test_a_proof_finds_every_kind_of_weakness():
    exercise = small(
        checks=[doubles],
        mistakes=[
            Mistake("harmless", "doubles", source="x"),
            Mistake("wrong check", "keeps_length", source="x"),
        ],
    )
    good, bad, begun = grade(exercise, double), grade(exercise, lambda v: [1]), grade(exercise, not_begun)
    outcomes = {
        "stub": good,
        "solution": bad,
        "returns nothing": good,
        "equals everything": begun,
        "mistake: harmless": good,
        "mistake: wrong check": bad,
    }
    assert len(verdicts(exercise, outcomes)) == 7


def test_an_edit_must_fit_the_solution_exactly_once():
    assert Mistake("m", "c", edit=("a", "b")).apply("xa") == "xb"
    for mistake in (Mistake("m", "c", edit=("a", "b")), Mistake("m", "c"), Mistake("m", "c", "s", ("a", "b"))):
        with pytest.raises(ExerciseError):
            mistake.apply("aa")


# --- files


def test_stripping_keeps_indentation_and_refuses_unpaired_marks():
    text = "def f():\n    '''doc'''\n    ### BEGIN SOLUTION\n    return 1\n    ### END SOLUTION\n\ny = 1"
    stub = strip_solution(text)
    assert "return 1" not in stub
    assert stub.endswith("    raise NotImplementedError\n\ny = 1")
    compile(stub, "stub", "exec")
    for bad in ("### BEGIN SOLUTION\nx", "### END SOLUTION", "### BEGIN SOLUTION\n### BEGIN SOLUTION"):
        with pytest.raises(ExerciseError):
            strip_solution(bad)


def test_building_clears_outputs():
    cell = {"cell_type": "code", "source": "1", "outputs": [{"x": 1}], "execution_count": 3, "id": "a", "metadata": {}}
    (made,) = student_notebook({"cells": [cell]})["cells"]
    assert (made["outputs"], made["execution_count"], made["id"]) == ([], None, "a")


def test_start_never_overwrites(tmp_path):
    path, backup = start("1", tmp_path)
    assert backup is None
    path.write_text("my work", encoding="utf-8")
    with pytest.raises(ExerciseError, match=re.escape(str(path))):
        start("01", tmp_path)
    assert path.read_text(encoding="utf-8") == "my work"
    backups = {start("01", tmp_path, fresh=True)[1] for _ in range(3)}
    assert len(backups) == 3
    assert "my work" in [backup.read_text(encoding="utf-8") for backup in backups]
    assert path.read_text(encoding="utf-8") == registry.student_path("01").read_text(encoding="utf-8")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"cells": 3}', '{"cells": [3]}', '{"cells": [{}]}', "\ud800"])
def test_a_notebook_that_is_none_is_refused_in_one_line(content, tmp_path, capsys):
    path = tmp_path / "bad.ipynb"
    path.write_text(content, encoding="utf-8", errors="surrogatepass")
    assert main(["check", "01", "--notebook", str(path)]) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["check", "77"], "77"),
        (["check", "../x"], "../x"),
        (["check", "01", "nothing"], "nothing"),
        (["check", "01", "--notebook", "absent.ipynb"], "absent.ipynb"),
        (["start", "xx"], "xx"),
        (["prove", "99"], "99"),
        (["build", "99"], "99"),
    ],
)
def test_bad_arguments_end_with_two_and_one_line(arguments, named, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


def test_the_command_line_from_outside(tmp_path):
    def exercises(*arguments):
        command = [sys.executable, "-m", "exercises", *arguments]
        return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", cwd=registry.HOME.parent)

    listed = json.loads(exercises("list", "--json").stdout)
    assert {(e["chapter"], e["name"]) for e in listed} == {(e.chapter, e.name) for e in ALL}
    solved = exercises("check", "01", "--notebook", str(RIGHT))
    assert solved.returncode == 0, solved.stdout + solved.stderr
    assert solved.stdout.count("passed") == len(registry.exercises("01"))
    assert exercises("build", "--verify").returncode == 0


def test_a_notebook_cell_shows_the_verdict_and_escapes_it():
    outcome = check("01", "train_merges", lambda text, n: {"<b>": text})
    assert outcome.status == FAILED
    assert "<b>dict" not in outcome._repr_html_()
    outcome.message = "<script>"
    assert "<script>" not in outcome._repr_html_()
    with pytest.raises(ExerciseError, match="train_merges"):
        check("01", "no_such", double)
