"""The cache folder, and the one way minillm writes into it: whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


def cache_dir() -> Path:
    """Where models and measurements are kept: $MINILLM_CACHE, else $XDG_CACHE_HOME/minillm, else ~/.cache/minillm."""
    if path := os.environ.get("MINILLM_CACHE"):
        return Path(path).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "minillm"


def write_atomically(path: Path, write: Callable[[Any], None]) -> None:
    """Calls `write(file)` on a temporary binary file beside `path` and renames it. On any error nothing is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def remembered(name: str, key: dict[str, Any], measure: Callable[[], dict[str, Any]], fresh: bool = False) -> dict:
    """`measure()`, or what it gave last time for the same `key` (machine, versions). A damaged file is measured anew.

    A cache folder that cannot be written costs the measurement each time, and one warning.
    """
    path = cache_dir() / name
    if not fresh and (known := _read(path)) is not None and known.get("key") == key:
        return known["value"]
    value = measure()
    text = json.dumps({"key": key, "value": value}, indent=1)
    try:
        write_atomically(path, lambda file: file.write(text.encode()))
    except OSError as error:
        warnings.warn(f"{path} cannot be written ({error}); measuring again next time", stacklevel=2)
    return value


def _read(path: Path) -> dict | None:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return known if isinstance(known, dict) and isinstance(known.get("value"), dict) else None
