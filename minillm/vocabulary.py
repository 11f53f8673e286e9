"""The tables of a byte-level BPE tokenizer, and how they are read from the fields of a GGUF file.

Files name each token by a string in which every byte is one printable character (GPT-2's table), so that a token
which is half a character can still be written down. Here those strings become bytes, names become ids, and what
minillm cannot honour is refused by name: a vocabulary read half right gives wrong ids without a word.
tokenizer_json.py does the same for a Hugging Face tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import TokenizerError

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# family -> the patterns that cut text into words, applied one after the other: each cuts the pieces of the one before.
# \p{N} is every numeric character, so the digits stage of SmolLM isolates ½ and Ⅷ as well as 7.
PATTERNS: dict[str, tuple[str, ...]] = {
    "gpt2": (GPT2_PATTERN,),
    "smollm": (r"\p{N}", GPT2_PATTERN),
    "llama3": (_CL100K % "{1,3}",),
    "qwen2": (_CL100K % "",),
}
GGUF_FAMILY = {  # tokenizer.ggml.pre -> family
    "gpt-2": "gpt2",
    "smollm": "smollm",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
}
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type
_LIMIT = 1 << 31


def _byte_alphabet() -> dict[int, str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


BYTE_TO_CHAR = _byte_alphabet()  # in GPT-2's order: printable bytes first
CHAR_TO_BYTE = {char: byte for byte, char in BYTE_TO_CHAR.items()}


@dataclass(frozen=True)
class Vocabulary:
    """The tables of a byte-level BPE tokenizer; every id in it has been checked to exist.

    merges[rank] is (left id, right id, id of the joined token). `special` tokens are recognised in text only when
    the caller allows it; `added` ones (a file's user-defined tokens, such as Qwen's <think>) always, as in llama.cpp
    and tokenizers. `prefix_ids` and `suffix_ids` are what the model expects around a whole text (BOS, EOS).
    """

    tokens: Mapping[int, bytes]  # every id, special ones included
    words: Mapping[bytes, int]  # what BPE may produce
    merges: Sequence[tuple[int, int, int]]
    stages: tuple[str, ...]
    special: Mapping[str, int] = field(default_factory=dict)
    added: Mapping[str, int] = field(default_factory=dict)
    nfc: bool = False  # text is brought to Unicode normal form C first
    ignore_merges: bool = False  # a word that is a token is that token, reachable by merges or not
    unk_id: int | None = None  # stands for a byte without a token; None drops the byte
    fuse_unk: bool = False
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    template_tokens: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, ... for the template


def token_to_bytes(token: str) -> bytes:
    """The bytes behind a token's printable name; a name outside the table stands for its own UTF-8."""
    try:
        return bytes([CHAR_TO_BYTE[char] for char in token])
    except KeyError:
        return utf8(token)


def bytes_to_token(data: bytes) -> str:
    """The printable name of a token's bytes."""
    return "".join(BYTE_TO_CHAR[byte] for byte in data)


