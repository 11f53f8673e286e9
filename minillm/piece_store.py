"""Compiled pieces on disk: made ahead of time, found again by all that went into them.

A piece is one .pt2 package (torch.export, then AOTInductor): generated C++, and the library built from it. Loading one
takes some 20 ms and needs neither a compiler nor a trace; making one takes seconds of g++.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import platform
import secrets
import stat
import warnings
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from . import layers
from .errors import CompilationError, short
from .storage import cache_dir, remove_leftovers

ONE, MANY = "one", "many"
EXAMPLE_ROWS = {ONE: 1, MANY: 6}
Run = Callable[[list], list]


class PieceStore:
    """`get` gives a piece as a function of a flat list of tensors; `made`, `found` and `sources` say where from.

    The folder holds programs: it must belong to this user alone, or nothing in it is loaded.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_dir() / "compiled"
        self.made = self.found = 0
        self.paths: dict[str, Path] = {}  # name and kind of row -> package, the last of each
        self._runs: dict[str, Run] = {}

    def get(self, name: str, kind: str, about: dict, code: list, make: Callable[[], tuple[nn.Module, list]]) -> Run:
        """The piece that `make` gives as (module, example inputs), compiled unless it is there already.

        about: shapes and constants, code: classes and functions that it is made of; both are part of its key.
        """
        key = _key(name, kind, about, code)
        if key not in self._runs:
            path = self.folder / f"{name}-{kind}-{key[:32]}.pt2"
            self._runs[key] = self._load(path) or self._make(path, kind, *make())
            self.paths[f"{name}-{kind}"] = path
        return self._runs[key]

    def sources(self) -> dict[str, str]:
        """The generated C++ of each piece in use."""
        return {name: generated_code(path) for name, path in self.paths.items()}

    def _load(self, path: Path) -> Run | None:
        if not path.exists():
            return None
        _check_private(self.folder)
        try:
            run = _loaded(path)
        except Exception as error:  # cut short, or of a torch that its key does not tell apart: made anew
            warnings.warn(f"{path.name} cannot be loaded ({short(error)}); compiling it again", stacklevel=2)
            return None
        self.found += 1
        return run

    def _make(self, path: Path, kind: str, module: nn.Module, example: list[Tensor]) -> Run:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_private(self.folder)
        remove_leftovers(self.folder, "*.part.pt2")
        part = path.with_name(f"{path.stem[:60]}.{secrets.token_hex(8)}.part.pt2")
        try:
            compile_ahead(module, example, part, kind)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        self.made += 1
        return _loaded(path)


def compile_ahead(module: nn.Module, example: list[Tensor], path: Path, kind: str) -> None:
    """Exports and compiles; rows are fixed for ONE and any number from 2 for MANY. Raises CompilationError."""
    need_compiler()
    # one row is less work than waking a second thread; for many, as many threads as torch has when it runs
    options = {"cpp.threads": 1} if kind == ONE else {"cpp.dynamic_threads": True}
    log = logging.getLogger("torch._inductor")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(module, (example,), dynamic_shapes=_dynamic(example, kind))
            torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)
    except Exception as error:
        raise CompilationError(
            f"{type(module).__name__} could not be compiled ({type(error).__name__}: {short(error, 160)}); "
            "leave out compile"
        ) from error
    finally:
        log.setLevel(level)


def _dynamic(example: list[Tensor], kind: str) -> tuple | None:
    """Which inputs grow with the rows: those whose first size is the example's rows, or twice that."""
    if kind == ONE:
        return None
    rows = torch.export.Dim("rows", min=2, max=1 << 20)
    sizes = {EXAMPLE_ROWS[MANY]: rows, 2 * EXAMPLE_ROWS[MANY]: 2 * rows}
    return ([{0: sizes[x.shape[0]]} if x.shape[0] in sizes else None for x in example],)


def need_compiler() -> None:
    """Raises CompilationError where there is no C++ compiler."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, OSError):
        raise CompilationError("there is no C++ compiler here; install g++ or clang++, or leave out compile") from None


def generated_code(path: Path) -> str:
    """The loops that the compiler wrote, from a package."""
    with zipfile.ZipFile(path) as package:
        names = sorted(name for name in package.namelist() if name.endswith(".kernel.cpp"))
        return "\n".join(package.read(name).decode() for name in names)


def _loaded(path: Path) -> Run:
    """The loader's own `run`: torch.export's call flattens its arguments first, which takes longer than the piece, and
    torch._inductor, where the public loader lives, takes a second to import."""
    return torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1).run


def _check_private(folder: Path) -> None:
    """Raises CompilationError for a folder in which another user could have put a program."""
    if not hasattr(os, "getuid") or not folder.exists():
        return
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CompilationError(f"{folder} holds programs and can be written by others; make it yours alone (chmod 700)")


def _key(name: str, kind: str, about: dict, code: list) -> str:
    source = [_source(part) for part in (*code, layers.apply_rotary)]
    whole = [name, kind, about, source, _machine()]
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()


_source = cache(inspect.getsource)  # asked for every layer


@cache
def _machine() -> list[str]:
    """What generated code depends on: torch, the operating system, and the processor's instructions."""
    flags = ""
    if (path := Path("/proc/cpuinfo")).exists():
        lines = path.read_text(errors="replace").splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return [torch.__version__, torch.backends.cpu.get_cpu_capability(), platform.platform(), platform.machine(), flags]
