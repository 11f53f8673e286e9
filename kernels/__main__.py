"""python -m kernels aot | gpu | list"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

try:
    import torch  # noqa: F401
except ImportError:
    print(f"error: {sys.executable} has no torch; run this with a Python that has torch and triton", file=sys.stderr)
    sys.exit(2)

from kernels import aot, gpu
from kernels.catalog import kernel_files
from kernels.launch import KernelError
from kernels.watch import watch


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels", description="The kernels, without a GPU and with one.")
    commands = parser.add_subparsers(dest="command", required=True)
    compiling = commands.add_parser("aot", help="compile every kernel for sm_75 to sm_100; needs no GPU")
    compiling.add_argument("--json", action="store_true", help="rows as JSON instead of a table")
    compiling.add_argument("--only", default="", metavar="TEXT", help="kernels whose name contains this")
    compiling.add_argument("--fresh", action="store_true", help="compile what kernels/compiled.json has, too")
    compiling.add_argument("--record", action="store_true", help="write kernels/compiled.json and kernels/COMPILED.md")
    compiling.add_argument("--workers", type=int, help="processes (one a core)")
    running = commands.add_parser("gpu", help="test and time every kernel on the GPU of this machine")
    running.add_argument("--budget", type=float, default=420, metavar="S", help="seconds after which to stop (420)")
    running.add_argument("--only", default="", metavar="TEXT", help="kernel files whose name contains this")
    running.add_argument("--out", metavar="FILE", help="where the JSON goes (a new file in figures/measurements/)")
    running.add_argument("--journal", help=argparse.SUPPRESS)  # set for the child process
    commands.add_parser("list", help="kernel files and what each hands to the tools")
    args = parser.parse_args(argv)
    try:
        return {"aot": _aot, "gpu": _gpu, "list": _list}[args.command](args)
    except KernelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _aot(args: argparse.Namespace) -> int:
    if args.record and args.only:
        raise KernelError("--record writes all the rows there are; leave out --only")
    rows = aot.compile_all(args.only, args.workers, fresh=args.fresh)
    if not rows:
        raise KernelError(f"no kernel's name contains {args.only!r}; python -m kernels aot names them all")
    print(json.dumps(rows, indent=1) if args.json else aot.table(rows))
    bad = [row for row in rows if row["faults"]]
    for row in bad:
        print(f"error: {row['kernel']} on {row['target']}: {'; '.join(row['faults'])}", file=sys.stderr)
    if args.record:
        aot.record(rows)
    compiled = sum(not row["recorded"] for row in rows)
    print(f"{len(rows)} rows: {compiled} compiled, {len(rows) - compiled} unchanged since recorded", file=sys.stderr)
    return 1 if bad else 0


def _gpu(args: argparse.Namespace) -> int:
    if args.journal:
        return gpu.main(args)
    gpu.check_machine()
    if not any(args.only in name for name in ("gpu_model", *(file.__name__ for file in kernel_files()))):
        raise KernelError(f"no kernel file's name contains {args.only!r}; python -m kernels list names them")
    journal = (Path(args.out).parent if args.out else gpu.MEASUREMENTS) / "kernels-journal.jsonl"
    try:
        journal.parent.mkdir(parents=True, exist_ok=True)
        journal.write_text("")
    except OSError as error:
        raise KernelError(f"cannot write {journal}: {error.strerror}; name another place with --out FILE") from None
    arguments = ["-m", "kernels", "gpu", "--only", args.only, *(["--out", args.out] if args.out else [])]
    print(f"every row is noted in {journal}, until the report is written", flush=True)
    code = watch(arguments, journal, args.budget)
    journal.unlink()
    return code


def _list(args: argparse.Namespace) -> int:
    for file in kernel_files():
        counts = ", ".join(f"{len(getattr(file, name, []))} {name}" for name in ("CASES", "COMPILE", "BENCHES"))
        print(f"{file.__name__.removeprefix('kernels.'):16} {file.__doc__.splitlines()[0]}  [{counts}]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
