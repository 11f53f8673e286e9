"""What students usually get wrong, done to every solution: one clear sentence each time, and never a pass."""

import ast
import copy
import functools

import pytest
import torch

from exercises import registry
from exercises.child import execute
from exercises.core import FAILED
from exercises.files import code_cells, read_notebook, without_marks
from exercises.grade import grade

ALL = [exercise for chapter in registry.chapters() for exercise in registry.exercises(chapter)]
every_exercise = pytest.mark.parametrize("exercise", ALL, ids=lambda e: f"{e.chapter}-{e.name}")


@functools.cache
def solutions(chapter):
    cells = code_cells(read_notebook(registry.solution_path(chapter)))
    namespace, errors = execute([without_marks(cell) for cell in cells if 'check("' not in cell])
    assert errors == {}
    return namespace


def altered(solution, alter):
    """The solution with `alter(call, args)` in place of each call; of a class, of each of its methods."""
    if not isinstance(solution, type):
        return lambda *args, **kwargs: alter(lambda *given: solution(*given, **kwargs), args)

    def method(name):
        own = getattr(solution, name)
        return lambda self, *args: alter(lambda *given: own(self, *given), args)

    public = [name for name, member in vars(solution).items() if callable(member) and not name.startswith("_")]
    return type(solution.__name__, (solution,), {name: method(name) for name in public})


def refused(exercise, answer):
    """The message, after making sure that it is one."""
    outcome = grade(exercise, answer)
    assert outcome.status == FAILED, outcome
    assert outcome.check
    assert outcome.message
    assert "\n" not in outcome.message
    assert "could not be used" not in outcome.message, "the check tripped over it"
    return outcome.message


def change(value):
    """Something in `value` becomes another -> whether anything could."""
    if isinstance(value, torch.Tensor) and value.numel():
        value.view(-1)[0] += 1 if value.dtype != torch.bool else True
    elif isinstance(value, list):
        value.append(value[-1] if value else 0)
    elif isinstance(value, dict):
        value["one more"] = 0
    elif isinstance(value, set):
        value.add(77)
    else:
        return isinstance(value, tuple) and any(change(part) for part in value)
    return True


@every_exercise
@pytest.mark.parametrize("last", [False, True], ids=["first argument", "last argument"])
def test_an_argument_changed_in_place_is_told(exercise, last):
    changed = []

    def in_place(call, args):
        result = call(*copy.deepcopy(args)) if all(map(plain, args)) else call(*args)
        changed.append(any(change(arg) for arg in (reversed(args) if last else args)))
        return result

    outcome = grade(exercise, altered(solutions(exercise.chapter)[exercise.entry], in_place))
    assert outcome.passed is not any(changed), outcome
    assert "changed an argument" in outcome.message or not any(changed)


def plain(value):
    if isinstance(value, (list, tuple)):
        return all(map(plain, value))
    return isinstance(value, (int, float, str, bytes, dict, set, torch.Tensor, type(None)))


def one_more(value):
    """The last number in it one larger, the last text one longer; the same value where there is neither."""
    if isinstance(value, torch.Tensor):
        value = value.clone().contiguous()
        if value.numel():
            last = value.view(-1)[-1]
            value.view(-1)[-1] = ~last if value.dtype == torch.bool else last + 1
    elif isinstance(value, dict) and value:
        key = list(value)[-1]
        value = {**value, key: one_more(value[key])}
    elif isinstance(value, (list, tuple)) and value:
        value = type(value)([*value[:-1], one_more(value[-1])])
    elif isinstance(value, bool):
        value = not value
    elif isinstance(value, (int, float)):
        value += 1
    elif isinstance(value, (str, bytes)):
        value += value[-1:] or type(value)()
    return value


PROGRAMS = ("swiglu_program", "add_norm_program")  # they return nothing; what counts is what they store


@every_exercise
def test_an_answer_that_is_off_by_one_is_refused(exercise):
    if exercise.name not in PROGRAMS:
        off = altered(solutions(exercise.chapter)[exercise.entry], lambda call, args: one_more(call(*args)))
        refused(exercise, off)


@every_exercise
def test_the_examples_by_heart_are_not_enough(exercise):
    """The first two calls are answered rightly, all later ones as the second."""
    known = []

    def by_heart(call, args):
        if len(known) < 2:
            known.append(call(*args))
        return copy.deepcopy(known[-1])

    refused(exercise, altered(solutions(exercise.chapter)[exercise.entry], by_heart))


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError


def raising(error):
    def alter(call, args):
        raise error

    return alter


@every_exercise
def test_an_exception_is_told_whatever_it_is(exercise):
    solution = solutions(exercise.chapter)[exercise.entry]
    for error in (KeyError(3), Unspeakable(), SystemExit(), KeyboardInterrupt(), RuntimeError("two\nlines " * 999)):
        message = refused(exercise, altered(solution, raising(error)))
        assert type(error).__name__ in message
        assert len(message) < 1000


@every_exercise
def test_other_parameters_are_told(exercise):
    def without():
        return None

    class Without:
        def __init__(self, one, two, three, four):
            pass

    solution = solutions(exercise.chapter)[exercise.entry]
    message = refused(exercise, Without if isinstance(solution, type) else without)
    assert "The call raised TypeError" in message
    assert "parameters" in message


class Nothing:
    """An object of no use."""


def endless_list():
    nest = []
    nest.append(nest)
    return nest


ODD = [
    None,
    Nothing(),
    Nothing,
    refused,
    ...,
    "12",
    [],
    [[1], [2, 3]],
    endless_list(),
    (None,),
    {None: None},
    10**400,
    float("inf"),
    1j,
    torch.eye(3).to_sparse(),
    torch.empty(3, 3, device="meta"),
    torch.empty(0),
    torch.tensor(1.5),
    (i for i in range(3)),
]


@every_exercise
def test_a_result_of_the_wrong_kind_is_refused(exercise):
    solution = solutions(exercise.chapter)[exercise.entry]
    for result in ODD:
        refused(exercise, altered(solution, lambda call, args, result=result: result))


@pytest.mark.parametrize("exercise", [e for e in ALL if e.entry[0].isupper()], ids=lambda e: e.name)
def test_a_class_without_its_methods_is_told(exercise):
    methods = [name for name in vars(solutions(exercise.chapter)[exercise.entry]) if not name.startswith("_")]
    source = f"class {exercise.entry}:\n    def __init__(self, *given):\n        pass\n"
    ast.parse(source)
    assert f"There is no {exercise.entry}." in refused(exercise, execute([source])[0][exercise.entry])
    fields = "".join(f"        self.{name} = 3\n" for name in methods)
    answer = execute([source.replace("        pass\n", fields)])[0][exercise.entry]
    assert "is int, must be a method" in refused(exercise, answer)
