"""Shared by all tests: the default model, tiny random models written by transformers, and a quiet machine."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing in the tests may need a network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

if not torch.cuda.is_available():
    # Kernels run through Triton's interpreter, which has to be asked for before anything imports triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from minillm import checkpoint
from minillm.gguf_file import GGUFFile

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(min(2, os.cpu_count() or 1))

# Files that take a minute or so, whatever the number of their tests: begun first, or one of two workers would still be
# at them when the other has nothing left.
LONG = (
    "test_compilation.py", "test_compiled_step.py", "test_soak.py", "test_real_model.py", "test_packing.py",
    "test_models.py", "test_aot.py", "test_backend.py", "test_engine.py", "test_speculative_eagle_composed.py",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture(scope="session")
def smollm2_path():
    return checkpoint.default_model_path(progress=False)


@pytest.fixture(scope="session")
def smollm2_gguf_fields(smollm2_path):
    return GGUFFile(smollm2_path).fields


@pytest.fixture(scope="session")
def smollm2(smollm2_path):
    """(model, tokenizer) in float32, the exact path."""
    return checkpoint.load(smollm2_path, "float32")
