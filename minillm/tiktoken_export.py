"""A tokenizer's vocabulary as a tiktoken.Encoding, once it is certain that both cut every word alike.

tiktoken has no merges: it joins two neighbours whenever their bytes together are a token, lowest id first. That is
the same as merging by rank exactly if (1) every token longer than a byte comes out of its own bytes by merges, and
(2) ids grow with the rank of the last merge that makes the token. For then two neighbours that spell a token are the
two that its last merge joins: merges inside them ran as if the token stood alone.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from .errors import TokenizerError
from .vocabulary import GPT2_PATTERN, PATTERNS

if TYPE_CHECKING:
    import tiktoken

    from .tokenizer import Tokenizer

# SmolLM's two stages as one pattern. The second stage sees a digit as the end of the text, and so must \s+(?!\S).
_SMOLLM = r"\p{N}|" + GPT2_PATTERN.replace(r"| ?\p{N}+", "").replace(r"(?!\S)", r"(?![^\s\p{N}])")
_ONE_PATTERN = {PATTERNS[family]: PATTERNS[family][0] for family in ("gpt2", "llama3", "qwen2")}
_ONE_PATTERN[PATTERNS["smollm"]] = _SMOLLM


def to_tiktoken(tokenizer: Tokenizer) -> tiktoken.Encoding:
    """See Tokenizer.to_tiktoken."""
    import tiktoken

    pattern = _ONE_PATTERN.get(tokenizer.vocabulary.stages)
    if pattern is None:
        raise TokenizerError(f"no tiktoken pattern for {tokenizer.vocabulary.stages}; known: {', '.join(PATTERNS)}")
    ranks = dict(tokenizer.vocabulary.words)
    _check_order(tokenizer)
    for i, byte in enumerate(sorted(tokenizer.missing_bytes)):
        ranks[bytes([byte])] = tokenizer.vocab_size + i
    special = tokenizer.special_tokens | tokenizer.added_tokens
    return tiktoken.Encoding("minillm", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def _check_order(tokenizer: Tokenizer) -> None:
    by_rank = sorted(
        (rank, token) for token in tokenizer.vocabulary.words.values() if (rank := _rank(tokenizer, token))
    )
    for (_, low), (_, high) in pairwise(by_rank):
        if low > high:
            raise TokenizerError(
                f"tiktoken needs ids in the order of merges, but id {low} is merged before id {high}; use encode"
            )


def _rank(tokenizer: Tokenizer, token: int) -> int | None:
    """1 + rank of the last merge that makes this token from its bytes; None for a byte, or a token never met whole."""
    data = tokenizer.vocabulary.tokens[token]
    if len(data) == 1:
        return None
    last: list[int] = []
    for symbols in tokenizer._steps(tokenizer._symbols(data)):
        if symbols == [token]:
            return 1 + tokenizer._ranks[last[0], last[1]][0]
        last = symbols
    if len(last) > 2 and tokenizer.vocabulary.ignore_merges:  # only ever found as a whole word, in both
        return None
    raise TokenizerError(f"no merges lead to token {token} ({data!r}), so tiktoken would cut words differently")
