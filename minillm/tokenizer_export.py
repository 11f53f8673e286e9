"""A Tokenizer written as Hugging Face's files, so that a model folder made here is whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .storage import write_atomically
from .tokenizer import Tokenizer
from .vocabulary import bytes_to_token


def save_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> None:
    """tokenizer.json and tokenizer_config.json; reading them back gives the same ids for every text."""
    folder = Path(folder)
    v = tokenizer.vocabulary
    settings: dict[str, Any] = dict(v.template_tokens)
    if v.chat_template is not None:
        settings["chat_template"] = v.chat_template
    files = {"tokenizer.json": tokenizer_json(tokenizer), "tokenizer_config.json": settings,
             "generation_config.json": {"eos_token_id": list(v.eos_ids)}}  # fmt: skip
    for name, value in files.items():
        data = json.dumps(value, ensure_ascii=False, indent=1).encode()
        write_atomically(folder / name, lambda file, data=data: file.write(data))


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The pipeline: normal form C where the model has it, splitting patterns, byte-level merges."""
    v = tokenizer.vocabulary
    own = v.special | v.added
    texts = {i: text for text, i in own.items()}
    names = {i: texts.get(i) or bytes_to_token(data) for i, data in v.tokens.items()}
    stages = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in v.stages]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [_added(text, i, text in v.special) for i, text in sorted(texts.items())],
        "normalizer": {"type": "NFC"} if v.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*stages, byte_level]},
        "post_processor": _template([names[i] for i in v.prefix_ids], [names[i] for i in v.suffix_ids], own),
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": names.get(v.unk_id), "fuse_unk": v.fuse_unk,
            "byte_fallback": False, "ignore_merges": v.ignore_merges,
            "vocab": {name: i for i, name in sorted(names.items())},
            "merges": [[names[left], names[right]] for left, right, _ in v.merges],
        },
    }  # fmt: skip


def _added(text: str, index: int, special: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": text, **plain, "special": special}


def _template(before: list[str], after: list[str], own: dict[str, int]) -> dict[str, Any] | None:
    if not before and not after:
        return None
    special = lambda name: {"SpecialToken": {"id": name, "type_id": 0}}  # noqa: E731
    return {
        "type": "TemplateProcessing",
        "single": [*map(special, before), {"Sequence": {"id": "A", "type_id": 0}}, *map(special, after)],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [own[name]], "tokens": [name]} for name in {*before, *after}},
    }
