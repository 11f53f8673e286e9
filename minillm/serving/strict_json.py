"""JSON as the standard has it. Python's own reader also takes NaN, repeated keys and numbers that overflow."""

from __future__ import annotations

import json
import math
from typing import Any

_DEPTH = 64  # lists and objects within each other; Python's own limit is whatever a library has last set it to
_DIGITS = 40  # no field takes more, and reading thousands of digits costs quadratic time


class JSONError(ValueError):
    """Not JSON, or JSON that no field can mean."""


def loads(data: bytes) -> Any:
    """The value of a body. Raises JSONError with the reason, for whatever the bytes are."""
    try:
        value = json.loads(
            data.decode("utf-8"),
            parse_constant=_constant,
            parse_float=_float,
            parse_int=_int,
            object_pairs_hook=_object,
        )
        _check_depth(value)
        if b"\\u" in data:  # an escape can spell half a surrogate pair, which no UTF-8 text can hold
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise JSONError(f"the body is not UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError:
        raise JSONError("a string of the body holds half a surrogate pair; escape characters as whole pairs") from None
    except RecursionError:
        raise JSONError(f"the body is nested more than {_DEPTH} levels deep") from None
    except json.JSONDecodeError as error:
        raise JSONError(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    return value


def dumps(value: Any) -> bytes:
    """UTF-8 bytes without spaces. Raises ValueError for NaN and infinities: whoever sends numbers mends them."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")


def _check_depth(value: Any) -> None:
    """Raises RecursionError, as Python's own reader does where its limit is the lower one."""
    level = [value]
    for _ in range(_DEPTH + 1):
        nodes = [node for node in level if isinstance(node, (list, dict))]
        if not nodes:
            return
        level = [child for node in nodes for child in (node.values() if isinstance(node, dict) else node)]
    raise RecursionError


def _constant(name: str) -> None:
    raise JSONError(f"the body holds {name}, which JSON has no number for")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise JSONError(f"the body holds the number {text[:20]}, which is too large")
    return value


def _int(text: str) -> int:
    if len(text) > _DIGITS:
        raise JSONError(f"the body holds a whole number of {len(text)} digits, which is too large")
    return int(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise JSONError(f"the key {twice[:60]!a} occurs twice in one object")
    return found
