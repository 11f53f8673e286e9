"""What harness.check_bounds is for, planted: each fault is told of its own kernel, and the next one runs."""

from __future__ import annotations

import signal

import pytest

from tests.kernels import harness

ASTRAY = "tests.kernels.astray"


def told(only: str, module: str = ASTRAY, **limit) -> str:
    with pytest.raises(AssertionError) as failure:
        harness.check_bounds(module, only, **limit)
    harness.check_bounds(ASTRAY, "in bounds")
    return str(failure.value)


@pytest.mark.parametrize(("where", "fence"), [("far", "end"), ("early", "start")])
@pytest.mark.parametrize("act", ["reads", "writes"])
def test_one_element_beside_a_tensor(act, where, fence):
    name = f"{act} one too {where}"
    message = told(name)
    assert message.startswith(f"{ASTRAY}, {name}, fenced at its {fence}: exit {-signal.SIGSEGV}\n")
    assert "astray.py" in message, "where in the kernel"


def test_a_kernel_that_never_ends():
    assert f"never ends, fenced at its end: exit {-signal.SIGALRM}\n" in told("never ends", seconds=1)


def test_a_launcher_that_fails():
    message = told("fails")
    assert "fails, fenced at its end: exit 1\n" in message
    assert "ValueError: on purpose" in message


@pytest.mark.parametrize(("module", "only"), [("tests.kernels.no_such_file", ""), (ASTRAY, "no such case")])
def test_what_runs_nothing_proves_nothing(module, only):
    assert f"{module}, before the first case: exit 1\n" in told(only, module)


def test_a_guard_that_is_lost_is_started_again():
    harness.check_bounds(ASTRAY, "in bounds")
    harness._GUARD.process.kill()
    harness._GUARD.process.wait()
    harness.check_bounds(ASTRAY, "in bounds")
