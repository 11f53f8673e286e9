"""`python -m minillm.train_draft`: sample, train, evaluate, export; run again, it goes on where it stopped."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..cli.common import Parser, error_line
from ..errors import MinillmError

INTERRUPTED, BAD_INPUT = 130, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for bad input or a full disk told in one line, 130 after Ctrl-C."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has said why
        return stop.code or 0
    try:
        return _run(args)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED
    except (MinillmError, OSError) as error:
        if args.debug or (line := error_line(error)) is None:
            raise
        print(f"minillm: error: {line}", file=sys.stderr)
        return BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m minillm.train_draft",
        description="Makes a small draft of a target model from text that the target writes. Run again with the same "
        "options, it goes on where it stopped.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", metavar="NAME", help="the target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the text and of the weights (default: 0)")
    parser.add_argument("--minutes", type=float, metavar="M", help="scale the recipe to about M minutes on two cores")
    parser.add_argument("--out", metavar="FOLDER", default="draft", help="where the model goes (default: ./draft)")
    parser.add_argument("--work", metavar="FOLDER", help="text and training state (default: in minillm's cache folder)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads; equal threads give equal weights")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _run(args: argparse.Namespace) -> int:
    import torch  # a second that --help need not wait

    from ..storage import cache_dir, user_path
    from .pipeline import make_draft
    from .recipe import Recipe, fingerprint

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    recipe = Recipe()
    recipe = replace(recipe, sampling=replace(recipe.sampling, seed=args.seed))
    recipe = recipe if args.minutes is None else recipe.scaled(args.minutes)
    work = user_path(args.work, "work") if args.work else cache_dir() / "train_draft" / fingerprint(recipe.sampling)
    machine = f"{platform.machine()}, {torch.get_num_threads()} of {os.cpu_count()} cores, torch {torch.__version__}"
    print(make_draft(args.model, recipe, Path(work), user_path(args.out, "out"), machine))
    return 0


if __name__ == "__main__":
    sys.exit(main())
