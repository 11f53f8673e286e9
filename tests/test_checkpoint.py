"""Promise: a model folder is read whole and right, or refused in one line that names the file and the remedy."""

# ruff: noqa: E501  (a table of damage reads best a line a case)

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm import checkpoint
from minillm.errors import CheckpointError, ConfigError, FetchError, MinillmError, RequestError
from minillm.generate import encode_prompt, generate, generate_n, next_logits, stream
from minillm.kv_cache import ContiguousCache, NoCache
from minillm.sampling import SamplingParams
from tests import tiny


@pytest.fixture
def folder(tmp_path):
    tiny.save("llama", tmp_path)
    return tmp_path


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_tensors(folder, change):
    """Rewrites the one shard that holds the final norm."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if "model.norm.weight" in tensors:
            change(tensors)
            save_file(tensors, path)


def test_a_copy_of_a_tied_head_in_the_file_is_ignored(tmp_path):
    """sglang#1508, vllm#6758: tied means tied, whether or not lm_head is in the file."""
    theirs = tiny.save("llama-mqa-tied", tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    save_file({"lm_head.weight": torch.randn(tiny.VOCAB, 48)}, tmp_path / "extra.safetensors")
    mapping = json.loads(index.read_text())
    mapping["weight_map"]["lm_head.weight"] = "extra.safetensors"
    index.write_text(json.dumps(mapping))
    model, tokens = checkpoint.load_model(tmp_path), torch.arange(9)
    expected = theirs(tokens[None]).logits[0]
    assert torch.allclose(model.logits(model(tokens, tokens, NoCache(model.config))), expected, atol=1e-4)


def test_an_untied_head_that_is_missing_is_an_error(tmp_path):
    tiny.save("llama-mqa-tied", tmp_path)
    change_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing and the config does not tie it"):
        checkpoint.load_model(tmp_path)


def test_half_precision_files_load_as_their_values(folder):
    exact = checkpoint.load_model(folder)
    for path in folder.glob("*.safetensors"):
        save_file({name: t.to(torch.bfloat16) for name, t in load_file(path).items()}, path)
    rounded = checkpoint.load_model(folder)
    assert rounded.embedding.dtype == torch.float32
    assert torch.equal(rounded.embedding, exact.embedding.to(torch.bfloat16).float())


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda f: next(f.glob("*.safetensors")).unlink(), CheckpointError, "this shard is missing; download the whole"),
        (lambda f: next(f.glob("*.safetensors")).write_bytes(b"\xff" * 100), CheckpointError, "not a whole safetensors"),
        (lambda f: next(f.glob("*.safetensors")).write_bytes(b""), CheckpointError, "not a whole safetensors"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), CheckpointError, "not a readable index"),
        (lambda f: (f / "model.safetensors.index.json").write_text("[]"), CheckpointError, "not a readable index"),
        (lambda f: (f / "model.safetensors.index.json").write_text("[" * 100_000), CheckpointError, "not a readable index"),
        (lambda f: (f / "model.safetensors.index.json").write_bytes(b"\xff" * 100_000), CheckpointError, "not a readable index"),
        (lambda f: (f / "config.json").unlink(), ConfigError, "no such file; give a config.json or the folder"),
        (lambda f: (f / "config.json").write_text("{"), ConfigError, "not a readable JSON file"),
        (lambda f: (f / "config.json").write_text("[1]"), ConfigError, "holds list, not a JSON object"),
        (lambda f: change_config(f, model_type="mamba"), ConfigError, "model_type 'mamba' is not supported"),
        (lambda f: change_config(f, model_type="gpt_oss", num_local_experts=4, num_experts_per_tok=2), ConfigError,
         "can be sized but not run yet"),
        (lambda f: change_config(f, hidden_size=-3), ConfigError, "hidden_size is -3; it must lie between 1"),
        (lambda f: change_config(f, hidden_size="big"), ConfigError, "hidden_size is 'big'; it must be a whole number"),
        (lambda f: change_config(f, num_key_value_heads=4), ConfigError, "6 is not a multiple of num_key_value_heads 4"),
        (lambda f: change_config(f, hidden_size=64), CheckpointError, r"has shape \(320, 48\), the config says \(320, 64\)"),
        (lambda f: change_config(f, num_hidden_layers=2), CheckpointError, "that this architecture does not have, such as"),
        (lambda f: change_config(f, num_hidden_layers=4), CheckpointError, "layers.3.* is missing from the checkpoint"),
        (lambda f: change_config(f, vocab_size=1 << 40), ConfigError, "vocab_size is 1099511627776"),
        (lambda f: change_config(f, rms_norm_eps=float("nan")), ConfigError, "rms_norm_eps is nan"),
        (lambda f: change_tensors(f, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.int8)})),
         CheckpointError, r"model\.norm\.weight is stored as I8; minillm reads plain floats"),
    ],
)  # fmt: skip
def test_damage_is_one_clear_error(folder, damage, error, message):
    damage(folder)
    with pytest.raises(error, match=message) as caught:
        checkpoint.load_model(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_an_index_cannot_reach_outside_its_folder(folder, tmp_path_factory):
    index = folder / "model.safetensors.index.json"
    mapping = json.loads(index.read_text())
    name = next(iter(mapping["weight_map"]))
    mapping["weight_map"][name] = "../secret.safetensors"
    index.write_text(json.dumps(mapping))
    with pytest.raises(CheckpointError, match="names a file outside its folder; do not trust this model"):
        checkpoint.load_model(folder)


def test_pickled_weights_are_not_read(tmp_path):
    tiny.save("llama", tmp_path)
    for path in tmp_path.glob("*.safetensors*"):
        path.unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file; minillm does not read pickled weights"):
        checkpoint.load_model(tmp_path)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("./no/such/folder", CheckpointError),
        ("/no/such/file.gguf", CheckpointError),
        ("model.gguf", CheckpointError),
        ("no-such-owner/no-such-model", FetchError),
        ("not a hub name at all", FetchError),
    ],
)
def test_unknown_models_say_what_to_do(source, error):
    with pytest.raises(error, match=r"check (the path|name and network)") as caught:
        checkpoint.locate(source)
    assert source in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_dtype(folder):
    with pytest.raises(CheckpointError, match="dtype 'int3' is not known; choose one of auto, float32"):
        checkpoint.load_model(folder, "int3")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loaded")
    tiny.save("qwen2", folder)
    return checkpoint.load(folder, "float32")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([3, 320], "prompt token 320 is not an id of this vocabulary"),
        ([-1], "prompt token -1 is not an id"),
        ([1.5], "prompt token 1.5 is not an id"),
        ([True], "prompt token True is not an id"),
        ([5] * 512, "has 512 tokens and the model's context is 512"),
    ],
)
def test_prompts_that_cannot_be_served(loaded, prompt, message):
    with pytest.raises(RequestError, match=message):
        generate(*loaded, prompt)


