"""An EAGLE head on disk: a folder with config.json and model.safetensors, laid out and named as heads are published.

`fc.weight` (d, 2d) joins embedding and feature, in that order; `layers.0.*` is a Llama block by Hugging Face's names,
q, k and v apart. What is the target's (embedding, final norm, head) is not in the file. The tensors can be read by
whoever reads published heads (yuhuili/EAGLE-...), but neither side can run the other's: those read and guess features
behind the target's final norm, have no `layers.0.input_layernorm`, and some have an `fc.bias`; a head of minillm reads
them before that norm. So config.json says model_type "eagle" and, under `target`, which model the head was trained for.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..config import ModelConfig
from ..errors import CheckpointError, EngineError, short
from ..storage import new_folder, user_path, write_atomically
from ..transformer import Transformer

CONFIG, WEIGHTS, KIND = "config.json", "model.safetensors", "eagle"
_FLOATS = ("F32", "F16", "BF16")
_SHAPE = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
_MARKS = 16  # numbers of the target's final norm that tell it from others of its shape
_CLOSE = 0.01  # by which they may differ: a target in 16 bits has rounded them, a lightly tuned one hardly moved them
_OWN = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "sliding_window",
)  # fmt: skip
_MAKE = "python -m minillm train_eagle"


def write(
    folder: str | Path, tensors: Mapping[str, Tensor], config: ModelConfig, target: Transformer, name: str | None
) -> int:
    """Writes a head; returns the bytes of its weights. The description comes last: without it nothing is loaded.

    Raises RequestError for a folder that holds something, CheckpointError for weights that are not finite, OSError on a
    full disk; whatever comes between, nothing is left.
    """
    folder = new_folder(folder)
    if bad := [key for key, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise CheckpointError(f"{short(bad[0])} is not finite; the training diverged, lower the learning rate")
    apart = {key: t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for key, t in tensors.items()}
    own = {key: getattr(config, key) for key in _OWN}
    scaling = {} if config.rope_scaling is None else {"rope_scaling": dict(config.rope_scaling)}
    text = json.dumps(
        {"architectures": ["MinillmEagleHead"], "model_type": KIND, **own, **scaling, "hidden_act": "silu",
         "bias": False, "dtype": "float32", "target": describe(target, name)}, indent=2,
    )  # fmt: skip
    data, made = save(apart, {"format": "pt"}), not folder.exists()
    try:
        write_atomically(folder / WEIGHTS, lambda file: file.write(data))
        write_atomically(folder / CONFIG, lambda file: file.write(f"{text}\n".encode()))
    except BaseException:
        (folder / WEIGHTS).unlink(missing_ok=True)
        if made:
            with contextlib.suppress(OSError):  # never made, or somebody else put something there
                folder.rmdir()
        raise
    return len(data)


def describe(target: Transformer, name: str | None = None) -> dict[str, Any]:
    """What tells a target from others: its shape, and the first numbers of its final norm, which quantizing leaves
    alone (a rotation does not, and does change every hidden state)."""
    marks = [float(f"{x:.5g}") for x in target.final_norm.weight[:_MARKS].tolist()]
    return {"name": name, **{key: getattr(target.config, key) for key in _SHAPE}, "final_norm": marks}


def read_description(folder: str | Path) -> dict[str, Any]:
    """A head's config.json. Raises CheckpointError if there is none, or it is damaged or no head's."""
    folder = user_path(folder, "draft")
    path, shown = folder / CONFIG, short(folder, 200)
    if not path.is_file():
        what = "holds no config.json" if folder.is_dir() else "is no folder" if folder.exists() else "no such folder"
        raise CheckpointError(f"{shown}: {what}; give the folder of an EAGLE head, or make one: {_MAKE} --out FOLDER")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{shown}: config.json cannot be read ({short(error, 120)}); train the head again"
        ) from None
    kind = found.get("model_type") if isinstance(found, dict) else None
    if kind != KIND:
        raise CheckpointError(
            f"{shown}: config.json says model_type {short(repr(kind))}, which is no EAGLE head of minillm (those of "
            f"others read other features); make one: {_MAKE} --out FOLDER"
        )
    if not _is_description(found.get("target")):
        raise CheckpointError(f"{shown}: config.json does not say which model the head is for; train the head again")
    return found


def _is_description(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("final_norm"), list):
        return False
    return all(type(x) is float and math.isfinite(x) for x in value["final_norm"])


def read(folder: str | Path, shapes: Mapping[str, tuple[int, ...]], target: Transformer) -> dict[str, Tensor]:
    """The tensors of these names and shapes, float32 on the CPU, of a head that was trained for this target.

    Raises CheckpointError for a file that is missing, damaged or another's, EngineError for a head of another model.
    """
    theirs, ours, folder = read_description(folder)["target"], describe(target), user_path(folder, "draft")
    same_shape = all(theirs.get(key) == ours[key] for key in _SHAPE)
    if not same_shape or not _alike(theirs["final_norm"], ours["final_norm"]):
        other = "" if not same_shape else ", of the same shape with other weights"
        raise EngineError(
            f"{short(folder, 200)}: a head for {_words(theirs)}; the target is {_words(ours)}{other}. Train one for "
            f"it: {_MAKE} --model NAME --out FOLDER, with the target's own --quantize if it has one"
        )
    return _tensors(folder / WEIGHTS, shapes)


def _alike(left: list[float], right: list[float]) -> bool:
    close = (math.isclose(a, b, rel_tol=_CLOSE, abs_tol=1e-4) for a, b in zip(left, right, strict=False))
    return len(left) == len(right) and all(close)


def _words(about: Mapping[str, Any]) -> str:
    kind, tokens, width, layers = (short(about.get(key)) for key in _SHAPE)
    name = f"{short(about['name'])}, " if about.get("name") else ""
    return f"{name}a {kind} of {layers} layers, {width} wide, {tokens} tokens"


def _tensors(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    shown = short(path, 200)
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if missing := sorted(set(shapes) - names):
                raise CheckpointError(f"{shown}: tensor {missing[0]} is missing; train the head again")
            if surplus := sorted(names - set(shapes)):
                raise CheckpointError(f"{shown}: tensor {short(surplus[0])} is no part of a head; train the head again")
            return {name: _tensor(file, name, shape, shown) for name, shape in shapes.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{shown}: no such file; copy the whole folder, or train the head again") from None
    except (SafetensorError, OSError, UnicodeError) as error:
        raise CheckpointError(
            f"{shown}: not a whole safetensors file ({short(error, 120)}); copy it again, or train the head again"
        ) from None


def _tensor(file, name: str, shape: tuple[int, ...], shown: str) -> Tensor:
    stored = file.get_slice(name)
    if (found := tuple(stored.get_shape())) != shape:  # before memory is asked for it
        raise CheckpointError(f"{shown}: tensor {name} has shape {found}, a head of this target {shape}")
    if (kind := stored.get_dtype()) not in _FLOATS:
        raise CheckpointError(f"{shown}: tensor {name} is stored as {kind}; a head is {', '.join(_FLOATS)}")
    tensor = file.get_tensor(name).to(torch.float32)
    if not tensor.isfinite().all():
        raise CheckpointError(f"{shown}: tensor {name} holds numbers that are not finite; train the head again")
    return tensor
