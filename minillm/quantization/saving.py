"""A quantized model on disk: safetensors, config.json and the tokenizer, in a folder that checkpoint.load reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from ..attention import Attention
from ..errors import QuantizationError
from ..layers import Linear, SwiGLU
from ..storage import write_atomically
from ..tokenizer import Tokenizer
from ..tokenizer_export import save_tokenizer
from ..transformer import Transformer
from .compressed import config_group, tensors_of
from .linear import QuantizedLinear
from .scheme import FP8_BLOCK
from .weight import QuantizedWeight


def save_quantized(
    model: Transformer, folder: str | Path, tokenizer: Tokenizer | None = None, dtype: torch.dtype = torch.float32
) -> int:
    """Writes a dense model that quantize_ has changed; returns the bytes of its weights.

    dtype: of embedding, norms and biases, which stay unquantized; float32 reloads bit for bit.
    Raises QuantizationError for a model that is not quantized, or one whose matrices cannot be told apart by rows.
    """
    folder = Path(folder)
    tensors, schemes = {"model.embed_tokens.weight": model.embedding.data.to(dtype)}, {}
    for name, layer in named_parts(model):
        if isinstance(layer, QuantizedWeight):
            schemes.setdefault(replace(layer.scheme, method="rtn", rotate=False), []).append(name)
            tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in tensors_of(layer).items()}
        else:
            tensors[name] = layer.to(dtype)
    if not schemes:
        raise QuantizationError("the model is not quantized; call quantize_(model, scheme) first")
    whole = {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}  # none shares memory
    data = save(whole, {"format": "pt"})
    write_atomically(folder / "model.safetensors", lambda file: file.write(data))
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)
    config = json.dumps(_config(model, schemes), indent=2).encode()
    write_atomically(folder / "config.json", lambda file: file.write(config))  # last: without it nothing is loaded
    return sum(t.nbytes for t in tensors.values())


def _config(model: Transformer, schemes: dict) -> dict[str, Any]:
    """The model's own config, with what was quantized how. A head of its own format is no longer the embedding."""
    groups = [config_group(scheme, sorted(names)) for scheme, names in schemes.items()]
    untied = any("lm_head" in names for names in schemes.values())
    quantization = {
        "quant_method": "compressed-tensors",
        "format": groups[0]["format"] if len({g["format"] for g in groups}) == 1 else "mixed-precision",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": [] if untied else ["lm_head"],
    }
    raw = {k: v for k, v in model.config.raw.items() if k != "quantization_config"}
    tied = model.config.tie_word_embeddings and not untied
    return raw | {"tie_word_embeddings": tied, "quantization_config": quantization}


def named_parts(model: Transformer) -> Iterator[tuple[str, QuantizedWeight | Tensor]]:
    """(Hugging Face's name, tensor or quantized matrix) of everything but the embedding; stacked matrices taken apart.

    A QuantizedWeight goes by its module's name, a plain tensor by its own.
    """
    c = model.config
    for i, block in enumerate(model.blocks):
        if not isinstance(block.attention, Attention) or not isinstance(block.mlp, SwiGLU):
            raise QuantizationError("dense models alone can be saved quantized so far; this one has other layers")
        at, mlp, prefix = block.attention, block.mlp, f"model.layers.{i}."
        queries, keys = at.heads * at.head_dim, at.kv_heads * at.head_dim
        rows = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
        yield from _parts(at.qkv_proj, prefix, rows)
        yield from _parts(at.o_proj, prefix, {"self_attn.o_proj": c.hidden_size})
        half = c.intermediate_size
        yield from _parts(mlp.gate_up_proj, prefix, {"mlp.gate_proj": half, "mlp.up_proj": half})
        yield from _parts(mlp.down_proj, prefix, {"mlp.down_proj": c.hidden_size})
        norms = {"input_layernorm": block.attn_norm, "post_attention_layernorm": block.ffn_norm,
                 "self_attn.q_norm": at.q_norm, "self_attn.k_norm": at.k_norm}  # fmt: skip
        for name, norm in norms.items():
            if norm is not None:
                yield f"{prefix}{name}.weight", norm.weight.data
    yield "model.norm.weight", model.final_norm.weight.data
    if isinstance(model.lm_head, QuantizedLinear) or not c.tie_word_embeddings:
        yield from _parts(model.lm_head, "", {"lm_head": c.vocab_size})


def _parts(layer: nn.Module, prefix: str, rows: dict[str, int]) -> Iterator[tuple[str, QuantizedWeight | Tensor]]:
    if not isinstance(layer, QuantizedLinear | Linear):
        raise QuantizationError(f"{prefix}{next(iter(rows))} is packed for this CPU; quantize a float32 model")
    first = 0
    for name, count in rows.items():
        cut = _rows(first, first + count)
        if isinstance(layer, QuantizedLinear):
            yield prefix + name, layer.weight if len(rows) == 1 else layer.weight.map_rows(cut, count)
        else:
            yield f"{prefix}{name}.weight", cut(layer.weight.data)
        if layer.bias is not None:
            yield f"{prefix}{name}.bias", cut(layer.bias.data)
        first += count


def _rows(first: int, last: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor[first:last]


def stack(parts: list[QuantizedWeight]) -> QuantizedWeight:
    """Quantized matrices of one width and scheme as one, by rows. Raises QuantizationError if they do not agree."""
    if len(parts) == 1:
        return parts[0]
    first, rows = parts[0], sum(p.shape[0] for p in parts)
    if not all(p.scheme == first.scheme and _same(p.global_scale, first.global_scale) for p in parts):
        raise QuantizationError("matrices that share their input are quantized differently; they are multiplied as one")
    of_blocks = first.scheme.format.startswith("fp8") and first.scheme.granularity == "block"
    if of_blocks and any(p.shape[0] % FP8_BLOCK for p in parts[:-1]):
        raise QuantizationError(
            f"matrices that share their input are multiplied as one, and blocks of {FP8_BLOCK} rows do not end where "
            f"one of {', '.join(str(p.shape[0]) for p in parts)} rows does"
        )
    shared = first.scheme.granularity == "tensor"
    if shared and not all(torch.equal(p.scale, first.scale) for p in parts):
        parts, shared = [_by_rows(p) for p in parts], False
        first = parts[0]
    scale = first.scale if shared else torch.cat([p.scale for p in parts])
    zero = None if first.zero is None else torch.cat([p.zero for p in parts])
    packed = torch.cat([p.packed.view(torch.uint8) for p in parts]).view(first.packed.dtype)
    return replace(first, shape=(rows, first.shape[1]), packed=packed, scale=scale, zero=zero)


def _by_rows(weight: QuantizedWeight) -> QuantizedWeight:
    """The same numbers, the tensor's one scale written out for each row."""
    scheme = replace(weight.scheme, granularity="channel")
    return replace(weight, scheme=scheme, scale=weight.scale.expand(weight.shape[0], 1))


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
