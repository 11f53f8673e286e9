"""--speculate and --draft, of every command that has them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..errors import RequestError

if TYPE_CHECKING:
    from ..speculative import SpeculativeConfig, Speculator
    from ..tokenizer import Tokenizer
    from ..transformer import Transformer

_COUNTS = ("steps", "plain_steps", "drafted", "accepted", "acceptance", "tokens_per_step", "per_position")


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--speculate", metavar="METHOD[:K]",
        help="guess up to K tokens a step (default: 5) and keep those that the model would have said: ngram (from the "
        "text so far), draft (a small model), early_exit:LAYERS[:K] (the model's first layers), eagle (a head on its "
        "hidden states, made by train_eagle)",
    )  # fmt: skip
    group.add_argument(
        "--draft", metavar="NAME",
        help="the model of --speculate draft (default: SmolLM2's own), or the folder of --speculate eagle",
    )  # fmt: skip


def config(args: argparse.Namespace) -> SpeculativeConfig | None:
    """The options, or None without --speculate. Raises EngineError, and for a folder that holds no head
    CheckpointError: before a model is loaded."""
    if args.speculate is None:
        if args.draft is not None:
            raise RequestError("--draft goes with --speculate draft or eagle; add it, or leave --draft out")
        return None
    from ..speculative import eagle_file, parse

    found = parse(args.speculate, args.draft)
    if found.method == "eagle":
        eagle_file.read_description(found.draft)
    return found


def speculator(config: SpeculativeConfig | None, model: Transformer, tokenizer: Tokenizer) -> Speculator | None:
    """For `generate`. Raises MinillmError for a target and a draft that do not go together."""
    if config is None:
        return None
    from ..speculative import make_speculator

    return make_speculator(config, model, tokenizer)


def counts(speculator: Speculator) -> dict[str, Any]:
    """What became of the drafts, for --json."""
    return {name: getattr(speculator.stats, name) for name in _COUNTS}
