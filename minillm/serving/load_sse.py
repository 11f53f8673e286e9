"""Server-sent events, as far as a language model's stream needs them (WHATWG HTML, section 9.2).

Bytes come in pieces of any size; an event ends at an empty line. Lines that are no `data:` (comments, which servers
send to keep a connection alive, event names, ids) carry nothing here.
"""

from __future__ import annotations

LIMIT = 4 * 2**20  # bytes of one event; more is no stream of tokens
STREAM_LIMIT = 64 * 2**20  # and of a whole stream; 300 bytes a token leave room for 200,000 of them


class EventStream:
    """`feed(bytes)` returns the data of the events that are now complete, as bytes."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = self._total = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Raises ValueError for an event of more than 4 MiB, and for a stream of more than 64 MiB."""
        self._total += len(piece)
        if self._total > STREAM_LIMIT:
            raise ValueError("a stream of more than 64 MiB")
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > LIMIT:
            raise ValueError("a line of more than 4 MiB")
        return [data for line in lines if (data := self._line(line.rstrip(b"\r"))) is not None]

    def flush(self) -> list[bytes]:
        """What a stream that ended without its last empty line left behind."""
        return [data for data in (*self.feed(b"\n"), *self.feed(b"\n")) if data]

    def _line(self, line: bytes) -> bytes | None:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
            self._size += len(line)
            if self._size > LIMIT:
                raise ValueError("an event of more than 4 MiB")
        if line or not self._data:
            return None
        data, self._data, self._size = b"\n".join(self._data), [], 0
        return data
