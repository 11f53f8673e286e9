"""A quantized model on disk: safetensors, config.json and the tokenizer, in a folder that checkpoint.load reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from ..errors import QuantizationError
from ..layers import Linear
from ..storage import write_atomically
from ..tokenizer import Tokenizer
from ..tokenizer_export import save_tokenizer
from ..transformer import Transformer
from .compressed import config_group, tensors_of
from .linear import QuantizedLinear
from .parts import named_parts
from .weight import QuantizedWeight

ROUTER = (".gate.weight", ".e_score_correction_bias")


def save_quantized(
    model: Transformer, folder: str | Path, tokenizer: Tokenizer | None = None, dtype: torch.dtype = torch.float32
) -> int:
    """Writes a model that quantize_ has changed; returns the bytes of its weights.

    dtype: of embedding, norms, biases and what else stays unquantized, routers excepted, which stay as they are;
    float32 reloads bit for bit. Blocks of 128 rows that are not the same rows in the file, where q, k and v are apart
    and a hybrid's heads lie elsewhere, are written with scales for each row and 128 columns (strategy "group").
    Raises QuantizationError for a model that is not quantized, or one with layers that have no names in such files.
    """
    folder = Path(folder)
    tensors, schemes, whole = {"model.embed_tokens.weight": model.embedding.data.to(dtype)}, {}, []
    for name, layer in named_parts(model):
        if isinstance(layer, QuantizedWeight):
            schemes.setdefault(replace(layer.scheme, method="rtn", rotate=False), []).append(name)
            tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in tensors_of(layer).items()}
        else:
            tensors[name] = layer if name.endswith(ROUTER) else layer.to(dtype)
            whole += [name.removesuffix(".weight")] if layer.dim() == 2 else []
    if not schemes:
        raise QuantizationError("the model is not quantized; call quantize_(model, scheme) first")
    apart = {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}  # none shares memory
    data = save(apart, {"format": "pt"})
    write_atomically(folder / "model.safetensors", lambda file: file.write(data))
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)
    config = json.dumps(_config(model, schemes, whole), indent=2).encode()
    write_atomically(folder / "config.json", lambda file: file.write(config))  # last: without it nothing is loaded
    return sum(t.nbytes for t in tensors.values())


def _config(model: Transformer, schemes: dict, whole: list[str]) -> dict[str, Any]:
    """The model's own config, with what was quantized how, and in `ignore` the matrices that were not. A head of its
    own format is no longer the embedding."""
    groups = [config_group(scheme, sorted(names)) for scheme, names in schemes.items()]
    untied = any("lm_head" in names for names in schemes.values())
    quantization = {
        "quant_method": "compressed-tensors",
        "format": groups[0]["format"] if len({g["format"] for g in groups}) == 1 else "mixed-precision",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": [*whole, *([] if untied or "lm_head" in whole else ["lm_head"])],
    }
    raw = {k: v for k, v in model.config.raw.items() if k != "quantization_config"}
    tied = model.config.tie_word_embeddings and not untied
    return raw | {"tie_word_embeddings": tied, "quantization_config": quantization}


def stack(parts: list[QuantizedWeight]) -> QuantizedWeight:
    """Quantized matrices of one width and scheme as one, by rows. Raises QuantizationError if they do not agree."""
    if len(parts) == 1:
        return parts[0]
    in_blocks = any(p.in_blocks for p in parts)
    if in_blocks:
        parts = [p.by_rows() for p in parts]
    first, rows = parts[0], sum(p.shape[0] for p in parts)
    if not all(_same(p.order, first.order) for p in parts):
        raise QuantizationError(
            "matrices that share their input have their columns grouped in different orders (weight_g_idx); they are "
            'multiplied as one, so quantize them with actorder "weight"'
        )
    if not all(p.scheme == first.scheme and _same(p.global_scale, first.global_scale) for p in parts):
        raise QuantizationError("matrices that share their input are quantized differently; they are multiplied as one")
    shared = first.scheme.granularity == "tensor"
    if shared and not all(torch.equal(p.scale, first.scale) for p in parts):
        parts, shared = [p.by_rows() for p in parts], False
        first = parts[0]
    scale = first.scale if shared else torch.cat([p.scale for p in parts])
    zero = None if first.zero is None else torch.cat([p.zero for p in parts])
    packed = torch.cat([p.packed.view(torch.uint8) for p in parts]).view(first.packed.dtype)
    whole = replace(first, shape=(rows, first.shape[1]), packed=packed, scale=scale, zero=zero)
    return whole.by_blocks() if in_blocks else whole


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def quantized_maker(exact: bool) -> Callable[[list, Tensor | None], nn.Module]:
    """How from_tensors makes a layer of matrices of which some are quantized."""

    def make(parts: list, bias: Tensor | None) -> nn.Module:
        kinds = {isinstance(part, QuantizedWeight) for part in parts}
        if kinds == {True}:
            return QuantizedLinear(stack(parts), bias, exact)
        if kinds == {False}:
            return Linear(torch.cat(parts) if len(parts) > 1 else parts[0], bias)
        raise QuantizationError("of matrices that share their input some are quantized and some are not")

    return make
