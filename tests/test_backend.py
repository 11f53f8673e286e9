"""Promise: a backend changes who computes, never what. Every lossless gate holds with Triton as it holds with torch.

On a machine without a GPU the kernels run through Triton's interpreter (conftest.py asks for it), on tiny models.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import launch
from kernels.launch import KernelError
from minillm import backend, checkpoint
from minillm.batching import SchedulerConfig
from minillm.cli import main
from minillm.config import ModelConfig
from minillm.delta_state import DeltaStates
from minillm.engine import Engine
from minillm.errors import EngineError
from minillm.generate import generate, next_logits
from minillm.kv_cache import ContiguousCache, NoCache
from minillm.layers import Rotary
from minillm.llm import LLM
from minillm.paging import PagedCache, PagedStep, SequenceStep, StepMetadata
from minillm.sampling import SamplingParams
from tests import tiny
from tests.kernels import harness
from tests.serving import answers, expected, run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(not launch.HAVE_TRITON, reason="triton is not installed (it has wheels for Linux)")
PROMPTS = [list(range(10, 19)), list(range(10, 18)), [40, 41, 42]]
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(autouse=True)
def quick():
    with harness.quick_interpreter():
        yield


# --- the switch ---


def test_auto_is_torch_off_the_gpu_and_triton_stays_unimported():
    code = (
        "import sys; from minillm import backend; assert backend.choose('auto', 'cpu') == 'torch'; "
        "assert backend.choose('torch', 'cpu') == 'torch'; assert not {'triton', 'kernels'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(("installed", "chosen"), [(True, "triton"), (False, "torch")])
def test_auto_on_cuda_is_triton_where_it_is_installed(monkeypatch, installed, chosen):
    monkeypatch.setattr(launch, "HAVE_TRITON", installed)
    assert backend.choose("auto", "cuda:1") == chosen
    assert backend.choose("torch", "cuda") == "torch"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_triton_where_it_is_not_installed_is_one_clear_error(monkeypatch, device):
    monkeypatch.setattr(launch, "HAVE_TRITON", False)
    with pytest.raises(KernelError, match="triton is not installed"):
        backend.choose("triton", device)


def test_the_kernels_folder_may_be_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)
    assert backend.choose("auto", "cuda") == "torch"
    with pytest.raises(EngineError, match=r"needs the folder kernels/"):
        backend.choose("triton", "cuda")


def test_an_unknown_backend_is_refused(tmp_path):
    with pytest.raises(EngineError, match=r"backend 'cuda' is not known; choose one of auto, triton, torch"):
        checkpoint.load(tmp_path / "nothing here", backend="cuda")


@needs_triton
def test_triton_on_the_cpu_is_refused_before_anything_is_loaded(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    missing = str(tmp_path / "no model")
    with pytest.raises(KernelError, match=r"tensors on cpu; use CUDA tensors.*TRITON_INTERPRET=1"):
        LLM(missing, backend="triton")
    for command in (["generate", "x"], ["serve"], ["bench"], ["demo"]):
        assert main([*command, "--model", missing, "--device", "cpu", "--backend", "triton"]) == 2
        error = capsys.readouterr().err.strip()
        assert error.count("\n") == 0
        assert "TRITON_INTERPRET=1" in error


# --- the model ---


FAMILIES = ["qwen3", "mistral-window", "qwen2-window", "deepseek", "mistral-sinks", "qwen3-next-bias", "mixtral"]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """(the torch model, tokenizer): no window, all layers with one, some; a latent; a window and the first tokens; a
    state in every second layer; experts."""
    return _tiny(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return _tiny("qwen3", tmp_path_factory)


def _tiny(family, tmp_path_factory):
    """Two layers, because the interpreter takes a millisecond for what a GPU does in a microsecond."""
    folder = tmp_path_factory.getbasetemp() / f"backend-{family}"
    if not folder.exists():
        folder.mkdir()
        tiny.save(family, folder, num_hidden_layers=2)
    return checkpoint.load(folder, "float32", DEVICE, "torch")


@needs_triton
def test_a_model_on_another_backend_shares_every_weight_and_leaves_the_first_alone(qwen3):
    model, _ = qwen3
    other = backend.with_backend(model, "triton")
    assert (model.backend, other.backend) == ("torch", "triton")
    assert [p.data_ptr() for p in other.parameters()] == [p.data_ptr() for p in model.parameters()]
    assert other.decode_bytes() == model.decode_bytes()
    assert type(model.blocks[0].attention.q_norm).__module__ == "minillm.layers"
    assert backend.with_backend(other, "triton") is other
    assert backend.with_backend(other, None) is other
    back = backend.with_backend(other, "torch")
    assert [type(m) for m in back.modules()] == [type(m) for m in model.modules()]


def test_what_follows_from_the_config_stays_float32_on_a_device():
    """In bfloat16 the angles of position 4000 would be wrong by whole turns."""
    config = ModelConfig("llama", 64, 32, 32, 1, 2, 1, 16, 8192, layer_types=("full_attention",))
    weights = {
        "model.embed_tokens.weight": torch.zeros(64, 32), "lm_head.weight": torch.zeros(64, 32),
        "model.norm.weight": torch.ones(32),
        **{f"model.layers.0.{n}_layernorm.weight": torch.ones(32) for n in ("input", "post_attention")},
        **{f"model.layers.0.self_attn.{n}_proj.weight": torch.zeros(r, c) for n, r, c in (
            ("q", 32, 32), ("k", 16, 32), ("v", 16, 32), ("o", 32, 32))},
        **{f"model.layers.0.mlp.{n}_proj.weight": torch.zeros(32, 32) for n in ("gate", "up", "down")},
    }  # fmt: skip
    model = checkpoint.from_tensors(config, weights).place("cpu", torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.blocks[0].attn_norm.gain.dtype == torch.float32
    positions = torch.tensor([4000])
    torch.testing.assert_close(model.rotary(positions), Rotary(config)(positions), rtol=0, atol=0)


@needs_triton
def test_with_triton_none_of_torchs_operators_is_left(qwen3, monkeypatch):
    """Norms, rotary, SwiGLU, embedding and both kinds of attention step."""
    want = expected(qwen3, PROMPTS[0], GREEDY)

    def forbidden(*args, **kwargs):
        raise AssertionError("torch's own operator was called")

    engine = _engine(qwen3, "triton")
    for module, name in (
        (F, "silu"), (F, "scaled_dot_product_attention"), (F, "embedding"), (torch.linalg, "vector_norm"),
        (torch, "addcmul"), (torch.Tensor, "index_copy_"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, forbidden)
    engine.add_request("a", PROMPTS[0], GREEDY)
    assert answers(run(engine)["a"]) == want


@needs_triton
def test_decode_of_a_latent_runs_in_its_kernel(tmp_path_factory, monkeypatch):
    from minillm import triton_step

    pair, calls, kernel = _tiny("deepseek", tmp_path_factory), [], triton_step.mla_decode
    monkeypatch.setattr(
        triton_step, "mla_decode", lambda q, *args, **kw: calls.append(tuple(q.shape)) or kernel(q, *args, **kw)
    )
    engine = _engine(pair, "triton")
    for name, prompt in zip("ab", PROMPTS, strict=False):
        engine.add_request(name, prompt, GREEDY)
    run(engine)
    assert calls == [(2, 6, 32 + 16)] * 2 * (GREEDY.max_tokens - 1)  # two requests, two layers


def _engine(pair, name, **options) -> Engine:
    options = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32, **options}
    invariant = options.pop("batch_invariant", False)
    return Engine(*pair, SchedulerConfig(**options), invariant, backend=name)


# --- the gates ---


def _served(pair, name, prompts=PROMPTS, params=GREEDY, **options):
    """(answers, logits of each step that sampled) of all prompts at once."""
    engine, seen = _engine(pair, name, **options), []
    compute = engine.runner.run

    def recorded(output):
        logits = compute(output)
        seen.extend([] if logits is None else [logits.clone()])
        return logits

    engine.runner.run = recorded
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    done = run(engine)
    return [answers(done[str(i)]) for i in range(len(prompts))], seen, done


SCHEDULES = {
    "batched": {},
    "chunked and preempted": {"max_num_batched_tokens": 5, "num_blocks": 7},
    "swapped": {"num_blocks": 7, "preemption": "swap", "num_host_blocks": 16, "prefix_cache": "off"},
}


@needs_triton
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_schedule_gives_the_answers_and_logits_of_torch(pair, schedule):
    """Batched = alone, chunked = whole, preempted = never preempted, paged = contiguous: `expected` is generate.py's
    answer to each request alone, on torch and a contiguous cache."""
    options = SCHEDULES[schedule]
    texts, logits, done = _served(pair, "triton", **options)
    assert texts == [expected(pair, prompt, GREEDY) for prompt in PROMPTS]
    _, by_torch, _ = _served(pair, "torch", **options)
    assert len(logits) == len(by_torch)
    for ours, theirs in zip(logits, by_torch, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    preemptions = sum(output.metrics.num_preemptions for output in done.values())
    assert (preemptions > 0) == (schedule != "batched")


@needs_triton
def test_with_triton_states_go_on_through_the_kernel(tmp_path_factory, monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("torch's own delta rule was called")

    pair = _tiny("qwen3-next-bias", tmp_path_factory)
    want = expected(pair, PROMPTS[0], GREEDY)
    for name in ("apply", "apply_each"):
        monkeypatch.setattr(DeltaStates, name, forbidden)
    texts, *_ = _served(pair, "triton", PROMPTS[:1])
    assert texts == [want]


@needs_triton
def test_a_prefix_hit_answers_as_a_miss(pair):
    engine = _engine(pair, "triton")
    outputs = []
    for name in ("first", "second"):
        engine.add_request(name, PROMPTS[0], GREEDY)
        outputs.append(run(engine)[name])
    assert [o.num_cached_tokens for o in outputs] == [0, 0 if pair[0].config.linear_layers else 8]
    assert answers(outputs[0]) == answers(outputs[1]) == expected(pair, PROMPTS[0], GREEDY)


@needs_triton
def test_exact_mode_gives_the_same_bits_alone_and_in_company(tmp_path_factory):
    """It keeps its own step, one query at a time through torch; the layers around it are Triton's, and row by row."""
    pair = _tiny("mistral-no-window", tmp_path_factory)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=2)
    options = {"batch_invariant": True, "max_num_batched_tokens": 5}
    prompts = [PROMPTS[0][:5], PROMPTS[2][:2]]
    _, _, together = _served(pair, "triton", prompts, params, **options)
    _, _, alone = _served(pair, "triton", prompts[:1], params, **options)
    assert alone["0"].outputs[0].logprobs == together["0"].outputs[0].logprobs


