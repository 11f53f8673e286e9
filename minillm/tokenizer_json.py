"""Reads a Hugging Face tokenizer.json into a Vocabulary, or says which part of it is not supported.

The file is a pipeline (normalizer, pre-tokenizer, model, post-processor, decoder). Byte-level BPE models use few of
its parts: normal form C, a chain of splitting patterns, merges, and a template that puts BOS in front.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import regex

from .errors import TokenizerError
from .vocabulary import (
    GPT2_PATTERN,
    Vocabulary,
    chat_template_of,
    check_id,
    link_merges,
    token_to_bytes,
    utf8,
    words_of,
)


def read_tokenizer_json(path: str | Path) -> Vocabulary:
    """Vocabulary from a tokenizer.json or the folder that holds one. Raises TokenizerError naming the file.

    Beside it, tokenizer_config.json gives the BOS and EOS tokens and a chat template, generation_config.json further
    stop ids, and chat_template.jinja the template of newer models; each may be absent.
    """
    path = Path(path)
    path = path / "tokenizer.json" if path.is_dir() else path
    raw = _read_json(path)
    if raw is None:
        raise TokenizerError(f"{path}: no such file; give a tokenizer.json or the folder that holds one")
    settings = _read_json(path.parent / "tokenizer_config.json") or {}
    generation = _read_json(path.parent / "generation_config.json") or {}
    jinja = path.parent / "chat_template.jinja"
    if jinja.is_file():
        settings["chat_template"] = jinja.read_text(encoding="utf-8", errors="replace")
    try:
        return _from_json(raw, settings, generation)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: not a readable JSON file ({error}); download the model again") from None
    if not isinstance(raw, dict):
        raise TokenizerError(f"{path}: holds {type(raw).__name__}, not a JSON object; download the model again")
    return raw


def _from_json(raw: dict[str, Any], settings: dict[str, Any], generation: dict[str, Any]) -> Vocabulary:
    model = _supported_model(raw)
    special, added = _added_tokens(raw.get("added_tokens"))
    own = special | added
    ids = _vocab_ids(model.get("vocab"), own)
    normal = [(name, i) for name, i in ids.items() if name not in own]
    before, after = _post_processor(raw.get("post_processor"), own)
    named = {f"{n}_token": _content(settings.get(f"{n}_token")) for n in ("bos", "eos", "pad", "unk")}
    named = {name: token for name, token in named.items() if token is not None}
    known = ids | own
    return Vocabulary(
        tokens={i: token_to_bytes(name) for name, i in normal} | {i: utf8(name) for name, i in own.items()},
        words=words_of(normal),
        merges=link_merges(model.get("merges"), ids),
        stages=_stages(raw.get("pre_tokenizer")),
        special=special,
        added=added,
        nfc=_is_nfc(raw.get("normalizer")),
        ignore_merges=model.get("ignore_merges") is True,
        unk_id=known.get(_content(model.get("unk_token"))),
        fuse_unk=model.get("fuse_unk") is True,
        prefix_ids=before,
        suffix_ids=after,
        bos_id=known.get(named.get("bos_token")),
        eos_ids=_eos_ids(known.get(named.get("eos_token")), generation.get("eos_token_id")),
        chat_template=chat_template_of(settings.get("chat_template")),
        template_tokens=named,
    )


def _type(node: Any) -> str | None:
    return node.get("type") if isinstance(node, dict) else None


def _children(node: Any, key: str) -> list[Any]:
    """The members of a Sequence, or the node itself; nothing for null."""
    if node is None:
        return []
    inner = node.get(key) if _type(node) == "Sequence" else [node]
    return inner if isinstance(inner, list) else [inner]


def _unsupported(what: str, node: Any) -> TokenizerError:
    text = json.dumps(node)
    short = text if len(text) <= 120 else text[:117] + "..."
    return TokenizerError(f"{what} {short} is not supported; minillm reads byte-level BPE as of GPT-2, Llama-3, Qwen2")


def _supported_model(raw: dict[str, Any]) -> dict[str, Any]:
    model = raw.get("model")
    if not isinstance(model, dict):
        raise TokenizerError("model is missing; this is not a tokenizer.json")
    if model.get("type", "BPE") != "BPE":
        raise _unsupported("model", model["type"])
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(option):
            raise _unsupported(f"model option {option}", model[option])
    if raw.get("decoder") is not None and _type(raw["decoder"]) != "ByteLevel":
        raise _unsupported("decoder", raw["decoder"])
    return model


def _added_tokens(entries: Any) -> tuple[dict[str, int], dict[str, int]]:
    special: dict[str, int] = {}
    added: dict[str, int] = {}
    for entry in entries if isinstance(entries, list) else []:
        text = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(text, str) or not text:
            raise TokenizerError(f"added token {entry!r} has no text; the file is damaged")
        for option in ("lstrip", "rstrip", "single_word"):
            if entry.get(option):
                raise _unsupported(f"added token {text!r} with", {option: True})
        (special if entry.get("special") else added)[text] = check_id(entry.get("id"), f"added token {text!r}")
    return special, added


def _vocab_ids(vocab: Any, own: Mapping[str, int]) -> dict[str, int]:
    if not isinstance(vocab, dict) or not vocab:
        raise TokenizerError("model.vocab is missing or empty; download the model again")
    names: dict[int, str] = {}
    for name, index in [*vocab.items(), *own.items()]:
        if names.setdefault(check_id(index, f"token {name!r}"), name) != name:
            raise TokenizerError(f"id {index} belongs to two tokens, {names[index]!r} and {name!r}")
        if vocab.get(name, index) != index:
            raise TokenizerError(f"token {name!r} has two ids, {vocab[name]} and {index}")
    return vocab


def _stages(node: Any) -> tuple[str, ...]:
    stages: list[str] = []
    steps = _children(node, "pretokenizers")
    if [_type(step) == "ByteLevel" for step in steps] != [False] * (len(steps) - 1) + [True]:  # once, at the end
        raise _unsupported("pre-tokenizer", node)
    for step in steps:
        stages += _stage(step)
    return tuple(stages)


def _stage(step: Any) -> list[str]:
    kind = _type(step)
    if kind == "ByteLevel" and not step.get("add_prefix_space", True):
        return [GPT2_PATTERN] if step.get("use_regex", True) else []
    if kind == "Digits":
        return [r"\p{N}" if step.get("individual_digits") else r"\p{N}+"]
    if kind == "Split":
        how, source = {name: step.get(name) for name in ("behavior", "invert")}, step.get("pattern")
        if how["behavior"] != "Isolated" or how["invert"]:
            raise _unsupported("pre-tokenizer Split with", how)
        if isinstance(source, dict) and isinstance(source.get("Regex"), str):
            return [_compiles(source["Regex"])]
    raise _unsupported("pre-tokenizer", step)


def _compiles(pattern: str) -> str:
    try:
        regex.compile(pattern)
    except regex.error as error:
        raise TokenizerError(f"pre-tokenizer pattern {pattern!r} does not compile ({error})") from None
    return pattern


def _is_nfc(node: Any) -> bool:
    steps = _children(node, "normalizers")
    for step in steps:
        if _type(step) != "NFC":
            raise _unsupported("normalizer", step)
    return bool(steps)


def _post_processor(node: Any, own: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that the file puts before and after a single text."""
    before: list[int] = []
    after: list[int] = []
    for step in _children(node, "processors"):
        if _type(step) == "ByteLevel":  # trims offsets, changes no id
            continue
        if _type(step) != "TemplateProcessing" or not isinstance(step.get("single"), list):
            raise _unsupported("post-processor", step)
        side = before
        for part in step["single"]:
            if isinstance(part, dict) and "Sequence" in part:
                side = after
                continue
            name = part["SpecialToken"].get("id") if isinstance(part, dict) and _is_special(part) else None
            if not isinstance(name, str) or name not in own:
                raise TokenizerError(f"post-processor adds {name!r}, which is not among the added tokens")
            side.append(own[name])
    return tuple(before), tuple(after)


def _is_special(part: dict[str, Any]) -> bool:
    return isinstance(part.get("SpecialToken"), dict)


def _content(token: Any) -> str | None:
    """tokenizer_config.json writes a token as its text or as an object around it."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _eos_ids(named: int | None, listed: Any) -> tuple[int, ...]:
    listed = listed if isinstance(listed, list) else [listed]
    return tuple(dict.fromkeys(i for i in (named, *listed) if isinstance(i, int)))
