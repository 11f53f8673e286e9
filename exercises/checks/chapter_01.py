"""Chapter 01, tokens: train merges, encode with them, and decode a stream.

The right merges come from a brute force on joined strings (chapter_01_brute.py); chapter_01_encode.py and
chapter_01_stream.py hold the other two exercises.
"""

from __future__ import annotations

from exercises import Exercise, Judge, Mistake

from .chapter_01_brute import READY_MADE, TALK, brute_merges
from .chapter_01_encode import ENCODE
from .chapter_01_stream import STREAM

NESTED = "abcdef1abcde2abcd3abc4ab5"  # no ties in the first four merges


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


def every_place_counts(train_merges, judge: Judge) -> None:
    hint = "Likely mistake: places that overlap counted once; in 'aaa' the pair a, a stands at two places."
    judge.equal(train_merges("aaa", 1), [(b"a", b"a")], hint)
    judge.equal(train_merges("xyxyaaaa", 1), [(b"a", b"a")], f"a, a stands at three places, x, y at two. {hint}")


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

APART_ONLY = """
def train_merges(text, n):
    pieces, merges = [bytes([byte]) for byte in text.encode()], []
    for _ in range(n):
        counts, last = {}, {}
        for i, pair in enumerate(zip(pieces, pieces[1:])):
            if last.get(pair, -2) < i - 1:
                counts[pair] = counts.get(pair, 0) + 1
                last[pair] = i
        best = max(counts, key=counts.get, default=None)
        if best is None or counts[best] < 2:
            break
        merges.append(best)
        merged, i = [], 0
        while i < len(pieces):
            match = tuple(pieces[i : i + 2]) == best
            merged.append(best[0] + best[1] if match else pieces[i])
            i += 2 if match else 1
        pieces = merged
    return merges
"""

THE_CHECKS_ANSWER = """
from exercises.checks.chapter_01 import brute_merges


def train_merges(text, n):
    return brute_merges(text, n)
"""

THE_PACKAGE = """
from collections import Counter
from itertools import islice

import minillm.bpe_training


def train_merges(text, n):
    learnt = minillm.bpe_training.learn_merges(Counter([text]))
    return [(merge.left, merge.right) for merge in islice(learnt, n)]
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
        every_place_counts,
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
        Mistake("counts what does not overlap", "every_place_counts", source=APART_ONLY),
        Mistake("joins from the right", "merges_do_not_overlap", source=FROM_THE_RIGHT),
        Mistake("merges what occurs once", "stops_when_nothing_repeats", edit=("counts[best] < 2", "counts[best] < 1")),
        Mistake("the answer of the checks", "own work", source=THE_CHECKS_ANSWER),
        Mistake("the package's own", "own work", source=THE_PACKAGE),
    ],
    forbids=READY_MADE,
)


EXERCISES = [TRAIN, ENCODE, STREAM]