@needs_triton
@pytest.mark.parametrize("window", [None, 9])
def test_a_contiguous_cache_attends_through_flash_attention(tmp_path, monkeypatch, window):
    """Heads of 64, which that kernel takes. Whole prompt = in chunks = no cache = torch."""
    family = "qwen3" if window is None else "mistral-window"
    extra = {} if window is None else {"sliding_window": window}
    tiny.save(family, tmp_path, head_dim=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, **extra)
    model, tokenizer = checkpoint.load(tmp_path, "float32", DEVICE, "triton")
    plain = backend.with_backend(model, "torch")
    ids = list(range(30, 67))
    want = next_logits(plain, ids, NoCache(plain.config))
    from minillm import triton_step

    queries, kernel = [], triton_step.flash_attention
    monkeypatch.setattr(
        triton_step, "flash_attention", lambda q, *args, **kw: queries.append(len(q)) or kernel(q, *args, **kw)
    )
    for chunk in (None, 21):
        cache = ContiguousCache(model.config, 64, model.dtype, model.device, backend.attention(model))
        torch.testing.assert_close(next_logits(model, ids, cache, chunk), want, rtol=1e-4, atol=1e-4)
    assert queries == [37, 21, 16]
    assert generate(model, tokenizer, ids, GREEDY).token_ids == generate(plain, tokenizer, ids, GREEDY).token_ids


