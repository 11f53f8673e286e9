"""When a sequence ends, and which of its text may already be shown.

Text arrives a piece a token. A stop string is often spread over several pieces, so a piece that might be its
beginning is held back until the next ones tell. The rule, chosen so that it does not depend on where tokens part:

* A stop string matches where it *ends* first; among those that end at the same character, the one that begins first
  (the longest) wins. A reader who saw the text one character at a time would cut exactly there, and no earlier
  beginning can be known at that moment: "abcd" with stops "abcd" and "bc" is cut before "bc".
* Text before the match is the output; with include_stop_str_in_output the match is too, and what follows it in the
  same token never is.
* The first min_tokens tokens cannot stop: a match must end in the text of a later token, though it may begin earlier.
* In one step, a stop or end token comes before a stop string, and a stop string before the length limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .errors import RequestError
from .sampling_params import SamplingParams


class Match(NamedTuple):
    """A stop string found at text[start:end]."""

    start: int
    end: int
    stop: str


def find_stop(text: str, stops: Sequence[str], exempt: int = 0) -> Match | None:
    """The winning match in the text, or None. One that ends within the first `exempt` characters does not count."""
    matches = []
    for stop in stops:
        start = text.find(stop, max(0, exempt - len(stop) + 1))
        if start >= 0:
            matches.append(Match(start, start + len(stop), stop))
    return min(matches, key=lambda m: (m.end, m.start), default=None)


def held_length(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of the text that may be the beginning of a stop string: the longest such run."""
    longest = max(map(len, stops), default=1) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        tail = text[start:]
        if any(len(tail) < len(stop) and stop.startswith(tail) for stop in stops):
            return len(tail)
    return 0


class Emission(NamedTuple):
    """Text that is certain; on the last step also why it ended: "stop", with the string or
    the id of stop_token_ids that did it and None for the model's own end token, or "length"."""

    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class StopChecker:
    """Follows one sequence: `push` for each token, then `flush` once. The joined texts are the output.

    `max_model_len` bounds prompt and output tokens together. It ends a sequence even before min_tokens.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_ids: Iterable[int] = (),
        max_model_len: int | None = None,
        prompt_tokens: int = 0,
    ) -> None:
        self.params = params
        self.tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
        limits = [params.max_tokens] if params.max_tokens is not None else []
        limits += [max_model_len - prompt_tokens] if max_model_len is not None else []
        self._limit = min(limits, default=None)
        self._held = ""
        self._exempt = 0  # leading characters of _held in which no match may end
        self._flushed = False

    def stops_at(self, token_id: int) -> bool:
        """Whether this token, pushed next, ends the sequence by itself. Its text is then not part of the output."""
        return token_id in self._ends and self.tokens >= self.params.min_tokens

    def push(self, token_id: int, text: str) -> Emission:
        """Takes a token and the text that became certain with it, which may be empty. Raises RequestError at the end.

        The text of a stop or end token is dropped unless include_stop_str_in_output. When the answer has a
        finish_reason, call `flush` with what the detokenizer still holds.
        """
        if self.finish_reason or self._flushed:
            raise RequestError(f"token {token_id} came after the sequence had ended; start a new StopChecker")
        ends = self.stops_at(token_id)
        self.tokens += 1
        if ends:
            named = token_id in self.params.stop_token_ids  # an end token has no reason but itself
            self.finish_reason, self.stop_reason = "stop", token_id if named else None
            if not self.params.include_stop_str_in_output:
                return Emission("", "stop", self.stop_reason)
            self._held += text
            return Emission(self._release(len(self._held)), "stop", self.stop_reason)
        emitted = self._advance(text)
        if not self.finish_reason and self._limit is not None and self.tokens >= self._limit:
            self.finish_reason = "length"
        return Emission(emitted, self.finish_reason, self.stop_reason)

    def flush(self, text: str = "") -> Emission:
        """Ends the sequence: releases what was held back and `text`, the detokenizer's rest. Empty if called again.

        The rest may still complete a stop string, which then replaces "length" as the reason.
        """
        emitted = ""
        if not self._flushed and not isinstance(self.stop_reason, str):
            emitted = self._advance(text)
            emitted += self._release(len(self._held))
        self._flushed = True
        return Emission(emitted, self.finish_reason, self.stop_reason)

    def _advance(self, text: str) -> str:
        self._held += text
        if self.tokens <= self.params.min_tokens:
            self._exempt = len(self._held)
        match = find_stop(self._held, self.params.stop, self._exempt)
        if match is None:
            return self._release(len(self._held) - held_length(self._held, self.params.stop))
        self.finish_reason, self.stop_reason = "stop", match.stop
        emitted = self._held[: match.end if self.params.include_stop_str_in_output else match.start]
        self._held = ""
        return emitted

    def _release(self, count: int) -> str:
        emitted, self._held = self._held[:count], self._held[count:]
        self._exempt = max(0, self._exempt - count)
        return emitted
