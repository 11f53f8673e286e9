"""Promise: the model computes what transformers computes, for every family, however the tokens arrive."""

from __future__ import annotations

import functools

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from minillm import checkpoint
from minillm.attention import naive_attention
from minillm.generate import generate, next_logits
from minillm.kv_cache import ContiguousCache, NoCache
from minillm.sampling import SamplingParams
from tests import tiny


def relative(a, b) -> float:
    return ((a - b).double().norm() / b.double().norm()).item()


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def pair(request, tmp_path_factory):
    """(transformers model, minillm model) of one family, from one folder of several shards."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = tiny.save(request.param, folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return theirs, checkpoint.load_model(folder)


@torch.inference_mode()
def test_logits_equal_transformers(pair):
    theirs, ours = pair
    tokens = torch.randint(0, tiny.VOCAB, (200,), generator=torch.Generator().manual_seed(1))
    expected = theirs(tokens[None]).logits[0]
    logits = ours.logits(ours(tokens, torch.arange(200), NoCache(ours.config)))
    assert relative(logits, expected) < 1e-4
    assert (logits - expected).abs().max() < 1e-3 * expected.abs().max()


def test_parameters_are_counted_once(pair):
    theirs, ours = pair
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


@torch.inference_mode()
def test_cached_decode_equals_transformers(pair):
    """Prefill of 20, then one token at a time: rotary positions, windows and the cache all move."""
    theirs, ours = pair
    tokens = torch.randint(0, tiny.VOCAB, (40,), generator=torch.Generator().manual_seed(2))
    expected = theirs(tokens[None]).logits[0]
    cache = ContiguousCache(ours.config, 40)
    rows = [ours.logits(ours(tokens[:20], torch.arange(20), cache))]
    rows += [ours.logits(ours(tokens[i : i + 1], torch.tensor([i]), cache)) for i in range(20, 40)]
    assert relative(torch.cat(rows), expected) < 1e-4


@torch.inference_mode()
def test_the_naive_formula_gives_the_same_model(pair):
    _, ours = pair
    tokens, positions = torch.randint(0, tiny.VOCAB, (50,)), torch.arange(50)
    fused = ours(tokens, positions, NoCache(ours.config))
    naive = ours(tokens, positions, NoCache(ours.config, naive_attention))
    assert relative(naive, fused) < 1e-5


@torch.inference_mode()
@settings(max_examples=8, deadline=None)
@given(cuts=st.lists(st.integers(1, 30), min_size=1, max_size=8), seed=st.integers(0, 1000))
def test_any_chunking_gives_the_same_logits(pair, cuts, seed):
    """Chunked = whole."""
    _, ours = pair
    total = sum(cuts)
    ids = torch.randint(0, tiny.VOCAB, (total,), generator=torch.Generator().manual_seed(seed))
    whole = ours.logits(ours(ids, torch.arange(total), NoCache(ours.config)))
    cache, rows, start = ContiguousCache(ours.config, total), [], 0
    for cut in cuts:
        rows.append(ours.logits(ours(ids[start : start + cut], torch.arange(start, start + cut), cache)))
        start += cut
    assert cache.length == total
    assert relative(torch.cat(rows), whole) < 1e-5


def test_text_with_and_without_a_cache(tmp_path):
    """The gate of chapter 3: a cache changes the cost and nothing else, token for token."""
    tiny.save("qwen3", tmp_path)
    model, tokenizer = checkpoint.load(tmp_path, "float32")
    params = SamplingParams(temperature=2.0, seed=3, max_tokens=40, ignore_eos=True)
    cached = generate(model, tokenizer, "the cat", params)
    recomputed = generate(model, tokenizer, "the cat", params, cache=NoCache(model.config))
    chunked = generate(model, tokenizer, "the cat", params, chunk=2)
    assert cached.token_ids == recomputed.token_ids == chunked.token_ids
    assert len(set(cached.token_ids)) > 5  # a model stuck on one token would prove nothing


@pytest.fixture(scope="module")
def smollm2_reference(smollm2_path):
    """transformers' own reading of the GGUF file: its block formats, its un-permuted rows."""
    with torch.device("meta"):
        shape = LlamaForCausalLM(LlamaConfig(num_hidden_layers=30, vocab_size=8))  # names of tensors
    with pytest.MonkeyPatch.context() as patched:  # or the same table of names is made for each of 397 modules
        patched.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        parsed = load_gguf_checkpoint(str(smollm2_path), return_tensors=True, model_to_load=shape)
    config = LlamaConfig(**{k: v for k, v in parsed["config"].items() if k != "model_type"})
    model = LlamaForCausalLM(config).float().eval()
    left = model.load_state_dict(parsed["tensors"], strict=False)
    assert left.missing_keys == ["lm_head.weight"]
    assert not left.unexpected_keys
    model.tie_weights()
    return model


PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a small village,",
    "The three laws of thermodynamics are",
    "1, 1, 2, 3, 5, 8,",
    "Dear Professor,",
    "SELECT name FROM users WHERE",
    "La tour Eiffel est",
    "The difference between a list and a tuple in Python is",
    "import torch\n",
    "Water boils at",
    "Q: Why is the sky blue?\nA:",
    "In 1969,",
    "Ingredients: 2 eggs,",
    "<html>\n<body>",
    "The mitochondria is",
    "To be, or not to be",
    "日本の首都は",
    "E = mc",
    "The quick brown fox",
]


@torch.inference_mode()
def test_smollm2_logits_equal_transformers(smollm2, smollm2_reference):
    model, tokenizer = smollm2
    ids = torch.tensor(tokenizer.encode(" ".join(PROMPTS)))
    expected = smollm2_reference(ids[None]).logits[0]
    logits = model.logits(model(ids, torch.arange(len(ids)), NoCache(model.config)))
    assert relative(logits, expected) < 1e-4


@pytest.fixture(scope="module")
def greedy(smollm2):
    """Prompt -> our 64 likeliest tokens, one at a time through our cache."""
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    return functools.cache(lambda prompt: generate(*smollm2, prompt, params))


@torch.inference_mode()
@pytest.mark.parametrize("prompt", PROMPTS)
def test_smollm2_greedy_equals_transformers(greedy, smollm2_reference, prompt):
    """Against transformers given the whole text at once.

    Token for token: each of ours must be transformers' argmax after the same prefix, which is what its own greedy
    loop would have drawn.
    """
    done = greedy(prompt)
    ids = done.prompt_token_ids + done.token_ids
    logits = smollm2_reference(torch.tensor([ids])).logits[0]
    assert logits[len(done.prompt_token_ids) - 1 : -1].argmax(-1).tolist() == done.token_ids


def test_smollm2_text_equals_transformers_generate(smollm2, greedy, smollm2_reference):
    """The same through transformers' own generate(), once."""
    _, tokenizer = smollm2
    done = greedy(PROMPTS[0])
    theirs = smollm2_reference.generate(
        torch.tensor([done.prompt_token_ids]), max_new_tokens=64, min_new_tokens=64, do_sample=False
    )
    # min_new_tokens forbids the end token there, so compare up to the first one here
    end = next((i for i, t in enumerate(done.token_ids) if t in tokenizer.eos_ids), 64)
    assert theirs[0, len(done.prompt_token_ids) :][:end].tolist() == done.token_ids[:end]


def test_next_logits_computes_only_what_is_missing(tmp_path):
    tiny.save("llama", tmp_path)
    model = checkpoint.load_model(tmp_path)
    cache = ContiguousCache(model.config, 16)
    next_logits(model, [5, 6, 7], cache)
    seen = []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].tolist()))
    next_logits(model, [5, 6, 7, 8], cache)
    assert seen == [[8]]