# --- the step alone ---

H, HKV, D, SIZE = 6, 2, 16, 4


@needs_triton
@settings(max_examples=8, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(0, 20), st.sampled_from([1, 1, 1, 2, 9])), min_size=1, max_size=5),
    window=st.sampled_from([None, 1, 6]),
    padding=st.sampled_from([0, 0, 3]),
    stored=st.sampled_from([torch.float32, torch.float16]),
)
def test_a_step_attends_and_writes_as_torchs_does(parts, window, padding, stored):
    from minillm.triton_step import TritonStep

    config = ModelConfig(
        "llama", 64, 32, 32, 2, H, HKV, D, 512, sliding_window=window,
        layer_types=("full_attention", "sliding_attention" if window else "full_attention"),
    )  # fmt: skip
    sequences, first, block = [], 0, 1
    for start, count in parts:
        used = -(-(start + count) // SIZE)
        sequences.append(SequenceStep(first, count, start, list(range(block, block + used))[::-1]))
        first, block = first + count, block + used
    rows = first + padding
    q, k, v = (torch.randn(rows, heads, D, device=DEVICE) for heads in (H, HKV, HKV))
    outs, caches = [], []
    for kind in (PagedStep, TritonStep):
        cache = PagedCache(config, block, SIZE, stored, DEVICE, kind)
        cache.storage[:, :, 1:] = torch.randn(cache.storage[:, :, 1:].shape, generator=torch.Generator().manual_seed(0))
        step = cache.step(StepMetadata(sequences, SIZE, rows, DEVICE))
        outs.append(torch.stack([step.attend(layer, q, k, v) for layer in (0, 1)]))
        caches.append(cache.storage)
    assert torch.equal(*caches)
    tolerance = 1e-5 if stored == torch.float32 else 5e-3
    torch.testing.assert_close(outs[1], outs[0], rtol=tolerance, atol=tolerance)
