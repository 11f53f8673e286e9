"""Which backend runs, where Triton is there."""

from __future__ import annotations

import pytest
import torch

from kernels import launch
from kernels.launch import KernelError


def test_the_switch():
    x = torch.ones(3, device="cpu")
    assert launch.use_triton("auto", x) is False
    assert launch.use_triton("torch", x) is False
    assert launch.use_triton("triton", torch.ones(3)) is True


def test_triton_on_cpu_tensors_needs_the_interpreter(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(KernelError, match=r"tensors on cpu; use CUDA tensors.*TRITON_INTERPRET=1"):
        launch.use_triton("triton", torch.ones(3, device="cpu"))
