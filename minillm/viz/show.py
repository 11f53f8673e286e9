"""`show(obj)`: print source from the module it lives in, so that what is shown is what is shipped."""

from __future__ import annotations

import html
import inspect
import textwrap
from pathlib import Path
from typing import Any

from ..errors import MinillmError
from .tables import Html

PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = (PACKAGE, PACKAGE.parent / "kernels")


_PRE = "white-space:pre;overflow-x:auto;font-size:12px;line-height:1.4"  # long lines scroll, they do not wrap


class ShowError(MinillmError):
    """Something that is not source of this project."""


def show(obj: Any) -> Html:
    """The source of a function, class, method or module, with its file and line numbers.

    Raises ShowError for anything that does not come from a file of `minillm` or `kernels`: code pasted into a notebook
    is not what runs.
    """
    target, name = _source_object(obj)
    path = _shipped_file(target, name)
    lines, first = inspect.getsourcelines(target)
    first = max(first, 1)
    where = f"{path.relative_to(PACKAGE.parent).as_posix()}, lines {first}–{first + len(lines) - 1}"
    code = textwrap.dedent("".join(lines)).rstrip()
    return Html(_markup(code, first, where), _text(code, first, where))


def _source_object(obj: Any) -> tuple[Any, str]:
    """Follow properties, decorators and compiled kernels (`.fn`) to what was written in the file."""
    obj = getattr(obj, "fget", None) or obj
    obj = getattr(obj, "__func__", obj)
    if not (inspect.isroutine(obj) or inspect.isclass(obj) or inspect.ismodule(obj)):
        obj = getattr(obj, "fn", obj)
    obj = inspect.unwrap(obj) if callable(obj) else obj
    name = getattr(obj, "__qualname__", getattr(obj, "__name__", repr(type(obj).__name__)))
    return obj, name


def _shipped_file(obj: Any, name: str) -> Path:
    try:
        path = Path(inspect.getsourcefile(obj) or "").resolve()
    except TypeError:
        raise ShowError(f"{name} has no source: show takes a function, class, method or module") from None
    if not path.is_file() or not any(path.is_relative_to(root) for root in SHIPPED):
        raise ShowError(f"{name} is not from minillm or kernels; show prints only what is shipped")
    return path


def _text(code: str, first: int, where: str) -> str:
    lines = code.split("\n")
    width = len(str(first + len(lines)))
    return "\n".join([f"# {where}", *(f"{first + i:>{width}}  {line}".rstrip() for i, line in enumerate(lines))])


def _markup(code: str, first: int, where: str) -> str:
    """Highlighted when pygments is there (it comes with Jupyter), plain otherwise."""
    head = f'<div style="color:#5f6b7a;font-size:90%"><code>{html.escape(where)}</code></div>'
    try:
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import PythonLexer
    except ImportError:
        return f"{head}<pre>{html.escape(code)}</pre>"
    formatter = HtmlFormatter(style="friendly", noclasses=True, linenos="inline", linenostart=first, prestyles=_PRE)
    return head + highlight(code, PythonLexer(stripnl=False), formatter)
