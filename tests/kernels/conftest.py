"""Says so when the interpreter is needed and came too late; tests/conftest.py is where it is asked for.

Triton reads TRITON_INTERPRET when it is imported and again at each @triton.jit, so the variable has to be there before
any test file, any worker, imports triton or kernels.
"""

from __future__ import annotations

import pytest
import torch

from kernels import launch
from tests.kernels import harness

# Triton has wheels for Linux alone; what remains elsewhere is that everything imports and torch runs.
collect_ignore_glob = [] if launch.HAVE_TRITON else ["test_[!l]*.py"]


@pytest.fixture(autouse=True)
def on_the_gpu_where_there_is_one():
    """Makes torch.ones and its kin land where backend="triton" can run."""
    if harness.DEVICE == "cpu":
        yield
        return
    with torch.device(harness.DEVICE):
        yield


@pytest.fixture(autouse=True)
def quick():
    """test_quick_interpreter.py shows that it changes nothing but the time."""
    with harness.quick_interpreter():
        yield


def pytest_collection_modifyitems(items):
    if launch.HAVE_TRITON and not torch.cuda.is_available() and not launch.INTERPRETED:
        raise pytest.UsageError("triton was imported before TRITON_INTERPRET=1 was set; tests/conftest.py must set it")
