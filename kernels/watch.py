"""The GPU run in a child process, and again in the next where a kernel takes one down or never returns."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from kernels.gpu import Journal
from kernels.launch import KernelError

PATIENCE = 90.0  # seconds without a new line in the journal
ENDS = (0, 1, 2)  # exit codes of a run that came to its end


def watch(arguments: list[str], journal: Path, budget: float, patience: float = PATIENCE) -> int:
    """Runs `python ARGUMENTS --journal JOURNAL --budget SECONDS` until it ends by itself -> its exit code.

    A row during which the process ended is noted as failed, and the next process begins behind it. Raises KernelError
    if a process ends before it begins a new row.
    """
    start = time.monotonic()
    while True:
        before = Journal(journal).begun
        left = max(budget - (time.monotonic() - start), 0.0)
        command = [sys.executable, *arguments, "--journal", str(journal), "--budget", f"{left:.0f}"]
        code = _run(command, journal, patience)
        if code in ENDS:
            return code
        noted = Journal(journal)
        if noted.begun == before:
            raise KernelError(f"the run ended with {code} before it began a row; see what it printed above")
        if noted.begun not in noted.done:
            why = f"no end within {patience:.0f} s" if code is None else f"the process ended with {code}"
            noted.note(done=noted.begun, row={"name": noted.begun, "error": why})


def _run(command: list[str], journal: Path, patience: float) -> int | None:
    """The exit code, or None for a process that was stopped because it did nothing for so long."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with subprocess.Popen(command, env=env) as child:
        try:
            size, since = -1, time.monotonic()
            while child.poll() is None:
                time.sleep(0.1)
                now = journal.stat().st_size if journal.exists() else 0
                if now != size:
                    size, since = now, time.monotonic()
                if time.monotonic() - since > patience:
                    return None
            return child.returncode
        finally:
            child.kill()
