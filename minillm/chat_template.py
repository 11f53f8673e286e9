"""Chat templates: a Jinja program inside the model file that turns messages into the text the model was trained on.

A template is code that came with the weights, so it runs in Jinja's immutable sandbox: no attribute of Python
objects, no change to its inputs. The sandbox does not bound time or memory. Names and options are those of
transformers' `apply_chat_template`, so the same template gives the same text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from .errors import TokenizerError


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training masks; to a reader it is only its contents."""

    tags = {"generation"}  # noqa: RUF012 Jinja's own protocol

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt text of a conversation.

    messages: dicts with "role" and "content" (text; absent only beside "tool_calls"). `variables` are further names
    for the template: bos_token, tools, enable_thinking. Raises TokenizerError for malformed messages and for whatever
    goes wrong inside the template, its own `raise_exception` included.
    """
    check_messages(messages)
    names = {"tools": None, "documents": None, **(variables or {})}
    names |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
    try:
        return _compile(template).render(**names)
    except Exception as error:  # a template can fail in any way that Python can
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TokenizerError(f"chat template failed: {reason}; check the messages, or pass raw text instead") from None


def check_messages(messages: Any) -> None:
    """Raises TokenizerError naming the first message that is not a dict with a role and text."""
    if not isinstance(messages, list | tuple) or not messages:
        raise TokenizerError("messages must be a non-empty list of dicts with role and content")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise TokenizerError(f"message {i} is {type(message).__name__}; it must be a dict with role and content")
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise TokenizerError(f"message {i} has no role; give one such as system, user or assistant")
        if message.get("content") is None and message.get("tool_calls"):
            continue
        if not isinstance(message.get("content"), str):
            raise TokenizerError(f"message {i} ({message['role']}) has no text; its content must be a string")


def guard(value: Any, special: Iterable[str]) -> tuple[Any, dict[int, str]]:
    """A copy of `value` in which no string spells a special token, and the table that undoes it (`str.translate`).

    A message that reads "<|im_end|>" would otherwise end the user's turn and go on as the system. Each such spelling
    has its first character replaced by a Unicode noncharacter that occurs nowhere in `value`; the caller renders,
    finds the special tokens of the template, and translates the rest back.
    """
    used: set[str] = set()
    _map_text(value, lambda text: used.update(text) or text)
    free = [chr(code) for code in range(0xFDD0, 0xFDF0) if chr(code) not in used]
    firsts = sorted({token[0] for token in special})
    if len(firsts) > len(free):
        raise TokenizerError("messages hold too many of the noncharacters U+FDD0 to U+FDEF; remove them")
    marks = dict(zip(firsts, free, strict=False))

    def hide(text: str) -> str:
        for token in special:
            while token in text:
                text = text.replace(token, marks[token[0]] + token[1:])
        return text

    return _map_text(value, hide), {ord(mark): first for first, mark in marks.items()}


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_text(key, change): _map_text(item, change) for key, item in value.items()}
    return [_map_text(item, change) for item in value] if isinstance(value, list | tuple) else value


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's own prints nothing for a forbidden attribute and fails one step later; this one says so at once."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"a template may not read {attribute!r} of {type(obj).__name__}")


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
):
    """Jinja's own filter escapes HTML, which a prompt must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
