"""Chapter 08, attention variants: bytes of a mixed cache, a window's slots, absorbed MLA, the gated delta rule.

The right answers come from numbers counted token by token, a memory that is written and read back, keys and values made
one by one, and the delta rule as a product of matrices.
"""

from __future__ import annotations

from exercises import Exercise, Judge, Mistake

from .chapter_08_delta import DELTA
from .chapter_08_mla import ABSORBED

# --- cache_bytes

FULL = {"kind": "full", "kv_heads": 8, "head_dim": 128}
SLIDING = {"kind": "sliding", "kv_heads": 4, "head_dim": 64, "window": 100, "sinks": 4}
LATENT = {"kind": "latent", "latent": 512, "rope": 64}
LINEAR = {"kind": "linear", "heads": 6, "key_dim": 32, "value_dim": 48}


def counted(layers: list, tokens: int, element: int) -> int:
    """Token by token."""
    size = 0
    for layer in layers:
        if layer["kind"] == "linear":
            size += sum(4 for _ in range(layer["heads"] * layer["key_dim"] * layer["value_dim"]))
            continue
        for t in range(tokens):
            age = tokens - 1 - t
            if layer["kind"] == "latent":
                size += element * layer["latent"] + element * layer["rope"]
            elif layer["kind"] == "full" or age < layer["window"] or t < layer["sinks"]:
                size += (element + element) * layer["kv_heads"] * layer["head_dim"]
    return size


def sized(cache_bytes, layers: list, tokens: int, element: int, judge: Judge, hint: str) -> None:
    got = cache_bytes(layers, tokens, element)
    judge.type(got, (int, float))
    want = counted(layers, tokens, element)
    judge.equal(got, want, f"for {tokens} tokens of {element} bytes in {layers}. Likely mistake: {hint}")


def full_layers(cache_bytes, judge: Judge) -> None:
    for tokens in (1, 1000):
        sized(cache_bytes, [FULL] * 3, tokens, 2, judge, "keys without values, or one layer for all.")


def latent_layers(cache_bytes, judge: Judge) -> None:
    hint = "a latent row is stored once, as key and value both, and the rotary key stands beside it."
    sized(cache_bytes, [LATENT] * 2, 30, 2, judge, hint)


def windows_fill_up(cache_bytes, judge: Judge) -> None:
    for tokens in (3, 50, 100, 102, 104, 105, 3000):
        hint = "a sliding layer holds min(tokens, window + sinks) rows."
        sized(cache_bytes, [SLIDING], tokens, 2, judge, hint)


def states_are_constant(cache_bytes, judge: Judge) -> None:
    for tokens in (1, 500):
        sized(cache_bytes, [LINEAR] * 2, tokens, 2, judge, "a state counted by token, or not in float32.")


def other_formats(cache_bytes, judge: Judge) -> None:
    for element in (1, 4):
        hint = "bytes written as a number; `element` says them, for all but states, which stay at 4."
        sized(cache_bytes, [FULL, LATENT, SLIDING, LINEAR], 70, element, judge, hint)


def mixed(cache_bytes, judge: Judge) -> None:
    sized(cache_bytes, [LINEAR, LINEAR, LINEAR, LATENT] * 2, 900, 2, judge, "the kind of one layer taken for all.")
    sized(cache_bytes, [SLIDING, FULL] * 3, 900, 2, judge, "the kind of one layer taken for all.")


SIZE = Exercise(
    name="cache_bytes",
    title="Cache of a mixed model",
    chapter="08",
    difficulty=2,
    minutes=20,
    checks=[full_layers, latent_layers, windows_fill_up, states_are_constant, mixed, other_formats],
    mistakes=[
        Mistake("keys alone", "full_layers", edit=("2 * layer", "1 * layer")),
        Mistake("the last layer alone", "full_layers", edit=("total += rows", "total = rows")),
        Mistake(
            "the latent twice",
            "latent_layers",
            edit=('layer["latent"] + layer["rope"]', '2 * (layer["latent"] + layer["rope"])'),
        ),
        Mistake("no rotary key", "latent_layers", edit=('layer["latent"] + layer["rope"]', 'layer["latent"]')),
        Mistake("all tokens in a window", "windows_fill_up", edit=("rows = min(tokens, ", "rows = max(tokens, ")),
        Mistake("sinks forgotten", "windows_fill_up", edit=('layer["window"] + layer["sinks"]', 'layer["window"]')),
        Mistake(
            "sinks beside few tokens",
            "windows_fill_up",
            edit=('min(tokens, layer["window"] + layer["sinks"])', 'min(tokens, layer["window"]) + layer["sinks"]'),
        ),
        Mistake("a state a token", "states_are_constant", edit=("total += 4 *", "total += tokens * 4 *")),
        Mistake("states in the cache's format", "states_are_constant", edit=("total += 4 *", "total += element *")),
        Mistake("always two bytes", "other_formats", edit=("rows * width * element", "rows * width * 2")),
        Mistake("the first layer's kind", "mixed", edit=('kind = layer["kind"]', 'kind = layers[0]["kind"]')),
    ],
    forbids=("minillm.analysis", "minillm.kv_cache", "minillm.config"),
)


