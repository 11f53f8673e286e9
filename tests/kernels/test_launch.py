"""The checks, and life without Triton; nothing here needs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels import launch
from kernels.launch import KernelError

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # as on macOS and Windows: importing it fails
import torch
from kernels.catalog import kernel_files
from kernels.launch import KernelError
from kernels.swiglu import swiglu, swiglu_kernel
from minillm.viz import show
assert "def swiglu_kernel(" in repr(show(swiglu_kernel))  # what a notebook prints of a kernel that cannot run
assert len(kernel_files()) >= 3
x = torch.ones(2, 8)
assert torch.equal(swiglu(x, x), swiglu(x, x, backend="torch"))
try:
    swiglu(x, x, backend="triton")
except KernelError as error:
    print(error)
"""


def child(*command: str) -> subprocess.CompletedProcess:
    root = Path(__file__).parents[2]
    return subprocess.run([sys.executable, *command], cwd=root, capture_output=True, text=True, timeout=100)


def test_without_triton_everything_imports_and_torch_runs():
    done = child("-c", WITHOUT_TRITON)
    assert done.returncode == 0, done.stderr
    assert done.stdout == 'backend="triton", but triton is not installed (Linux only); use backend="torch"\n'


def test_mixed_devices_are_refused():
    with pytest.raises(KernelError, match="on cpu and meta; move them to one device"):
        launch.use_triton("auto", torch.ones(3, device="cpu"), torch.ones(3, device="meta"))


def test_checks_name_argument_value_and_remedy():
    with pytest.raises(KernelError, match=r"^K is 100, not a multiple of 32; pad it or choose another size$"):
        launch.check_multiple("K", 100, of=32)
    with pytest.raises(KernelError, match=r"^w has shape \(2, 3\); \(2, 4\) is needed$"):
        launch.check_shape("w", torch.ones(2, 3), 2, 4)
    launch.check_shape("w", torch.ones(2, 3), None, 3)
    launch.check_contiguous_rows(one_column=torch.ones(4, 8)[:, :1].as_strided((4, 1), (8, 5)))


def test_a_gpu_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    x = SimpleNamespace(is_cuda=True, device="cuda:1")
    with pytest.raises(
        launch.UnsupportedError, match=r"^e4m3 needs a GPU of sm_89 or later, and this one is sm_80; no$"
    ):
        launch.check_capability(x, (8, 9), "e4m3", "no")
    launch.check_capability(x, (8, 0), "bfloat16", "no")
    launch.check_capability(torch.ones(1, device="cpu"), (8, 9), "e4m3", "no")


def test_gpu_without_a_gpu_is_one_line(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = child("-m", "kernels", "gpu")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no CUDA GPU" in done.stderr
