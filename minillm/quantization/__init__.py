"""Weights in fewer bits: `quantize_(model, "int4-g128")`. Reading order: number_formats, scheme, weight, kernels,
linear, apply; then the methods that choose codes with more care."""

from .apply import Report, quantize_
from .linear import QuantizedLinear
from .scheme import Scheme, parse
from .weight import QuantizedWeight, quantize_weight

__all__ = ["QuantizedLinear", "QuantizedWeight", "Report", "Scheme", "parse", "quantize_", "quantize_weight"]
