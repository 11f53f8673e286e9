"""Tools for writing checks: comparisons that cannot be fooled by an object that equals everything, and safe copies.

A tensor or an array is recognised by what it can do, so that chapters without torch do not import it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .core import Failed

_PLAIN = (bool, int, float, str, bytes, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset)


def is_tensor(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "torch" and hasattr(value, "detach")


def is_array(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "numpy" and hasattr(value, "tolist")


def plain_copy(value: Any) -> Any:
    """A copy of plain data, containers, tensors and arrays; anything else (a model, a config) as it is."""
    if is_tensor(value):
        return value.detach().clone()
    if is_array(value):
        return value.copy()
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(plain_copy(item) for item in value)
    if type(value) is dict:
        return {key: plain_copy(item) for key, item in value.items()}
    if type(value) is bytearray:
        return bytearray(value)
    return value


def as_plain(value: Any) -> Any:
    """Lists, numbers and strings only, for comparison. Raises Failed on a type that is neither."""
    if is_tensor(value) or is_array(value):
        return value.tolist()
    if type(value) in (list, tuple):
        return [as_plain(item) for item in value]
    if type(value) is dict:
        return {as_key(key): as_plain(item) for key, item in value.items()}
    if type(value) in (set, frozenset):
        return {as_key(item) for item in value}
    if type(value) in _PLAIN:
        return value
    raise Failed(f"an object of type {type(value).__name__} came back where plain data was expected.")


def as_key(value: Any) -> Any:
    """`as_plain` for what must be hashable: a dictionary's key, a member of a set."""
    plain = as_plain(value)
    return tuple(as_key(item) for item in plain) if isinstance(plain, list) else plain


def short(value: Any, limit: int = 90) -> str:
    """repr, cut in the middle."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 25]} … {text[-20:]}"


def sketch(value: Any) -> str:
    """An argument in a few characters: a tensor or an array by its shape, plain data by itself, the rest by type."""
    if is_tensor(value) or is_array(value):
        return f"<{tuple(value.shape)}>"
    if isinstance(value, (*_PLAIN, *_CONTAINERS)):
        return short(value, 60)
    return f"<{type(value).__name__}>"


def _unequal(before: Any, after: Any) -> bool:
    if type(before) is not type(after):
        return True
    if is_tensor(before) or is_array(before):
        return before.shape != after.shape or (before.tolist() != after.tolist() and not _both_nan(before, after))
    if isinstance(before, (list, tuple)):
        return len(before) != len(after) or any(map(_unequal, before, after))
    if isinstance(before, dict):
        return before.keys() != after.keys() or any(_unequal(before[key], after[key]) for key in before)
    return isinstance(before, (*_PLAIN, *_CONTAINERS, bytearray)) and before != after and before == before


def _both_nan(before: Any, after: Any) -> bool:
    return repr(before.tolist()) == repr(after.tolist())


class Guarded:
    """The learner's function, called on copies, complaining when it changes them. Attributes pass through."""

    def __init__(self, function: Callable, name: str, mutates: bool = False) -> None:
        self.function, self.name, self.mutates = function, name, mutates
        self.calling = ""  # the call that is running, as the learner would write it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        named = [f"{key}={sketch(value)}" for key, value in kwargs.items()]
        self.calling = f"{self.name}({', '.join([*map(sketch, args), *named])})"
        result = self._call(args, kwargs)
        self.calling = ""
        return result

    def _call(self, args: tuple, kwargs: dict) -> Any:
        if self.mutates:
            return self.function(*args, **kwargs)
        mine, mine_named = plain_copy(list(args)), plain_copy(kwargs)
        result = self.function(*mine, **mine_named)
        if _unequal(list(args), mine) or _unequal(kwargs, mine_named):
            raise Failed(
                f"{self.name} changed an argument that belongs to its caller. "
                "Likely mistake: editing in place; copy first, or build a new value."
            )
        return result

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.function, attribute)


class Judge:
    """Handed to every check. Each method raises Failed with `otherwise`, which names the likely mistake."""

    copy = staticmethod(plain_copy)

    def true(self, condition: bool, otherwise: str) -> None:
        """`condition` must be a real bool: an object that merely claims to be true does not pass."""
        if condition is not True and not (type(condition).__name__ in ("bool_", "bool") and bool(condition)):
            raise Failed(otherwise)

    def type(self, got: Any, kind: type | tuple[type, ...], what: str = "the result") -> None:
        """`got` is an instance of exactly `kind` or a subclass; what came back instead is named."""
        if not issubclass(type(got), kind):
            wanted = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            hint = " Likely mistake: no return statement." if got is None else ""
            raise Failed(f"{what} is {type(got).__name__}, must be {wanted}.{hint}")

    def equal(self, got: Any, want: Any, otherwise: str = "") -> None:
        """Exact equality of plain data; lists equal tuples, tensors equal nested lists of the same numbers."""
        if got is None and want is not None:
            raise Failed("nothing came back. Likely mistake: no return statement.")
        if as_plain(got) != as_plain(want):
            raise Failed(_joined(f"got {short(got)}, expected {short(want)}", otherwise))

    def close(self, got: Any, want: Any, otherwise: str = "", rtol: float = 1e-5, atol: float = 1e-6) -> None:
        """Numbers or tensors of one shape, each within `atol + rtol * |want|`. NaN is never close."""
        if got is None:
            raise Failed("nothing came back. Likely mistake: no return statement.")
        if is_tensor(want) and not is_tensor(got):
            raise Failed(f"the result is {type(got).__name__}, must be a tensor.")
        if is_tensor(want) and tuple(got.shape) != tuple(want.shape):
            raise Failed(_joined(f"shape {tuple(got.shape)}, expected {tuple(want.shape)}", otherwise))
        mine, theirs = _flat(as_plain(got)), _flat(as_plain(want))
        if len(mine) != len(theirs):
            raise Failed(_joined(f"{len(mine)} numbers, expected {len(theirs)}", otherwise))
        wrong = [i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if not _near(a, b, rtol, atol)]
        if wrong:
            i = wrong[0]
            where = f" at position {i} of {len(mine)} ({len(wrong)} differ)" if len(mine) > 1 else ""
            raise Failed(_joined(f"got {mine[i]:.6g}, expected {theirs[i]:.6g}{where}", otherwise))

    def raises(self, call: Callable[[], Any], kinds: type | tuple[type, ...], otherwise: str) -> None:
        """`call()` must raise one of `kinds`."""
        try:
            call()
        except NotImplementedError:
            raise
        except kinds:
            return
        raise Failed(otherwise)


def _joined(fact: str, otherwise: str) -> str:
    """One sentence or two: what goes on in lower case, as "for f(3). Likely mistake: …", belongs to the fact."""
    goes_on = otherwise[:1].islower() or otherwise[:1] == "("
    return f"{fact}{', ' if goes_on else '. '}{otherwise}".strip()


def _flat(value: Any) -> list[float]:
    if isinstance(value, list):
        return [number for item in value for number in _flat(item)]
    if not isinstance(value, (int, float)):
        raise Failed(f"{short(value)} came back where a number was expected.")
    return [value]


def _near(got: float, want: float, rtol: float, atol: float) -> bool:
    if isinstance(got, complex) or math.isinf(want) or math.isinf(got):
        return got == want and type(got) is type(want)
    return abs(got - want) <= atol + rtol * abs(want)
