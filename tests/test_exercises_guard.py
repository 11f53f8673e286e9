"""How the grader watches a learner's code: arguments, memory, time, and exceptions that cannot say what they are."""

import subprocess
import sys
import threading

import pytest
import torch

from exercises import Exercise, Failed, Judge, check, registry
from exercises.child import execute
from exercises.core import FAILED, PASSED
from exercises.grade import grade, named
from exercises.guard import Guarded
from exercises.judge import DEEPEST


def exercise_of(*checks, entry="answer", **changes):
    values = {"name": "x", "title": "X", "chapter": "01", "difficulty": 1, "minutes": 5, "mistakes": []}
    return Exercise(**{**values, "checks": list(checks), "entry": entry, **changes})


class Shelf:
    def put(self, things):
        self.things = things
        return self

    def spoil(self, things):
        things.append(0)

    @property
    def label(self):
        return 3


def test_methods_are_guarded_and_get_the_very_arguments():
    shelf, things = Guarded(Shelf, "Shelf")(), [1]
    assert shelf.put(things).things is things
    with pytest.raises(Failed, match=r"Shelf\.spoil changed an argument"):
        shelf.spoil(things)
    with pytest.raises(Failed, match=r"There is no Shelf\.take"):
        _ = shelf.take
    with pytest.raises(Failed, match=r"Shelf\.label is int, must be a method"):
        _ = shelf.label
    assert Guarded(Shelf, "Shelf", mutates=True)().spoil(things) is None
    assert type(shelf).__name__ == "Shelf"


@pytest.mark.parametrize(
    "spoils",
    [
        lambda x, d: x.__setitem__(0, 5.0),
        lambda x, d: setattr(x, "data", x.data.double()),
        lambda x, d: x.requires_grad_(),
        lambda x, d: x.unsqueeze_(0),
        lambda x, d: d["a"].append(2),
        lambda x, d: d.pop("a"),
    ],
)
def test_every_way_to_change_an_argument_is_seen(spoils):
    x, d = torch.ones(3), {"a": [1]}
    with pytest.raises(Failed, match="changed an argument"):
        Guarded(spoils, "spoils")(x, d)
    assert (x.tolist(), x.dtype, x.requires_grad, d) == ([1, 1, 1], torch.float32, False, {"a": [1]})
    trainable = torch.ones(2, requires_grad=True)
    Guarded(lambda x: x.sum(), "sum")(trainable)


@pytest.mark.parametrize(
    "given_back", [lambda x: x, lambda x: x[1:], lambda x: (1, [x.view(2, 2)]), lambda x: {0: x[::2]}]
)
def test_a_view_of_an_argument_is_no_new_tensor(given_back):
    x = torch.ones(4)
    with pytest.raises(Failed, match="or a view of one"):
        Guarded(given_back, "f", fresh=True)(x)
    Guarded(given_back, "f")(x)
    for new in (lambda x: x.clone(), lambda x: x * 1, lambda x: [x[:0], x.tolist()], lambda x: None):
        Guarded(new, "f", fresh=True)(x)


def counts(answer, judge):
    judge.equal(answer(1), [1])
    judge.equal(answer(2), [2])


def test_a_default_that_grows_is_named_when_the_answer_is_wrong():
    def answer(n, seen=[]):  # noqa: B006
        seen.append(n)
        return seen

    assert "the default of seen has changed" in grade(exercise_of(counts), answer).message

    def memo(n, known={}):  # noqa: B006
        return known.setdefault(n, [n])

    assert grade(exercise_of(counts), memo).status == PASSED


def test_a_call_that_cannot_be_made_is_not_called_a_result():
    for source in ("def answer():\n    return 1", "def answer(n, m):\n    return 1", "answer = len"):
        message = grade(exercise_of(counts), execute([source])[0]["answer"]).message
        assert "The call raised TypeError" in message
        assert message.endswith("It was called as answer(1).")


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError


def test_an_exception_is_named_on_one_short_line():
    assert named(Unspeakable()) == "Unspeakable: (its text raised ValueError)"
    assert named(KeyError(3)) == "KeyError: 3"
    assert named(ValueError("a\n  b")) == "ValueError: a b"
    assert len(named(ValueError("x" * 9999))) < 400


