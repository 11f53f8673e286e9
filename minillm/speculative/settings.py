"""How to speculate, checked before anything is made."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

from ..errors import EngineError, short

METHODS = ("ngram", "draft", "early_exit", "eagle")
MOST = 64  # drafts of one step


@dataclass(frozen=True)
class SpeculativeConfig:
    """Settings of speculation. Raises EngineError for a bad one.

    method      "ngram" (prompt lookup), "draft" (a small model), "early_exit" (the target's first `layers`), "eagle"
    num_tokens  the most drafts a step, of each sequence
    draft       "draft": a loaded Transformer, a path or hub name, None for the one that comes with minillm;
                "eagle": a trained EagleHead, or the folder of one (EagleHead.save, `python -m minillm train_eagle`)
    adaptive    fewer drafts, or none, where they are not expected to pay (length.py)
    sampled     drafts of a model are drawn from its distribution; False: its likeliest tokens
    tree        "draft" and "early_exit": children of each node, level by level, in place of a chain. With generate
                alone: in the engine's attention a row sees all rows before it, and branches must not see each other
    ngram_max, ngram_min: the tokens that must stand alike, at most and at least
    """

    method: str = "ngram"
    num_tokens: int = 5
    draft: Any = None
    layers: int | None = None
    adaptive: bool = True
    sampled: bool = True
    tree: tuple[int, ...] = ()
    ngram_max: int = 4
    ngram_min: int = 2

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise EngineError(
                f"speculation method {short(repr(self.method))} is not known; choose {', '.join(METHODS)}"
            )
        _whole("num_tokens", self.num_tokens, 1, MOST)
        _whole("ngram_min", self.ngram_min, 1, MOST)
        _whole("ngram_max", self.ngram_max, self.ngram_min, MOST)
        for name in ("adaptive", "sampled"):
            if not isinstance(getattr(self, name), bool):
                raise EngineError(f"{name} is {short(repr(getattr(self, name)))}; it must be True or False")
        if not isinstance(self.tree, list | tuple):
            raise EngineError(f"tree is {short(repr(self.tree))}; give children a node, level by level, such as (4, 2)")
        object.__setattr__(self, "tree", tuple(self.tree))
        for width in self.tree:
            _whole("tree", width, 1, MOST)
        self._refuse_what_does_not_fit()

    def _refuse_what_does_not_fit(self) -> None:
        if self.tree and self.method not in ("draft", "early_exit"):
            raise EngineError(f"method {self.method} drafts chains; use tree with draft or early_exit")
        if self.draft is not None and self.method not in ("draft", "eagle"):
            raise EngineError(f"method {self.method} takes no draft; leave it out, or set method to 'draft'")
        if self.method == "eagle" and self.draft is None:
            raise EngineError(
                "method eagle needs draft, an EagleHead trained for this target or the folder of one, after --draft on "
                "the command line; make it with python -m minillm train_eagle --out FOLDER"
            )
        if (self.layers is not None) != (self.method == "early_exit"):
            raise EngineError("layers, of the target's that draft, go with method early_exit, which needs them")


def _whole(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= value <= most:
        raise EngineError(f"{name} is {short(repr(value))}; it must be a whole number from {least} to {most}")


def parse(text: str, draft: str | None = None) -> SpeculativeConfig:
    """METHOD[:K] of the command line; early exit is early_exit:LAYERS or early_exit:LAYERS:K."""
    method, *numbers = text.split(":")
    if not all(n.isdecimal() for n in numbers) or len(numbers) > 1 + (method == "early_exit"):
        raise EngineError(f"speculation {short(text)!r} is not METHOD or METHOD:K, such as ngram:5 or early_exit:8:3")
    if method == "early_exit" and not numbers:
        raise EngineError(
            "early_exit needs the number of layers that draft; write early_exit:LAYERS, such as early_exit:8"
        )
    values = [int(n) for n in numbers]
    options: dict[str, Any] = {"method": method}
    if method == "early_exit" and values:
        options["layers"] = values.pop(0)
    if values:
        options["num_tokens"] = values[0]
    if draft is not None:
        options["draft"] = draft
    return SpeculativeConfig(**options)
