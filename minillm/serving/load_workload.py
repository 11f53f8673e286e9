"""Made-up workloads: lengths drawn from distributions, and the tokens that fill prompts.

A trap that has made published numbers up to 86% too good: with a fixed seed the prompts of a second run are those of
the first, the server's prefix cache is warm, and prefill costs nothing. So lengths and arrivals follow the seed, but
the tokens follow seed and *salt*, and the salt is new for each run unless you give one.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..errors import short
from .load_record import MOST_TOKENS, LoadError, TraceRequest, check_seed

TOKEN_IDS = (1_000, 10_000)  # inside the vocabulary of any model of the last years, clear of control tokens

# Short, frequent words: nearly every vocabulary has each as one token, with its space.
_TEXT = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they "
    "which one you were all her she there would their we him been has when who will no more if out so up said "
    "what its about"
)
WORDS = _TEXT.split()


class Lengths(NamedTuple):
    """A distribution of token counts.

    kind: "constant" (a), "uniform" (whole numbers from a to b), "lognormal" (median a, and the standard deviation b of
    the logarithm: the long right tail of real prompts), "list" (values in turn).
    """

    kind: str
    a: float = 0
    b: float = 0
    values: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """ "128", "uniform:16:256", "lognormal:200:0.8" or "list:16,32,64". Raises LoadError."""
        kind, *numbers = text.split(":")
        try:
            if kind == "list" and len(numbers) == 1:
                return cls("list", values=tuple(int(n) for n in numbers[0].split(","))).checked(text)
            if kind in ("uniform", "lognormal") and len(numbers) == 2:
                return cls(kind, float(numbers[0]), float(numbers[1])).checked(text)
            if not numbers:
                return cls("constant", int(kind)).checked(text)
        except ValueError as error:
            if isinstance(error, LoadError):
                raise
        raise LoadError(f"lengths {text!r}: write 128, uniform:16:256, lognormal:200:0.8 or list:16,32,64")

    def checked(self, shown: str) -> Lengths:
        whole = self.kind != "uniform" or (self.a == int(self.a) and self.b == int(self.b))
        smallest = min(self.values, default=0) if self.kind == "list" else self.a
        ordered = self.kind != "uniform" or self.a <= self.b
        largest = max(self.values, default=0) if self.kind == "list" else max(self.a, self.b)
        if not (whole and smallest >= 1 and largest <= MOST_TOKENS and ordered and self.b >= 0):
            wanted = f"token counts are whole numbers from 1 to {MOST_TOKENS}, the smaller one first"
            raise LoadError(f"lengths {short(shown)!r}: {wanted}")
        return self

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        if self.kind == "constant":
            return [int(self.a)] * count
        if self.kind == "list":
            return [self.values[i % len(self.values)] for i in range(count)]
        if self.kind == "uniform":
            return rng.integers(int(self.a), int(self.b), count, endpoint=True).tolist()
        drawn = rng.lognormal(np.log(self.a), self.b, count)
        return [int(n) for n in np.clip(np.round(drawn), 1, MOST_TOKENS)]


def make_requests(
    arrivals: Sequence[float],
    prompt_tokens: Lengths | str | int = 128,
    output_tokens: Lengths | str | int = 64,
    seed: int = 0,
) -> tuple[TraceRequest, ...]:
    """A request for each arrival, lengths drawn from the distributions. The same seed gives the same lengths."""
    check_seed(seed)
    prompts, outputs = (
        value if isinstance(value, Lengths) else Lengths.parse(str(value)) for value in (prompt_tokens, output_tokens)
    )
    rng = np.random.default_rng([seed, 1])  # not the stream that draws arrivals
    lengths = zip(prompts.draw(rng, len(arrivals)), outputs.draw(rng, len(arrivals)), strict=True)
    return tuple(TraceRequest(float(at), p, o) for at, (p, o) in zip(arrivals, lengths, strict=True))


class Prompts:
    """The tokens of each request's prompt, made when asked for.

    Each prompt is unique, but for its first `shared_prefix` tokens and for blocks of equal hash_ids, which are equal
    within the run. salt: None draws a new one; a fixed one repeats the tokens, and so warms the server's cache.
    token_ids: lowest id and one past the highest.
    """

    def __init__(
        self,
        seed: int = 0,
        salt: str | None = None,
        shared_prefix: int = 0,
        token_ids: tuple[int, int] = TOKEN_IDS,
        block_tokens: int = 512,
    ) -> None:
        if not 0 <= token_ids[0] < token_ids[1] <= 2**31:
            raise LoadError(
                f"token ids from {token_ids[0]} to {token_ids[1]}; give the lowest and one past the highest"
            )
        check_seed(seed)
        if not 0 <= shared_prefix <= MOST_TOKENS:
            raise LoadError(f"shared_prefix is {shared_prefix}; it must be from 0 to {MOST_TOKENS} tokens")
        self.seed, self.shared_prefix, self.token_ids, self.block_tokens = seed, shared_prefix, token_ids, block_tokens
        self.salt = os.urandom(8).hex() if salt is None else salt
        self._root = [seed, *self.salt.encode()]
        self._prefix = self._draw((0, 0), shared_prefix)

    def ids(self, index: int, request: TraceRequest) -> list[int]:
        """The prompt of request `index`: request.prompt_tokens ids."""
        tokens = list(self._prefix[: request.prompt_tokens])
        for name in request.hash_ids:
            tokens += self._draw((1, abs(name), int(name < 0)), self.block_tokens)
        if len(tokens) < request.prompt_tokens:
            tokens += self._draw((2, index), request.prompt_tokens - len(tokens))
        return tokens[: request.prompt_tokens]

    def text(self, ids: Sequence[int]) -> str:
        """The same prompt in words, about one token each, for a server that takes no ids. Equal ids, equal words."""
        count = len(WORDS)
        words = (WORDS[part % count] for token in ids for part in (token, token // count))
        return " ".join(itertools.islice(words, len(ids)))

    def _draw(self, name: tuple[int, ...], count: int) -> list[int]:
        rng = np.random.default_rng([*self._root, *name])
        return rng.integers(*self.token_ids, count).tolist()
