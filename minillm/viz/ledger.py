"""Predictions and measurements, kept side by side.

`predict` before a cell runs, `reveal` after it, and `ledger()` at the chapter's end shows every pair and its residual.
A prediction made after its measurement is refused: it would be a memory, not a prediction.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass

from ..errors import MinillmError
from .tables import Html, emit, table
from .units import human, number, scale


class LedgerError(MinillmError):
    """A prediction or measurement out of order, or not a number."""


@dataclass
class Entry:
    """One pair. `residual` is measured minus predicted, in `unit`; `ratio` is measured over predicted."""

    name: str
    predicted: float
    unit: str
    why: str = ""
    measured: float | None = None

    @property
    def residual(self) -> float | None:
        return None if self.measured is None else self.measured - self.predicted

    @property
    def ratio(self) -> float | None:
        return None if self.measured is None or self.predicted == 0 else self.measured / self.predicted

    def cells(self) -> list[str]:
        """Name, prediction, measurement, ratio, residual: both figures under one prefix, so that they compare."""
        if self.measured is None:
            return [self.name, human(self.predicted, self.unit), "not measured", "–", "–"]
        divisor, unit = scale([self.predicted, self.measured], self.unit)
        predicted, measured, residual = (v / divisor for v in (self.predicted, self.measured, self.residual))
        ratio = "–" if self.ratio is None else f"× {self.ratio:.3g}"
        sign = "+" if residual > 0 else ""
        share = "" if self.predicted == 0 else f" ({_percent(100 * self.residual / abs(self.predicted))} %)"
        difference = f"{sign}{residual:.4g}" if residual else "0"
        return [
            self.name,
            f"{number(predicted)} {unit}".strip(),
            f"{number(measured)} {unit}".strip(),
            ratio,
            f"{difference} {unit}".strip() + share,
        ]


COLUMNS = ("what", "predicted", "measured", "ratio", "residual")


class Ledger:
    """The pairs of one chapter, in the order of their predictions."""

    def __init__(self, chapter: str = "") -> None:
        self.chapter, self.entries = chapter, {}

    def predict(self, name: str, value: float, unit: str, why: str = "") -> Entry:
        """Raises LedgerError when `name` has been measured already, or the value is not a finite number."""
        known = self.entries.get(name)
        if known is not None and known.measured is not None:
            raise LedgerError(
                f"{name!r} has been measured already, so this is no prediction; "
                "start_chapter(...) begins a new ledger, or use another name"
            )
        self.entries[name] = Entry(name, _finite(name, value), unit, why)
        return self.entries[name]

    def reveal(self, name: str, measured: float) -> Entry:
        """Raises LedgerError when nothing was predicted under `name`. Measuring again replaces the measurement."""
        if name not in self.entries:
            known = ", ".join(repr(entry) for entry in self.entries) or "none"
            raise LedgerError(f"nothing was predicted for {name!r}; predict(...) it first (predicted so far: {known})")
        self.entries[name].measured = _finite(name, measured)
        return self.entries[name]

    def table(self) -> Html:
        caption = f"Chapter {self.chapter}: predicted and measured" if self.chapter else "Predicted and measured"
        return table([entry.cells() for entry in self.entries.values()], COLUMNS, caption)


def _finite(name: str, value: float) -> float:
    try:
        result = float(value)
    except (TypeError, ValueError):
        raise LedgerError(f"{name!r}: {value!r} is not a number") from None
    if not math.isfinite(result):
        raise LedgerError(f"{name!r}: {result} is not a finite number")
    return result


_current = Ledger()


def start_chapter(chapter: str) -> None:
    """An empty ledger. The first cell of a chapter calls it, so that running from the top begins again."""
    global _current
    _current = Ledger(str(chapter))


def predict(name: str, value: float, unit: str, why: str = "") -> None:
    """Write down what will be measured under `name`, before it is. Shows one line."""
    entry = _current.predict(name, value, unit, why)
    shown, reason = human(entry.predicted, unit), f" ({why})" if why else ""
    markup = f"<b>{html.escape(name)}</b>: predicted <b>{html.escape(shown)}</b>{html.escape(reason)}"
    emit(_line(markup, f"{name}: predicted {shown}{reason}", "#8A929C"))


def reveal(name: str, measured: float) -> None:
    """Set the measurement beside its prediction. Shows one line: predicted, measured, ratio, residual."""
    _, predicted, shown, ratio, residual = _current.reveal(name, measured).cells()
    text = f"predicted {predicted}, measured {shown}, ratio {ratio}, residual {residual}"
    markup = (
        f"<b>{html.escape(name)}</b>: predicted {html.escape(predicted)}, measured <b>{html.escape(shown)}</b>, "
        f"ratio {html.escape(ratio)}, residual {html.escape(residual)}"
    )
    emit(_line(markup, f"{name}: {text}", "#0072B2"))


def ledger() -> Html:
    """Every pair of the chapter so far, as a table."""
    return _current.table()


def entries() -> list[Entry]:
    """The pairs themselves, for a figure or an assert."""
    return list(_current.entries.values())


def _line(markup: str, text: str, colour: str) -> Html:
    return Html(f'<div style="border-left:4px solid {colour};padding:2px 10px">{markup}</div>', text)


def _percent(value: float) -> str:
    """Three digits, and whole numbers from a thousand on."""
    return f"{value:+,.0f}" if abs(value) >= 1000 else f"{value:+.3g}"
