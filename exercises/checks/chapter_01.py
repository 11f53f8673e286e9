"""Chapter 01, tokens: train merges, encode with them, and decode a stream.

The right answers come from tiktoken and from a brute force that works on joined strings, neither of which is how the
solutions go about it.
"""

from __future__ import annotations

import random

import tiktoken

from exercises import Exercise, Judge, Mistake

from .chapter_01_stream import STREAM

NESTED = "abcdef1abcde2abcd3abc4ab5"  # no ties in the first four merges
HUG = "hug pug pun bun hugs"
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


# --- train_merges


def first_merge_is_the_commonest(train_merges, judge: Judge) -> None:
    judge.equal(
        train_merges("hug pug hug bug", 1),
        [(b"u", b"g")],
        "Likely mistake: not the most frequent pair, or pairs that are not neighbours.",
    )


def as_many_as_asked(train_merges, judge: Judge) -> None:
    for n in (0, 1, 4):
        got = train_merges(TALK, n)
        judge.type(got, list)
        judge.equal(len(got), n, f"Likely mistake: an off-by-one in the loop over n = {n} merges.")


def counts_again_after_each_merge(train_merges, judge: Judge) -> None:
    judge.equal(
        train_merges(NESTED, 4),
        [(b"a", b"b"), (b"ab", b"c"), (b"abc", b"d"), (b"abcd", b"e")],
        "Likely mistake: pairs counted once, at the beginning; after each merge the new pieces have new neighbours.",
    )


def ties_go_to_the_first(train_merges, judge: Judge) -> None:
    hint = "Likely mistake: the tie rule; of equally frequent pairs, the one that comes first in the text wins."
    judge.equal(train_merges("xy ab xy ab", 1), [(b"x", b"y")], hint)
    judge.equal(train_merges(TALK, 10), brute_merges(TALK, 10), hint)


def works_on_bytes(train_merges, judge: Judge) -> None:
    judge.equal(
        train_merges("éé", 1),
        [(b"\xc3", b"\xa9")],
        "Likely mistake: characters instead of UTF-8 bytes; start from text.encode().",
    )


def merges_do_not_overlap(train_merges, judge: Judge) -> None:
    text = "aaaaa" + "bbbaaab" * 3
    judge.equal(
        train_merges(text, 4),
        brute_merges(text, 4),
        "Likely mistake: overlapping merges; in 'aaa' the first two are joined and the third stays alone.",
    )


def stops_when_nothing_repeats(train_merges, judge: Judge) -> None:
    judge.equal(
        train_merges("abcab", 10),
        [(b"a", b"b")],
        "Likely mistake: going on when no pair occurs twice; such a merge would save nothing.",
    )
    judge.equal(train_merges("", 10), [], "Likely mistake: an empty text has no pairs; return an empty list.")


FROM_THE_RIGHT = """
from collections import Counter


def train_merges(text, n):
    pieces, merges = [bytes([byte]) for byte in text.encode()], []
    for _ in range(n):
        counts = Counter(zip(pieces, pieces[1:]))
        best = max(counts, key=counts.get, default=None)
        if best is None or counts[best] < 2:
            break
        merges.append(best)
        i = len(pieces) - 2
        while i >= 0:
            if (pieces[i], pieces[i + 1]) == best:
                pieces[i : i + 2] = [best[0] + best[1]]
            i -= 1
    return merges
"""

TRAIN = Exercise(
    name="train_merges",
    title="Train ten merges",
    chapter="01",
    difficulty=2,
    minutes=25,
    checks=[
        as_many_as_asked,
        first_merge_is_the_commonest,
        counts_again_after_each_merge,
        ties_go_to_the_first,
        works_on_bytes,
        merges_do_not_overlap,
        stops_when_nothing_repeats,
    ],
    mistakes=[
        Mistake("rarest pair", "first_merge_is_the_commonest", edit=("max(counts", "min(counts")),
        Mistake("one merge too many", "as_many_as_asked", edit=("range(n)", "range(n + 1)")),
        Mistake("never rewrites the text", "counts_again_after_each_merge", edit=("pieces = merged", "pass")),
        Mistake("last of the ties", "ties_go_to_the_first", edit=("max(counts,", "max(reversed(counts),")),
        Mistake(
            "characters, not bytes",
            "works_on_bytes",
            edit=("[bytes([byte]) for byte in text.encode()]", '[c.encode("latin-1") for c in text]'),
        ),
        Mistake("keeps the second half", "counts_again_after_each_merge", edit=("i += 2", "i += 1")),
        Mistake("joins from the right", "merges_do_not_overlap", source=FROM_THE_RIGHT),
        Mistake("merges what occurs once", "stops_when_nothing_repeats", edit=("counts[best] < 2", "counts[best] < 1")),
    ],
    forbids=("minillm.tokenizer", "tokenizers", "tiktoken"),
)


# --- encode

MERGES = [(b"u", b"g"), (b"h", b"ug"), (b"p", b"u"), (b"hug", b"s")]


