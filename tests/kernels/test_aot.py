"""Every kernel compiles for three generations of GPU without spills or crossed limits, and faults are found."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kernels import aot
from kernels.catalog import kernel_files


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    """Triton keeps what it has compiled, so that a second run of the tests takes seconds."""
    return aot.compile_all()


def test_nothing_spills_or_crosses_a_limit(rows):
    bad = {f"{row['kernel']} {row['target']} {row['config']}": row["faults"] for row in rows if row["faults"]}
    assert not bad
    assert all(0 < row["registers"] <= 255 and row["spills"] == 0 for row in rows)
    assert all(row["shared_bytes"] <= row["shared_limit"] for row in rows)


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
    rows = aot.compile_all(file="tests.kernels.planted")
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
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    wanted = {"kernel", "target", "registers", "spills", "shared_bytes", "shared_limit", "instruction"}
    assert all(wanted <= set(row) for row in json.loads(done.stdout))
