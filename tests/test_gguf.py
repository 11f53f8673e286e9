"""Promise: a GGUF file is read as what it is, or refused in one line; no damage makes it anything else."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import checkpoint
from minillm.errors import CheckpointError, ConfigError, MinillmError
from minillm.gguf_file import READABLE, GGUFFile, _expand
from minillm.gguf_header import GGUFTensor, read_gguf
from minillm.kv_cache import NoCache
from minillm.packing import GroupedInt4
from tests import gguf_files, tiny


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.write_tokenizer(folder)
    return folder / "tokenizer.json"


def write(folder, tokenizer_json, family="llama", kind="F32", **changes):
    """(path, transformers model holding the same values)"""
    model = tiny.make(family, **changes)
    path = folder / f"{family}-{kind}.gguf"
    gguf_files.write(path, model, tokenizer_json, kind)
    return path, model


BLOCKS = {"hidden_size": 96, "intermediate_size": 96, "head_dim": 32}  # rows in whole blocks of 32


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "llama-mqa-tied", "qwen2", "qwen3", "qwen3-tied"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_logits_equal_transformers(tmp_path, tokenizer_json, family, kind):
    """Llama's q and k rows are put back and Qwen's are not; the head is tied where the file has none."""
    changes = {"attention_bias": False} if family == "qwen3-tied" else {}
    path, theirs = write(tmp_path, tokenizer_json, family, kind, **BLOCKS, **changes)
    model, _ = checkpoint.load(path, "float32")
    tokens = torch.randint(0, tiny.VOCAB, (60,), generator=torch.Generator().manual_seed(1))
    expected = theirs(tokens[None]).logits[0]
    logits = model.logits(model(tokens, torch.arange(60), NoCache(model.config)))
    assert (logits - expected).norm() < 1e-4 * expected.norm()


def test_the_default_file_is_read_as_the_gguf_package_reads_it(smollm2_path):
    """Metadata value for value, tensors bit for bit."""
    fields, tensors = read_gguf(smollm2_path)
    reader = gguf.GGUFReader(smollm2_path)
    theirs = {name: f.contents() for name, f in reader.fields.items() if not name.startswith("GGUF.")}
    assert fields == theirs
    assert set(tensors) == {t.name for t in reader.tensors}
    for tensor in reader.tensors[::7]:
        ours = tensors[tensor.name]
        assert ours.kind == tensor.tensor_type
        assert ours.shape == tuple(tensor.shape[::-1])
        assert np.array_equal(ours.data, tensor.data.view(np.uint8).reshape(-1))


@pytest.mark.parametrize("kind", READABLE)
def test_every_format_expands_as_the_package_expands_it(kind):
    quant = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[quant]
    shape = (6, 2 * max(block, 32))
    raw = np.random.default_rng(0).integers(0, 60, shape[0] * shape[1] // block * size, dtype=np.uint8)
    plain = {"F32": np.float32, "F16": np.float16}.get(kind)
    rows = raw.reshape(shape[0], -1)
    expected = dequantize(rows.view(plain) if plain else rows, quant)
    ours = _expand(GGUFTensor(shape, quant, raw))
    assert ours.shape == shape
    assert ours.dtype == torch.float32
    assert np.array_equal(ours.numpy(), expected.reshape(shape).astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_codes_kept_are_the_weights_expanded(tmp_path, tokenizer_json, kind):
    path, _ = write(tmp_path, tokenizer_json, "llama", kind, **BLOCKS)
    plain, kept = GGUFFile(path), GGUFFile(path, keep_int4=True)
    kinds = set()
    for name in plain:
        weight = kept[name]
        kinds.add(type(weight))
        value = weight.dequantize() if isinstance(weight, GroupedInt4) else weight
        assert torch.equal(value, plain[name]), name
    assert kinds == {torch.Tensor, GroupedInt4}


@pytest.fixture(scope="module")
def small_file(tmp_path_factory, tokenizer_json):
    return write(tmp_path_factory.mktemp("small"), tokenizer_json)[0]


@pytest.fixture(scope="module")
def small(small_file):
    return small_file.read_bytes()


def load_bytes(folder, data: bytes):
    path = folder / "damaged.gguf"
    path.write_bytes(data)
    return checkpoint.load(path, "float32")


@pytest.mark.parametrize("kept", [0, 3, 4, 23, 24, 100, 1000, 0.2, 0.5, 0.9, -1])
def test_a_truncated_file_is_refused(tmp_path, small, kept):
    data = small[: int(len(small) * kept) if isinstance(kept, float) else kept]
    with pytest.raises(CheckpointError, match=r"damaged.gguf: not a whole GGUF file \(.*\); download it again"):
        load_bytes(tmp_path, data)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_damage_to_the_header_is_more_than_one_clear_error(small_file, tmp_path_factory, data):
    """Overwrite some bytes of the header: it still loads, or one MinillmError of one line says why not."""
    damaged = bytearray(small_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 12_000))
        piece = data.draw(st.binary(min_size=1, max_size=8))
        damaged[at : at + len(piece)] = piece
    message = ""
    try:
        load_bytes(tmp_path_factory.getbasetemp(), bytes(damaged))
    except MinillmError as error:
        message = str(error)
    assert "\n" not in message


def rewritten(small: bytes, old: bytes, new: bytes) -> bytes:
    assert old in small
    assert len(old) == len(new)
    return small.replace(old, new)


def test_unsupported_architecture_names_it(tmp_path, small):
    data = rewritten(small, b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05\x00\x00\x00\x00\x00\x00\x00mamba")
    with pytest.raises(ConfigError, match="architecture 'mamba' is not supported; from GGUF minillm runs llama, qwen2"):
        load_bytes(tmp_path, data)


def test_unsupported_tensor_type_names_it(tmp_path, small):
    name = b"output_norm.weight"
    at = small.index(name) + len(name) + 4 + 8
    data = small[:at] + (30).to_bytes(4, "little") + small[at + 4 :]  # BF16: half the bytes
    load_bytes(tmp_path, data)  # readable, only other numbers
    data = small[:at] + gguf.GGMLQuantizationType.F64.to_bytes(4, "little") + small[at + 4 :]
    with pytest.raises(CheckpointError, match="tensor type F64 is not supported; minillm reads F32, F16"):
        load_bytes(tmp_path, data)


def test_a_tensor_beyond_the_end_names_it(tmp_path, small):
    name = b"output_norm.weight"
    at = small.index(name) + len(name) + 4 + 8 + 4
    with pytest.raises(CheckpointError, match=r"tensor 'output_norm\.weight' ends at byte"):
        load_bytes(tmp_path, small[:at] + (1 << 40).to_bytes(8, "little") + small[at + 8 :])


def test_impossible_sizes_name_the_field(tmp_path, tokenizer_json, monkeypatch):
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_head_count", lambda self, n: self.add_uint32("llama.attention.head_count", 5)
    )
    path, _ = write(tmp_path, tokenizer_json)
    with pytest.raises(ConfigError, match="num_attention_heads 5 is not a multiple of num_key_value_heads 2"):
        checkpoint.load(path)


def test_llama_31_divisors_stretch_the_slow_pairs(tmp_path, tokenizer_json):
    """GGUF carries Llama 3.1's scaling as one divisor a pair; transformers has it as a formula."""
    model = tiny.make("llama-3.1-rope")
    theirs = model.model.rotary_emb.inv_freq
    plain = 1 / 5e5 ** (torch.arange(0, 16, 2) / 16)
    path = tmp_path / "llama31.gguf"
    original = gguf.GGUFWriter.write_header_to_file

    def with_divisors(self):
        self.add_tensor("rope_freqs.weight", (plain / theirs).numpy())
        original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_divisors)
        gguf_files.write(path, model, tokenizer_json)
    ours, _ = checkpoint.load(path, "float32")
    assert torch.allclose(ours.rotary.frequencies, theirs, rtol=1e-5)


