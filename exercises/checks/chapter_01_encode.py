"""Chapter 01's second exercise: encode with merges. The right answers come from tiktoken or from working by hand."""

from __future__ import annotations

import random

import tiktoken

from exercises import Exercise, Judge, Mistake

from .chapter_01_brute import HUG, READY_MADE, TALK, brute_merges

MERGES = [(b"u", b"g"), (b"h", b"ug"), (b"p", b"u"), (b"hug", b"s")]


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


def joins_from_the_left(encode, judge: Judge) -> None:
    judge.equal(
        encode("aaa", [(b"a", b"a")]),
        [b"aa", b"a"],
        "Likely mistake: joining from the right; from the left the first two are joined and the third stays alone.",
    )


def until_nothing_fits(encode, judge: Judge) -> None:
    judge.equal(
        encode("abc", [(b"ab", b"c"), (b"a", b"b")]),
        [b"abc"],
        "Likely mistake: one walk down the list. After 'a','b' is joined, 'ab','c' fits, though it stands earlier.",
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
    checks=[
        worked_by_hand,
        nothing_is_lost,
        every_place_is_merged,
        earlier_merges_come_first,
        joins_from_the_left,
        until_nothing_fits,
        equals_tiktoken,
    ],
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
        Mistake(
            "joins from the right",
            "joins_from_the_left",
            edit=(
                """        merged, i = [], 0
        while i < len(pieces):
            match = tuple(pieces[i : i + 2]) == best
            merged.append(best[0] + best[1] if match else pieces[i])
            i += 2 if match else 1
        pieces = merged
""",
                """        for i in range(len(pieces) - 2, -1, -1):
            if tuple(pieces[i : i + 2]) == best:
                pieces[i : i + 2] = [best[0] + best[1]]
""",
            ),
        ),
        Mistake(
            "one walk down the list",
            "until_nothing_fits",
            source="""
def encode(text, merges):
    pieces = [bytes([byte]) for byte in text.encode()]
    for pair in merges:
        i = 0
        while i < len(pieces) - 1:
            if (pieces[i], pieces[i + 1]) == pair:
                pieces[i : i + 2] = [pair[0] + pair[1]]
            i += 1
    return pieces
""",
        ),
    ],
    forbids=READY_MADE,
)
