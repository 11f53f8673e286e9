"""Widgets that are never alone: beside each stands a static figure, which is what GitHub and CI see.

ipywidgets is imported when a widget is made, so everything else works without it.
"""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from ..errors import MinillmError
from .rooflines import Ceiling, Point, roofline

WITHOUT_KERNEL = "(Run this cell, and controls appear that draw the figure anew.)"


def png(fig: Figure) -> bytes:
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png")
    return buffer.getvalue()


class Explorer:
    """A figure of the starting values, and controls that draw it anew.

    draw: called with one keyword for each control, returns a Figure. controls: name -> the values to choose from, the
    start among them (`start`, or the first). Raises ValueError on an empty control or a start that is no choice.
    """

    def __init__(
        self, draw: Callable[..., Figure], controls: Mapping[str, Sequence], start: Mapping[str, Any] | None = None
    ) -> None:
        self.draw = draw
        self.choices = {name: list(values) for name, values in controls.items()}
        self.values = {name: (start or {}).get(name, values[0]) for name, values in self.choices.items() if values}
        for name, values in self.choices.items():
            if self.values.get(name) not in values:
                raise ValueError(f"control {name!r}: {self.values.get(name)!r} is not among its values {values}")
        self.figure = draw(**self.values)
        self._widget = None

    @property
    def widget(self):
        """The live part (an ipywidgets box), made when first asked for."""
        if self._widget is None:
            self._widget = self._build()
        return self._widget

    def _build(self):
        import ipywidgets

        self.image = ipywidgets.Image(format="png", value=png(self.figure))
        self.message = ipywidgets.HTML()
        self.sliders = {
            name: ipywidgets.SelectionSlider(
                options=values, value=self.values[name], description=name, continuous_update=False
            )
            if len(values) > 1 and all(isinstance(value, (int, float)) for value in values)
            else ipywidgets.Dropdown(options=values, value=self.values[name], description=name)
            for name, values in self.choices.items()
        }
        for name, slider in self.sliders.items():
            slider.observe(lambda change, name=name: self.set(name, change["new"]), names="value")
        return ipywidgets.VBox([ipywidgets.HBox(list(self.sliders.values())), self.message, self.image])

    def set(self, name: str, value: Any) -> None:
        """Change one value and draw. What cannot be drawn says why and leaves the last picture."""
        self.values[name] = value
        try:
            figure = self.draw(**self.values)
        except MinillmError as error:
            self.message.value = html.escape(str(error))
            return
        self.message.value = ""
        self.image.value = png(figure)

    def _ipython_display_(self) -> None:
        from IPython.display import Image, display

        display(Image(png(self.figure)))
        live = self.widget._repr_mimebundle_()
        display(live | {"text/plain": WITHOUT_KERNEL}, raw=True)  # in place of the widget's repr


def explore(
    draw: Callable[..., Figure], controls: Mapping[str, Sequence], start: Mapping[str, Any] | None = None
) -> Explorer:
    """`explore(draw, {"batch": [1, 2, 4]})` as the last line of a cell: the static figure, then the controls."""
    return Explorer(draw, controls, start)


class RooflineData(NamedTuple):
    """What the cost model says for one choice: the machine or machines, the work, and the message."""

    ceilings: Ceiling | Sequence[Ceiling]
    points: Sequence[Point]
    title: str


class RooflineExplorer(Explorer):
    """Model × hardware × batch × context × precision on a roofline.

    compute: called with `model, hardware, batch, context, precision`, returns a RooflineData. The cost model stays the
    caller's, so this module knows neither torch nor a config.
    """

    def __init__(
        self,
        compute: Callable[..., RooflineData],
        models: Sequence,
        hardware: Sequence,
        batches: Sequence[int],
        contexts: Sequence[int],
        precisions: Sequence,
        start: Mapping[str, Any] | None = None,
    ) -> None:
        def draw(**values: Any) -> Figure:
            data = compute(**values)
            return roofline(data.ceilings, data.points, data.title)

        controls = {
            "model": models,
            "hardware": hardware,
            "batch": batches,
            "context": contexts,
            "precision": precisions,
        }
        super().__init__(draw, controls, start)
