"""Whether an answer is the learner's own: no ready-made version may be reachable from its code by a name."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from .core import Exercise, Failed

# The checks hold independent answers of their own, so no answer may lean on them.
ALWAYS_FORBIDDEN = ("exercises",)
_READS_A_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


def must_be_own_work(exercise: Exercise, entry: Any) -> None:
    """Raises Failed when the entry is not a function or class, or leans on a module the exercise forbids.

    Follows every function of the learner's own that the entry mentions. It catches the honest shortcut, not a
    determined fraud: whoever grades strangers should also read what they wrote.
    """
    if not callable(entry):
        raise Failed(f"{exercise.entry} is {type(entry).__name__}, not a function or class.")
    forbids = exercise.forbids + ALWAYS_FORBIDDEN
    for part in (*entry.__mro__, *vars(entry).values()) if isinstance(entry, type) else (entry,):
        module = getattr(_function(part), "__module__", None)
        if _forbidden(module, forbids):
            raise Failed(f"{exercise.entry} comes from {module}; the exercise is to write it here.")
    namespace = namespace_of(entry) or {}
    seen, todo = set(), list(_code_of(entry))
    while todo:
        code = todo.pop()
        if code in seen:
            continue
        seen.add(code)
        for module in _modules_used(code, namespace):
            if _forbidden(module, forbids):
                raise Failed(f"{exercise.entry} uses {module}; the exercise is to do without it.")
        todo += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        for value in map(namespace.get, code.co_names):
            todo += _code_of(value) if namespace_of(value) is namespace else []


def namespace_of(entry: Any) -> dict | None:
    """The globals that the learner's code runs in, of a function or of a class's methods."""
    for candidate in (entry, *vars(entry).values()) if isinstance(entry, type) else (entry,):
        function = _function(candidate)
        if isinstance(function, types.FunctionType):
            return function.__globals__
    return None


def _modules_used(code: types.CodeType, namespace: dict) -> Iterator[Any]:
    """The names of the modules that the code reaches: by import, by a global name, by attributes of either.

    Attributes are followed loosely, every name of the code on every module that it reaches: between `import minillm`
    and `.attention` the module may have passed through local variables.
    """
    reached = []
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname == "IMPORT_NAME":
            yield name
            yield from (f"{name}.{attribute}" for attribute in code.co_names)  # perhaps not imported yet
            reached += [sys.modules.get(name), sys.modules.get(name.split(".")[0])]
        elif instruction.opname in _READS_A_GLOBAL:
            reached.append(namespace.get(name))
    seen = set()
    while reached:
        value = reached.pop()
        if not isinstance(value, types.ModuleType):
            yield getattr(_function(value), "__module__", None)
        elif value not in seen:
            seen.add(value)
            yield value.__name__
            reached += map(vars(value).get, code.co_names)


def _forbidden(module: Any, prefixes: tuple[str, ...]) -> bool:
    return isinstance(module, str) and any(module == p or module.startswith(p + ".") for p in prefixes)


def _code_of(entry: Any) -> list[types.CodeType]:
    members = vars(entry).values() if isinstance(entry, type) else (entry,)
    return [f.__code__ for f in map(_function, members) if isinstance(f, types.FunctionType)]


def _function(value: Any) -> Any:
    """The function within a method, a property, a partial or a cache; the value itself when there is none."""
    if isinstance(value, functools.partial):
        return _function(value.func)
    for wrapping in ("__func__", "fget", "__wrapped__"):
        inner = getattr(value, wrapping, None)
        if isinstance(inner, types.FunctionType) and not isinstance(value, types.FunctionType):
            return inner
    return value
