"""quantize_(model, scheme): every weight matrix of a model replaced by its quantized form, in place.

The embedding stays as it is: a step reads one row of it. The head, which in small models is the widest matrix, gets
int8 with one scale a row whatever the scheme, because a few bits there hurt most (`head=` says otherwise). Routers of
experts stay in full precision.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

from ..errors import QuantizationError
from ..layers import Linear
from ..packing import PackedLinear
from ..transformer import Transformer
from .linear import QuantizedLinear
from .scheme import GROUPS, Scheme, parse
from .weight import QuantizedWeight, check_weight, quantize_weight

HEAD = "lm_head"


@dataclass
class Report:
    """What quantize_ did. Bytes are those of weight matrices: before, in float32, and as stored now."""

    scheme: str
    layers: int = 0
    float32_bytes: int = 0
    stored_bytes: int = 0
    groups: Counter = field(default_factory=Counter)  # group size -> matrices

    @property
    def bits_per_weight(self) -> float:
        return 32 * self.stored_bytes / self.float32_bytes


def linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, Linear]]:
    """(parent, attribute, full name, layer) of every weight matrix that quantize_ replaces."""
    for parent_name, parent in list(model.named_modules()):
        for attribute, layer in list(parent.named_children()):
            name = f"{parent_name}.{attribute}".lstrip(".")
            if isinstance(layer, QuantizedLinear):
                raise QuantizationError(f"{name} is quantized already; load the model again to quantize it otherwise")
            if isinstance(layer, PackedLinear):
                raise QuantizationError(f'{name} is packed for this CPU; load the model with dtype "float32" first')
            if isinstance(layer, Linear):
                yield parent, attribute, name, layer


def scheme_for(scheme: Scheme, weight: Tensor, name: str, shrink_groups: bool) -> Scheme:
    """The scheme itself, or with a smaller group where its own does not divide the columns and `shrink_groups` allows
    that. Raises QuantizationError."""
    group = scheme.group
    if shrink_groups and group and scheme.format.startswith("int") and weight.shape[1] % group:
        fitting = math.gcd(weight.shape[1], group)
        if fitting in GROUPS:
            scheme = scheme.with_group(fitting)
    check_weight(weight, scheme, name)
    return scheme


def quantize_(
    model: Transformer,
    scheme: str | Scheme,
    head: str | None = "int8",
    shrink_groups: bool = False,
    exact: bool = False,
) -> Report:
    """Replaces every Linear of the model by a QuantizedLinear; nothing is replaced if one of them does not fit.

    scheme: a name such as "int4-g128" (see scheme.py). head: the scheme of lm_head, None to leave it alone.
    shrink_groups: where a group size does not divide a matrix's columns, take the largest of 32, 64, 128 that does.
    exact: multiply by dequantized float32 numbers instead of a packed kernel; for measuring quality.
    Raises QuantizationError naming the layer. Source of the convention: torchao's quantize_.
    """
    scheme, head_scheme = parse(scheme), None if head is None else parse(head)
    if scheme.needs_calibration:
        raise QuantizationError(f"scheme {scheme.name!r} looks at activations; give calibration tokens")
    found = list(linear_layers(model))
    chosen = {}
    for _, _, name, layer in found:
        wanted = head_scheme if name == HEAD else scheme
        if wanted is not None:
            chosen[name] = scheme_for(wanted, layer.weight, name, shrink_groups)
    report = Report(scheme.name)
    for parent, attribute, name, layer in found:
        if name in chosen:
            replace_layer(parent, attribute, layer, quantize_weight(layer.weight, chosen[name]), exact, report)
    model.layout = scheme.name
    return report


def replace_layer(
    parent: nn.Module, attribute: str, layer: Linear, weight: QuantizedWeight, exact: bool, report: Report
) -> None:
    setattr(parent, attribute, QuantizedLinear(weight, layer.bias, exact))
    report.layers += 1
    report.float32_bytes += 4 * weight.shape[0] * weight.shape[1]
    report.stored_bytes += weight.nbytes
    report.groups[weight.scheme.group or weight.shape[1]] += 1
