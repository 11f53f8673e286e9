"""The end-to-end rows of the GPU run, on a tiny model that the interpreter can carry."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kernels import gpu, gpu_model
from minillm.config import ModelConfig
from tests.kernels import harness

ROOF = {"copy_bytes_per_s": 1e9, "matmul_flops_per_s": 1e12}
TINY = ModelConfig(
    "qwen3", 64, 32, 48, 1, 2, 1, 16, 512, tie_word_embeddings=True, qk_norm=True, layer_types=("full_attention",)
)


@pytest.fixture
def small(monkeypatch):
    for name, value in {
        "CONTEXT": 5, "CHUNK": 8, "STEPS": 3, "BATCHES": (3,), "SHAPES": ("tiny",), "model_config": lambda name: TINY,
        "memory_bytes": lambda: 16 << 30, "_captured": lambda forward: float(forward().shape[0]),
    }.items():  # fmt: skip
        monkeypatch.setattr(gpu_model, name, value)
    monkeypatch.setattr(gpu, "DEVICE", harness.DEVICE)
    if harness.DEVICE == "cpu":  # the interpreter computes bfloat16 wrongly
        monkeypatch.setattr(torch, "bfloat16", torch.float32)
    return monkeypatch


def test_each_shape_is_prefilled_and_decoded_on_both_backends(small):
    done = {name: call() for name, call in gpu_model.rows(ROOF)}
    assert list(done) == [
        "tiny, prefill of 8, triton", "tiny, prefill of 8, torch",
        "tiny, decode, batch 3, triton", "tiny, decode, batch 3, torch",
    ]  # fmt: skip
    for row in done.values():
        assert "error" not in row
        assert row["fraction"] == pytest.approx(row["least_ms"] / row["ms"])
        assert row["least_ms"] == pytest.approx(1e3 * max(row["bytes"] / 1e9, row["flops"] / 1e12))
    decoded = done["tiny, decode, batch 3, triton"]
    assert decoded["tokens_per_s"] == pytest.approx(3 / decoded["ms"] * 1e3)
    assert decoded["graph_ms"] == 3.0  # the captured step has a row of logits for each sequence
    assert done["tiny, prefill of 8, torch"]["disagreement"] < 1e-4


def test_backends_that_disagree_are_an_error(small):
    subject = gpu_model.Subject(TINY)
    gpu_model.prefill(subject, "triton", ROOF)
    subject.logits["triton"] = subject.logits["triton"].flip(-1)
    assert "differ by" in gpu_model.prefill(subject, "torch", ROOF)["error"]


def test_a_model_too_large_for_the_gpu_is_skipped_unmade(small):
    small.setattr(gpu_model, "memory_bytes", lambda: 1 << 30)
    subject = gpu_model.Subject(TINY)
    assert gpu_model.decode(subject, "torch", 1, ROOF) == {"skipped": "needs about 2 GiB of GPU memory"}
    assert subject._model is None


def test_the_names_are_those_of_the_real_checkpoints():
    """Every shape builds; on the meta device a model of any size weighs nothing."""
    from minillm.analysis import model_config, parameter_count
    from minillm.transformer import from_tensors

    for name in gpu_model.SHAPES:
        config = model_config(name)
        shapes = gpu_model.shapes(config)
        model = from_tensors(config, {n: torch.empty(s, device="meta") for n, s in shapes.items()})
        assert sum(p.numel() for p in model.parameters()) == parameter_count(config).total


def test_it_needs_torch_and_triton_alone():
    """A CUDA machine's own Python has no gguf, safetensors, regex or numpy: everything but torch's own needs is
    refused here."""
    code = (
        "import sys, torch, triton, triton.testing\n"
        "before = set(sys.modules)\n"
        "import kernels.gpu, kernels.gpu_model\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "outside = new - set(sys.stdlib_module_names) - {'kernels', 'minillm', 'torch', 'triton'}\n"
        "assert not outside, outside\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
