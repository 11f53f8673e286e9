"""A change of a model that is made whole or not at all, and never behind the back of what holds its matrices too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from ..errors import MinillmError
from ..transformer import Transformer

_HELD = ("_modules", "_parameters", "_buffers")  # dictionaries of a module that a change writes into


def refuse_views(model: Transformer, error: type[MinillmError]) -> None:
    """Raises `error` for a model whose matrices something else holds too, which would go on with the old ones."""
    from ..compilation import CompiledTransformer  # both below this file in reading order
    from ..moe_offload import OffloadedExperts

    if isinstance(model, CompiledTransformer):
        raise error("the model is compiled and keeps the matrices that it was compiled with; change it first")
    if any(isinstance(module, OffloadedExperts) for module in model.modules()):
        raise error("the model's experts are offloaded, and the device keeps copies; change it before offload_experts")


@contextlib.contextmanager
def whole_or_not(model: nn.Module) -> Iterator[None]:
    """`with whole_or_not(model):` whatever ends the block early, Ctrl-C included, leaves the model as it was: the same
    layers, parameters, buffers and attributes, holding the same numbers.

    Nothing is copied. What the block replaces is kept until it ends, so that the peak is the old matrices and the new
    ones; and the block must put new tensors in the place of old ones (`p.data = ...`), never write into them.
    """
    modules = [(m, vars(m) | {name: dict(vars(m)[name]) for name in _HELD}) for m in model.modules()]
    numbers = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for module, before in modules:
            for added in vars(module).keys() - before.keys():
                del vars(module)[added]
            vars(module).update(before)
        for parameter, data in numbers:
            parameter.data = data
        raise