def test_one_number_is_no_list_of_one():
    judge = Judge()
    for got, want in (([1.0], 1.0), ((1.0,), 1.0), (1.0, [1.0]), (torch.ones(1), 1.0)):
        with pytest.raises(Failed, match="came back, must be"):
            judge.close(got, want)
    judge.close(torch.tensor(1.0), 1.0)
    for got, want in (([[1.0], [2.0, 3.0]], [1.0, 2.0, 3.0]), ([1.0, 2.0, 3.0], [[1.0, 2.0], [3.0]])):
        with pytest.raises(Failed):
            judge.close(got, want)


@pytest.mark.parametrize(
    ("got", "said"),
    [
        (10**400, "got 1000"),
        (torch.eye(2).to_sparse(), "a sparse_coo tensor came back"),
        (torch.empty(2, device="meta"), "a meta tensor came back"),
        ("12", "where a number was expected"),
    ],
)
def test_what_no_number_can_be_is_refused_in_words(got, said):
    with pytest.raises(Failed, match=said):
        Judge().close(got, 2.0)


def test_a_list_without_end_is_refused():
    nest: list = []
    nest.append(nest)
    with pytest.raises(Failed, match="put into itself"):
        Judge().equal(nest, [1])
    deep = [1]
    for _ in range(DEEPEST - 1):
        deep = [deep]
    Judge().equal(deep, deep)


def test_long_lists_that_look_alike_are_told_apart():
    want = list(range(100))
    got = [*want[:50], -1, *want[51:]]
    with pytest.raises(Failed, match=r"they differ first at position 50: -1, expected 50"):
        Judge().equal(got, want)
    with pytest.raises(Failed) as refused:
        Judge().equal(torch.arange(100).view(4, 25), want)
    assert "\n" not in str(refused.value)


def test_parts_are_counted_and_named():
    judge = Judge()
    assert judge.parts((1, 2), "keys", "values") == (1, 2)
    for got, said in (
        ((1,), "1 part, must be 2: keys and values"),
        ([1, 2, 3], "3 parts"),
        (None, "no return"),
        (7, "int"),
    ):
        with pytest.raises(Failed, match=said):
            judge.parts(got, "keys", "values")


def test_another_exception_than_the_one_asked_for_is_told():
    def full():
        raise IndexError("full")

    with pytest.raises(Failed, match="IndexError was raised where ValueError is wanted: full"):
        Judge().raises(full, ValueError, "")


# --- time and memory


def turns(values):
    while True:
        pass


def turns_on(values):
    while True:
        try:
            sum(values)
        except Exception:
            continue


over = threading.Event()  # a loop that went on would take every other moment of all tests after it


def will_not_stop(values):
    for _ in range(40):
        try:
            while not over.is_set():
                sum(values)
        except BaseException:
            continue


def begun(answer, judge):
    answer([1])


@pytest.mark.parametrize(("answer", "goes_on"), [(turns, False), (turns_on, False), (will_not_stop, True)])
def test_an_endless_loop_in_a_notebook_is_stopped_if_it_lets_itself_be(answer, goes_on, monkeypatch):
    monkeypatch.setattr(registry, "find", lambda chapter, name: exercise_of(begun, seconds=0.2))
    before = set(threading.enumerate())
    try:
        outcome = check("01", "answer", answer)
    finally:
        left = set(threading.enumerate()) - before
        over.set()
        for thread in left:
            thread.join(10)
        over.clear()
    assert (outcome.status, outcome.check) == (FAILED, "time limit")
    assert ("Restart the kernel" in outcome.message) is bool(left) is goes_on
    assert not any(thread.is_alive() for thread in left)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be asked to limit memory")
def test_a_list_that_grows_for_ever_meets_the_memory_limit():
    code = """
from exercises.child import limit_memory
limit_memory(1 << 30)
grown = []
try:
    for _ in range(100):
        grown.append(bytes(1 << 24))
except MemoryError:
    print(len(grown), "of them")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=registry.HOME.parent)
    assert done.stdout.endswith("of them\n"), done.stderr
    assert 20 < int(done.stdout.split()[0]) <= 64
