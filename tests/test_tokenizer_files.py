"""What is read from a tokenizer.json and from GGUF fields, and what is refused, in one line that names the part."""

import contextlib
import copy
import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from minillm.errors import TokenizerError
from minillm.tokenizer import Tokenizer
from minillm.vocabulary import BYTE_TO_CHAR
from tests.tokenizer_references import trained

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@pytest.fixture(scope="module")
def whole():
    """family -> a sound tokenizer.json, parsed."""
    return {family: json.loads(trained(family).to_str()) for family in ("gpt2", "llama3", "qwen2")}


def write(folder, raw, **beside):
    (folder / "tokenizer.json").write_text(raw if isinstance(raw, str) else json.dumps(raw), encoding="utf-8")
    for name, content in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def refused(path):
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_file(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_merges_as_pairs_and_as_strings_are_the_same(whole, tmp_path):
    raw = copy.deepcopy(whole["gpt2"])
    pairs = Tokenizer.from_file(write(tmp_path, raw)).vocabulary
    assert isinstance(raw["model"]["merges"][0], list)
    raw["model"]["merges"] = [" ".join(pair) for pair in raw["model"]["merges"]]
    assert Tokenizer.from_file(write(tmp_path, raw) / "tokenizer.json").vocabulary == pairs


def test_settings_beside_the_file(whole, tmp_path):
    config = {"eos_token": {"content": "<|end|>"}, "bos_token": "<|begin|>", "pad_token": None}
    config["chat_template"] = [
        {"name": "tool_use", "template": "x"},
        {"name": "default", "template": "{{ bos_token }}"},
    ]
    ours = Tokenizer.from_file(
        write(tmp_path, whole["gpt2"], tokenizer_config=config, generation_config={"eos_token_id": [1, 5]})
    )
    assert ours.eos_ids == (1, 5)
    assert ours.bos_id == 0
    assert ours.apply_chat_template([{"role": "user", "content": "a"}]) == "<|begin|>"
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}", encoding="utf-8")
    assert Tokenizer.from_file(tmp_path).apply_chat_template([{"role": "user", "content": "a"}]) == "<|end|>"


def test_without_settings_there_is_no_end_and_no_template(whole, tmp_path):
    ours = Tokenizer.from_file(write(tmp_path, whole["gpt2"]))
    assert (ours.eos_ids, ours.bos_id) == ((), None)
    with pytest.raises(TokenizerError, match="no chat template"):
        ours.apply_chat_template([{"role": "user", "content": "a"}])


def test_what_the_file_puts_around_a_text(tmp_path):
    reference = trained("gpt2")
    ends = [(name, reference.token_to_id(name)) for name in ("<|begin|>", "<|end|>")]
    template = "<|begin|> $A <|end|> <|end|>"
    reference.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=ends)
    ours = Tokenizer.from_file(write(tmp_path, reference.to_str()))
    assert ours.encode("a b", add_special=True) == reference.encode("a b").ids
    assert ours.encode("a b") == reference.encode("a b", add_special_tokens=False).ids


def test_added_tokens_that_are_not_special_are_always_found(whole, tmp_path):
    reference = trained("gpt2")
    reference.add_tokens(["<think>"])
    ours = Tokenizer.from_file(write(tmp_path, reference.to_str()))
    reference.encode_special_tokens = True
    text = "a <think>b<|end|>"
    assert ours.encode(text) == reference.encode(text).ids
    assert ours.added_tokens["<think>"] in ours.encode(text)
    assert ours.decode(ours.encode(text), skip_special=True) == text


def test_a_chain_of_patterns_as_deepseek_has(whole, tmp_path):
    reference = trained("gpt2")
    chain = [pre_tokenizers.Split(tokenizers.Regex(p), "isolated") for p in (r"\p{N}{1,3}", r"[一-龥]+", r"[A-Z]+")]
    chain += [pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(False, use_regex=False)]
    reference.pre_tokenizer = pre_tokenizers.Sequence(chain)
    ours = Tokenizer.from_file(write(tmp_path, reference.to_str()))
    text = "the THE 12345 ½½ 漢字かな the. 1a"
    assert ours.split(text) == ["the ", "THE", " ", "123", "45", " ", "½½", " ", "漢字", "かな the. ", "1", "a"]
    assert ours.encode(text) == reference.encode(text).ids
    with pytest.raises(TokenizerError, match="no tiktoken pattern"):
        ours.to_tiktoken()


def drop(*path):
    def change(raw):
        for key in path[:-1]:
            raw = raw[key]
        del raw[path[-1]]

    return change


def put(value, *path):
    def change(raw):
        for key in path[:-1]:
            raw = raw[key]
        raw[path[-1]] = value

    return change


