"""Standard streams that work, whatever the command was started with."""

from __future__ import annotations

import contextlib
import os
import sys


def mend() -> None:
    """Puts something in the place of streams that are closed, and lets the others print any character.

    Python sets a closed stream to None, and print then writes to whatever stands beside it. A missing stdin is an
    empty one, a missing stdout a pipe that nobody reads, and what a missing stderr would have said is dropped.
    """
    if None in (sys.stdin, sys.stdout, sys.stderr):
        _fill_descriptors()
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  it stays open
    if sys.stdout is None:
        sys.stdout = _unread_pipe()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) in ("strict", "surrogateescape") and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # cp1252 has no 你, and UTF-8 no half of a surrogate pair


def _fill_descriptors() -> None:
    """Takes descriptors 0 to 2 where they are free: a file opened later would get one, and a child write into it."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(handle)


def _unread_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w", encoding="utf-8")


def tell(text: str) -> None:
    """A line on stderr. If nobody can read it, nobody can be told that either."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def flush_stdout() -> None:
    """Before an error is told; a stdout that takes no more is given up."""
    try:
        sys.stdout.flush()
    except OSError:
        drop_stdout()


def drop_stdout() -> None:
    """Python flushes stdout once more at its end and would complain; give that flush somewhere to go."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
