"""Every kernel compiles for three generations of GPU without spills or crossed limits, and faults are found.

What kernels/compiled.json has is not compiled again, unless what went into it has changed; a row of each file is drawn
and compiled all the same.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kernels import aot
from kernels.catalog import kernel_files
from kernels.launch import triton

ROOT = Path(__file__).parents[2]


def recorded_with_this_triton() -> bool:
    return json.loads(aot.RECORD.read_text())["triton"] == triton.__version__


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return aot.compile_all(workers=1)  # each has to import torch and triton, and little is compiled


def test_the_record_is_in_step_with_the_kernels(rows):
    """With another Triton than the record's, no row may come from it."""
    same = recorded_with_this_triton()
    remedy = "python -m kernels aot --record writes kernels/compiled.json and COMPILED.md anew"
    assert [row["kernel"] for row in rows if row["recorded"] != same] == [], remedy
    assert {row["key"] for row in rows} == set(aot.recorded()) or not same, remedy
    assert aot.PAGE.read_text() == aot.markdown(list(aot.recorded().values())), remedy


def test_the_record_is_true(rows):
    of_files = {row["file"]: [] for row in rows}
    for row in rows:
        of_files[row["file"]].append(row["key"])
    drawn = {random.SystemRandom().choice(keys) for keys in of_files.values()}
    again = aot.compile_all(fresh=True, keys=drawn)
    assert {row["key"] for row in again} == drawn
    said = {row["key"]: row | {"recorded": False} for row in rows}
    assert again == [said[row["key"]] for row in again], "python -m kernels aot --record --fresh"


SOURCE = """
import torch
from kernels.catalog import Compilation
from kernels.launch import tl, triton

FACTOR = tl.constexpr(3.0)

@triton.jit
def factor():
    return FACTOR

@triton.jit
def scaled(x):
    return x * factor()

@triton.jit
def kernel(x_ptr, BLOCK: tl.constexpr):
    at = x_ptr + tl.arange(0, BLOCK)
    tl.store(at, scaled(tl.load(at)))

COMPILE = [Compilation("kernel", kernel, lambda dtype: (dtype,), {"BLOCK": 256}, min_sm=100)]
"""


KEYS = """
import importlib
from kernels import aot
for i in range({count}):
    file = importlib.import_module(f"changed_{{i}}")
    print(*(aot._key(*job) for job in aot._jobs(*file.COMPILE)))
"""


def test_a_key_changes_with_all_that_is_compiled_and_with_nothing_else(tmp_path):
    changes = [("x", "x"), ("\nFACTOR", "\n# a remark\nFACTOR"), ("3.0", "4.0"), ("x *", "x +"), ("256", "512")]
    changes += [("at)", "at + 1)"), ("min_sm", "num_warps=8, min_sm"), ("(dtype,)", "(torch.int8,)")]
    for i, (old, new) in enumerate(changes):
        assert old in SOURCE
        (tmp_path / f"changed_{i}.py").write_text(SOURCE.replace(old, new, 1))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", KEYS.format(count=len(changes))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    keys = done.stdout.split()
    assert len(keys) == len(changes), done.stderr
    assert keys[0] == keys[1]
    assert len(set(keys)) == len(changes) - 1


def test_nothing_spills_or_crosses_a_limit(rows):
    """Another Triton than the record's brings another ptxas. There `aot` tells of spills, and the tests do not fail."""
    counted = lambda fault: recorded_with_this_triton() or not fault.startswith("spills")  # noqa: E731
    faults = {f"{row['kernel']} {row['target']} {row['config']}": list(filter(counted, row["faults"])) for row in rows}
    assert {row: found for row, found in faults.items() if found} == {}
    assert all(0 < row["registers"] <= 255 for row in rows)
    assert all(row["shared_bytes"] <= row["shared_limit"] for row in rows)


def test_what_an_a100_runs_a_card_for_games_runs_too(rows):
    """sm_86 and sm_89 take the code of sm_80, and have 99 KiB of shared memory for it."""
    assert [row["kernel"] for row in rows if row["target"] == "sm_80" and row["shared_bytes"] > 101_376] == []


def test_every_kernel_is_compiled_for_every_target(rows):
    declared = {c.name: c for file in kernel_files() for c in getattr(file, "COMPILE", [])}
    names = [c.name for file in kernel_files() for c in getattr(file, "COMPILE", [])]
    assert len(names) == len(declared), f"two compilations of one name: {Counter(names).most_common(1)}"
    for name, compilation in declared.items():
        targets = {row["target"] for row in rows if row["kernel"] == name}
        assert {f"sm_{sm}" for sm in (80, 90, 100) if sm >= compilation.min_sm} <= targets, name


def test_every_kernel_file_serves_every_tool():
    for file in kernel_files():
        assert all(getattr(file, name, []) for name in ("CASES", "COMPILE", "BENCHES")), file.__name__


@pytest.fixture(scope="module")
def planted() -> dict[str, list[dict]]:
    rows = aot.compile_all(file="tests.kernels.planted", workers=1)
    return {name: [row for row in rows if row["kernel"] == name] for name in {row["kernel"] for row in rows}}


@pytest.mark.parametrize(
    ("name", "target", "fault"),
    [
        ("spilling", "sm_90", r"spills \d+ registers"),
        ("wide", "sm_90", "works in float64 somewhere"),
        ("small matmul", "sm_90", r"mma\.sync instead of wgmma"),
        ("no matmul", "sm_100", "no matrix instruction"),
        ("large tiles", "sm_90", r"shared memory \d+ > 232448"),
        ("undefined", "sm_90", "scale is not defined"),
    ],
)
def test_planted_faults_are_found(planted, name, target, fault):
    (row,) = (row for row in planted[name] if row["target"] == target)
    assert re.search(fault, "; ".join(row["faults"]))


def test_an_autotuned_kernel_is_compiled_in_each_configuration(planted):
    assert len(planted["tuned"]) == 2 * 4
    assert {row["dtype"] for row in planted["tuned"] if row["target"] == "sm_75"} == {"float16"}
    assert not any(row["faults"] for row in planted["tuned"])


def test_the_command_prints_rows():
    command = [sys.executable, "-m", "kernels", "aot", "--json", "--only", "swiglu", "--workers", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    wanted = {"kernel", "target", "registers", "spills", "shared_bytes", "shared_limit", "instruction"}
    assert all(wanted <= set(row) for row in json.loads(done.stdout))
