"""quantize_(model, scheme): every weight matrix of a model replaced by its quantized form, in place.

The embedding stays as it is: a step reads one row of it. The head, which in small models is the widest matrix, gets
int8 with one scale a row whatever the scheme, because a few bits there hurt most (`head=` says otherwise). Routers of
experts stay in full precision, and so does the matrix that MLA takes apart to absorb it into queries and outputs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from ..errors import QuantizationError
from ..layers import Linear
from ..packing import PackedLinear
from ..transformer import Transformer
from .awq import clipped, scale_block
from .calibration import for_each_block
from .folding import folds
from .gptq import gptq
from .hqq import hqq
from .linear import QuantizedLinear
from .rotation import rotate_
from .scheme import GROUPS, Scheme, parse
from .smoothquant import smooth_block
from .weight import QuantizedWeight, check_weight, quantize_weight
from .whole import refuse_views, whole_or_not

HEAD = "lm_head"
WHOLE = ("kv_b_proj",)  # multiplied by parts, which no packed layout gives


@dataclass
class Report:
    """What quantize_ did. Bytes are those of weight matrices: before, in float32, and as stored now."""

    scheme: str
    layers: int = 0
    float32_bytes: int = 0
    stored_bytes: int = 0
    groups: Counter = field(default_factory=Counter)  # group size -> matrices
    unseen: list[str] = field(default_factory=list)  # matrices that no calibration token reached: rounded to nearest

    @property
    def bits_per_weight(self) -> float:
        return 32 * self.stored_bytes / self.float32_bytes


def linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, Linear]]:
    """(parent, attribute, full name, layer) of every weight matrix that quantize_ replaces."""
    for parent_name, parent in model.named_modules():
        for attribute, layer in parent.named_children():
            name = f"{parent_name}.{attribute}".lstrip(".")
            if isinstance(layer, PackedLinear):
                raise QuantizationError(f'{name} is packed for this CPU; load the model with dtype "float32" first')
            if isinstance(layer, Linear) and attribute not in WHOLE:
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
    calibration: Sequence[int] | None = None,
    head: str | None = "int8",
    shrink_groups: bool = False,
    exact: bool = False,
) -> Report:
    """Replaces every Linear of the model by a QuantizedLinear, or changes nothing: an error or Ctrl-C on the way leaves
    the model as it was.

    scheme: a name such as "int4-g128" (see scheme.py). calibration: token ids for the methods that look at
    activations (gptq, awq, smoothquant); never the text that quality is then measured on. head: the scheme of lm_head,
    None to leave it alone. shrink_groups: where a group size does not divide a matrix's columns, take the largest of
    32, 64, 128 that does. exact: multiply by dequantized float32 numbers instead of a packed kernel.
    Raises QuantizationError naming the layer. Source of the convention: torchao's quantize_.
    """
    scheme, head_scheme = parse(scheme), None if head is None else parse(head)
    if scheme.needs_calibration and calibration is None:
        raise QuantizationError(f"scheme {scheme.name!r} looks at activations; give calibration tokens")
    if any(isinstance(layer, QuantizedLinear) for layer in model.modules()):
        raise QuantizationError("the model is quantized already; leave quantizing out, or load full-precision weights")
    _check_model(model, scheme)
    wanted = {name: head_scheme if name == HEAD else scheme for *_, name, _ in linear_layers(model)}
    chosen = {
        name: scheme_for(wanted[name], layer.weight, name, shrink_groups)
        for *_, name, layer in linear_layers(model)
        if wanted[name] is not None
    }
    with whole_or_not(model):
        return _change(model, scheme, chosen, calibration, exact)


def _change(
    model: Transformer, scheme: Scheme, chosen: dict[str, Scheme], calibration: Sequence[int] | None, exact: bool
) -> Report:
    """What quantize_ does once all is checked: rotation, then block by block with calibration, then what is left."""
    job = _Job(model, chosen, exact, Report(scheme.name))
    if scheme.rotate:
        rotate_(model)
    if scheme.needs_calibration:
        prepare, choose = METHODS[scheme.method]
        for_each_block(model, calibration, lambda i, block, found: job.block(i, block, found, scheme, prepare, choose))
    plain = hqq if scheme.method == "hqq" else quantize_weight
    left = [place for *place, _ in linear_layers(model) if place[2] in chosen]
    for parent, attribute, name in left:  # without the layers: a rotated matrix is let go when it has been replaced
        method = plain if name != HEAD else quantize_weight
        job.replace(parent, attribute, name, method(getattr(parent, attribute).weight, chosen[name]))
    sparse = getattr(model, "sparsity", None)
    model.layout = scheme.name if sparse is None else f"{scheme.name}, {sparse.name}"
    return job.report


def _check_model(model: Transformer, scheme: Scheme) -> None:
    """Whether the method suits every block, before any is changed, and a sparse model stays one: what a scheme would
    fill is refused, and so are matrices packed as 2:4."""
    from ..sparsity.packed import SparseLinear  # above this file in reading order, and needed for a message alone

    refuse_views(model, QuantizationError)
    if any(isinstance(layer, SparseLinear) for layer in model.modules()):
        raise QuantizationError("the model is packed 2:4, in 16 bits or more; quantize before packing, or not at all")
    if getattr(model, "sparsity", None) is not None and not scheme.keeps_zeros:
        raise QuantizationError(
            f"scheme {scheme.name} would fill the zeros of {model.sparsity.name}; use one that keeps them, such as "
            "int8, int4-g128, awq-int4-g32, fp8, mxfp4"
        )
    if scheme.method in ("awq", "smoothquant"):
        for block in model.blocks:
            list(folds(block))


# method -> (what it does to a block before rounding, how it rounds one matrix)
METHODS = {
    "gptq": (
        lambda block, found, scheme: None,
        lambda weight, found, scheme: (
            gptq(weight, found.moments, scheme) if found.tokens else quantize_weight(weight, scheme)
        ),
    ),
    "awq": (scale_block, lambda weight, found, scheme: clipped(weight, found.moments, scheme)),
    "smoothquant": (
        lambda block, found, scheme: smooth_block(block, found),
        lambda weight, found, scheme: quantize_weight(weight, scheme),
    ),
}


@dataclass
class _Job:
    """One call of quantize_: which layer gets which scheme, and what has been replaced so far."""

    model: Transformer
    chosen: dict[str, Scheme]
    exact: bool
    report: Report

    def block(self, index: int, block: nn.Module, found: dict, scheme: Scheme, prepare, choose) -> None:
        names = {name: full for name in found if (full := f"blocks.{index}.{name}") in self.chosen}
        narrowest = min((self.chosen[full].group or 0 for full in names.values()), default=0)
        prepare(block, found, scheme.with_group(narrowest or None))
        for name, full in names.items():
            parent_name, _, attribute = name.rpartition(".")
            parent = block.get_submodule(parent_name)
            if not found[name].tokens:
                self.report.unseen.append(full)
            weight = choose(getattr(parent, attribute).weight, found[name], self.chosen[full])
            self.replace(parent, attribute, full, weight)

    def replace(self, parent: nn.Module, attribute: str, name: str, weight: QuantizedWeight) -> None:
        layer = getattr(parent, attribute)
        setattr(parent, attribute, QuantizedLinear(weight, layer.bias, self.exact))
        self.report.layers += 1
        self.report.float32_bytes += 4 * weight.shape[0] * weight.shape[1]
        self.report.stored_bytes += weight.nbytes
        self.report.groups[weight.scheme.group or weight.shape[1]] += 1
