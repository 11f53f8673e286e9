"""Every refusal in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..errors import EngineError, MinillmError, OverloadedError, QueueFullError, short
from ..sampling_params import SamplingParams
from .strict_json import dumps

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 504: "timeout_error"}


class ApiError(HTTPException):
    """A refusal. `code` is a short word that programs can branch on, `param` the field it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.message, self.code, self.param = message, code, param

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(dumps(self.body), self.status_code, self.headers, "application/json")


def invalid(message: str, code: str = "invalid_value", param: str | None = None) -> ApiError:
    return ApiError(400, message, code, param)


def draining() -> ApiError:
    return ApiError(503, "the server is shutting down; ask another, or later", "draining", headers={"Retry-After": "5"})


def timed_out(seconds: float) -> ApiError:
    return ApiError(
        504, f"the request took more than {seconds:g} seconds and was aborted; ask for fewer tokens", "request_timeout"
    )


def from_engine(error: Exception) -> ApiError:
    """What the engine or the tokenizer refused, as a client is told."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        wait = max(1, math.ceil(error.retry_after_s))
        code = "overloaded" if isinstance(error, OverloadedError) else "queue_full"
        return ApiError(429, str(error), code, headers={"Retry-After": str(wait)})
    if isinstance(error, EngineError):
        return ApiError(503, str(error), "engine_stopped")
    if isinstance(error, MinillmError):
        return invalid(str(error), param=_param_of(str(error)))
    raise error


def _param_of(message: str) -> str | None:
    """SamplingParams's messages begin with the field's name."""
    word = message.partition(" ")[0].partition("[")[0]
    return word if word in SamplingParams.__dataclass_fields__ else None


def from_http(error: HTTPException, method: str, path: str) -> ApiError:
    """Starlette's own 404 and 405."""
    if error.status_code == 404:
        return ApiError(404, f"there is nothing at {short(path)}; see /openapi.json for what there is", "not_found")
    if error.status_code == 405:
        message = f"{short(path)} does not take {short(method, 20)}; see the Allow header"
        return ApiError(405, message, "method_not_allowed", headers=error.headers)
    return ApiError(error.status_code, str(error.detail), "http_error", headers=error.headers)


# What a field takes that has several forms; one sentence instead of one for each form.
_FORMS = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists, none of them empty, at most 128",
    "logit_bias": 'an object of at most 1024 token ids, as {"17": -100}, with numbers from -100 to 100',
    "stop": "a text or a list of at most 16 texts, each of 1 to 1024 characters",
    "content": 'a text, or a list of parts {"type": "text", "text": ...}',
}


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first of pydantic's complaints in one sentence that names the field, its value and what it takes."""
    error = errors[0]
    where = [part for part in error["loc"] if part != "body"]
    context = error.get("ctx") or {}
    if "code" in context:  # one of unsupported.py's
        return invalid(error["msg"], context["code"], path_text([*where, context["param"]]))
    for depth, part in enumerate(where):
        if part in _FORMS and (depth + 1 < len(where) or error["type"] != "missing"):
            name = path_text(where[: depth + 1])
            return invalid(f"{name} must be {_FORMS[part]}", "invalid_type", name)
    if not where:
        return invalid("the body must be one JSON object", "invalid_type")
    name = path_text(where)
    if error["type"] == "missing":
        return invalid(f"{name} is missing; it is required", "missing_required_parameter", name)
    wanted = error["msg"][0].lower() + error["msg"][1:]
    code = "invalid_type" if error["type"].endswith(("_type", "_parsing")) else "invalid_value"
    return invalid(f"{name} is {shown(error.get('input'))}: {wanted}", code, name)


def path_text(parts: Iterable[str | int]) -> str:
    """("messages", 0, "role") -> "messages[0].role"."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{short(part)}" if text else short(part)
    return text


def shown(value: Any) -> str:
    """The value as JSON if it is small, otherwise its kind."""
    if isinstance(value, list | dict):
        return f"a list of {len(value)}" if isinstance(value, list) else "an object"
    return short(dumps(value).decode())


def nearest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'temperature'?" or nothing."""
    close = difflib.get_close_matches(name[:60], list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""
