"""A model with zeros, as it is loaded: what `--sparsify` does."""

from __future__ import annotations

from pathlib import Path

import torch

from .. import checkpoint
from ..analysis.quality import calibration_ids
from ..backend import choose, with_backend
from ..errors import SparsityError
from ..quantization import apply as quantization
from ..quantization.loading import CALIBRATION_TOKENS
from ..quantization.scheme import Scheme
from ..quantization.scheme import parse as parse_scheme
from ..tokenizer import Tokenizer
from ..transformer import Transformer
from .apply import Report, pack_, sparsify_
from .pattern import Sparsity, parse


def load_sparse(
    source: str | Path | None,
    sparsity: str | Sparsity,
    device: str = "cpu",
    scheme: str | Scheme | None = None,
    exact: bool = False,
    backend: str = "auto",
) -> tuple[Transformer, Tokenizer, Report, quantization.Report | None]:
    """Loads in float32, sparsifies, and then quantizes if `scheme` says so.

    On the CPU the zeros stay where they are, since no kernel here gains by leaving them out. On CUDA the model is in
    bfloat16, and a 2:4 one is packed for the sparse tensor cores. `backend` is "triton", "torch" or "auto", as in
    checkpoint.load; zeros are chosen and weights rounded by torch's operators whatever it is. Raises SparsityError,
    QuantizationError, and what checkpoint.load raises.
    """
    sparsity = parse(sparsity)  # a bad name is told before anything is loaded
    choose(backend, device)
    scheme = None if scheme is None else parse_scheme(scheme)
    if scheme is not None:
        if not scheme.keeps_zeros:
            raise SparsityError(
                f"scheme {scheme.name} would fill the zeros of {sparsity.name}; use one that keeps them, such "
                "as int8, int4-g128, awq-int4-g32, fp8, mxfp4"
            )
        if device != "cpu":
            raise SparsityError(f"--sparsify with --quantize runs on the CPU here, not on {device}; add --device cpu")
    model, tokenizer = checkpoint.load(source, "float32", backend="torch")
    needs = sparsity.needs_calibration or (scheme is not None and scheme.needs_calibration)
    tokens = calibration_ids(tokenizer, CALIBRATION_TOKENS) if needs else None
    report = sparsify_(model, sparsity, calibration=tokens)
    if device != "cpu":
        if sparsity.pattern == "2:4":
            pack_(model)
        model.place(device, torch.bfloat16).layout = f"bfloat16, {sparsity.name}"
    quantized = None
    if scheme is not None:
        quantized = quantization.quantize_(model, scheme, tokens, shrink_groups=True, exact=exact)
    return with_backend(model, backend), tokenizer, report, quantized
