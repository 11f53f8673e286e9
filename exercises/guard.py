"""The learner's function or object as the checks see it: a call that changes its arguments is told so."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from .core import Failed
from .judge import CONTAINERS, PLAIN, is_array, is_tensor, plain_copy, sketch


class Guarded:
    """The learner's function, called on copies, complaining when it changes them. Attributes pass through.

    Where it is a class, the methods of what it makes are guarded too.
    """

    def __init__(self, function: Callable, name: str, mutates: bool = False, fresh: bool = False) -> None:
        self.function, self.name, self.mutates, self.fresh = function, name, mutates, fresh
        self.calling = ""  # the call that is running, as the learner would write it
        self._defaults = plain_copy(defaults_of(function))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calling = as_written(self.name, args, kwargs)
        result = self._call(args, kwargs)
        self.calling = ""
        if isinstance(self.function, type):
            return type(self.name, (GuardedObject,), {})(result, self)  # messages name the learner's class
        return result

    def _call(self, args: tuple, kwargs: dict) -> Any:
        if self.mutates:
            return self.function(*args, **kwargs)
        mine, mine_named = plain_copy(list(args)), plain_copy(kwargs)
        result = self.function(*mine, **mine_named)
        must_be_unchanged(self.name, (list(args), kwargs), (mine, mine_named))
        if self.fresh and not _memory(result).isdisjoint(_memory((mine, mine_named))):
            raise Failed(
                f"{self.name} returned a tensor of its caller, or a view of one, where a new one is wanted. "
                "Likely mistake: no copy in the case where there is nothing to do."
            )
        return result

    def remembers(self) -> str:
        """A sentence on a default argument that calls have changed, "" where there is none.

        Not a mistake by itself, a memo may lie there; but where an answer is wrong it is the likely reason.
        """
        for name, value in defaults_of(self.function).items():
            if _unequal(self._defaults.get(name), value):
                return (
                    f" Likely reason: the default of {name} has changed from call to call. "
                    f"Python makes a default once, for all calls; begin with {name}=None and make the value inside."
                )
        return ""

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.function, attribute)


class GuardedObject:
    """What a learner's class made. Its methods get the very arguments, so that one that keeps them can be found out."""

    def __init__(self, target: Any, maker: Guarded) -> None:
        self.target, self._maker = target, maker

    def __getattr__(self, attribute: str) -> Callable:
        name = f"{self._maker.name}.{attribute}"
        method = getattr(self.target, attribute, None)
        if not callable(method):
            there = hasattr(self.target, attribute)
            raise Failed(f"{name} is {type(method).__name__}, must be a method." if there else f"There is no {name}.")

        def call(*args: Any, **kwargs: Any) -> Any:
            self._maker.calling = as_written(name, args, kwargs)
            before = plain_copy((args, kwargs))
            result = method(*args, **kwargs)
            if not self._maker.mutates:
                must_be_unchanged(name, before, (args, kwargs))
            self._maker.calling = ""
            return result

        return call


def defaults_of(entry: Any) -> dict[str, Any]:
    """Parameters with a default that can change, of a function or of a class's methods."""
    members = vars(entry).values() if isinstance(entry, type) else (entry,)
    parameters = [
        parameter
        for member in members
        if isinstance(member, types.FunctionType)
        for parameter in inspect.signature(member).parameters.values()
    ]
    return {p.name: p.default for p in parameters if isinstance(p.default, CONTAINERS) or is_tensor(p.default)}


def as_written(name: str, args: tuple, kwargs: dict) -> str:
    """A call in a few characters."""
    return f"{name}({', '.join([*map(sketch, args), *(f'{key}={sketch(value)}' for key, value in kwargs.items())])})"


def must_be_unchanged(name: str, before: Any, after: Any) -> None:
    if _unequal(before, after):
        raise Failed(
            f"{name} changed an argument that belongs to its caller. "
            "Likely mistake: editing in place; copy first, or build a new value."
        )


def _unequal(before: Any, after: Any) -> bool:
    if type(before) is not type(after):
        return True
    if is_tensor(before) and (before.dtype, before.requires_grad) != (after.dtype, after.requires_grad):
        return True
    if is_tensor(before) or is_array(before):
        return before.shape != after.shape or (before.tolist() != after.tolist() and not _both_nan(before, after))
    if isinstance(before, (list, tuple)):
        return len(before) != len(after) or any(map(_unequal, before, after))
    if isinstance(before, dict):
        return before.keys() != after.keys() or any(_unequal(before[key], after[key]) for key in before)
    return isinstance(before, (*PLAIN, *CONTAINERS, bytearray)) and before != after and before == before


def _both_nan(before: Any, after: Any) -> bool:
    return repr(before.tolist()) == repr(after.tolist())


def _memory(value: Any) -> set[int]:
    """Where the tensors within plain data lie."""
    return {tensor.untyped_storage().data_ptr() for tensor in _tensors(value) if tensor.numel()}


def _tensors(value: Any) -> Iterator[Any]:
    if is_tensor(value) and not value.is_meta and str(value.layout) == "torch.strided":
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
