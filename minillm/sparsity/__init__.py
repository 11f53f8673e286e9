"""Weights that are zero: `sparsify_(model, "wanda", pattern="2:4", calibration=ids)`. Reading order: pattern, methods,
packed, apply."""

from .apply import Report, pack_, sparsify_
from .packed import Packed24, SparseLinear, pack_2_4
from .pattern import Sparsity, parse

__all__ = ["Packed24", "Report", "SparseLinear", "Sparsity", "pack_", "pack_2_4", "parse", "sparsify_"]
