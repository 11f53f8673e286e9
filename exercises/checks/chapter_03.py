"""Chapter 03, the cache and the choice: append rows, positions of a chunk, the size of a cache, top-p.

The right answers come from lists of Python numbers, from what torch says a tensor weighs, and from exact fractions.
"""

from __future__ import annotations

import torch

from exercises import Exercise, Judge, Mistake

from .chapter_03_cache import ROW_CACHE
from .chapter_03_top_p import TOP_P

# --- chunk_positions


def walked(total: int, size: int | None, cached: int) -> list[list[int]]:
    """One token after another, as one would with a pencil."""
    passes: list[list[int]] = []
    for position in range(total):
        if position < cached and position != total - 1:
            continue
        if not passes or len(passes[-1]) == size:
            passes.append([])
        passes[-1].append(position)
    return passes


def passes_of(chunk_positions, total: int, size: int | None, cached: int, judge: Judge) -> list:
    got = chunk_positions(total, size, cached)
    judge.type(got, list)
    for entry in got:
        judge.type(entry, list, "a pass")
    return got


def counts_from_the_start(chunk_positions, judge: Judge) -> None:
    judge.equal(
        passes_of(chunk_positions, 6, 2, 0, judge),
        [[0, 1], [2, 3], [4, 5]],
        "Likely mistake: positions that begin at 0, or at 1, in each pass; they count from the start of the text.",
    )


def the_rest_is_a_pass(chunk_positions, judge: Judge) -> None:
    for total, size in ((5, 2), (7, 3), (3, 8), (1, 1), (10, 4)):
        judge.equal(
            passes_of(chunk_positions, total, size, 0, judge),
            walked(total, size, 0),
            f"for {total} tokens by {size}. Likely mistake: the last pass dropped, or running past the prompt.",
        )


def cached_is_not_computed_again(chunk_positions, judge: Judge) -> None:
    for total, size, cached in ((6, 2, 3), (9, 4, 1), (9, 4, 5), (5, 2, 3)):
        judge.equal(
            passes_of(chunk_positions, total, size, cached, judge),
            walked(total, size, cached),
            f"for {total} tokens by {size}, {cached} of them cached. Likely mistake: what is cached is computed again, "
            "or the passes begin at multiples of size instead of at the first token that is missing.",
        )


def the_last_token_always_runs(chunk_positions, judge: Judge) -> None:
    for total, size in ((5, 2), (8, 8), (1, 3)):
        judge.equal(
            passes_of(chunk_positions, total, size, total, judge),
            [[total - 1]],
            f"with all {total} tokens cached. Likely mistake: nothing is computed, and then there are no logits to "
            "choose from; or more than the one token that is needed.",
        )


def none_is_one_pass(chunk_positions, judge: Judge) -> None:
    for total, cached in ((7, 0), (7, 4), (7, 7), (1, 0)):
        judge.equal(
            passes_of(chunk_positions, total, None, cached, judge),
            [list(range(min(cached, total - 1), total))],
            "with a size of None. Likely mistake: None must mean everything in one pass.",
        )


CHUNKS = Exercise(
    name="chunk_positions",
    title="Positions of a chunk",
    chapter="03",
    difficulty=2,
    minutes=15,
    checks=[
        counts_from_the_start,
        the_rest_is_a_pass,
        cached_is_not_computed_again,
        the_last_token_always_runs,
        none_is_one_pass,
    ],
    mistakes=[
        Mistake(
            "each chunk from zero",
            "counts_from_the_start",
            edit=("list(range(begin, min(begin + step, total)))", "list(range(min(step, total - begin)))"),
        ),
        Mistake("counts from one", "counts_from_the_start", edit=("range(begin, min", "range(begin + 1, 1 + min")),
        Mistake(
            "loses the rest",
            "the_rest_is_a_pass",
            edit=("range(first, total, step)", "range(first, total - step + 1, step)"),
        ),
        Mistake("runs past the prompt", "the_rest_is_a_pass", edit=("min(begin + step, total)", "begin + step")),
        Mistake("computes all again", "cached_is_not_computed_again", edit=("min(cached, total - 1)", "0")),
        Mistake(
            "multiples of size",
            "cached_is_not_computed_again",
            edit=("min(cached, total - 1)", "min(cached, total - 1) // (size or 1) * (size or 1)"),
        ),
        Mistake("nothing left to run", "the_last_token_always_runs", edit=("min(cached, total - 1)", "cached")),
        Mistake(
            "the last chunk again",
            "the_last_token_always_runs",
            edit=(
                "min(cached, total - 1)",
                "max(0, min(cached, total - 1 if cached < total else total - (size or 1)))",
            ),
        ),
        Mistake("None is one at a time", "none_is_one_pass", edit=("total if size is None else size", "size or 1")),
    ],
    forbids=("minillm.generate",),
)


