"""The command line: `python -m minillm demo | chat | generate | serve | load | tokenize | bench | quality | ...`.

Each command is a module with `add_parser` and `run`. torch takes a second to import, so the commands import it when
they run, and `--help` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import traceback
import warnings
from collections.abc import Sequence

from .. import __version__
from ..errors import MinillmError
from . import bench, chat, demo, doctor, generate, load, quality, quantize, serve, size, streams, tokenize, train_eagle
from .common import Parser, error_line, one_line

COMMANDS = (demo, chat, generate, serve, load, tokenize, bench, quality, quantize, train_eagle, size, doctor)
BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 130, 141  # the last two are a shell's 128 + signal number

_EPILOG = """\
examples:
  python -m minillm demo                     a model answers, and what the answer cost
  python -m minillm chat                     talk to it
  python -m minillm COMMAND --help           options and examples of one command
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 1 (doctor found something essential missing), 2 for bad input
    told in one line on stderr, 130 after Ctrl-C, 141 when whoever read the output has gone."""
    streams.mend()
    args = argparse.Namespace(debug=False)
    try:
        with _short_warnings():
            code = _run(argv, args)
            sys.stdout.flush()
            return code
    except KeyboardInterrupt:
        streams.tell("")
        return INTERRUPTED
    except BrokenPipeError:
        streams.drop_stdout()
        return BROKEN_PIPE
    except (MinillmError, OSError, MemoryError, RuntimeError, ModuleNotFoundError) as error:
        if (line := error_line(error)) is None:
            raise
        streams.flush_stdout()
        streams.tell(traceback.format_exc() * args.debug + f"minillm: error: {line}")
        return BAD_INPUT


def _run(argv: Sequence[str] | None, args: argparse.Namespace) -> int:
    """Parses into `args` and runs the command."""
    parser = _parser()
    try:
        parser.parse_args(argv, args)
    except SystemExit as stop:  # argparse has said why
        return stop.code or 0
    if args.command is None:
        parser.print_help()
        return BAD_INPUT
    return args.run(args)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m minillm",
        description="LLM inference, built to be read.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"minillm {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


@contextlib.contextmanager
def _short_warnings():
    """A warning is for the person who typed the command: one line, without the source it came from."""
    shown, warnings.showwarning = warnings.showwarning, _show_warning
    try:
        yield
    finally:
        warnings.showwarning = shown


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    streams.tell(f"minillm: warning: {one_line(message)}")
