"""Chapter 01, tokens: train merges, encode with them, and decode a stream.

The right answers come from tiktoken, from Python's own UTF-8 codec and from a brute force that works on joined
strings, none of which is how the solutions go about it.
"""

from __future__ import annotations

import codecs
import random

import tiktoken

from exercises import Exercise, Judge, Mistake

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


# --- StreamingDecoder

STREAMS = ("plain text", "café, naïve", "½ Ⅷ ٣", "日本語の文", "fox 🦊 and 👩‍👧", "a\u0301 e\u0302 \ufffd kept")


def cuts(text: str, seed: int) -> list[bytes]:
    """The text's bytes in random pieces of 0 to 4, as tokens would cut them."""
    draw, data, pieces = random.Random(seed), text.encode(), []
    while data:
        size = draw.choice((0, 1, 1, 2, 3, 4))
        pieces.append(data[:size])
        data = data[size:]
    return pieces


def pushed(decoder, piece: bytes, judge: Judge) -> str:
    text = decoder.push(piece)
    judge.type(text, str, "what push returns")
    return text


def drained(StreamingDecoder, pieces: list[bytes], judge: Judge) -> list[str]:
    decoder = StreamingDecoder()
    texts = [pushed(decoder, piece, judge) for piece in pieces]
    tail = decoder.flush()
    judge.type(tail, str, "what flush returns")
    return [*texts, tail]


def plain_text_passes(StreamingDecoder, judge: Judge) -> None:
    judge.equal(
        drained(StreamingDecoder, [b"to", b"", b"kens"], judge),
        ["to", "", "kens", ""],
        "Likely mistake: text given twice, or kept back until flush although it was certain.",
    )


def never_half_a_character(StreamingDecoder, judge: Judge) -> None:
    got = drained(StreamingDecoder, [b"\xf0\x9f", b"\xa6", b"\x8a", b"!"], judge)
    judge.equal(
        got[:4],
        ["", "", "🦊", "!"],
        "Likely mistake: each piece decoded by itself; the bytes of an unfinished character must wait.",
    )


def the_stream_is_the_text(StreamingDecoder, judge: Judge) -> None:
    for seed, text in enumerate(STREAMS * 5):
        judge.equal(
            "".join(drained(StreamingDecoder, cuts(text, seed), judge)),
            text,
            "The joined stream is not the text. Likely mistake: bytes dropped or repeated at a cut.",
        )


def nothing_certain_waits(StreamingDecoder, judge: Judge) -> None:
    for seed, text in enumerate(STREAMS * 5):
        decoder, incremental = StreamingDecoder(), codecs.getincrementaldecoder("utf-8")()
        for piece in cuts(text, 100 + seed):
            judge.equal(
                pushed(decoder, piece, judge),
                incremental.decode(piece),
                f"after pushing {piece!r} of {text!r}. Likely mistake: whole characters held back with the half one.",
            )


def streams_are_apart(StreamingDecoder, judge: Judge) -> None:
    first, second = StreamingDecoder(), StreamingDecoder()
    got = [first.push(b"\xc3"), second.push(b"a"), first.push(b"\xa9")]
    judge.equal(
        got,
        ["", "a", "é"],
        "Two streams share their bytes. Likely mistake: the buffer belongs to the class, not to self.",
    )


def broken_bytes_do_not_block(StreamingDecoder, judge: Judge) -> None:
    for data in (b"a\xffb and more", b"\xe2\x28\xa1 x", b"ends half \xe6\x97", b"\x80\x80 stray", b"\xf0\x9fABC"):
        pieces = [data[i : i + 1] for i in range(len(data))]
        judge.equal(
            "".join(drained(StreamingDecoder, pieces, judge)),
            data.decode("utf-8", errors="replace"),
            f"for {data!r}. Likely mistake: bytes that can never become a character wait for ever, "
            "or are dropped; they must come out as \ufffd.",
        )
    decoder = StreamingDecoder()
    early = "".join(decoder.push(bytes([byte])) for byte in b"\xff then good text")
    judge.true("good tex" in early, "One broken byte holds back the good text behind it until flush.")


STREAM = Exercise(
    name="streaming_decoder",
    entry="StreamingDecoder",
    title="A stream that never shows half a character",
    chapter="01",
    difficulty=3,
    minutes=30,
    checks=[
        plain_text_passes,
        never_half_a_character,
        streams_are_apart,
        the_stream_is_the_text,
        nothing_certain_waits,
        broken_bytes_do_not_block,
    ],
    mistakes=[
        Mistake(
            "each piece by itself",
            "never_half_a_character",
            source="""
class StreamingDecoder:
    def push(self, piece):
        return piece.decode("utf-8", errors="replace")

    def flush(self):
        return ""
""",
        ),
        Mistake("everything at the end", "plain_text_passes", edit=("keep = unfinished(data)", "keep = len(data)")),
        Mistake("text given twice", "plain_text_passes", edit=("self.held = data[cut:]", "self.held = data")),
        Mistake(
            "one buffer for all",
            "streams_are_apart",
            source="""
class StreamingDecoder:
    held = []

    def push(self, piece):
        self.held += piece
        try:
            text = bytes(self.held).decode()
        except UnicodeDecodeError:
            return ""
        self.held.clear()
        return text

    def flush(self):
        return bytes(self.held).decode(errors="replace")
""",
        ),
        Mistake(
            "all or nothing",
            "nothing_certain_waits",
            source="""
class StreamingDecoder:
    def __init__(self):
        self.held = b""

    def push(self, piece):
        self.held += piece
        try:
            text = self.held.decode()
        except UnicodeDecodeError:
            return ""
        self.held = b""
        return text

    def flush(self):
        return self.held.decode(errors="replace")
""",
        ),
        Mistake(
            "ignores what it cannot read",
            "broken_bytes_do_not_block",
            edit=('decode("utf-8", "replace")', 'decode("utf-8", "ignore")'),
        ),
        Mistake(
            "strict until flush",
            "broken_bytes_do_not_block",
            source="""
class StreamingDecoder:
    def __init__(self):
        self.held = b""

    def push(self, piece):
        self.held += piece
        for cut in range(len(self.held), -1, -1):
            try:
                text = self.held[:cut].decode()
            except UnicodeDecodeError:
                continue
            self.held = self.held[cut:]
            return text

    def flush(self):
        return self.held.decode(errors="replace")
""",
        ),
    ],
    forbids=("minillm.tokenizer", "codecs", "_codecs", "encodings", "io"),
)

EXERCISES = [TRAIN, ENCODE, STREAM]
