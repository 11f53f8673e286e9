"""Log-probabilities in OpenAI's two forms. They are of the raw distribution, before temperature, penalties and cuts."""

from __future__ import annotations

from collections.abc import Sequence

from ..sampling import SampledToken
from ..tokenizer import StreamDecoder, Tokenizer
from .responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

FLOOR = -9999.0  # stands for log 0, which JSON cannot say; OpenAI's own value


def finite(logprob: float) -> float:
    return max(logprob, FLOOR)


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """An id that the vocabulary skips has none; it can be among the likeliest without ever being drawn."""
    return tokenizer.vocabulary.tokens.get(token, b"")


def token_text(tokenizer: Tokenizer, token: int) -> str:
    r"""The token's text, or "bytes:\xf0\x9f" for one that is a piece of a character."""
    data = token_bytes(tokenizer, token)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Offsets:
    """Where in the answer each token's text begins; a piece of a character begins where the character will.

    A whole token can also end a broken character before it, and then begins after its U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._decoder, self._length = tokenizer, StreamDecoder(tokenizer, skip_special=True), 0

    def push(self, token: int) -> int:
        start, text, own = self._length, self._decoder.push(token), token_text(self._tokenizer, token)
        self._length += len(text)
        return self._length - len(own) if text.endswith(own) else start


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[SampledToken], offsets: Offsets) -> CompletionLogprobs:
    """Tokens that are spelt alike share an entry of top_logprobs: the likelier one's."""
    return {
        "tokens": [token_text(tokenizer, t.id) for t in tokens],
        "token_logprobs": [finite(t.logprob) for t in tokens],
        "top_logprobs": [_by_text(tokenizer, t) for t in tokens],
        "text_offset": [offsets.push(t.id) for t in tokens],
    }


def _by_text(tokenizer: Tokenizer, token: SampledToken) -> dict[str, float]:
    found: dict[str, float] = {}
    for i, logprob in [*token.top_logprobs, (token.id, token.logprob)]:
        found.setdefault(token_text(tokenizer, i), finite(logprob))
    return found


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[SampledToken]) -> ChatLogprobs:
    return {"content": [_entry(tokenizer, token) for token in tokens], "refusal": None}


def _entry(tokenizer: Tokenizer, token: SampledToken) -> TokenLogprob:
    top = [_single(tokenizer, i, logprob) for i, logprob in token.top_logprobs]
    return {**_single(tokenizer, token.id, token.logprob), "top_logprobs": top}


def _single(tokenizer: Tokenizer, token: int, logprob: float) -> TopLogprob:
    return {
        "token": token_text(tokenizer, token),
        "logprob": finite(logprob),
        "bytes": list(token_bytes(tokenizer, token)),
    }