def utf8(text: str) -> bytes:
    """UTF-8 of a token's text. Raises TokenizerError on half a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise TokenizerError(f"token {text!a} holds half a surrogate pair; the vocabulary is damaged") from None


def _pair(merge: Any) -> tuple[str, str]:
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if not (isinstance(parts, list | tuple) and len(parts) == 2 and all(isinstance(part, str) for part in parts)):
        raise TokenizerError(f"merge {merge!r} is not a pair of tokens")
    return parts[0], parts[1]


def link_merges(merges: Any, ids: Mapping[str, int]) -> list[tuple[int, int, int]]:
    """Merges by name ("a b" or [a, b]) as (left id, right id, joined id). Raises TokenizerError on an unknown name."""
    if not isinstance(merges, list | tuple):
        raise TokenizerError("merges is missing or not a list; only byte-level BPE vocabularies can be read")
    linked = []
    for rank, merge in enumerate(merges):
        left, right = _pair(merge)
        for token in (left, right, left + right):
            if token not in ids:
                raise TokenizerError(f"merge {rank} ({left!r} + {right!r}) needs the token {token!r}, which has no id")
        linked.append((ids[left], ids[right], ids[left + right]))
    return linked


def check_id(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LIMIT:
        raise TokenizerError(f"{what} has id {value!r}; an id is a whole number from 0")
    return value


def words_of(names: Iterable[tuple[str, int]]) -> dict[bytes, int]:
    """Bytes -> id. Raises TokenizerError if two ids stand for the same bytes."""
    words: dict[bytes, int] = {}
    for name, index in names:
        if words.setdefault(token_to_bytes(name), index) != index:
            raise TokenizerError(f"token {name!r} appears twice, with ids {words[token_to_bytes(name)]} and {index}")
    return words


def read_gguf(fields: Mapping[str, Any]) -> Vocabulary:
    """Vocabulary from the tokenizer.* fields of a GGUF header, already parsed to Python values.

    Raises TokenizerError. What a file leaves out is filled in as llama.cpp does: Llama-3 takes whole words from the
    vocabulary and starts with BOS. Qwen2 text is brought to normal form C, as its own tokenizer.json says.
    """
    try:
        return _read_gguf(fields)
    except TokenizerError as error:
        raise TokenizerError(f"GGUF tokenizer: {error}") from None


def _read_gguf(fields: Mapping[str, Any]) -> Vocabulary:
    def get(name: str, default: Any = None) -> Any:
        return fields.get(f"tokenizer.ggml.{name}", default)

    family = _gguf_family(get("model"), get("pre"))
    names, types = _gguf_tokens(get("tokens"), get("token_type"))
    typed = list(zip(names, range(len(names)), types, strict=True))
    by_type = {kind: {name: i for name, i, t in typed if t == kind and name} for kind in (_CONTROL, _USER_DEFINED)}
    normal = [(name, i) for name, i, t in typed if t == _NORMAL]
    tokens = {i: token_to_bytes(name) if t == _NORMAL else utf8(name) for name, i, t in typed}
    bos, eos, eot = (_gguf_id(get(f"{n}_token_id"), n, len(names)) for n in ("bos", "eos", "eot"))
    return Vocabulary(
        tokens=tokens,
        words=words_of(normal),
        merges=link_merges(get("merges"), dict(normal)),
        stages=PATTERNS[family],
        special=by_type[_CONTROL],
        added=by_type[_USER_DEFINED],
        nfc=family == "qwen2",
        ignore_merges=family == "llama3",
        prefix_ids=(bos,) if bos is not None and get("add_bos_token", family == "llama3") else (),
        suffix_ids=(eos,) if eos is not None and get("add_eos_token", False) else (),
        bos_id=bos,
        eos_ids=tuple(dict.fromkeys(i for i in (eos, eot) if i is not None)),
        chat_template=chat_template_of(fields.get("tokenizer.chat_template")),
        template_tokens={f"{n}_token": names[i] for n, i in (("bos", bos), ("eos", eos)) if i is not None},
    )


def _gguf_family(model: Any, pre: Any) -> str:
    if model != "gpt2":
        raise TokenizerError(f"model {model!r} is not supported; minillm reads byte-level BPE (model 'gpt2')")
    if not isinstance(pre, str) or pre not in GGUF_FAMILY:
        raise TokenizerError(f"pre-tokenizer {pre!r} is not supported; known: {', '.join(GGUF_FAMILY)}")
    return GGUF_FAMILY[pre]


def _gguf_tokens(names: Any, types: Any) -> tuple[list[str], list[int]]:
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise TokenizerError("tokens is missing or not a list of strings; the file carries no vocabulary")
    types = [_NORMAL] * len(names) if types is None else types
    if not isinstance(types, list | tuple):
        raise TokenizerError("token_type is not a list; the file is damaged")
    if len(types) != len(names):
        raise TokenizerError(f"{len(names)} tokens but {len(types)} token types; the file is damaged")
    return list(names), list(types)


def _gguf_id(value: Any, what: str, size: int) -> int | None:
    if value is not None and check_id(value, f"{what}_token") >= size:
        raise TokenizerError(f"{what}_token_id {value} is beyond the {size} tokens of the vocabulary")
    return value


def chat_template_of(value: Any) -> str | None:
    """One template, or the one named default out of a list of {name, template}."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