@pytest.mark.parametrize("prompt", [None, 5, {"a": 1}])
def test_a_prompt_of_another_kind_is_refused(loaded, prompt):
    with pytest.raises(RequestError, match="give a text or a list of token ids"):
        generate(*loaded, prompt)


def test_ids_of_other_integer_types_are_taken(loaded):
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    assert generate(*loaded, np.array([5, 6, 7]), params).token_ids == generate(*loaded, [5, 6, 7], params).token_ids


@pytest.mark.parametrize("chunk", [0, -1, 1.5, True])
def test_chunks_of_no_tokens_are_refused(loaded, chunk):
    with pytest.raises(RequestError, match=r"chunk is .*; it must be a whole number of at least 1"):
        generate(*loaded, [5, 6, 7], chunk=chunk)


def test_chunks_without_a_cache_are_refused(loaded):
    """They could never end: nothing of the first chunk is left when the second comes."""
    with pytest.raises(RequestError, match="a cache that keeps nothing cannot take a prompt in chunks"):
        generate(*loaded, [5, 6, 7, 8], cache=NoCache(loaded[0].config), chunk=3)


def test_a_cache_that_fills_up_ends_the_answer(loaded):
    """Ten rows hold a prompt of six and four tokens of answer; the fifth is drawn and need not be kept."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    done = generate(*loaded, [5] * 6, params, cache=ContiguousCache(loaded[0].config, 10))
    assert (len(done.token_ids), done.finish_reason) == (5, "length")
    assert done.token_ids == generate(*loaded, [5] * 6, params).token_ids[:5]
    with pytest.raises(RequestError, match="the prompt has 11 tokens, the cache room for 10"):
        generate(*loaded, [5] * 11, params, cache=ContiguousCache(loaded[0].config, 10))


def test_a_cache_of_fewer_bits_is_close(loaded):
    model, _ = loaded
    exact = next_logits(model, [5, 6, 7, 8], ContiguousCache(model.config, 8))
    rounded = next_logits(model, [5, 6, 7, 8], ContiguousCache(model.config, 8, torch.bfloat16))
    assert 0 < (exact - rounded).norm() < 0.05 * exact.norm()


def test_token_ids_of_the_padding_are_refused_before_the_first_step(loaded):
    """The model has rows for 320 ids, the tokenizer fewer: a bias on one between can never be meant."""
    model, tokenizer = loaded
    assert tokenizer.vocab_size < 319 < model.config.vocab_size
    for params in (SamplingParams(logit_bias={319: 1.0}), SamplingParams(stop_token_ids=[319])):
        with pytest.raises(RequestError, match="319; it must be below the vocabulary size"):
            stream(model, tokenizer, "the", params)


def test_the_context_ends_a_sequence(loaded):
    model, tokenizer = loaded
    done = generate(model, tokenizer, [5] * 505, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(done.token_ids) == 7
    assert done.finish_reason == "length"


def test_min_tokens_that_cannot_be_reached_end_with_length(loaded):
    """vllm#51299"""
    model, tokenizer = loaded
    params = SamplingParams(temperature=0, min_tokens=100, max_tokens=100)
    done = generate(model, tokenizer, [5] * 500, params)
    assert done.finish_reason == "length"
    assert len(done.token_ids) == 12


