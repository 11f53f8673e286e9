"""harness.quick_interpreter, in which every other file here runs, changes no bit."""

from __future__ import annotations

import pytest
import torch

from kernels.catalog import kernel_files
from tests.kernels import harness


@pytest.fixture(autouse=True)
def quick():
    """Not in this file: in place of conftest's."""


@pytest.mark.parametrize("file", kernel_files(), ids=lambda file: file.__name__)
def test_it_computes_what_the_interpreter_computes(file):
    for case in {file.CASES[0].name: file.CASES[0], file.CASES[-1].name: file.CASES[-1]}.values():
        dtype = next(dtype for dtype in harness.DTYPES if dtype in case.dtypes)
        with harness.quick_interpreter():
            before = harness.make(case, dtype).kernel()
        plain = harness.make(case, dtype).kernel()
        with harness.quick_interpreter():
            after = harness.make(case, dtype).kernel()
        for outputs in zip(before, plain, after, strict=True):
            first, second, third = (output.view(torch.uint8) for output in outputs)
            assert torch.equal(first, second), case.name
            assert torch.equal(second, third), case.name