# --- rolling_cache


def written(length: int, window: int, sinks: int) -> list[tuple[int, int]]:
    """A memory is written token by token and read back."""
    memory: dict[int, int] = {}
    free = 0
    for position in range(length):
        if position < sinks + window:
            memory[free] = position
            free += 1
        else:  # over the oldest that is no sink
            oldest = min(slot_position for slot_position in memory.values() if slot_position >= sinks)
            memory[next(slot for slot, held in memory.items() if held == oldest)] = position
    return sorted((position, slot) for slot, position in memory.items())


RING = (
    "the tokens are right, their slots are not: behind the sinks is a ring of `window` slots, and token `sinks` went "
    "to the first of them."
)


def rolled(rolling_cache, case: tuple, judge: Judge, hint: str) -> None:
    got, want = rolling_cache(*case), written(*case)
    judge.type(got, list)
    tokens = [pair[0] for pair in got if isinstance(pair, (tuple, list)) and pair]
    if tokens == [token for token, _ in want]:
        hint = RING
    judge.equal(got, want, f"for rolling_cache{case}. Likely mistake: {hint}")


def not_full_yet(rolling_cache, judge: Judge) -> None:
    for case in ((0, 4, 2), (1, 4, 2), (3, 4, 2), (6, 4, 2)):
        rolled(
            rolling_cache, case, judge, "tokens that are not there yet, or lost too early: there is room for W + sinks."
        )


def no_sinks(rolling_cache, judge: Judge) -> None:
    for length in (5, 7, 8, 21):
        hint = (
            "the oldest is overwritten first, the window counts the newest token, and pairs come in the tokens' order."
        )
        rolled(rolling_cache, (length, 4, 0), judge, hint)


def sinks_stay(rolling_cache, judge: Judge) -> None:
    for case in ((7, 4, 2), (9, 4, 2), (30, 4, 3), (12, 4, 4)):
        rolled(rolling_cache, case, judge, "sinks are never overwritten, and the ring begins behind them.")


def other_sizes(rolling_cache, judge: Judge) -> None:
    for case in ((100, 7, 4), (101, 16, 1), (64, 16, 16), (12, 1, 4), (5, 16, 9)):
        rolled(rolling_cache, case, judge, "a window or a number of sinks written as a number.")


ROLLING = Exercise(
    name="rolling_cache",
    title="Window with sinks",
    chapter="08",
    difficulty=2,
    minutes=20,
    checks=[not_full_yet, no_sinks, sinks_stay, other_sizes],
    mistakes=[
        Mistake("sinks within the window", "not_full_yet", edit=("length - window", "length - window + sinks")),
        Mistake("one token too many", "no_sinks", edit=("p >= length - window", "p >= length - window - 1")),
        Mistake("one token too few", "not_full_yet", edit=("p >= length - window", "p > length - window")),
        Mistake(
            "packed to the front",
            "no_sinks",
            source="""
def rolling_cache(length, window, sinks):
    kept = [p for p in range(length) if p < sinks or p >= length - window]
    return [(p, slot) for slot, p in enumerate(kept)]
""",
        ),
        Mistake("a ring over everything", "sinks_stay", edit=("sinks + (p - sinks) % window", "p % (window + sinks)")),
        Mistake(
            "the ring begins at the first slot",
            "sinks_stay",
            edit=("sinks + (p - sinks) % window", "(p - sinks) % window if p >= sinks + window else p"),
        ),
        Mistake(
            "positions not counted from the sinks",
            "sinks_stay",
            edit=("(p - sinks) % window", "(p if p >= sinks + window else p - sinks) % window"),
        ),
        Mistake(
            "in the order of the slots",
            "no_sinks",
            edit=("in kept]", "in sorted(kept, key=lambda p: p if p < sinks else sinks + (p - sinks) % window)]"),
        ),
        Mistake("a ring of four", "other_sizes", edit=("(p - sinks) % window", "(p - sinks) % 4")),
    ],
    forbids=("minillm.attention", "minillm.kv_cache"),
)


EXERCISES = [SIZE, ROLLING, ABSORBED, DELTA]
