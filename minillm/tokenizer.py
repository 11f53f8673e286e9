"""Text to token ids and back: byte-level byte-pair encoding (Sennrich et al. 2016; bytes as in GPT-2, Radford 2019).

Text is cut into words by the patterns of the model's family, each word into bytes, and neighbours are joined by the
merge of lowest rank, leftmost first, until no merge applies. Every id stands for a string of bytes, so any text can
be encoded, and a single id may be part of a character: `StreamDecoder` holds such a part back.

What counts as a letter or digit follows the Unicode version of the `regex` package. Characters assigned later than
the version another library carries may be cut differently there.
"""

from __future__ import annotations

import codecs
import heapq
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import regex

from . import chat_template
from .bpe_training import BYTES, Merge, learn_merges
from .errors import TokenizerError
from .tokenizer_json import read_tokenizer_json
from .vocabulary import PATTERNS, Vocabulary, read_gguf

if TYPE_CHECKING:
    import tiktoken

_CACHE_WORDS = 1 << 16
_CACHE_LENGTH = 64  # longer words are rare, and a cache of them would hold an attacker's text


class Tokenizer:
    """A vocabulary put to work. Immutable but for a bounded cache of words.

    special_tokens: token text -> id of those found in text only with `allow_special`.
    added_tokens: of those always found. eos_ids: ids that end a turn. missing_bytes: bytes that have no token and
    are dropped by `encode`, as tokenizers and llama.cpp do (SmolLM2 lacks 21, eight of which occur in valid UTF-8).
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.vocab_size = max(vocabulary.tokens) + 1
        self.special_tokens = dict(vocabulary.special)
        self.added_tokens = dict(vocabulary.added)
        self.eos_ids, self.bos_id = vocabulary.eos_ids, vocabulary.bos_id
        self.missing_bytes = frozenset(b for b in range(256) if bytes([b]) not in vocabulary.words)
        self._special_ids = frozenset(self.special_tokens.values())
        self._byte_ids = [vocabulary.words.get(bytes([b]), vocabulary.unk_id) for b in range(256)]
        self._ranks = {(left, right): (rank, new) for rank, (left, right, new) in enumerate(vocabulary.merges)}
        self._stages = [regex.compile(pattern) for pattern in vocabulary.stages]
        self._find_added = _alternatives(self.added_tokens)
        self._find_all = _alternatives(self.special_tokens | self.added_tokens)
        self._cache: dict[str, tuple[int, ...]] = {}

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any]) -> Tokenizer:
        """From the parsed fields of a GGUF header (`tokenizer.ggml.tokens` and so on). Raises TokenizerError."""
        return cls(read_gguf(fields))

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """From a Hugging Face tokenizer.json or the folder that holds one. Raises TokenizerError."""
        return cls(read_tokenizer_json(path))

    # --- encode ---

    def encode(self, text: str, allow_special: bool = False, add_special: bool = False) -> list[int]:
        """Ids of `text`.

        allow_special: read "<|im_end|>" and its like as the token rather than as the characters. Off by default, for
        text from outside must not be able to write control tokens. add_special: put BOS in front (and EOS behind)
        where the model's file asks for it; wanted for a raw prompt, not for a chat template, which writes its own.
        Raises TokenizerError if the text holds half a surrogate pair.
        """
        _check_text(text)
        ids = self._encode_marked(text, {}) if allow_special else self._encode_plain(text)
        if add_special:
            return [*self.vocabulary.prefix_ids, *ids, *self.vocabulary.suffix_ids]
        return ids

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Ids of a conversation in which only the template, never a message, can write special tokens.

        Equal to encoding `apply_chat_template` with `allow_special` unless a message spells a special token.
        """
        chat_template.check_messages(messages)
        (safe, names), restore = chat_template.guard((messages, variables), self.special_tokens)
        text = self.apply_chat_template(safe, add_generation_prompt, **names)
        _check_text(text)
        return self._encode_marked(text, restore)

    def _encode_marked(self, text: str, restore: Mapping[int, str]) -> list[int]:
        ids: list[int] = []
        for piece in _cut(self._find_all, text):
            token = self.special_tokens.get(piece)
            ids += self._encode_plain(piece.translate(restore)) if token is None else (token,)
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in _cut(self._find_added, text):
            token = self.added_tokens.get(piece)
            if token is not None:
                ids.append(token)
                continue
            for word in self.split(piece):
                ids += self._encode_word(word)
        return ids

    def split(self, text: str) -> list[str]:
        """The words that merges stay within; joined they are the text (in normal form C where the model asks)."""
        return _split(self._stages, unicodedata.normalize("NFC", text) if self.vocabulary.nfc else text)

    def _encode_word(self, word: str) -> tuple[int, ...]:
        ids = self._cache.get(word)
        if ids is None:
            data = word.encode()
            whole = self.vocabulary.words.get(data) if self.vocabulary.ignore_merges else None
            ids = tuple(self._merge(self._symbols(data))) if whole is None else (whole,)
            if len(word) <= _CACHE_LENGTH:
                if len(self._cache) >= _CACHE_WORDS:
                    self._cache.clear()
                self._cache[word] = ids
        return ids

    def _symbols(self, data: bytes) -> list[int]:
        """One id for each byte. A byte without a token is the unknown token, or nothing where there is none."""
        vocabulary = self.vocabulary
        ids = [self._byte_ids[byte] for byte in data]
        if vocabulary.fuse_unk:
            ids = [i for n, i in enumerate(ids) if i != vocabulary.unk_id or n == 0 or ids[n - 1] != i]
        return [i for i in ids if i is not None] if None in ids else ids

    def _merge(self, symbols: list[int]) -> list[int]:
        """Applies merges, lowest rank first, leftmost among equals: O(n log n) for n symbols.

        `after` and `before` link the surviving symbols; a joined symbol lives where its left half was. Entries of
        the heap go stale when a neighbour changes, and are recognised by asking for the pair's merge again.
        """
        n, ranks = len(symbols), self._ranks
        after, before = list(range(1, n + 1)), list(range(-1, n - 1))
        heap = [(*ranks[pair], i) for i, pair in enumerate(pairwise(symbols)) if pair in ranks]
        heapq.heapify(heap)
        while heap:
            rank, new, i = heapq.heappop(heap)
            j = after[i]
            if j >= n or ranks.get((symbols[i], symbols[j])) != (rank, new):
                continue
            symbols[i], symbols[j] = new, -1
            after[i] = k = after[j]
            if k < n:
                before[k] = i
            for left, right in ((before[i], i), (i, k)):
                if left >= 0 and right < n and (found := ranks.get((symbols[left], symbols[right]))):
                    heapq.heappush(heap, (*found, left))
        return [symbol for symbol in symbols if symbol >= 0]

    def merge_steps(self, word: str) -> Iterator[list[bytes]]:
        """The pieces of one word before the first merge and after each: what a picture of BPE shows.

        The word is taken as it is, not split. The last state is what `encode` makes of it.
        """
        _check_text(word)
        for symbols in self._steps(self._symbols(word.encode())):
            yield [self.vocabulary.tokens[i] for i in symbols]

    def _steps(self, symbols: list[int]) -> Iterator[list[int]]:
        """The algorithm of `_merge` without its links and heap: look at every pair, join the best, begin again."""
        while True:
            yield symbols
            found = [(*self._ranks[pair], i) for i, pair in enumerate(pairwise(symbols)) if pair in self._ranks]
            if not found:
                return
            _, new, i = min(found, key=lambda entry: (entry[0], entry[2]))
            symbols = [*symbols[:i], new, *symbols[i + 2 :]]

    # --- decode ---

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one id. Raises TokenizerError if no token has it."""
        try:
            return self.vocabulary.tokens[token]
        except (KeyError, TypeError):
            raise TokenizerError(
                f"token id {token!r} is not in the vocabulary of {self.vocab_size}; were the ids made by another model?"
            ) from None

    def decode_bytes(self, ids: Iterable[int], skip_special: bool = False) -> bytes:
        """Bytes of all ids end to end; special tokens are written out unless `skip_special`."""
        return b"".join(self.token_bytes(i) for i in ids if not (skip_special and i in self._special_ids))

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of all ids. Bytes that are not UTF-8 become U+FFFD, as a sampled sequence may end inside a character."""
        return self.decode_bytes(ids, skip_special).decode("utf-8", errors="replace")

    def pieces(self, ids: Iterable[int]) -> list[str]:
        r"""Text of each id alone, for display; bytes that are no whole character are written \xNN."""
        return [self.token_bytes(i).decode("utf-8", errors="backslashreplace") for i in ids]

    # --- chat, and the same vocabulary elsewhere ---

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Prompt text of a conversation by the model's own template; encode it with `allow_special=True`.

        `variables` reach the template (tools, enable_thinking). Raises TokenizerError.
        """
        template = self.vocabulary.chat_template
        if template is None:
            raise TokenizerError("the model's files hold no chat template; pass raw text, or use an instruct model")
        names = {**self.vocabulary.template_tokens, **variables}
        return chat_template.render(template, messages, add_generation_prompt, names)

    def to_tiktoken(self) -> tiktoken.Encoding:
        """The same vocabulary as a tiktoken.Encoding, for speed. Raises TokenizerError if it would not be the same.

        tiktoken does not normalise text, finds added tokens only when `allowed_special` names them, and needs a token
        for each byte: it gives the missing ones ids from `vocab_size` on, where `encode` drops them.
        """
        from .tiktoken_export import to_tiktoken

        return to_tiktoken(self)


class StreamDecoder:
    """Text of ids as they arrive, never half a character: all of it joined is `decode` of all ids at once."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that this id makes certain; "" while a character is incomplete. Raises TokenizerError."""
        return self._decoder.decode(self._tokenizer.decode_bytes([token], self._skip_special))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never came whole. The decoder can be used again."""
        return self._decoder.decode(b"", final=True)


def train_bpe(
    text: str | Iterable[str],
    vocab_size: int,
    pattern: str = "gpt2",
    special_tokens: Sequence[str] = (),
    on_merge: Callable[[Merge], None] | None = None,
) -> Tokenizer:
    """A tokenizer learned from `text` (or from several texts, no word reaching over the end of one).

    Ids: 0 to 255 the bytes in GPT-2's order, then one for each merge, then the special tokens. Learning ends early
    when every word has become one token. `on_merge` sees each merge as it is learned. Raises TokenizerError.
    """
    if isinstance(special_tokens, str) or not all(isinstance(token, str) and token for token in special_tokens):
        raise TokenizerError("special_tokens must be a list of non-empty strings")
    special_tokens = list(dict.fromkeys(special_tokens))
    room = vocab_size - len(BYTES) - len(special_tokens)
    if room < 0:
        raise TokenizerError(f"vocab_size {vocab_size} must be at least {len(BYTES)} plus the special tokens")
    ids = {token: i for i, token in enumerate(BYTES)}
    merges = []
    for merge in islice(learn_merges(count_words(text, pattern)), room):
        ids[merge.token] = len(ids)
        merges.append((ids[merge.left], ids[merge.right], ids[merge.token]))
        if on_merge:
            on_merge(merge)
    special = {token: len(ids) + i for i, token in enumerate(special_tokens)}
    tokens = {i: token for token, i in ids.items()} | {i: token.encode() for token, i in special.items()}
    return Tokenizer(Vocabulary(tokens, ids, merges, PATTERNS[pattern], special, nfc=pattern == "qwen2"))


def count_words(text: str | Iterable[str], pattern: str = "gpt2") -> Counter[str]:
    """How often each word of the text occurs, words being cut as by a family of PATTERNS. Raises TokenizerError."""
    if pattern not in PATTERNS:
        raise TokenizerError(f"pattern {pattern!r} is not known; use one of {', '.join(PATTERNS)}")
    stages = [regex.compile(stage) for stage in PATTERNS[pattern]]
    words: Counter[str] = Counter()
    for part in [text] if isinstance(text, str) else text:
        _check_text(part)
        words.update(_split(stages, unicodedata.normalize("NFC", part) if pattern == "qwen2" else part))
    return words


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise TokenizerError(f"text is {type(text).__name__}; give a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"text holds half a surrogate pair, {text[error.start]!a}, at position {error.start}; remove it"
        ) from None


def _alternatives(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that finds the leftmost token, and the longest of those that begin there."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _cut(pattern: re.Pattern[str] | regex.Pattern[str] | None, text: str) -> Iterator[str]:
    """Matches and the text between them, in order, empty pieces left out."""
    end = 0
    for match in pattern.finditer(text) if pattern else ():
        if match.start() > end:
            yield text[end : match.start()]
        if match.end() > match.start():
            yield match.group()
        end = match.end()
    if end < len(text):
        yield text[end:]


def _split(stages: Sequence[regex.Pattern[str]], text: str) -> list[str]:
    pieces = [text]
    for pattern in stages:
        pieces = [part for piece in pieces for part in _cut(pattern, piece)]
    return pieces
