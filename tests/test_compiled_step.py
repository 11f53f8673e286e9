"""Promise: a compiled step computes what the model computes, for any sequences within its buckets, and after warm-up
never compiles again: counted where the compiler is called."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch._inductor import cpp_builder, exc

from minillm import checkpoint, compiled_step
from minillm.checkpoint import load_model
from minillm.compiled_step import bucket_of, compile_step, greedy, visible
from minillm.errors import CompilationError, RequestError
from minillm.generate import next_logits
from minillm.kv_cache import ContiguousCache
from minillm.quantization import quantize_
from tests import tiny

HAVE_COMPILER = shutil.which("g++") is not None or shutil.which("clang++") is not None
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 11, 12], [11], [40, 41, 42, 43, 44]]


def model_of(name: str, folder):
    tiny.make(name).save_pretrained(folder)
    return load_model(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_of("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def step(model):
    return compile_step(model, buckets=(4, 1, 2), max_tokens=48, backend="eager")


def expected(model, ids: list[int], count: int) -> list[int]:
    """Alone, eagerly, on a contiguous cache."""
    cache, ids = ContiguousCache(model.config, len(ids) + count), list(ids)
    for _ in range(count):
        ids.append(int(next_logits(model, ids, cache).argmax()))
    return ids[-count:]


def test_one_compile_a_bucket_and_none_after(model, step):
    """All batch sizes, lengths from 1 to the cache's last row, sequences that come and go: the model's own tokens."""
    assert step.compiles == len(step.buckets) == len(step.seconds)
    for n in (1, 2, 3, 4):
        assert greedy(step, PROMPTS[:n], 9) == [expected(model, ids, 9) for ids in PROMPTS[:n]]
    (answer,) = greedy(step, [[7]], 48)  # the last token drawn never enters the cache
    assert answer == expected(model, [7], 48)
    assert step.compiles == len(step.buckets)
    assert len(step) == 0


@pytest.mark.parametrize("name", ["qwen2", "qwen3-tied", "mistral-window", "qwen2-sinks", "llama-mha-bias"])
def test_families(name, tmp_path):
    """Biases, norms of heads, windows, sinks: logits of every step, and a layer's graph used for all that are alike."""
    model = model_of(name, tmp_path)
    step = compile_step(model, buckets=(2,), max_tokens=32, backend="aot_eager")
    caches = [ContiguousCache(model.config, 32) for _ in range(2)]
    rows = [[3, 4, 5, 6, 7, 8, 9, 10], [20, 21]]
    for ids, cache in zip(rows, caches, strict=True):
        torch.testing.assert_close(step.add(ids), next_logits(model, ids, cache))
    for token in range(30, 42):
        for ids in rows:
            ids.append(token)
        found = step([token, token])
        alone = torch.stack([next_logits(model, ids, cache) for ids, cache in zip(rows, caches, strict=True)])
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)
    assert step.compiles == 1


def test_a_layer_is_traced_once(tmp_path, monkeypatch):
    """Ten layers, one traced and used ten times. If attention read its layer's number, each
    would be traced anew, and torch stops at eight."""
    tiny.make("llama", num_hidden_layers=10).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    compile_step(model, buckets=(1,), max_tokens=8, backend="eager")
    attend = compiled_step.OneLayer.attend

    def reading_its_number(self, layer, q, k, v):
        return attend(self, layer, q, k, v) if layer >= 0 else q

    monkeypatch.setattr(compiled_step.OneLayer, "attend", reading_its_number)
    with pytest.raises(Exception, match="maximum reuse entries"):
        compile_step(model, buckets=(1,), max_tokens=8, backend="eager")


@pytest.mark.skipif(not HAVE_COMPILER, reason="compiling needs g++ or clang++")
def test_inductor(model):
    """Generated code: the same tokens, one row and padded, nothing compiled after."""
    step = compile_step(model, buckets=(1, 4), max_tokens=32)
    for prompts in (PROMPTS[:1], PROMPTS[:3], PROMPTS):
        assert greedy(step, prompts, 12) == [expected(model, ids, 12) for ids in prompts]
    assert step.compiles == 2
    assert all(seconds > 0 for seconds in step.seconds.values())


def test_rows_without_a_gap(model, step):
    """A sequence that ends in the middle: the last one takes its row and goes on as if nothing had happened."""
    answers = {i: [int(step.add(ids).argmax())] for i, ids in enumerate(PROMPTS[:3])}
    order = [0, 1, 2]
    for turn in range(6):
        if turn == 2:
            step.remove(0)
            order = [2, 1]
        if turn == 4:
            answers[3] = [int(step.add(PROMPTS[3]).argmax())]
            order.append(3)
        for i, token in zip(order, step([answers[i][-1] for i in order]).argmax(-1).tolist(), strict=True):
            answers[i].append(token)
    while len(step):
        step.remove(len(step) - 1)
    for i, answer in answers.items():
        assert answer == expected(model, PROMPTS[i], len(answer))