DAMAGED = [
    (drop("model"), "model is missing"),
    (drop("model", "vocab"), "model.vocab is missing"),
    (put([], "model", "vocab"), "model.vocab is missing"),
    (drop("model", "merges"), "merges is missing"),
    (put([["Ġ", "nothing"]], "model", "merges"), r"merge 0 \('Ġ' \+ 'nothing'\) needs the token 'nothing'"),
    (put([["a", "\u0141"]], "model", "merges"), "needs the token 'aŁ'"),
    (put(["a b c"], "model", "merges"), "merge 'a b c' is not a pair"),
    (put([["a"]], "model", "merges"), "is not a pair"),
    (put([7], "model", "merges"), "merge 7 is not a pair"),
    (put(5, "model", "vocab", "new"), "id 5 belongs to two tokens"),
    (put(-1, "model", "vocab", "a"), "token 'a' has id -1"),
    (put(1.5, "model", "vocab", "a"), "token 'a' has id 1.5"),
    (put(10**12, "model", "vocab", "a"), "token 'a' has id 1000000000000"),
    (put(9000, "model", "vocab", "\ud800"), "half a surrogate pair"),
    (put(9000, "model", "vocab", "\u0120 "), None),  # a name outside the table is its own UTF-8: sound
    (put(700, "added_tokens", 0, "id"), "id 700 belongs to two tokens"),
    (put(70000, "added_tokens", 0, "id"), "has two ids"),
    (put(None, "added_tokens", 0, "content"), "has no text"),
    (put("WordPiece", "model", "type"), 'model "WordPiece" is not supported'),
    (put("</w>", "model", "end_of_word_suffix"), "end_of_word_suffix"),
    (put("##", "model", "continuing_subword_prefix"), "continuing_subword_prefix"),
    (put(True, "model", "byte_fallback"), "byte_fallback"),
    (put(0.1, "model", "dropout"), "dropout"),
    (put({"type": "Lowercase"}, "normalizer"), "normalizer .*Lowercase.* is not supported"),
    (put({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "NFKC"}]}, "normalizer"), "NFKC"),
    (put({"type": "Metaspace"}, "pre_tokenizer"), "pre-tokenizer .*Metaspace.* is not supported"),
    (put(None, "pre_tokenizer"), "pre-tokenizer null is not supported"),
    (put({**BYTE_LEVEL, "add_prefix_space": True}, "pre_tokenizer"), "add_prefix_space.*is not supported"),
    (put({"type": "Sequence", "pretokenizers": [BYTE_LEVEL, BYTE_LEVEL]}, "pre_tokenizer"), "is not supported"),
    (put({"type": "Sequence", "pretokenizers": [3, BYTE_LEVEL]}, "pre_tokenizer"), "pre-tokenizer 3 is not supported"),
    (put({"type": "WordPiece"}, "decoder"), "decoder .* is not supported"),
    (put({"type": "BertProcessing"}, "post_processor"), "post-processor .*BertProcessing"),
    (
        put({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}]}, "post_processor"),
        "post-processor adds '<s>'",
    ),
    (put({"type": "TemplateProcessing", "single": ["<s>"]}, "post_processor"), "post-processor adds None"),
    (put(True, "added_tokens", 0, "lstrip"), "with .*lstrip.* is not supported"),
]


