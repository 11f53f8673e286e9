"""Quantized weights in safetensors files, named as the compressed-tensors library names them.

A matrix X becomes `X.weight` (int8, float8) or `X.weight_packed` (4 bits), with `X.weight_scale` and, where the scheme
has them, `X.weight_zero_point`, `X.weight_global_scale`, `X.weight_shape`. config.json says under
`quantization_config` which modules have which format, so that a server that knows the convention can load the file.
What the convention has no word for (3 bits, ternary, fractional zero points) is stored in the same way and marked
"minillm-packed". Where a group's columns lie anywhere (actorder "group"), `X.weight_g_idx` says each column's group.

Read, and never written: 8-bit codes that others pack too, four to an int32, and one scale for a whole tensor. How
others would round activations and the KV cache (`X.input_scale`, `k_scale`) is not read: they stay as they are, but for
int8 weights whose config names activations, which become int8-dynamic.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, short
from . import number_formats as nf
from .scheme import FP8_BLOCK, Scheme
from .weight import QuantizedWeight, in_order

SUFFIXES = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_global_scale", "weight_shape",
            "weight_g_idx")  # fmt: skip
FORMAT = {"int8": "int-quantized", "int4": "pack-quantized", "fp8": "float-quantized", "fp8-e5m2": "float-quantized",
          "mxfp4": "mxfp4-pack-quantized", "nvfp4": "nvfp4-pack-quantized"}  # fmt: skip
OWN = "minillm-packed"
_NAIVE, _MIXED = "naive-quantized", "mixed-precision"  # codes as they are; groups of several formats
_OF_ACTIVATIONS = re.compile(r".*\.(?:input|output|q|k|v)_(?:scale|zero_point|global_scale)")
_FLOAT8 = {"fp8": torch.float8_e4m3fn, "fp8-e5m2": torch.float8_e5m2}
_CODES = {"int8": torch.int8, **_FLOAT8}  # of the others uint8
_SCALES = {"mxfp4": torch.uint8, "nvfp4": torch.float8_e4m3fn}  # of the others any float


def tensors_of(weight: QuantizedWeight) -> dict[str, Tensor]:
    """What is stored for one matrix, by suffix."""
    s, packed, found = weight.scheme, weight.packed, {"weight_scale": weight.scale}
    if weight.order is not None:  # in a file codes lie in the matrix's own order
        places = weight.order.argsort()
        packed, found["weight_g_idx"] = in_order(packed, s.bits, places), places.to(torch.int32) // s.group
    if s.bits == 8:
        found["weight"] = packed if packed.dtype != torch.uint8 else (packed.short() - 128).to(torch.int8)
    elif s.format == "int4":
        found["weight_packed"] = packed.contiguous().view(torch.int32)  # eight codes, lowest first
        found["weight_shape"] = torch.tensor(weight.shape)
    else:
        found["weight_packed"] = packed
    if weight.zero is not None:
        found["weight_zero_point"] = _stored_zero(weight)
    if weight.global_scale is not None:
        found["weight_global_scale"] = 1 / weight.global_scale.view(1)  # there it multiplies before rounding
    return {name: t.contiguous() for name, t in found.items()}


def _stored_zero(weight: QuantizedWeight) -> Tensor:
    """4-bit zero points are packed along rows, 8-bit ones shifted with their codes, fractional ones kept."""
    zero = weight.zero
    if zero.is_floating_point() or weight.scheme.bits not in (4, 8):
        return zero
    if weight.scheme.bits == 8:
        return (zero.short() - 128).to(torch.int8)
    rows = torch.nn.functional.pad(zero, (0, 0, 0, -len(zero) % 8))
    return nf.pack_codes(rows.t().flatten(), 4).view(torch.int32).view(zero.shape[1], -1).t()


def weight_from(scheme: Scheme, shape: tuple[int, int], part: Mapping[str, Tensor], name: str) -> QuantizedWeight:
    """The matrix that `tensors_of` took apart. Raises CheckpointError naming what is missing, misshapen or damaged."""
    words = scheme.format == "int4" or (scheme.format == "int8" and "weight_packed" in part)  # int32s of several codes
    key = "weight" if scheme.bits == 8 and not words else "weight_packed"
    zero = [] if scheme.symmetric else ["weight_zero_point"]
    whole = ["weight_global_scale"] if scheme.format == "nvfp4" else []
    for needed in (key, "weight_scale", *zero, *whole):
        if needed not in part:
            raise CheckpointError(f"tensor {name}.{needed} is missing from the checkpoint; download the model again")
    if not zero and "weight_zero_point" in part and part["weight_zero_point"].any():
        raise CheckpointError(f"{name} has zero points, and its config says symmetric; download the config again")
    rows, columns = shape
    if scheme.group and columns % scheme.group:
        raise CheckpointError(
            f"{name} has {columns} columns, which its config's groups of {scheme.group} do not divide"
        )
    packed = _codes_of(scheme, part[key], shape, words, f"{name}.{key}")
    scale = part["weight_scale"]
    if scale.numel() == 1 and scale.dim() < 2 and scheme.format != "nvfp4":  # others write one number
        scale = scale.view(1, 1)
        if scheme.group is None and scheme.granularity == "channel":
            scale = scale.expand(rows, 1).contiguous()
    _check(f"{name}.weight_scale", scale, scale_shape(scheme, shape), _SCALES.get(scheme.format))
    found = [_loaded_zero(scheme, part["weight_zero_point"], rows, scale.shape[1], words, name) if zero else None]
    found += [_global_scale(part["weight_global_scale"], name) if whole else None]
    if not (nf.from_e8m0(scale) if scheme.format == "mxfp4" else scale.float()).isfinite().all():
        raise CheckpointError(f"tensor {name}.weight_scale holds no finite numbers; download the model again")
    order = _order(scheme, part.get("weight_g_idx"), columns, name)
    if order is not None:
        packed = in_order(packed, scheme.bits, order)
    return QuantizedWeight(replace(scheme, own_order=order is not None), shape, packed, scale, *found, order)


def _order(scheme: Scheme, g_idx: Tensor | None, columns: int, name: str) -> Tensor | None:
    """The columns, group by group, from each one's group; None where that is how they lie, which -1 for all of them
    says too."""
    name = f"{name}.weight_g_idx"
    if g_idx is None:
        return None
    if g_idx.shape != (columns,) or g_idx.dtype not in (torch.int32, torch.int64):
        raise CheckpointError(f"tensor {name} is not one whole number for each of {columns} columns; download it again")
    size = scheme.group or columns
    if (g_idx == -1).all() or torch.equal(g_idx.long(), torch.arange(columns) // size):
        return None
    if not scheme.own_order:
        raise CheckpointError(f'tensor {name} groups columns in an order, and its config has no actorder "group"')
    if g_idx.min() < 0 or g_idx.max() >= columns // size or (g_idx.bincount() != size).any():
        raise CheckpointError(f"tensor {name} does not allot {size} columns to each of {columns // size} groups")
    return g_idx.argsort(stable=True).to(torch.int32)


def _codes_of(scheme: Scheme, packed: Tensor, shape: tuple[int, int], words: bool, name: str) -> Tensor:
    """Codes as QuantizedWeight holds them. In words the lowest bits come first, every code shifted to be positive, and
    a row's last word is filled up."""
    rows, columns = shape
    if columns * scheme.bits % 8:
        raise CheckpointError(f"tensor {name} has {columns} columns, no whole bytes of {scheme.bits}-bit codes")
    width = columns * scheme.bits // 8
    if words:
        _check(name, packed, (rows, -(-width // 4)), torch.int32)
        packed = packed.view(torch.uint8)[:, :width].contiguous()
    stored = torch.uint8 if words else _CODES.get(scheme.format, torch.uint8)
    _check(name, packed, (rows, width), stored)
    if not _are_codes(scheme, packed):
        raise CheckpointError(f"tensor {name} holds codes that {scheme.name} has not; download the model again")
    if scheme.format != "int8" or words != scheme.symmetric:
        return packed
    return (packed.short() - 128).to(torch.int8) if words else (packed.short() + 128).to(torch.uint8)


def _are_codes(scheme: Scheme, packed: Tensor) -> bool:
    """False for float8 that is NaN or infinity, and for ternary's fourth code."""
    if scheme.format == "ternary":
        return not (packed & (packed >> 1) & 0b01010101).any()
    if scheme.format in _FLOAT8:
        least = {"fp8": 0x7F, "fp8-e5m2": 0x7C}[scheme.format]  # of the bits below the sign: all after this is none
        return not ((packed.view(torch.uint8) & 0x7F) >= least).any()
    return True


def _loaded_zero(scheme: Scheme, zero: Tensor, rows: int, groups: int, words: bool, name: str) -> Tensor:
    """In words a column of groups has its rows packed, as `_codes_of` has columns."""
    name = f"{name}.weight_zero_point"
    if zero.is_floating_point():
        _check(name, zero, (rows, groups))
        if not zero.isfinite().all():
            raise CheckpointError(f"tensor {name} holds no finite numbers; download the model again")
        return zero
    if words:
        _check(name, zero, (-(-rows * scheme.bits // 32), groups), torch.int32)
        words_of_rows = zero.t().clone(memory_format=torch.contiguous_format)  # contiguous() keeps a stride beside a 1
        return nf.unpack_codes(words_of_rows.view(torch.uint8), scheme.bits).t()[:rows].contiguous()
    if scheme.bits == 8:
        _check(name, zero, (rows, groups), torch.int8)
        return (zero.short() + 128).to(torch.uint8)
    _check(name, zero, (rows, groups), torch.uint8)
    if (zero >= 2**scheme.bits).any():
        raise CheckpointError(f"tensor {name} holds zero points beyond {scheme.bits} bits; download the model again")
    return zero


def _global_scale(stored: Tensor, name: str) -> Tensor:
    if stored.numel() != 1 or not stored.is_floating_point() or not (stored.isfinite() & (stored > 0)).all():
        raise CheckpointError(f"tensor {name}.weight_global_scale is no positive number; download the model again")
    return 1 / stored.view(())


def scale_shape(scheme: Scheme, shape: tuple[int, int]) -> tuple[int, int]:
    rows, columns = shape
    if scheme.format.startswith("fp8") and scheme.granularity in ("tensor", "block"):
        return (1, 1) if scheme.granularity == "tensor" else (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    return rows, columns // (scheme.group or columns)


def _check(name: str, tensor: Tensor, shape: tuple[int, int], dtype: torch.dtype | None = None) -> None:
    """dtype None: any that is floating."""
    if tuple(tensor.shape) != shape:
        raise CheckpointError(f"tensor {name} has shape {tuple(tensor.shape)}, its config says {shape}")
    if tensor.dtype != dtype and (dtype is not None or not tensor.is_floating_point()):
        wanted = "floating numbers" if dtype is None else str(dtype)
        raise CheckpointError(f"tensor {name} is stored as {tensor.dtype}, its config asks for {wanted}")


def config_group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    """One entry of config_groups."""
    strategy = "group" if scheme.group else "channel"
    if scheme.format.startswith("fp8"):
        strategy = scheme.granularity
    if scheme.format == "nvfp4":
        strategy = "tensor_group"
    weights = {
        "num_bits": scheme.bits,
        "type": "int" if scheme.format.startswith("int") else "float",
        "symmetric": scheme.symmetric,
        "strategy": strategy,
        "group_size": scheme.group,
        "block_structure": [FP8_BLOCK, FP8_BLOCK] if strategy == "block" else None,
        "dynamic": False,
    }
    weights |= {"actorder": "group"} if scheme.own_order else {}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": inputs if scheme.dynamic else None,
        "format": FORMAT.get(scheme.format, OWN) if "hqq-" not in scheme.name else OWN,
        "minillm_scheme": scheme.format,
    }


def scheme_of(group: Mapping[str, Any]) -> Scheme:
    """The Scheme that an entry of config_groups describes. Raises CheckpointError for one that minillm cannot read."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise CheckpointError("a config group of quantization_config has no weights; minillm reads quantized weights")
    bits, kind, strategy = (_plain(weights.get(name)) for name in ("num_bits", "type", "strategy"))
    size, symmetric = weights.get("group_size"), weights.get("symmetric", True)
    own = _plain(group.get("minillm_scheme"))
    form = own if own in (*FORMAT, "int3", "ternary") else {("int", 8): "int8", ("int", 4): "int4",
                                                            ("float", 8): "fp8"}.get((kind, bits))  # fmt: skip
    if own is None and (kind, bits) == ("float", 4):
        form = {16: "nvfp4", 32: "mxfp4"}.get(size)
    blocks = weights.get("block_structure") in (None, [FP8_BLOCK, FP8_BLOCK])
    known = strategy in ("group", "channel", "tensor", "block", "tensor_group") and isinstance(symmetric, bool)
    if form is None or not known or (strategy == "block" and not blocks):
        raise CheckpointError(f"quantized weights of {short(dict(weights), 120)} are not supported")
    granularity = strategy if form.startswith("fp8") else "channel"
    if granularity == "group" and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise CheckpointError(f"quantized weights of {short(dict(weights), 120)} have groups of no size")
    grouped = size if strategy in ("group", "tensor_group") and isinstance(size, int) and size > 0 else None
    name = form + (f"-g{grouped}" if grouped and form.startswith("int") else "") + ("" if symmetric else "-asym")
    inputs = isinstance(group.get("input_activations"), Mapping)
    dynamic = inputs and form == "int8" and grouped is None and symmetric
    in_own_order = weights.get("actorder") in ("group", "dynamic", True)
    return Scheme(
        name, form, group=grouped, symmetric=symmetric, dynamic=dynamic, granularity=granularity,
        own_order=in_own_order,
    )  # fmt: skip


def _plain(value: Any) -> Any:
    """A value of JSON as a key of a table; None for what can be none."""
    return value if isinstance(value, str | int) else None


class CompressedTensors(Mapping):
    """A safetensors folder whose `X.weight` of quantized modules is a QuantizedWeight.

    files: a mapping with `raw(name)`, tensors as stored. Raises CheckpointError for a convention it does not know.
    """

    def __init__(self, files, quantization: Mapping[str, Any]) -> None:
        if not isinstance(quantization, Mapping):
            raise CheckpointError("quantization_config is not an object; download the config again")
        if quantization.get("quant_method") != "compressed-tensors":
            method = short(repr(quantization.get("quant_method")))
            raise CheckpointError(f"quant_method {method} is not supported; minillm reads compressed-tensors and fp8")
        groups = _weight_groups(quantization)
        self.files = files
        self._groups = [(_targets(group), scheme_of(group)) for group in groups]
        modules = [name.removesuffix(".weight_scale") for name in files if name.endswith(".weight_scale")]
        self._schemes = {module: self._scheme(module) for module in modules}
        hidden = {f"{module}.{suffix}" for module in modules for suffix in SUFFIXES}
        self._names = [n for n in files if n not in hidden and not _OF_ACTIVATIONS.fullmatch(n)]
        self._names += [f"{module}.weight" for module in modules]

    def _scheme(self, module: str) -> Scheme:
        named = (lambda t: t == module, lambda t: t[:3] == "re:" and re.match(t[3:], module), lambda t: t == "Linear")
        for fits in named:
            for targets, scheme in self._groups:
                if any(fits(target) for target in targets):
                    return scheme
        raise CheckpointError(f"{module} is quantized and no config group names it; download the model again")

    @property
    def summary(self) -> str:
        """The format of most matrices, in a word."""
        names = [scheme.name for scheme in self._schemes.values()]
        return max(sorted(set(names)), key=names.count)

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str):
        module = name.removesuffix(".weight")
        if module not in self._schemes or module == name:
            return self.files[name]
        scheme = self._schemes[module]
        stored = {suffix: f"{module}.{suffix}" for suffix in SUFFIXES}
        part = {suffix: self.files.raw(full) for suffix, full in stored.items() if full in self.files}
        return weight_from(scheme, self._shape(scheme, part, module), part, module)

    @staticmethod
    def _shape(scheme: Scheme, part: Mapping[str, Tensor], module: str) -> tuple[int, int]:
        if (stated := part.get("weight_shape")) is not None:
            if stated.shape != (2,) or stated.dtype not in (torch.int64, torch.int32) or stated.min() < 1:
                raise CheckpointError(f"tensor {module}.weight_shape is not two sizes; download the model again")
            return tuple(stated.tolist())
        stored = part.get("weight", part.get("weight_packed"))
        if stored is None or stored.dim() != 2:
            return (0, 0)  # weight_from says what is missing
        return stored.shape[0], stored.shape[1] * (32 if stored.dtype == torch.int32 else 8) // scheme.bits


def _weight_groups(quantization: Mapping[str, Any]) -> list[Any]:
    """The entries of config_groups that round weights; those of activations alone (of attention) are left out.

    Raises CheckpointError for what would be read wrongly, or not found, without it.
    """
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError("quantization_config has no config_groups; download the model again")
    found = [g for g in groups.values() if not isinstance(g, Mapping) or g.get("weights", g) is not None]
    if not found:
        raise CheckpointError("quantization_config rounds activations alone; minillm reads quantized weights")
    for group in found:
        form = (group.get("format") if isinstance(group, Mapping) else None) or quantization.get("format")
        if form is not None and form not in (*FORMAT.values(), OWN, _NAIVE, _MIXED):
            raise CheckpointError(
                f"quantized weights of format {short(repr(form))} are not supported; minillm reads "
                f"{', '.join(dict.fromkeys(FORMAT.values()))}"
            )
    sparse = quantization.get("sparsity_config")
    if isinstance(sparse, Mapping) and sparse.get("format", "dense") not in ("dense", None):
        raise CheckpointError(
            f"weights stored as {short(repr(sparse['format']))} are not supported; save the model without sparse "
            "compression, its zeros in place"
        )
    if _turns_activations(quantization.get("transform_config")):
        raise CheckpointError(
            "the model's activations are to be rotated while it runs (transform_config), which is not supported; take "
            "one whose rotations are all in its weights"
        )
    return found


def _turns_activations(transform: Any) -> bool:
    """Whether a transform is anywhere else than in the weights, where it has been multiplied in already."""
    if not transform:
        return False
    try:
        places = [place["location"] for group in transform["config_groups"].values() for place in group["apply"]]
    except (TypeError, KeyError, AttributeError):
        return True  # unreadable, so nobody knows
    return any(place not in ("weight_input", "weight_output") for place in places)


def _targets(group: Any) -> list[str]:
    """Raises CheckpointError for what names no module, and for a pattern that is none."""
    targets = group.get("targets") if isinstance(group, Mapping) else None
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise CheckpointError("a config group of quantization_config has no list of targets; download the config again")
    for target in targets:
        try:
            re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
        except re.error:
            raise CheckpointError(f"target {short(repr(target))} of quantization_config is no pattern") from None
    return targets
