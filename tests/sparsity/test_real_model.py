"""The order of the three methods on a real model, on text that calibration has not seen."""

from __future__ import annotations

import copy

from minillm.analysis.quality import calibration_ids, compare_models, evaluation_ids
from minillm.sparsity import sparsify_


def test_magnitude_loses_most(smollm2):
    """SmolLM2's weights come from a 4-bit file. Three of its thirty blocks at 2:4, for time's sake."""
    reference, tokenizer = smollm2
    kl = {}
    for method in ("magnitude", "wanda", "sparsegpt"):
        model = copy.deepcopy(reference)
        sparsify_(model, method, pattern="2:4", calibration=calibration_ids(tokenizer, 512), blocks=[4, 14, 24])
        kl[method] = compare_models(model, reference, evaluation_ids(tokenizer, 256)).kl
    assert kl["magnitude"] > 1.2 * kl["wanda"]
    assert kl["magnitude"] > 1.2 * kl["sparsegpt"]
