"""A change of a model that is made whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

_HELD = ("_modules", "_parameters", "_buffers")  # dictionaries of a module that a change writes into


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
            vars(module).update(before)
        for parameter, data in numbers:
            parameter.data = data
        raise
