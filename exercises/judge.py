"""Tools for writing checks: comparisons that cannot be fooled by an object that equals everything, and safe copies.

`guard.py` uses them to watch over what a learner's code does to its arguments.

A tensor or an array is recognised by what it can do, so that chapters without torch do not import it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .core import Failed

PLAIN = (bool, int, float, str, bytes, type(None))
CONTAINERS = (list, tuple, dict, set, frozenset)
DEEPEST = 50

_LIKELY = {  # what makes a result of this type, other than an error in the answer itself
    "NoneType": "no return statement",
    "generator": "yield where return is meant, or round brackets around a comprehension",
    "coroutine": "async before def",
    "function": "a function returned, not called",
    "type": "a class returned, not an instance of it",
    "ellipsis": "the ... of a stub left where the answer belongs",
}


def is_tensor(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "torch" and hasattr(value, "detach")


def is_array(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "numpy" and hasattr(value, "tolist")


def plain_copy(value: Any) -> Any:
    """A copy of plain data, containers, tensors and arrays; anything else (a model, a config) as it is."""
    if is_tensor(value):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if is_array(value):
        return value.copy()
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(plain_copy(item) for item in value)
    if type(value) is dict:
        return {key: plain_copy(item) for key, item in value.items()}
    if type(value) is bytearray:
        return bytearray(value)
    return value


def as_plain(value: Any, depth: int = 0) -> Any:
    """Lists, numbers and strings only, for comparison. Raises Failed on a type that is neither, or on endless lists."""
    if depth > DEEPEST:
        raise Failed(f"lists within lists came back, more than {DEEPEST} deep. Likely mistake: a list put into itself.")
    if is_tensor(value):
        return _ordinary(value).tolist()
    if is_array(value):
        return value.tolist()
    if type(value) in (list, tuple):
        return [as_plain(item, depth + 1) for item in value]
    if type(value) is dict:
        return {as_key(key): as_plain(item, depth + 1) for key, item in value.items()}
    if type(value) in (set, frozenset):
        return {as_key(item) for item in value}
    if type(value) in PLAIN:
        return value
    raise Failed(f"an object of type {type(value).__name__} came back where plain data was expected.")


def _ordinary(tensor: Any) -> Any:
    """The tensor itself; raises Failed where its numbers cannot be read one by one."""
    kind = str(tensor.layout).removeprefix("torch.")
    if tensor.is_meta or kind != "strided":
        raise Failed(f"a {'meta' if tensor.is_meta else kind} tensor came back, must be an ordinary one with numbers.")
    return tensor


def as_key(value: Any) -> Any:
    """`as_plain` for what must be hashable: a dictionary's key, a member of a set."""
    plain = as_plain(value)
    return tuple(as_key(item) for item in plain) if isinstance(plain, list) else plain


def short(value: Any, limit: int = 90) -> str:
    """repr on one line, cut in the middle; a tensor or an array as the numbers in it."""
    numbers = is_array(value) or (is_tensor(value) and not value.is_meta and str(value.layout) == "torch.strided")
    text = " ".join(repr(value.tolist() if numbers else value).split())
    return text if len(text) <= limit else f"{text[: limit - 25]} … {text[-20:]}"


