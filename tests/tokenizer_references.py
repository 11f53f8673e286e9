"""The same vocabularies in Hugging Face's `tokenizers`, put together from its own parts."""

from collections.abc import Mapping
from pydoc_data.topics import topics
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TOPICS = list(topics.values())
OTHER_SCRIPTS = [
    "Привет, мир. Как дела? 12345",
    "日本語の文章と漢字。これは試験です。",
    "नमस्ते दुनिया ½ Ⅷ ٣ ٤٥",
    "e\u0301te\u0301 cafe\u0301 Ångström",
    "👩\u200d👩\u200d👧 👍🏽 🇫🇷 don't DON'T we'll WE'LL",
    "line\r\nline\r\n\r\n    four  spaces\t\ttabs",
]
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|begin|>", "<|end|>", "<|end|>>"]  # the last two begin alike: the longest must win


def pre_tokenizer(family: str) -> pre_tokenizers.PreTokenizer:
    if family == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if family == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    pattern = CL100K if family == "llama3" else CL100K.replace("{1,3}", "")
    words = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def trained(family: str, vocab_size: int = 900) -> tokenizers.Tokenizer:
    """A small vocabulary of a family, trained by `tokenizers` on English and a little of other scripts."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=family == "llama3"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer(family), decoders.ByteLevel()
    if family == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TOPICS[:20] + OTHER_SCRIPTS * 20, trainer)
    if family == "llama3":
        bos = ("<|begin|>", tokenizer.token_to_id("<|begin|>"))
        template = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[bos])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template])
    return tokenizer


def from_gguf(fields: Mapping[str, Any], family: str) -> tokenizers.Tokenizer:
    names, merges = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"]
    vocabulary = {name: i for i, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer(family), decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([name for name, kind in zip(names, kinds, strict=True) if kind == 3])
    return tokenizer