def test_a_vector_in_4_bit_codes_is_expanded(tmp_path, tokenizer_json):
    """Only matrices stay in their codes: a norm stored as Q4_1 is odd, and still a norm."""
    path, _ = write(tmp_path, tokenizer_json, "llama", "Q4_1", **BLOCKS)
    tensors = GGUFFile(path, keep_int4=True)
    flat = GGUFTensor((96,), gguf.GGMLQuantizationType.Q4_1, np.zeros(60, np.uint8))
    tensors._tensors["model.norm.weight"] = flat
    assert torch.equal(tensors["model.norm.weight"], torch.zeros(96))


@pytest.mark.parametrize(
    ("divisors", "message"),
    [
        (np.ones(5, np.float32), r"rope_freqs\.weight has 5 entries for 8 rotary pairs"),
        (np.zeros(8, np.float32), "holds numbers that no angle can be divided by"),
        (np.full(8, np.nan, np.float32), "holds numbers that no angle can be divided by"),
    ],
)
def test_divisors_that_cannot_be(tmp_path, tokenizer_json, monkeypatch, divisors, message):
    original = gguf.GGUFWriter.write_header_to_file

    def with_divisors(self):
        self.add_tensor("rope_freqs.weight", divisors)
        original(self)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_divisors)
    path, _ = write(tmp_path, tokenizer_json)
    with pytest.raises(ConfigError, match=message):
        checkpoint.load(path, "float32")


def test_an_empty_tensor_is_refused(tmp_path, small):
    name = b"output_norm.weight"
    at = small.index(name) + len(name) + 4
    with pytest.raises(CheckpointError, match=r"tensor 'output_norm\.weight' is empty"):
        load_bytes(tmp_path, small[:at] + bytes(8) + small[at + 8 :])
