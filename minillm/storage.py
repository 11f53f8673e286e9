"""The cache folder, and the one way minillm writes into it: whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import RequestError, short

_OLD = 24 * 3600  # seconds after which nobody is still writing a temporary file


def cache_dir() -> Path:
    """Where models and measurements are kept: $MINILLM_CACHE, else $XDG_CACHE_HOME/minillm, else ~/.cache/minillm.

    Raises RequestError for the home of a user whom this machine does not know.
    """
    if path := os.environ.get("MINILLM_CACHE"):
        return user_path(path, "MINILLM_CACHE")
    if base := os.environ.get("XDG_CACHE_HOME"):
        return user_path(base, "XDG_CACHE_HOME") / "minillm"
    return user_path("~/.cache/minillm", "the cache folder")


def user_path(text: str | Path, name: str = "path") -> Path:
    """The path with a leading ~ or ~user replaced by that user's home. `name` says in a message what it is.

    Raises RequestError for a user whom this machine does not know.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        user = Path(text).parts[0]
        raise RequestError(
            f"{name} {short(text)}: the home folder of {short(user)} is not known here; write the path out"
        ) from None


def new_folder(text: str | Path, name: str = "folder") -> Path:
    """The path, of nothing or of an empty folder: what a command that never overwrites may write to.

    Raises RequestError.
    """
    folder = user_path(text, name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RequestError(f"{name} {short(folder, 200)}: is there already and not an empty folder; name a new one")
    return folder


def write_atomically(path: Path, write: Callable[[Any], None]) -> None:
    """Calls `write(file)` on a temporary binary file beside `path` and renames it. On any error nothing is left.

    The file gets the mode that the user's umask gives any new file, so that a shared cache can be shared.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.parent / f"{path.name[:50]}.{secrets.token_hex(8)}.part"  # a name must stay below 256 bytes
    try:
        with open(part, "xb") as file:
            write(file)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def remove_leftovers(folder: Path, *patterns: str) -> None:
    """Removes what killed processes left in `folder`: files and folders of these names, a day old or more."""
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        with contextlib.suppress(OSError):  # someone else's, or gone already
            if time.time() - path.stat().st_mtime > _OLD:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


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
    except (OSError, ValueError, RecursionError):
        return None
    return known if isinstance(known, dict) and isinstance(known.get("value"), dict) else None
