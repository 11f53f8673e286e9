"""From a name or a path to a model that runs: GGUF and safetensors, checked before they are believed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .backend import choose, with_backend
from .config import ModelConfig
from .errors import CheckpointError, ConfigError, QuantizationError, short
from .fetch import DRAFT_FOLDER, default_model_path, locate
from .fp8_checkpoint import FP8Blocks
from .gguf_file import GGUFFile
from .packing import linear_maker
from .storage import cache_dir
from .tokenizer import Tokenizer
from .transformer import Transformer, from_tensors

__all__ = ["DTYPES", "cache_dir", "default_model_path", "load", "load_draft", "load_model", "locate"]

DTYPES = ("auto", "float32", "float16", "bfloat16")


def load(
    source: str | Path | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    backend: str = "auto",
    compile: bool = False,
    offload_experts: int | None = None,
) -> tuple[Transformer, Tokenizer]:
    """Model and tokenizer from a .gguf file, a model folder or a hub name; None is the default model.

    dtype "float32" computes exactly what the file says and is what the equality tests use. "float16" and "bfloat16"
    store matrices so; "auto" takes the fastest layouts measured on this machine (see packing.py). `backend` is
    "triton", "torch" or "auto" (see backend.py). `compile` runs its small operators as compiled code (compilation.py):
    seconds to minutes the first time, and from the cache folder after that. `offload_experts` keeps so many experts on
    the device and the others in host memory (moe_offload.py), in float32 on a CPU unless `dtype` says otherwise or the
    file holds quantized ones.
    Raises CheckpointError, ConfigError, FetchError or TokenizerError, each naming the file; EngineError or KernelError
    for a backend that cannot run here or a model without experts to offload, CompilationError for what cannot be
    compiled.
    """
    choose(backend, device)  # before anything is fetched
    if offload_experts is not None:
        model, tokenizer = _offloaded(source, dtype, device, offload_experts)
        return _compiled(with_backend(model, backend), compile), tokenizer
    path = locate(source)
    if path.is_file():
        file = GGUFFile(path, keep_int4=dtype == "auto" and device == "cpu")
        model, tokenizer = _build(file.config, file, dtype, device, path), Tokenizer.from_gguf(file.fields)
        return _compiled(with_backend(model, backend), compile), tokenizer
    return _compiled(load_model(path, dtype, device, backend), compile), _tokenizer(path)


def load_draft(dtype: str = "auto", device: str = "cpu", backend: str = "auto") -> Transformer:
    """The small draft of SmolLM2-135M-Instruct that comes with minillm; its tokenizer is the target's.

    `load("smollm2-draft")` gives both. Raises CheckpointError or ConfigError if its folder is not whole.
    """
    return load_model(DRAFT_FOLDER, dtype, device, backend)


def _tokenizer(folder: Path) -> Tokenizer:
    """A model folder's own, or that of the model that its config names: a draft shares its target's."""
    shared = ModelConfig.from_file(folder).raw.get("tokenizer_from")
    if shared is None or (folder / "tokenizer.json").exists():
        return Tokenizer.from_file(folder)
    if not isinstance(shared, str):
        raise CheckpointError(f"{folder}: tokenizer_from is {short(repr(shared))}; it must be a model's name")
    path = locate(shared)
    return Tokenizer.from_gguf(GGUFFile(path).fields) if path.is_file() else Tokenizer.from_file(path)


def _offloaded(source: str | Path | None, dtype: str, device: str, resident: int) -> tuple[Transformer, Tokenizer]:
    """The experts stay where they were read, so that a device is never asked to hold them all."""
    from .moe_offload import offload_experts

    on_cpu, path = torch.device(device).type == "cpu", locate(source)
    if path.is_dir() and _stays_quantized(ModelConfig.from_file(path)):
        model, tokenizer = load(source, dtype, device, "torch")  # which says so, if the device has no kernels for them
    else:
        model, tokenizer = load(source, "float32" if dtype == "auto" or not on_cpu else dtype, "cpu", "torch")
    offload_experts(model, resident, device)
    return (model if on_cpu else _placed(model, dtype, device)), tokenizer


def _stays_quantized(config: ModelConfig) -> bool:
    """Whether its file holds codes that are multiplied as codes; those of "fp8" are read as numbers."""
    quantization = config.raw.get("quantization_config")
    fp8 = isinstance(quantization, Mapping) and quantization.get("quant_method") == "fp8"
    return quantization is not None and not fp8


def _placed(model: Transformer, dtype: str, device: str) -> Transformer:
    """On a GPU, which multiplies 16-bit matrices as they are."""
    target = {"auto": torch.bfloat16}.get(dtype) or getattr(torch, dtype)
    model = model.place(device, target)
    model.layout = str(target).removeprefix("torch.")
    return model


def _compiled(model: Transformer, wanted: bool) -> Transformer:
    if not wanted:
        return model
    from .compilation import compiled  # below this file in reading order

    return compiled(model)


def load_model(folder: str | Path, dtype: str = "float32", device: str = "cpu", backend: str = "auto") -> Transformer:
    """The model alone, from a folder with config.json and safetensors: for tests, which need no language."""
    folder = Path(folder)
    config = ModelConfig.from_file(folder)
    return with_backend(_build(config, SafetensorsFolder(folder), dtype, device, folder), backend)


def _build(config: ModelConfig, tensors: Mapping, dtype: str, device: str, where: Path) -> Transformer:
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is not known; choose one of {', '.join(DTYPES)}")
    on_cpu = torch.device(device).type == "cpu"
    if _stays_quantized(config):
        return _build_quantized(config, tensors, dtype, on_cpu, where)
    if (quantization := config.raw.get("quantization_config")) is not None:
        tensors = _fp8_blocks(tensors, quantization, where)
    keeps_codes = isinstance(tensors, GGUFFile) and tensors.keep_int4
    make_linear, layout = linear_maker(dtype if on_cpu else "float32", keeps_codes)
    try:
        model = from_tensors(config, tensors, make_linear)
    except (CheckpointError, ConfigError) as error:
        raise type(error)(f"{where}: {error}") from None
    model.layout = layout
    return model if on_cpu else _placed(model, dtype, device)


def _fp8_blocks(tensors: Mapping, quantization: Mapping, where: Path) -> Mapping:
    try:
        return FP8Blocks(tensors, quantization)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None


def _build_quantized(config: ModelConfig, tensors: Mapping, dtype: str, on_cpu: bool, where: Path) -> Transformer:
    """Matrices stay as few bits as the file has; dtype "float32" multiplies by the exact numbers, "auto" by kernels."""
    from .quantization import compressed, saving  # below this file in reading order, and needed by such files alone

    if not on_cpu or dtype not in ("auto", "float32"):
        raise CheckpointError(f"{where}: holds quantized weights; load them on the CPU with dtype auto or float32")
    try:
        found = compressed.CompressedTensors(tensors, config.raw["quantization_config"])
        model = from_tensors(config, found, saving.quantized_maker(exact=dtype == "float32"))
    except (CheckpointError, ConfigError, QuantizationError) as error:
        raise CheckpointError(f"{where}: {error}") from None
    model.layout = found.summary
    return model


class SafetensorsFolder(Mapping):
    """Maps tensor names to float32 tensors over one file or many shards, read one at a time.

    Raises CheckpointError for a missing shard, a damaged header, or a dtype that is not a plain float.
    """

    FLOATS = ("F32", "F16", "BF16", "F64")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shards = _shards(folder)
        opened = {shard: _open(folder / shard) for shard in sorted(set(shards.values()))}
        self._files = {name: opened[shard] for name, shard in shards.items()}

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def raw(self, name: str) -> Tensor:
        """A tensor in the type it is stored in."""
        try:
            return self._files[name].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"tensor {name} cannot be read ({error}); download the model again") from None

    def __getitem__(self, name: str) -> Tensor:
        try:
            kind = self._files[name].get_slice(name).get_dtype()
            if kind not in self.FLOATS:
                raise CheckpointError(
                    f"tensor {name} is stored as {kind}; minillm reads plain floats ({', '.join(self.FLOATS)})"
                )
            return self._files[name].get_tensor(name).to(torch.float32)
        except SafetensorError as error:
            raise CheckpointError(f"tensor {name} cannot be read ({error}); download the model again") from None


def _open(path: Path):
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: this shard is missing; download the whole model") from None
    except (SafetensorError, OSError, UnicodeError) as error:
        reason = short(error, 120)
        raise CheckpointError(f"{path}: not a whole safetensors file ({reason}); download it again") from None


def _shards(folder: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        files = sorted(p.name for p in folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder}: holds no .safetensors file; minillm does not read pickled weights")
        return {name: file for file in files for name in _open(folder / file).keys()}  # noqa: SIM118
    try:
        mapping = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        inside = all(Path(shard).name == shard for shard in mapping.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = short(f"{type(error).__name__}: {error}", 120)
        raise CheckpointError(f"{index}: not a readable index ({reason}); download it again") from None
    if not inside:
        raise CheckpointError(f"{index}: names a file outside its folder; do not trust this model")
    return mapping
