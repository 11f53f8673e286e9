"""Promise: compiled code computes what the model computes, is made once, and never while requests are served."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch._inductor import cpp_builder, exc

from minillm.checkpoint import load_model
from minillm.compilation import Activate, Ends, Report, compiled
from minillm.errors import CompilationError
from minillm.kv_cache import ContiguousCache
from minillm.llm import LLM
from minillm.piece_store import MANY, ONE, PieceStore
from minillm.quantization import quantize_
from minillm.sampling_params import SamplingParams
from minillm.tokenizer import Tokenizer
from tests import tiny

HAVE_COMPILER = shutil.which("g++") is not None or shutil.which("clang++") is not None
needs_compiler = pytest.mark.skipif(not HAVE_COMPILER, reason="compiling needs g++ or clang++")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Compiled once for all tests here: a piece takes seconds."""
    path = tmp_path_factory.mktemp("compiled")
    path.chmod(0o700)
    return path


def model_of(name: str, tmp_path, scheme: str | None = None):
    tiny.make(name).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    if scheme:
        quantize_(model, scheme, shrink_groups=True)
    return model


def steps(model, prompt: int = 9, count: int = 5) -> torch.Tensor:
    """Logits of a prefill and of the steps after it."""
    cache = ContiguousCache(model.config, 64)
    ids = torch.arange(3, 3 + prompt + count)
    rows = []
    with torch.inference_mode():
        for start, end in [(0, prompt), *((prompt + i, prompt + i + 1) for i in range(count))]:
            hidden = model(ids[start:end], torch.arange(start, end), cache)
            rows.append(model.logits(hidden[-1:]))
    return torch.cat(rows)


@pytest.fixture(scope="module")
def models(tmp_path_factory, folder):
    """(model, compiled): int8 matrices, biases, norms of heads. One row only: a piece takes seconds of g++."""
    model = model_of("qwen3-tied", tmp_path_factory.mktemp("model"), "int8")
    return model, compiled(model, PieceStore(folder), (ONE,))


@needs_compiler
def test_compiled_is_the_model(models, folder):
    """Prefill and steps of one row; found again on disk; nothing is compiled in a step, counted by the compiler."""
    model, fast = models
    before = counted()
    expected, found = steps(model), steps(fast)
    assert counted() == before
    assert (found - expected).norm() <= 1e-3 * expected.norm()  # a 16-bit code may round the other way
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    again = compiled(model, PieceStore(folder), (ONE,))
    assert (again.report.made, again.report.found) == (0, fast.report.pieces)
    assert torch.equal(steps(again), found)


@needs_compiler
def test_code_for_any_number_of_rows(models, folder):
    """One piece, several batch sizes: what the operators give, and a row has the same bits in a smaller batch."""
    model, _ = models
    mlp = model.blocks[0].mlp
    piece = Activate(Ends(mlp.gate_up_proj, MANY), Ends(mlp.down_proj, MANY))
    store = PieceStore(folder)
    run = store.get("activate", MANY, piece.about(), [Activate], lambda: (piece, piece.example()))
    generator = torch.Generator().manual_seed(1)
    columns = piece.of.about[-2]
    y, scale = torch.randn(2 * 33, columns, generator=generator), torch.rand(33, 1, generator=generator)
    codes, whole_scale = run([y, scale])
    for rows in (2, 7, 33):
        part = [y.view(2, 33, -1)[:, :rows].reshape(2 * rows, -1), scale[:rows].clone()]
        found, found_scale = run(part)
        expected, expected_scale = piece(part)
        assert torch.allclose(found_scale, expected_scale, rtol=1e-6)
        high, low = (found - expected.int()).view(2, rows, -1)
        assert (high * 256 + low).abs().max() <= 1  # the last bit of sixteen
        assert torch.equal(found.view(2, rows, -1), codes.view(2, 33, -1)[:, :rows])
        assert torch.equal(found_scale, whole_scale[:rows])


@needs_compiler
def test_an_engine_serves_it(models, tmp_path):
    """Batched on paged blocks, the answers are those of the model that was not compiled."""
    tiny.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [11, 12]]
    plain, fast = (
        [output.outputs[0].token_ids for output in LLM(model, tokenizer, num_blocks=32).generate(prompts, params)]
        for model in models
    )
    assert fast == plain


def counted() -> dict:
    from torch._dynamo.utils import counters

    return {name: dict(values) for name, values in counters.items()}


@needs_compiler
def test_packages_on_disk(models, folder):
    """The generated code says what was fused. A package cut short is made again, with a warning; a folder that others
    can write is refused."""
    model, fast = models
    code = fast.report.sources()
    assert set(code) == {"turnnormed-one", "ready-one", "after-one", "activate-one"}
    assert "exp()" in code["activate-one"]
    assert code["activate-one"].count('extern "C"') == 1
    path = fast.report.store.paths["ready-one"]
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.warns(UserWarning, match="compiling it again"):
        again = compiled(model, PieceStore(folder), (ONE,))
    assert again.report.made == 1
    assert torch.equal(steps(again), steps(fast))
    folder.chmod(0o777)
    with pytest.raises(CompilationError, match="written by others"):
        compiled(model, PieceStore(folder))
    folder.chmod(0o700)


def test_refusals(tmp_path, monkeypatch):
    """One line for what cannot be compiled, before anything is."""
    for name in ("mla", "llama"):
        (tmp_path / name).mkdir()
    with pytest.raises(CompilationError, match="not compiled yet"):
        compiled(model_of("deepseek", tmp_path / "mla"))
    model = model_of("llama", tmp_path / "llama")

    def missing():
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(CompilationError, match="no C\\+\\+ compiler"):
        compiled(model, PieceStore(tmp_path / "empty"))
    assert not list((tmp_path / "empty").iterdir())


def test_break_even():
    report = Report(made=10, found=0, seconds=30.0, store=None)
    assert report.break_even(0.8, 0.5) == pytest.approx(100)
    assert report.break_even(0.5, 0.5) == report.break_even(0.4, 0.5) == float("inf")