def brute_encode(text: str, merges: list[tuple[bytes, bytes]]) -> list[bytes]:
    """Apply the earliest merge that fits anywhere, everywhere, until none fits."""
    pairs = [tuple(part.decode("latin-1") for part in merge) for merge in merges]
    pieces = list(text.encode().decode("latin-1"))
    while True:
        present = set(zip(pieces, pieces[1:], strict=False))
        fitting = [pair for pair in pairs if pair in present]
        if not fitting:
            return [piece.encode("latin-1") for piece in pieces]
        pieces = brute_merge(pieces, fitting[0])


def worked_by_hand(encode, judge: Judge) -> None:
    judge.type(encode("hugs", MERGES), list)
    judge.equal(encode("hugs", MERGES), [b"hugs"], "Likely mistake: stopping after the first merge that fits.")
    judge.equal(
        encode("a hug", MERGES), [b"a", b" ", b"hug"], "Likely mistake: bytes that belong to no merge were dropped."
    )


def nothing_is_lost(encode, judge: Judge) -> None:
    for text in ("", "x", "½ naïve café", "狐 fox", HUG):
        got = encode(text, MERGES)
        judge.type(got, list)
        judge.equal(
            b"".join(got),
            text.encode(),
            "The pieces joined are not the text. Likely mistake: characters instead of bytes, or a lost last piece.",
        )


def every_place_is_merged(encode, judge: Judge) -> None:
    judge.equal(
        encode("ugugug", MERGES), [b"ug"] * 3, "Likely mistake: a merge applied at the first place only, not at all."
    )


def earlier_merges_come_first(encode, judge: Judge) -> None:
    judge.equal(
        encode("pug", MERGES),
        [b"p", b"ug"],
        "Likely mistake: merging from left to right. 'u','g' was learnt before 'p','u', so it goes first.",
    )
    merges = [(b"b", b"c"), (b"a", b"b"), (b"ab", b"c"), (b"bc", b"d")]
    judge.equal(
        encode("abcd", merges),
        [b"a", b"bcd"],
        "Likely mistake: the longest piece taken first. BPE never looks at length, only at the order of the merges.",
    )


def equals_tiktoken(encode, judge: Judge) -> None:
    merges = brute_merges(TALK, 20)
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {left + right: 256 + i for i, (left, right) in enumerate(merges)}
    reference = tiktoken.Encoding("exercise", pat_str=r"(?s).+", mergeable_ranks=ranks, special_tokens={})
    draw = random.Random(1)
    words = [*TALK.split(), "wow", "est", "löwe", "lowww"]
    for _ in range(50):
        text = " ".join(draw.choices(words, k=draw.randint(1, 8)))
        want = [reference.decode_single_token_bytes(i) for i in reference.encode(text)]
        judge.equal(encode(text, merges), want, f"tiktoken splits {text!r} like this. Likely mistake: the merge order.")


ENCODE = Exercise(
    name="encode",
    title="Encode, and know the bill",
    chapter="01",
    difficulty=3,
    minutes=25,
    checks=[worked_by_hand, nothing_is_lost, every_place_is_merged, earlier_merges_come_first, equals_tiktoken],
    mistakes=[
        Mistake("one merge and done", "worked_by_hand", edit=("while True:", "for _ in range(1):")),
        Mistake(
            "characters, not bytes",
            "nothing_is_lost",
            edit=("[bytes([byte]) for byte in text.encode()]", '[c.encode("latin-1", "replace") for c in text]'),
        ),
        Mistake(
            "loses the last piece", "worked_by_hand", edit=("while i < len(pieces):", "while i < len(pieces) - 1:")
        ),
        Mistake(
            "only the first place",
            "every_place_is_merged",
            source="""
def encode(text, merges):
    pieces = [bytes([byte]) for byte in text.encode()]
    for left, right in merges:
        for i in range(len(pieces) - 1):
            if (pieces[i], pieces[i + 1]) == (left, right):
                pieces[i : i + 2] = [left + right]
                break
    return pieces
""",
        ),
        Mistake(
            "left to right",
            "earlier_merges_come_first",
            source="""
def encode(text, merges):
    pieces = [bytes([byte]) for byte in text.encode()]
    i = 0
    while i < len(pieces) - 1:
        if (pieces[i], pieces[i + 1]) in merges:
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
            i = 0
        else:
            i += 1
    return pieces
""",
        ),
        Mistake(
            "longest piece first",
            "earlier_merges_come_first",
            source="""
def encode(text, merges):
    data, pieces = text.encode(), []
    known = {left + right for left, right in merges}
    while data:
        size = next((n for n in range(len(data), 1, -1) if data[:n] in known), 1)
        pieces.append(data[:size])
        data = data[size:]
    return pieces
""",
        ),
    ],
    forbids=("minillm.tokenizer", "tokenizers", "tiktoken"),
)


EXERCISES = [TRAIN, ENCODE, STREAM]
