"""Chapter 02, grouped heads: causal attention with fewer key heads than query heads, over a cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from exercises import Exercise, Judge, Mistake

from .chapter_02_ready_made import WithoutReadyMade


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heads(T: int, S: int, H: int, Hkv: int, D: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return drawn(T, H, D, seed=seed), drawn(S, Hkv, D, seed=seed + 1), drawn(S, Hkv, D, seed=seed + 2)


def by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One query and one head at a time: torch's own attention over the keys which that query may see."""
    (T, H, D), (S, Hkv, _) = q.shape, k.shape
    out = torch.empty(T, H, D, dtype=torch.float64)
    for t in range(T):
        for h in range(H):
            key, seen = h * Hkv // H, S - T + t + 1
            row = (q[None, t : t + 1, h], k[None, :seen, key], v[None, :seen, key])
            out[t, h] = F.scaled_dot_product_attention(*(part.double() for part in row))[0, 0]
    return out.float()


def one_token_returns_its_value(grouped_attention, judge: Judge) -> None:
    q, k, v = heads(1, 1, 2, 2, 4)
    judge.close(
        grouped_attention(q, k, v),
        v,
        "With one token to look at, the answer is that token's value. Likely mistake: weights that do not sum to one.",
    )


def one_head(grouped_attention, judge: Judge) -> None:
    q, k, v = heads(5, 5, 1, 1, 16, seed=3)
    got = grouped_attention(q, k, v)
    judge.type(got, torch.Tensor)
    judge.close(
        got[-1:],
        by_torch(q, k, v)[-1:],
        "The last query of one head. Likely mistake: the scale 1/√D, or a softmax not over the keys.",
        rtol=1e-4,
    )


def never_the_future(grouped_attention, judge: Judge) -> None:
    q, k, v = heads(6, 6, 2, 2, 8, seed=6)
    hint = "Likely mistake: the mask; the future must have no weight, and the rest must still sum to one."
    judge.close(grouped_attention(q, k, v), by_torch(q, k, v), hint, rtol=1e-4, atol=1e-5)


def shares_the_key_heads(grouped_attention, judge: Judge) -> None:
    for H, Hkv in ((6, 2), (4, 1), (9, 3)):
        q, k, v = heads(4, 4, H, Hkv, 6, seed=H)
        judge.close(
            grouped_attention(q, k, v),
            by_torch(q, k, v),
            f"{H} query heads on {Hkv} key heads. Likely mistake: which head goes with which; neighbours share.",
            rtol=1e-4,
            atol=1e-5,
        )


def over_a_cache(grouped_attention, judge: Judge) -> None:
    for T, S in ((1, 7), (3, 8)):
        q, k, v = heads(T, S, 4, 2, 6, seed=T)
        judge.close(
            grouped_attention(q, k, v),
            by_torch(q, k, v),
            f"{T} queries, {S} keys. Likely mistake: a mask without the offset; the queries are the last tokens.",
            rtol=1e-4,
            atol=1e-5,
        )


def large_scores(grouped_attention, judge: Judge) -> None:
    q, k, v = heads(3, 3, 2, 1, 4, seed=9)
    judge.close(
        grouped_attention(100 * q, k, v),
        by_torch(100 * q, k, v),
        "Likely mistake: exp of a large score is infinite; take the row's maximum away first, as softmax does.",
        rtol=1e-3,
        atol=1e-4,
    )


def written_by_hand(grouped_attention, judge: Judge) -> None:
    with WithoutReadyMade("scaled_dot_product_attention"):
        grouped_attention(*heads(2, 3, 2, 1, 4))


_TORCHS_OWN = """
import torch
import {imported}


def grouped_attention(q, k, v):
    T, S = len(q), len(k)
    visible = torch.ones(T, S, dtype=torch.bool).tril(S - T)
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    return {attend}(q, k, v, attn_mask=visible, enable_gqa=True)[0].transpose(0, 1)
"""

ATTENTION = Exercise(
    name="grouped_attention",
    title="Grouped heads",
    chapter="02",
    difficulty=3,
    minutes=25,
    checks=[
        one_token_returns_its_value,
        one_head,
        never_the_future,
        shares_the_key_heads,
        over_a_cache,
        large_scores,
        written_by_hand,
    ],
    mistakes=[
        Mistake("no softmax", "one_token_returns_its_value", edit=(".softmax(dim=-1)", ".exp()")),
        Mistake("no scale", "one_head", edit=(" / D**0.5", "")),
        Mistake("softmax over the queries", "one_head", edit=("softmax(dim=-1)", "softmax(dim=1)")),
        Mistake("no mask", "never_the_future", edit=('.masked_fill(hidden, float("-inf"))', "")),
        Mistake("blind to the latest", "one_token_returns_its_value", edit=("[None, :] >", "[None, :] >=")),
        Mistake(
            "mask after the softmax",
            "never_the_future",
            edit=(
                'scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)',
                "scores.softmax(dim=-1).masked_fill(hidden, 0.0)",
            ),
        ),
        Mistake(
            "zero instead of minus infinity",
            "never_the_future",
            edit=('masked_fill(hidden, float("-inf"))', "masked_fill(hidden, 0.0)"),
        ),
        Mistake(
            "heads interleaved",
            "shares_the_key_heads",
            edit=("k = k.repeat_interleave(H // Hkv, dim=1)", "k = k.repeat(1, H // Hkv, 1)"),
        ),
        Mistake(
            "values interleaved",
            "shares_the_key_heads",
            edit=("v = v.repeat_interleave(H // Hkv, dim=1)", "v = v.repeat(1, H // Hkv, 1)"),
        ),
        Mistake("no offset", "over_a_cache", edit=("torch.arange(S - T, S)[:, None]", "torch.arange(T)[:, None]")),
        Mistake(
            "softmax by hand",
            "large_scores",
            edit=(
                'weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)',
                'weights = scores.masked_fill(hidden, float("-inf")).exp()\n'
                "    weights = weights / weights.sum(dim=-1, keepdim=True)",
            ),
        ),
        Mistake(
            "torch's own attention",
            "written_by_hand",
            source=_TORCHS_OWN.format(imported="torch.nn.functional as F", attend="F.scaled_dot_product_attention"),
        ),
        Mistake(
            "torch's own attention, renamed",
            "written_by_hand",
            source="from torch.nn.functional import scaled_dot_product_attention as attend\n"
            + _TORCHS_OWN.format(imported="math", attend="attend"),
        ),
        Mistake(
            "the package's own",
            "own work",
            source="""
import minillm.attention


def grouped_attention(q, k, v):
    return minillm.attention.naive_attention(q, k, v)
""",
        ),
    ],
    forbids=("minillm.attention", "minillm.kv_cache"),
)
