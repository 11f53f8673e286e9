"""Chapter 01: texts, and merges by brute force on joined strings, which is not how the solutions go about it."""

from __future__ import annotations

HUG = "hug pug pun bun hugs"
READY_MADE = ("minillm.tokenizer", "minillm.bpe_training", "minillm.vocabulary", "tokenizers", "tiktoken")
TALK = "low lower lowest newest widest slow slower slowest " * 3


def brute_merges(text: str, n: int) -> list[tuple[bytes, bytes]]:
    """Merges by looking at every place of every pair, on a list of strings of Latin-1 characters (one a byte)."""
    pieces, merges = list(text.encode().decode("latin-1")), []
    for _ in range(n):
        pairs = [(pieces[i], pieces[i + 1]) for i in range(len(pieces) - 1)]
        best = max(pairs, key=lambda pair: (pairs.count(pair), -pairs.index(pair)), default=None)
        if best is None or pairs.count(best) < 2:
            break
        pieces = brute_merge(pieces, best)
        merges.append(tuple(part.encode("latin-1") for part in best))
    return merges


def brute_merge(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    """Left to right: repeatedly join the first place that is left."""
    done: list[str] = []
    while pieces:
        take = 2 if tuple(pieces[:2]) == pair else 1
        done, pieces = [*done, "".join(pieces[:take])], pieces[take:]
    return done
