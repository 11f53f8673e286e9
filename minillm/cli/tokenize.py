"""`python -m minillm tokenize`: a text as the model sees it."""

from __future__ import annotations

import argparse
import sys

from . import common

EXAMPLES = """
python -m minillm tokenize "unbelievable tokenization"
python -m minillm tokenize "12345 ½ 你好" --json
python -m minillm tokenize "<|im_start|>user" --allow-special
cat notes.txt | python -m minillm tokenize - --json
"""
_GROUNDS = (153, 223, 217, 189, 183, 224)  # light colours of the 256-colour terminal palette


def add_parser(commands) -> None:
    parser = common.add_command(
        commands,
        "tokenize",
        run,
        "show the tokens of a text",
        EXAMPLES,
        description="Show the tokens of TEXT. The pieces joined are the text; a piece that is part of a character "
        r"shows its bytes as \xNN.",
    )
    parser.add_argument("text", metavar="TEXT", help='the text; "-" reads stdin')
    parser.add_argument("--allow-special", action="store_true", help="read <|im_end|> and its like as the one token")
    common.add_json(parser)
    common.add_model_options(parser, weights=False)


def run(args: argparse.Namespace) -> int:
    text = common.read_text(args.text)
    tokenizer = common.load_tokenizer(args.model)
    ids = tokenizer.encode(text, allow_special=args.allow_special)
    pieces = tokenizer.pieces(ids)
    if args.json:
        common.print_json({"ids": ids, "pieces": pieces})
        return 0
    if sys.stdout.isatty():
        print(_chips(pieces) + "\n")
    print(f"{'id':>8}  piece")
    for token, piece in zip(ids, pieces, strict=True):
        print(f"{token:>8}  '{visible(piece)}'")
    each = f", {len(text) / len(ids):.2f} characters a token" if ids else ""
    print(f"\n{len(ids)} tokens, {len(text)} characters, {len(text.encode())} bytes{each}")
    return 0


def _chips(pieces: list[str]) -> str:
    """The pieces in changing colours, for a terminal."""
    return "".join(
        f"\x1b[30;48;5;{_GROUNDS[i % len(_GROUNDS)]}m{visible(piece)}\x1b[0m" + "\n" * piece.endswith("\n")
        for i, piece in enumerate(pieces)
    )


def visible(piece: str) -> str:
    r"""The piece with characters that do not print written out: a line end as \n."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in piece)
