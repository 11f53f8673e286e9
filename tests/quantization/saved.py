"""Small models, quantized and saved, for tests that then change the files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from minillm import checkpoint
from minillm.analysis.quality import window_logits
from minillm.quantization import quantize_
from minillm.quantization.saving import save_quantized
from tests import tiny


def saver(tmp_path_factory, shape: dict, tokens: Sequence[int], **options) -> Callable[[str], tuple[Path, Tensor]]:
    """scheme -> (folder, logits over `tokens` of the model that was saved there); each is made once. `options` are
    quantize_'s."""
    plain, found = tmp_path_factory.mktemp("plain"), {}
    tiny.make("llama", **shape).save_pretrained(plain)

    def get(scheme: str) -> tuple[Path, Tensor]:
        if scheme not in found:
            model = checkpoint.load_model(plain)
            quantize_(model, scheme, tokens, **options)
            save_quantized(model, folder := tmp_path_factory.mktemp(scheme))
            found[scheme] = folder, window_logits(model, tokens)
        return found[scheme]

    return get