def sketch(value: Any) -> str:
    """An argument in a few characters: a tensor or an array by its shape, plain data by itself, the rest by type."""
    if is_tensor(value) or is_array(value):
        return f"<{tuple(value.shape)}>"
    if isinstance(value, (*PLAIN, *CONTAINERS)):
        return short(value, 60)
    return f"<{type(value).__name__}>"


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
            name = type(got).__name__
            hint = f" Likely mistake: {_LIKELY[name]}." if name in _LIKELY else ""
            raise Failed(f"{what} is {name}, must be {wanted}.{hint}")

    def equal(self, got: Any, want: Any, otherwise: str = "") -> None:
        """Exact equality of plain data; lists equal tuples, tensors equal nested lists of the same numbers."""
        if got is None and want is not None:
            raise Failed("nothing came back. Likely mistake: no return statement.")
        mine, theirs = as_plain(got), as_plain(want)
        if mine != theirs:
            fact = f"got {short(got)}, expected {short(want)}"
            raise Failed(_joined(fact + _first_difference(got, want), otherwise))

    def parts(self, got: Any, *names: str) -> tuple | list:
        """`got`, after making sure that it is a tuple or list of as many parts as there are names."""
        listed = f"{', '.join(names[:-1])} and {names[-1]}"
        self.type(got, (tuple, list))
        if len(got) != len(names):
            raise Failed(f"the result has {len(got)} part{'s' * (len(got) != 1)}, must be {len(names)}: {listed}.")
        return got

    def close(self, got: Any, want: Any, otherwise: str = "", rtol: float = 1e-5, atol: float = 1e-6) -> None:
        """Numbers, lists or tensors of one shape, each within `atol + rtol * |want|`. NaN is never close."""
        if got is None:
            raise Failed("nothing came back. Likely mistake: no return statement.")
        if is_tensor(want) and not is_tensor(got):
            raise Failed(f"the result is {type(got).__name__}, must be a tensor.")
        if is_tensor(want) and tuple(got.shape) != tuple(want.shape):
            raise Failed(_joined(f"shape {tuple(got.shape)}, expected {tuple(want.shape)}", otherwise))
        mine, theirs = as_plain(got), as_plain(want)
        if isinstance(mine, list) != isinstance(theirs, list):
            kinds = ("a list came back, must be one number", "one number came back, must be a list")
            raise Failed(_joined(f"{kinds[isinstance(theirs, list)]}: got {short(got)}", otherwise))
        same_form = _form(mine) == _form(theirs)
        mine, theirs = _flat(mine), _flat(theirs)
        if len(mine) != len(theirs):
            raise Failed(_joined(f"{len(mine)} numbers, expected {len(theirs)}", otherwise))
        if not same_form:
            raise Failed(_joined(f"lists of other lengths: got {short(got)}, expected {short(want)}", otherwise))
        wrong = [i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if not _near(a, b, rtol, atol)]
        if wrong:
            i = wrong[0]
            where = f" at position {i} of {len(mine)} ({len(wrong)} differ)" if len(mine) > 1 else ""
            raise Failed(_joined(f"got {_figure(mine[i])}, expected {_figure(theirs[i])}{where}", otherwise))

    def raises(self, call: Callable[[], Any], kinds: type | tuple[type, ...], otherwise: str) -> None:
        """`call()` must raise one of `kinds`."""
        try:
            call()
        except NotImplementedError:
            raise
        except kinds:
            return
        except Exception as error:
            wanted = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
            raise Failed(f"{type(error).__name__} was raised where {wanted} is wanted: {error}.") from error
        raise Failed(otherwise)


def _joined(fact: str, otherwise: str) -> str:
    """One sentence or two: what goes on in lower case, as "for f(3). Likely mistake: …", belongs to the fact."""
    goes_on = otherwise[:1].islower() or otherwise[:1] == "("
    return f"{fact}{', ' if goes_on else '. '}{otherwise}".strip()


def _first_difference(got: Any, want: Any) -> str:
    """Where two long lists differ, if what `short` leaves of them does not show it."""
    if short(got) != short(want) or not isinstance(as_plain(got), (list, str, bytes)):
        return ""
    for i, (mine, theirs) in enumerate(zip(as_plain(got), as_plain(want), strict=False)):
        if mine != theirs:
            return f" (they differ first at position {i}: {short(mine, 40)}, expected {short(theirs, 40)})"
    return ""


def _figure(number: float) -> str:
    try:
        return f"{number:.6g}"
    except OverflowError:  # a whole number that no float holds
        return short(number, 40)


def _form(value: Any) -> list | None:
    """Lists within lists without what is in them."""
    return [_form(item) for item in value] if isinstance(value, list) else None


def _flat(value: Any) -> list[float]:
    if isinstance(value, list):
        return [number for item in value for number in _flat(item)]
    if not isinstance(value, (int, float)):
        raise Failed(f"{short(value)} came back where a number was expected.")
    return [value]


def _near(got: float, want: float, rtol: float, atol: float) -> bool:
    try:
        if math.isinf(want) or math.isinf(got):
            return got == want and type(got) is type(want)
        return abs(got - want) <= atol + rtol * abs(want)
    except OverflowError:  # a whole number that no float holds is compared as it is
        return got == want
