"""The GPU run's own logic, with a clock and a device that need no GPU: rows, failures, goals, budget, JSON."""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace

import pytest
import torch

from kernels import gpu, gpu_model
from kernels.catalog import Bench, Case, Trial, Work


def _case(name, factor):
    def make(device, dtype, generator):
        x = torch.randn(64, generator=generator, device="cpu").to(dtype)
        return Trial(lambda x, backend: x * 2 * factor, lambda x: x * 2, (x,))

    return Case(name, make, dtypes=(torch.float32, torch.float16))


def _work(device, dtype, n):
    return Work(kernel=lambda: None, rivals={"torch": lambda: None}, bytes=n, flops=10 * n)


def _broken(device, dtype, n):
    raise RuntimeError("out of registers")


FILE = SimpleNamespace(
    __name__="kernels.pretended",
    CASES=[_case("right", 1.0), _case("wrong", 1.01)],
    BENCHES=[
        Bench("copying", _work, {"small": {"n": 100}, "large": {"n": 200}}, goal=0.15),
        Bench("multiplying", _work, {"one": {"n": 100}}, bound="compute"),
        Bench("broken", _broken, {"one": {"n": 100}}),
    ],
)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(budget) -> (exit code, report): a GPU that takes 1 ms for everything, 10⁶ bytes/s, 10⁷ FLOP/s."""
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "machine", lambda: {"gpu": "Pretended 1", "date": "2026-01-01T00:00:00Z"})
    monkeypatch.setattr(gpu, "roofline", lambda: {"copy_bytes_per_s": 1e6, "matmul_flops_per_s": 1e7})
    monkeypatch.setattr(gpu, "milliseconds", lambda call: 1.0)
    monkeypatch.setattr(gpu.triton.testing, "do_bench", lambda call, **settings: 1.0)
    monkeypatch.setattr(gpu, "kernel_files", lambda: [FILE])
    monkeypatch.setattr(gpu, "MEASUREMENTS", tmp_path)
    monkeypatch.setattr(gpu, "MODEL_SECONDS", 0.0)
    monkeypatch.setattr(gpu_model, "rows", lambda roof: iter([("a model", lambda: {"ms": 1.0})]))

    def go(budget=100.0):
        code = gpu.main(argparse.Namespace(budget=budget, only="", out=None))
        return code, json.loads((tmp_path / "kernels-pretended-1-2026-01-01.json").read_text())

    return go


def test_a_wrong_kernel_and_a_broken_bench_fail_the_run_but_hide_nothing(run):
    code, report = run()
    assert code == 1
    errors = {row["name"]: "error" in row for row in report["cases"] + report["benches"]}
    assert errors == {
        "kernels.pretended: right, float16": False,
        "kernels.pretended: wrong, float16": True,
        "copying, small, bfloat16": False,
        "copying, large, bfloat16": False,
        "multiplying, one, bfloat16": False,
        "broken, one, bfloat16": True,
    }


def test_fractions_are_of_what_was_measured(run):
    _, report = run()
    rows = {row["name"]: row for row in report["benches"]}
    assert rows["copying, small, bfloat16"]["fraction"] == pytest.approx(100 / 1e-3 / 1e6)
    assert rows["multiplying, one, bfloat16"]["fraction"] == pytest.approx(1000 / 1e-3 / 1e7)


def test_goals_missed_are_counted(run, capsys):
    run()
    assert "1 below goal" in capsys.readouterr().out


def test_a_spent_budget_lists_what_was_left_out(run):
    code, report = run(budget=0.0)
    assert code == 0
    assert report["cases"] == []
    assert report["benches"] == []
    assert report["model"] == []
    assert "copying, large, bfloat16" in report["left_out"]
    assert "a model" in report["left_out"]
    assert "kernels.pretended: wrong, float16" in report["left_out"]