@pytest.mark.parametrize(("change", "match"), DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_or_unsupported_file_is_one_clear_line(whole, tmp_path, change, match):
    raw = copy.deepcopy(whole["gpt2"])
    change(raw)
    if match is None:
        Tokenizer.from_file(write(tmp_path, raw))
        return
    with pytest.raises(TokenizerError, match=match):
        Tokenizer.from_file(write(tmp_path, raw))
    refused(tmp_path)


ODD = [None, [], {}, "x", -1, 10**20, 1.5, True, [[]], [None], {"type": "Sequence"}, {"type": []}, {"id": []}, "\ud800"]


def nodes(raw, path=()):
    """The way to every part of a parsed JSON file but single tokens and merges."""
    children = raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ()
    for key, child in children:
        yield (*path, key)
        if key not in ("vocab", "merges"):
            yield from nodes(child, (*path, key))


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_no_damage_escapes_as_another_error(whole, tmp_path_factory, data):
    raw = copy.deepcopy(whole["llama3"])
    put(data.draw(st.sampled_from(ODD)), *data.draw(st.sampled_from(list(nodes(raw)))))(raw)
    names = ("bos_token", "eos_token", "unk_token", "chat_template")
    config = {name: data.draw(st.sampled_from(ODD)) for name in names}
    stop = {"eos_token_id": data.draw(st.sampled_from(ODD))}
    folder = write(tmp_path_factory.mktemp("odd"), raw, tokenizer_config=config, generation_config=stop)
    with contextlib.suppress(TokenizerError):
        Tokenizer.from_file(folder).encode("abc 1", add_special=True)


@pytest.mark.parametrize("behavior", ["Removed", "MergedWithNext", "Contiguous"])
def test_other_ways_of_splitting_are_refused(whole, tmp_path, behavior):
    raw = copy.deepcopy(whole["llama3"])
    raw["pre_tokenizer"]["pretokenizers"][0]["behavior"] = behavior
    assert behavior in refused(write(tmp_path, raw))


def test_a_pattern_that_does_not_compile_is_refused(whole, tmp_path):
    raw = copy.deepcopy(whole["llama3"])
    raw["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a"
    assert "does not compile" in refused(write(tmp_path, raw))


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"model":', "\x00\x01"])
def test_what_is_not_json_is_refused(tmp_path, text):
    refused(write(tmp_path, text))


def test_missing_files_and_broken_settings_are_refused(whole, tmp_path):
    assert "no such file" in refused(tmp_path)
    assert "no such file" in refused(tmp_path / "elsewhere.json")
    write(tmp_path, whole["gpt2"])
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: not a readable JSON file"):
        Tokenizer.from_file(tmp_path)


# --- GGUF ---


def gguf(**changes):
    """A small GGUF vocabulary: the bytes, "ab", a control token and a user-defined one."""
    names = [*BYTE_TO_CHAR.values(), "ab", "<|end|>", "<think>"]
    fields = {"model": "gpt2", "pre": "gpt-2", "tokens": names, "token_type": [1] * 257 + [3, 4], "merges": ["a b"]}
    fields |= {"bos_token_id": 257, "eos_token_id": 257, **changes}
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}


def test_gguf_fields_are_read():
    ours = Tokenizer.from_gguf(gguf())
    assert (ours.eos_ids, ours.bos_id, ours.vocab_size) == ((257,), 257, 259)
    assert ours.encode("ab<|end|><think>")[-1] == 258
    assert ours.encode("ab<|end|>", allow_special=True) == [256, 257]
    assert ours.encode("ab", add_special=True) == [256]


def test_gguf_says_what_surrounds_a_text():
    both = Tokenizer.from_gguf(gguf(add_bos_token=True, add_eos_token=True, eot_token_id=258))
    assert both.encode("ab", add_special=True) == [257, 256, 257]
    assert both.encode("ab") == [256]
    assert both.eos_ids == (257, 258)
    assert Tokenizer.from_gguf(gguf(pre="llama-bpe")).encode("ab", add_special=True) == [257, 256]
    assert Tokenizer.from_gguf(gguf(pre="llama-bpe", add_bos_token=False)).encode("ab", add_special=True) == [256]


def test_gguf_families_differ():
    names = [*BYTE_TO_CHAR.values(), "xyz"]  # whole words are tokens in Llama-3 alone
    whole_words = {"tokens": names, "token_type": None, "merges": [], "bos_token_id": None, "eos_token_id": None}
    for pre in ("gpt-2", "smollm", "qwen2", "llama-bpe"):
        ours = Tokenizer.from_gguf(gguf(pre=pre, **whole_words))
        assert (ours.encode("xyz") == [256]) == (pre == "llama-bpe")
        assert (ours.decode(ours.encode("e\u0301")) == "\u00e9") == (pre == "qwen2")
        assert len(ours.split("123")) == {"gpt-2": 1, "llama-bpe": 1}.get(pre, 3)


def test_smollm2_fields(smollm2_gguf_fields):
    ours = Tokenizer.from_gguf(smollm2_gguf_fields)
    assert ours.vocab_size == 49152
    assert [ours.decode([i]) for i in ours.eos_ids] == ["<|im_end|>"]
    assert len(ours.special_tokens) == 17
    assert ours.pieces(ours.encode("The year 1984 cost ½.")) == [
        *("The", " year", " ", "1", "9", "8", "4", " cost", " ", "½", ".")
    ]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": "llama"}, "model 'llama' is not supported"),
        ({"model": None}, "model None is not supported"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not supported; known: gpt-2"),
        ({"pre": None}, "pre-tokenizer None"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": []}, "tokens is missing"),
        ({"tokens": ["a", 1]}, "tokens is missing or not a list of strings"),
        ({"token_type": [1]}, "259 tokens but 1 token types"),
        (
            {"token_type": [1, 1], "tokens": ["a", "a"], "bos_token_id": None, "eos_token_id": None},
            "token 'a' appears twice, with ids 0 and 1",
        ),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["a c"]}, "needs the token 'ac'"),
        ({"merges": ["ab"]}, "merge 'ab' is not a pair"),
        ({"eos_token_id": 400}, "eos_token_id 400 is beyond the 259 tokens"),
        ({"bos_token_id": -1}, "bos_token has id -1"),
    ],
)
def test_damaged_gguf_fields_are_refused(changes, match):
    with pytest.raises(TokenizerError, match=match):
        Tokenizer.from_gguf(gguf(**changes))
