"""Tables that a notebook shows as HTML and everything else as aligned text; and where either goes."""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

from .units import number


class Html:
    """Something with an HTML face and a text face. Both are given; escaping is the caller's affair."""

    def __init__(self, markup: str, text: str) -> None:
        self.markup, self.text = markup, text

    def _repr_html_(self) -> str:
        return self.markup

    def __repr__(self) -> str:
        return self.text


def in_notebook() -> bool:
    """Whether a Jupyter kernel is listening. Importing IPython to ask would be slow, so only look if it is there."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")


def emit(thing: Html) -> None:
    """Display in a notebook, print elsewhere."""
    if in_notebook():
        from IPython.display import display

        display(thing)
    else:
        print(thing)


def table(rows: Sequence[Mapping | Sequence], columns: Sequence[str], caption: str = "") -> Html:
    """Rows (mappings by column name, or sequences) as a table. Numbers are formatted and set right.

    A missing or None entry shows as a dash. Raises ValueError when a row has another length than `columns`.
    """
    lines = [_cells(row, columns) for row in rows]
    numeric = [_is_numeric([line[i] for line in lines]) for i in range(len(columns))]
    shown = [[_shown(value) for value in line] for line in lines]
    return Html(_html(shown, columns, numeric, caption), _text(shown, columns, numeric, caption))


def _cells(row: Mapping | Sequence, columns: Sequence[str]) -> list[Any]:
    if isinstance(row, Mapping):
        return [row.get(column) for column in columns]
    if len(row) != len(columns):
        raise ValueError(f"a row of {len(row)} entries in a table of {len(columns)} columns: {list(row)}")
    return list(row)


def _is_numeric(values: list[Any]) -> bool:
    given = [value for value in values if value is not None]
    return bool(given) and all(isinstance(value, Number) and not isinstance(value, bool) for value in given)


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(float(value)) if isinstance(value, Number) else str(value)


def _html(shown: list[list[str]], columns: Sequence[str], numeric: list[bool], caption: str) -> str:
    style = ["text-align:right" if right else "text-align:left" for right in numeric]
    head = "".join(f'<th style="{s}">{html.escape(c)}</th>' for c, s in zip(columns, style, strict=True))
    body = "".join(
        "<tr>" + "".join(f'<td style="{s}">{html.escape(v)}</td>' for v, s in zip(line, style, strict=True)) + "</tr>"
        for line in shown
    )
    title = f"<caption><b>{html.escape(caption)}</b></caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _text(shown: list[list[str]], columns: Sequence[str], numeric: list[bool], caption: str) -> str:
    lines = [list(columns), *shown]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    lines.insert(1, ["-" * width for width in widths])
    text = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    ]
    return "\n".join([caption, *text] if caption else text)