def test_what_would_compile_again_is_an_error(model):
    """torch's number of threads is a guard. The step says so and stops, and counts nothing; back again it goes on."""
    step = compile_step(model, buckets=(1,), max_tokens=16, backend="eager")
    step.add([5, 6])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        with pytest.raises(CompilationError, match=r"compile again.*num_threads"):
            step([7])
    finally:
        torch.set_num_threads(threads)
    assert step.compiles == 1
    assert step([7]).shape == (1, model.config.vocab_size)
    assert step.lengths == [3]


def test_a_position_as_a_number_is_caught(model, monkeypatch):
    """The mistake this file is about, planted: the position as a Python int is a guard, so the second step compiles."""
    step = compile_step(model, buckets=(1,), max_tokens=16, backend="eager")
    inner = compiled_step.step_function(model)

    def with_number(tokens, positions, cache, position):
        return inner(tokens, torch.full_like(tokens, position), cache)

    planted = torch.compile(with_number, backend=step._counting, fullgraph=True, dynamic=False)
    monkeypatch.setitem(step._run, 1, lambda tokens, positions, cache: planted(tokens, positions, cache, 2))
    with torch.inference_mode():
        zero = torch.zeros(1, dtype=torch.long)
        planted(zero, zero.clone(), step._caches[1], 2)
    step.add([5, 6])
    step([7])  # at position 2, which it was compiled for
    monkeypatch.setitem(step._run, 1, lambda tokens, positions, cache: planted(tokens, positions, cache, 3))
    with pytest.raises(CompilationError, match=r"compile again.*position == 2"):
        step([8])


def test_visible():
    assert visible(torch.tensor([0, 2]), 4, None, 0).int().tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]]
    assert visible(torch.tensor([3]), 5, 2, 1).int().tolist() == [[1, 0, 1, 1, 0]]


def test_bad_input(model, step, tmp_path):
    assert [bucket_of(n, (1, 2, 4)) for n in (1, 2, 3, 4)] == [1, 2, 4, 4]
    with pytest.raises(RequestError, match="5 sequences, and the largest bucket holds 4"):
        greedy(step, [[5]] * 5, 2)
    with pytest.raises(RequestError, match="a row holds 1 to 48"):
        greedy(step, [[5] * 49], 2)
    with pytest.raises(RequestError, match="0 tokens for 0 sequences"):
        step([])
    with pytest.raises(RequestError, match="room"):
        greedy(step, [[5] * 47], 9)
    assert len(step) == 0  # an error leaves nothing behind
    for _ in range(4):
        step.add([5])
    with pytest.raises(RequestError, match="all 4 rows are taken"):
        step.add([5])
    with pytest.raises(RequestError, match="no row 4"):
        step.remove(4)
    while len(step):
        step.remove(0)
    for buckets in ((), (0,), (True, 2), (1.5,)):
        with pytest.raises(RequestError, match="buckets are"):
            compile_step(model, buckets)
    with pytest.raises(RequestError, match="max_tokens"):
        compile_step(model, max_tokens=0)


def test_models_it_is_not_made_for(tmp_path):
    with pytest.raises(CompilationError, match="QuantizedLinear is not compiled whole"):
        compile_step(quantized(tmp_path / "int8"))
    for name in ("mixtral", "deepseek", "qwen3-next"):
        with pytest.raises(CompilationError, match="is not compiled whole"):
            compile_step(model_of(name, tmp_path / name))


def quantized(folder):
    model = model_of("llama", folder)
    quantize_(model, "int8")
    return model


def test_no_compiler(model, monkeypatch):
    """Before anything is traced, and in one line."""

    def missing():
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(CompilationError, match="no C\\+\\+ compiler"):
        compile_step(model)


def test_the_default_model():
    """SmolLM2's own words, two prompts side by side."""
    model, tokenizer = checkpoint.load(dtype="float32")
    step = compile_step(model, buckets=(2,), max_tokens=32, backend="eager")
    prompts = [tokenizer.encode(text) for text in ("The capital of France is", "1, 2, 3,")]
    assert greedy(step, prompts, 4) == [expected(model, ids, 4) for ids in prompts]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_graph(tmp_path):
    """Each bucket's step recorded and replayed: the same tokens, and logits that the next replay leaves alone."""
    tiny.make("llama").save_pretrained(tmp_path)
    model = load_model(tmp_path, "float32", "cuda", backend="torch")
    step = compile_step(model, buckets=(1, 4), max_tokens=48)
    alone = load_model(tmp_path)
    for n in (1, 3, 4):
        assert greedy(step, PROMPTS[:n], 9) == [expected(alone, ids, 9) for ids in PROMPTS[:n]]
    assert step.compiles == 2
    step.add([5, 6, 7])
    first = step([8])
    kept = first.clone()
    step([9])
    assert torch.equal(first, kept)
