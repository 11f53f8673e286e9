"""sparsify_(model, method): weights of every matrix set to zero, in place.

The embedding and the head stay dense, as in the papers of Wanda and SparseGPT. Zeros alone change neither the model's
size nor its speed; `pack_` stores a 2:4 model as half its values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from ..errors import SparsityError
from ..layers import Linear
from ..quantization.apply import HEAD, linear_layers
from ..quantization.calibration import InputStatistics, for_each_block
from ..quantization.linear import QuantizedLinear
from ..quantization.whole import refuse_views, whole_or_not
from ..transformer import Transformer
from .methods import magnitude, sparsegpt, wanda
from .packed import SparseLinear, pack_2_4, packed_bytes
from .pattern import Sparsity, parse


@dataclass
class Report:
    """What sparsify_ did. Bytes are those of the matrices it changed; `unseen` names those that no calibration token
    reached (experts), where it went by magnitude."""

    sparsity: Sparsity
    layers: int = 0
    weights: int = 0
    zeros: int = 0
    stored_bytes: int = 0
    packed_bytes_16: int = 0
    unseen: list[str] = field(default_factory=list)

    @property
    def fraction(self) -> float:
        """Share of zeros, counted."""
        return self.zeros / self.weights

    @property
    def float32_bytes(self) -> int:
        return 4 * self.weights

    @property
    def packed_bytes(self) -> int | None:
        """What the 2:4 format takes with values of 16 bits; None for a pattern it cannot hold."""
        return self.packed_bytes_16 if self.sparsity.pattern == "2:4" else None

    def count(self, weight: Tensor) -> None:
        self.layers += 1
        self.weights += weight.numel()
        self.zeros += int((weight == 0).sum())
        self.stored_bytes += weight.nbytes
        self.packed_bytes_16 += packed_bytes(*weight.shape)


def sparsify_(
    model: Transformer,
    method: str | Sparsity,
    sparsity: float | None = None,
    pattern: str | None = None,
    calibration: Sequence[int] | None = None,
    blocks: Sequence[int] | None = None,
) -> Report:
    """Sets weights of every Linear but the head to zero, or changes nothing: an error or Ctrl-C on the way leaves the
    model as it was.

    method: "magnitude", "wanda" or "sparsegpt" with sparsity=0.5 or pattern="2:4" (or "4:8"); or a whole name such as
    "wanda-2:4". calibration: token ids for wanda and sparsegpt; never the text that quality is then measured on.
    blocks: the numbers of the blocks to change, all of them by default.
    Raises SparsityError naming the layer; QuantizationError for calibration tokens that the model does not know.
    """
    wanted = _wanted(method, sparsity, pattern)
    if wanted.needs_calibration and calibration is None:
        raise SparsityError(f"{wanted.name} looks at activations; give calibration tokens")
    chosen = dict(_chosen(model, wanted, blocks))
    report = Report(wanted)
    with whole_or_not(model):
        if wanted.needs_calibration:
            for_each_block(model, calibration, lambda i, _, found: _sparsify_block(i, found, chosen, report))
        else:
            for layer in chosen.values():
                _set(layer, magnitude(layer.weight, wanted), report)
        model.layout, model.sparsity = f"{model.layout}, {wanted.name}", wanted
    return report


def _wanted(method: str | Sparsity, sparsity: float | None, pattern: str | None) -> Sparsity:
    if sparsity is None and pattern is None:
        return parse(method)
    if sparsity is not None and pattern is not None:
        raise SparsityError(f"sparsity {sparsity} and pattern {pattern} say different things; give one of them")
    return Sparsity(method, 0.5 if sparsity is None else sparsity, pattern)


def _chosen(model: Transformer, wanted: Sparsity, blocks: Sequence[int] | None) -> Iterator[tuple[str, Linear]]:
    """(name, layer) of what is to be changed, each checked."""
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            raise SparsityError(f"{name} is quantized; sparsify first, then quantize: zero is a code in every format")
        if isinstance(layer, SparseLinear):
            raise SparsityError(f"{name} is packed 2:4 already; load the model again to sparsify it otherwise")
    refuse_views(model, SparsityError)
    count = len(model.blocks)
    if blocks is not None and (wrong := [i for i in blocks if i not in range(count)]):
        raise SparsityError(f"there is no block {wrong[0]}; the model has blocks 0 to {count - 1}")
    for *_, name, layer in linear_layers(model):
        if name == HEAD or (blocks is not None and int(name.split(".")[1]) not in blocks):
            continue
        if layer.weight.shape[1] % wanted.group:
            raise SparsityError(
                f"{name} has {layer.weight.shape[1]} columns, which groups of {wanted.group} ({wanted.pattern}) do not "
                "divide; give a share of zeros instead, such as sparsity=0.5"
            )
        if not layer.weight.isfinite().all():
            raise SparsityError(f"{name} holds NaN or infinity; get the checkpoint again")
        yield name, layer


def _sparsify_block(index: int, found: dict[str, InputStatistics], chosen: dict[str, Linear], report: Report) -> None:
    for name, statistics in found.items():
        if (layer := chosen.get(full := f"blocks.{index}.{name}")) is None:
            continue
        if statistics.tokens == 0:
            report.unseen.append(full)
            weight = magnitude(layer.weight, report.sparsity)
        else:
            method = {"wanda": wanda, "sparsegpt": sparsegpt}[report.sparsity.method]
            weight = method(layer.weight, statistics.moments, report.sparsity)
        _set(layer, weight, report)


def _set(layer: Linear, weight: Tensor, report: Report) -> None:
    layer.weight.data = weight
    report.count(weight)


def pack_(model: Transformer) -> int:
    """Every Linear but the head stored as 2:4; nothing is changed if one of them is not. Returns the bytes they take.

    For a GPU with sparse tensor cores, or to keep a model in less memory: on a CPU it runs slower so.
    Raises SparsityError.
    """
    refuse_views(model, SparsityError)
    layers = [found for found in linear_layers(model) if found[2] != HEAD]
    if not layers:
        raise SparsityError("there is no Linear to pack; load the model with dtype float32 and sparsify it first")
    packed = [SparseLinear(pack_2_4(layer.weight, name), layer.bias) for *_, name, layer in layers]
    with whole_or_not(model):
        for (parent, attribute, *_), layer in zip(layers, packed, strict=True):
            setattr(parent, attribute, layer)
    return sum(layer.stored_bytes for layer in packed)


def is_packed(model: nn.Module) -> bool:
    return any(isinstance(layer, SparseLinear) for layer in model.modules())
