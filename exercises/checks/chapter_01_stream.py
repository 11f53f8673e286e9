"""Chapter 01's third exercise: decode a stream of tokens. The right answers come from Python's own UTF-8 codec."""

from __future__ import annotations

import codecs
import random

from exercises import Exercise, Judge, Mistake

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


def broken_bytes_end_where_they_break(StreamingDecoder, judge: Judge) -> None:
    for pieces, where in (
        ((b"\xe2", b"\x28", b"\xe2\x82", b"\xac"), "b'\\xe2' promises three bytes, and '(' is not one of them"),
        ((b"\xff\xe2", b"\x82\xac"), "a broken byte stands before the beginning of a good character"),
    ):
        judge.equal(
            "".join(drained(StreamingDecoder, list(pieces), judge)),
            b"".join(pieces).decode("utf-8", errors="replace"),
            f"pushed {pieces}: {where}. Likely mistake: the promised number of bytes taken whatever they are, or all "
            "that is held replaced at once.",
        )


def whatever_the_bytes(StreamingDecoder, judge: Judge) -> None:
    draw = random.Random(6)
    for _ in range(300):
        data = bytes(draw.choices(b"a(\x80\x82\xa0\xac\xbf\xc0\xc3\xe0\xe2\xed\xf0\xf4\xf5\xff", k=draw.randint(1, 9)))
        at = draw.randint(0, len(data))
        pieces = [data[:at], *(data[i : i + 1] for i in range(at, len(data)))]
        judge.equal(
            "".join(drained(StreamingDecoder, pieces, judge)),
            data.decode("utf-8", errors="replace"),
            f"pushed {pieces}. Likely mistake: a case of broken bytes that the examples missed.",
        )


def flush_gives_once(StreamingDecoder, judge: Judge) -> None:
    decoder = StreamingDecoder()
    pushed(decoder, b"ok \xe6\x97", judge)
    judge.equal(
        [decoder.flush(), decoder.flush()],
        ["\ufffd", ""],
        "flushed twice. Likely mistake: what flush has returned is still held.",
    )


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
        broken_bytes_end_where_they_break,
        whatever_the_bytes,
        flush_gives_once,
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
        Mistake(
            "believes the first byte",
            "broken_bytes_end_where_they_break",
            source="""
class StreamingDecoder:
    def __init__(self):
        self.held = b""

    def push(self, piece):
        self.held, text = self.held + piece, ""
        while self.held:
            first = self.held[0]
            length = 1 if first < 0xC0 or first > 0xF7 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
            if len(self.held) < length:
                break
            text += self.held[:length].decode("utf-8", "replace")
            self.held = self.held[length:]
        return text

    def flush(self):
        text, self.held = self.held.decode("utf-8", "replace"), b""
        return text
""",
        ),
        Mistake(
            "all right or all replaced",
            "broken_bytes_end_where_they_break",
            source="""
class StreamingDecoder:
    def __init__(self):
        self.held = b""

    def push(self, piece):
        data = self.held + piece
        for keep in range(4):
            try:
                text = data[: len(data) - keep].decode()
            except UnicodeDecodeError:
                continue
            self.held = data[len(data) - keep :]
            return text
        self.held = b""
        return data.decode("utf-8", "replace")

    def flush(self):
        text, self.held = self.held.decode("utf-8", "replace"), b""
        return text
""",
        ),
        Mistake(
            "one sign for a whole impossible character",
            "whatever_the_bytes",
            source="""
class StreamingDecoder:
    def __init__(self):
        self.held = b""

    def push(self, piece):
        self.held, text = self.held + piece, ""
        while self.held:
            first, size = self.held[0], 1
            length = 1 if first < 0xC0 or first > 0xF7 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
            while size < min(length, len(self.held)) and self.held[size] >> 6 == 0b10:
                size += 1
            if len(self.held) == size < length:
                break
            try:
                text += self.held[:size].decode()
            except UnicodeDecodeError:
                text += "\ufffd"
            self.held = self.held[size:]
        return text

    def flush(self):
        text, self.held = self.held.decode("utf-8", "replace"), b""
        return text
""",
        ),
        Mistake(
            "flush keeps it",
            "flush_gives_once",
            edit=('errors="replace")\n        self.held = b""', 'errors="replace")'),
        ),
    ],
    forbids=("minillm.tokenizer", "codecs", "_codecs", "encodings", "io"),
)
