"""A model, quantized as it is loaded: what `--quantize` does."""

from __future__ import annotations

from pathlib import Path

from .. import checkpoint
from ..analysis.quality import calibration_ids
from ..backend import choose, with_backend
from ..errors import QuantizationError
from ..tokenizer import Tokenizer
from ..transformer import Transformer
from .apply import Report, quantize_
from .scheme import Scheme, parse

CALIBRATION_TOKENS = 4096


def load_quantized(
    source: str | Path | None, scheme: str | Scheme, device: str = "cpu", exact: bool = False, backend: str = "auto"
) -> tuple[Transformer, Tokenizer, Report]:
    """Loads in float32 and quantizes. Groups shrink where a matrix needs it; the report says which. `backend` is
    "triton", "torch" or "auto", as in checkpoint.load: what runs beside the matrices, which have kernels of their own.

    Raises QuantizationError, and what checkpoint.load raises.
    """
    scheme = parse(scheme)  # a bad name is told before anything is loaded
    if device != "cpu":
        raise QuantizationError(f"--quantize runs on the CPU here, not on {device}; add --device cpu")
    choose(backend, device)
    model, tokenizer = checkpoint.load(source, "float32", device, "torch")
    tokens = calibration_ids(tokenizer, CALIBRATION_TOKENS) if scheme.needs_calibration else None
    report = quantize_(model, scheme, tokens, shrink_groups=True, exact=exact)
    return with_backend(model, backend), tokenizer, report
