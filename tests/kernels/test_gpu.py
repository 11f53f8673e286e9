"""The GPU run's own logic, with a clock and a device that need no GPU: rows, failures, goals, budget, JSON."""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace

import pytest
import torch

from kernels import gpu, gpu_model
from kernels.catalog import Bench, Case, Trial, Work, kernel_files
from kernels.launch import KernelError, UnsupportedError
from kernels.watch import watch


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
    """run(budget, journal) -> (exit code, report): a GPU that takes 1 ms for everything, 10⁶ bytes/s, 10⁷ FLOP/s."""
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "JOURNAL", gpu.JOURNAL)
    monkeypatch.setattr(gpu, "check_machine", lambda: None)
    monkeypatch.setattr(gpu, "_answers", lambda: True)
    monkeypatch.setattr(gpu, "machine", lambda: {"gpu": "Pretended 1", "date": "2026-01-01T00:00:00Z"})
    monkeypatch.setattr(gpu, "roofline", lambda: {"copy_bytes_per_s": 1e6, "matmul_flops_per_s": 1e7})
    monkeypatch.setattr(gpu, "milliseconds", lambda call: 1.0)
    monkeypatch.setattr(gpu.triton.testing, "do_bench", lambda call, **settings: 1.0)
    monkeypatch.setattr(gpu, "kernel_files", lambda: [FILE])
    monkeypatch.setattr(gpu, "MEASUREMENTS", tmp_path)
    monkeypatch.setattr(gpu, "MODEL_SECONDS", 0.0)
    monkeypatch.setattr(gpu_model, "rows", lambda roof: iter([("a model", lambda: {"ms": 1.0})]))

    def go(budget=100.0, journal=None):
        code = gpu.main(argparse.Namespace(budget=budget, only="", out=None, journal=journal))
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


def test_what_the_gpu_is_too_old_for_is_skipped_not_failed(run, monkeypatch):
    def refuse(case, dtype):
        raise UnsupportedError("e4m3 needs a GPU of sm_89")

    monkeypatch.setattr(gpu, "run_case", refuse)
    _, report = run()
    assert [row.get("skipped") for row in report["cases"]] == ["e4m3 needs a GPU of sm_89"] * 2
    assert not any("error" in row for row in report["cases"])


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


def test_a_gpu_that_answers_no_more_ends_the_process_and_the_next_goes_on_behind(run, monkeypatch, tmp_path):
    journal = tmp_path / "journal"
    monkeypatch.setattr(gpu, "_answers", lambda: False)
    with pytest.raises(SystemExit) as ended:
        run(journal=journal)
    assert ended.value.code == gpu.BROKEN
    assert gpu.Journal(journal).begun == "kernels.pretended: wrong, float16"
    called = []
    monkeypatch.setattr(gpu, "_answers", lambda: True)
    monkeypatch.setattr(gpu, "run_case", lambda case, dtype: called.append(case))
    code, report = run(budget=0.0, journal=journal)
    assert code == 1
    assert called == []
    assert [("error" in row) for row in report["cases"]] == [False, True]
    assert len(report["left_out"]) == 5


def test_no_two_rows_have_one_name():
    """The journal tells them apart by it."""
    cases = [f"{file.__name__}: {case.name}" for file in kernel_files() for case in file.CASES]
    benches = [f"{bench.name}, {size}" for file in kernel_files() for bench in file.BENCHES for size in bench.sizes]
    assert len(set(cases + benches)) == len(cases + benches)


RUN = """
import json, os, signal, sys, time
path = sys.argv[sys.argv.index("--journal") + 1]
assert 0 < float(sys.argv[sys.argv.index("--budget") + 1]) <= 60
assert "TRITON_INTERPRET" not in os.environ
def note(**entry):
    with open(path, "a") as file:
        file.write(json.dumps(entry) + "\\n")
done = [json.loads(line).get("done") for line in open(path)] if os.path.exists(path) else []
for name in ("fine", "crash", "also fine", "loop", "last"):
    if name not in done:
        note(begin=name)
        if name == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if name == "loop":
            time.sleep(60)
        note(done=name, row={"name": name})
"""


def test_a_crash_and_an_endless_kernel_cost_their_own_rows_alone(tmp_path):
    (tmp_path / "run.py").write_text(RUN)
    journal = tmp_path / "journal"
    assert watch([str(tmp_path / "run.py")], journal, budget=60.0, patience=3.0) == 0
    done = gpu.Journal(journal).done
    assert list(done) == ["fine", "crash", "also fine", "loop", "last"]
    errors = {name: row["error"] for name, row in done.items() if "error" in row}
    assert errors == {"crash": "the process ended with -11", "loop": "no end within 3 s"}


def test_a_run_that_cannot_begin_is_not_begun_for_ever(tmp_path):
    with pytest.raises(KernelError, match="ended with 7 before it began a row"):
        watch(["-c", "import sys; sys.exit(7)"], tmp_path / "journal", budget=60.0)