def test_ids_and_times_agree(loaded):
    model, tokenizer = loaded
    done = generate(model, tokenizer, "the cat", SamplingParams(temperature=1, seed=4, max_tokens=12, ignore_eos=True))
    assert done.prompt_token_ids == encode_prompt(model, tokenizer, "the cat")
    assert len(done.token_times) == len(done.token_ids) == 12
    assert done.token_times == sorted(done.token_times)
    assert done.tpot_s == pytest.approx((done.token_times[-1] - done.ttft_s) / 11)
    assert tokenizer.decode(done.token_ids, skip_special=True) == done.text


def test_n_answers_are_distinct_and_reproducible(loaded):
    """vllm#11898"""
    params = SamplingParams(temperature=1.5, seed=9, n=4, max_tokens=10, ignore_eos=True)
    first = [done.token_ids for done in generate_n(*loaded, "the dog", params)]
    again = [done.token_ids for done in generate_n(*loaded, "the dog", params)]
    assert first == again
    assert len({tuple(ids) for ids in first}) == 4


def test_a_stop_string_is_never_shown_and_ends_the_text(loaded):
    """Whatever string the model writes, stopping at any piece of it shows exactly what came before."""
    model, tokenizer = loaded
    base = SamplingParams(temperature=1.5, seed=2, max_tokens=30, ignore_eos=True)
    whole = generate(model, tokenizer, "the", base)
    for start in range(2, len(whole.text) - 4, 5):
        stop = whole.text[start : start + 3]
        params = SamplingParams(temperature=1.5, seed=2, max_tokens=30, ignore_eos=True, stop=[stop])
        done = generate(model, tokenizer, "the", params)
        assert done.text == whole.text[: whole.text.index(stop)]
        assert done.stop_reason == stop
        assert whole.token_ids[: len(done.token_ids)] == done.token_ids


def test_errors_are_value_errors():
    assert issubclass(MinillmError, ValueError)
