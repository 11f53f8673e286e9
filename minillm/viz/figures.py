"""Every shared picture under one name. Each takes plain data and returns a matplotlib Figure (or `Html`)."""

from .charts import (
    Series,
    Span,
    bars,
    distributions,
    lines,
    predicted_measured,
    stacked_bars,
    timeline,
    tpot_lines,
    ttft_lines,
)
from .chips import merge_steps, token_chips, token_strip
from .diagrams import STACK, attention_map, recompute_map, shapes_flow, stack_map
from .rooflines import Ceiling, Point, roofline
from .tables import table

__all__ = [
    "STACK",
    "Ceiling",
    "Point",
    "Series",
    "Span",
    "attention_map",
    "bars",
    "distributions",
    "lines",
    "merge_steps",
    "predicted_measured",
    "recompute_map",
    "roofline",
    "shapes_flow",
    "stack_map",
    "stacked_bars",
    "table",
    "timeline",
    "token_chips",
    "token_strip",
    "tpot_lines",
    "ttft_lines",
]