# --- cache_bytes

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
LLAMA_70B = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192}
QWEN_SMALL = {
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "hidden_size": 1024,
    "head_dim": 128,
}


def allocated(layers: int, kv_heads: int, dim: int, tokens: int, sequences: int, dtype: torch.dtype) -> int:
    """What torch reserves, key by key and value by value."""
    one = torch.empty(tokens, kv_heads, dim, dtype=dtype).nbytes
    return sum(one for _ in range(sequences) for _ in range(layers) for _ in ("key", "value"))


def one_token_by_hand(cache_bytes, judge: Judge) -> None:
    judge.close(
        cache_bytes(SMALL, 1, 1, 2),
        256,
        "2 (key and value) · 2 layers · 4 heads · 8 numbers · 2 bytes. Likely mistake: the 2 for key and value, or a "
        "config without num_key_value_heads, where every query head has its own.",
        rtol=0,
    )


def grouped_heads(cache_bytes, judge: Judge) -> None:
    hint = "Likely mistake: query heads counted where key-value heads are kept."
    judge.close(cache_bytes(LLAMA_70B, 1, 1, 2), 327_680, f"one token of Llama-3-70B. {hint}", rtol=0)
    judge.close(
        cache_bytes({**SMALL, "num_key_value_heads": 1}, 1, 1, 4), allocated(2, 1, 8, 1, 1, torch.float32), hint, rtol=0
    )


def head_dim_rules(cache_bytes, judge: Judge) -> None:
    judge.close(
        cache_bytes(QWEN_SMALL, 1, 1, 2),
        114_688,
        "this config has a head_dim of 128, though 1,024 over 16 is 64. Likely mistake: head_dim ignored.",
        rtol=0,
    )


def linear_in_tokens(cache_bytes, judge: Judge) -> None:
    for tokens in (2, 17, 1000):
        judge.close(
            cache_bytes(SMALL, tokens, 1, 2),
            allocated(2, 4, 8, tokens, 1, torch.bfloat16),
            f"for {tokens} tokens. Likely mistake: tokens counted twice or squared; the cache is linear in them.",
            rtol=0,
        )


def every_sequence_has_its_own(cache_bytes, judge: Judge) -> None:
    judge.close(
        cache_bytes(SMALL, 5, 3, 2),
        allocated(2, 4, 8, 5, 3, torch.bfloat16),
        "Likely mistake: the number of sequences left out.",
        rtol=0,
    )


def half_a_byte(cache_bytes, judge: Judge) -> None:
    judge.close(
        cache_bytes(SMALL, 4, 1, 0.5),
        allocated(2, 4, 8, 4, 1, torch.uint8) / 2,
        "with 4-bit numbers. Likely mistake: element_bytes rounded to a whole number, or taken for bits.",
        rtol=0,
    )


BYTES = Exercise(
    name="cache_bytes",
    title="What a cache weighs",
    chapter="03",
    difficulty=1,
    minutes=15,
    checks=[
        one_token_by_hand,
        grouped_heads,
        head_dim_rules,
        linear_in_tokens,
        every_sequence_has_its_own,
        half_a_byte,
    ],
    mistakes=[
        Mistake(
            "keys alone", "one_token_by_hand", edit=('2 * config["num_hidden_layers"]', 'config["num_hidden_layers"]')
        ),
        Mistake(
            "one head by default",
            "one_token_by_hand",
            edit=('"num_key_value_heads", heads', '"num_key_value_heads", 1'),
        ),
        Mistake("query heads", "grouped_heads", edit=("* kv_heads * head_dim", "* heads * head_dim")),
        Mistake(
            "hidden over heads",
            "head_dim_rules",
            edit=('config.get("head_dim", config["hidden_size"] // heads)', 'config["hidden_size"] // heads'),
        ),
        Mistake("quadratic", "linear_in_tokens", edit=("row * tokens *", "row * tokens * tokens *")),
        Mistake("one sequence", "every_sequence_has_its_own", edit=("* sequences", "")),
        Mistake("whole bytes only", "half_a_byte", edit=("* element_bytes", "* int(element_bytes)")),
    ],
    forbids=("minillm.analysis", "minillm.kv_cache"),
)

EXERCISES = [ROW_CACHE, CHUNKS, BYTES, TOP_P]
