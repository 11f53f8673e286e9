"""Chapter 04, the roofline: intensity of decode, the batch that turns it, the batch that keeps a promise.

The right intensities are sums over the operators of `step_costs`, which tests compare with torch's FLOP counter; the
right batches come from trying every one (chapter_04_batches.py).
"""

from __future__ import annotations

from exercises import Exercise, Judge, Mistake
from minillm.analysis import Precision, Step, model_config, step_costs
from minillm.config import ModelConfig

from .chapter_04_batches import PROMISE, TURN

MATRICES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")
MODELS = ("SmolLM2-135M", "Llama-2-7B", "Llama-3-8B", "Llama-3-70B")


def tiny(**changes) -> ModelConfig:
    shape = {
        "model_type": "llama",
        "hidden_size": 2,
        "intermediate_size": 3,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "vocab_size": 5,
    }
    return ModelConfig.from_dict(shape | changes)


def by_operators(config: ModelConfig, batch: int, context: int, weight_bytes: float, kv_bytes: float) -> float:
    precision = Precision(weight_bytes, 2, kv_bytes, kept=weight_bytes)
    costs = {op.name: op for op in step_costs(config, Step.decode(context, batch), precision)}
    flops = sum(costs[name].flops for name in (*MATRICES, "attention"))
    read = sum(costs[name].weight_bytes for name in MATRICES) + costs["attention"].kv_bytes
    return flops / read


# --- decode_intensity


def worked_example(decode_intensity, judge: Judge) -> None:
    got = decode_intensity(tiny(), 1, 2, 4, 2)
    judge.type(got, float)
    judge.close(
        got,
        112 / 200,
        "Likely mistake: a matrix left out (q, k, v, o, gate, up, down, head), one FLOP instead of two for each "
        "multiply-add, the new token's own key forgotten, or the two byte widths exchanged.",
    )


def weights_are_shared(decode_intensity, judge: Judge) -> None:
    config = model_config("Llama-3-8B")
    judge.close(
        decode_intensity(config, 64, 0, 2, 2),
        by_operators(config, 64, 0, 2, 2),
        "At batch 64 with empty caches. Likely mistake: the batch multiplies the weights' bytes, or not all of the "
        "FLOPs; weights are read once for the whole batch.",
        rtol=0.01,  # caches have a check of their own
    )


def caches_are_not_shared(decode_intensity, judge: Judge) -> None:
    config = tiny(num_hidden_layers=3)
    judge.close(
        decode_intensity(config, 16, 100, 2, 2),
        by_operators(config, 16, 100, 2, 2),
        "At batch 16, context 100. Likely mistake: keys and values counted for one sequence, for one layer, or "
        "without the new token.",
    )


def key_heads_are_fewer(decode_intensity, judge: Judge) -> None:
    config = tiny(num_attention_heads=8, num_key_value_heads=2, hidden_size=16)
    judge.close(
        decode_intensity(config, 3, 1000, 2, 2),
        by_operators(config, 3, 1000, 2, 2),
        "With 8 query heads on 2 key heads. Likely mistake: num_attention_heads where num_key_value_heads belongs: in "
        "the k and v matrices, or in the bytes of the cache.",
    )


def head_dim_is_its_own(decode_intensity, judge: Judge) -> None:
    config = tiny(num_attention_heads=4, num_key_value_heads=2, hidden_size=16, head_dim=10)
    judge.close(
        decode_intensity(config, 5, 50, 2, 2),
        by_operators(config, 5, 50, 2, 2),
        "With head_dim 10 where hidden_size / heads is 4. Likely mistake: computing head_dim, or taking q and o for "
        "square matrices.",
    )


def bytes_are_told_apart(decode_intensity, judge: Judge) -> None:
    for name in MODELS:
        for weights, kv in ((4, 2), (1, 2), (2, 1)):
            judge.close(
                decode_intensity(model_config(name), 8, 500, weights, kv),
                by_operators(model_config(name), 8, 500, weights, kv),
                f"{name} with {weights} bytes a weight and {kv} a cache entry. "
                "Likely mistake: a width taken for granted.",
            )


INTENSITY = Exercise(
    name="decode_intensity",
    title="Derive decode intensity",
    chapter="04",
    difficulty=3,
    minutes=25,
    checks=[
        worked_example,
        weights_are_shared,
        caches_are_not_shared,
        key_heads_are_fewer,
        head_dim_is_its_own,
        bytes_are_told_apart,
    ],
    mistakes=[
        Mistake("forgets the head", "worked_example", edit=("+ gate_up_down) + head", "+ gate_up_down)")),
        Mistake("one FLOP a weight", "worked_example", edit=("2 * batch * weights", "batch * weights")),
        Mistake("two matrices in the FFN", "worked_example", edit=("3 * d", "2 * d")),
        Mistake(
            "reads the weights for each",
            "weights_are_shared",
            edit=("weights * weight_bytes", "batch * weights * weight_bytes"),
        ),
        Mistake("one sequence's cache", "caches_are_not_shared", edit=("batch * (context + 1)", "context + 1")),
        Mistake("one layer's cache", "caches_are_not_shared", edit=("2 * layers * kv_heads", "2 * kv_heads")),
        Mistake("forgets the new token", "worked_example", edit=("(context + 1)", "context")),
        Mistake(
            "every head has its own k and v",
            "key_heads_are_fewer",
            edit=("2 * d * kv_heads * head_dim", "2 * d * heads * head_dim"),
        ),
        Mistake(
            "every head has a cache",
            "key_heads_are_fewer",
            edit=("2 * layers * kv_heads * head_dim", "2 * layers * heads * head_dim"),
        ),
        Mistake(
            "works out head_dim",
            "head_dim_is_its_own",
            edit=("config.head_dim", "config.hidden_size // config.num_attention_heads"),
        ),
        Mistake("one width for both", "worked_example", edit=("keys * kv_bytes", "keys * weight_bytes")),
        Mistake("caches always bf16", "bytes_are_told_apart", edit=("keys * kv_bytes", "keys * 2")),
    ],
    forbids=("minillm.analysis",),
)


EXERCISES = [INTENSITY, TURN, PROMISE]
