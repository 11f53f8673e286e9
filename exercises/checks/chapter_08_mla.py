"""Chapter 08, absorbed MLA: against keys and values made one by one, in float64, with an eye on what is made."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

from exercises import Exercise, Failed, Judge, Mistake

from .chapter_02_ready_made import WithoutReadyMade

NAMES = ("q_nope", "q_rope", "latents", "rope_keys", "w_uk", "w_uv")


def case(seed: int, tokens: int, heads: int = 1, nope: int = 6, rope: int = 4, latent: int = 5, value: int = 7):
    made = torch.Generator().manual_seed(seed)
    shapes = (
        (heads, nope),
        (heads, rope),
        (tokens, latent),
        (tokens, rope),
        (heads, nope, latent),
        (heads, value, latent),
    )
    return [torch.randn(*shape, generator=made, dtype=torch.float64) for shape in shapes]


def one_by_one(q_nope, q_rope, latents, rope_keys, w_uk, w_uv) -> torch.Tensor:
    """Every key and value of every head, as the definition has it."""
    width = q_nope.shape[1] + q_rope.shape[1]
    rows = []
    for h in range(len(q_nope)):
        query = torch.cat([q_nope[h], q_rope[h]])
        keys = [torch.cat([w_uk[h] @ c, r]) for c, r in zip(latents, rope_keys, strict=True)]
        weights = (torch.stack(keys) @ query / width**0.5).softmax(0)
        rows.append(sum(w * (w_uv[h] @ c) for w, c in zip(weights, latents, strict=True)))
    return torch.stack(rows)


def decoded(absorbed_decode, given: list, judge: Judge, hint: str) -> None:
    with WithoutReadyMade("scaled_dot_product_attention"):
        got = absorbed_decode(*given)
    judge.close(got, one_by_one(*given), f"Likely mistake: {hint}", rtol=1e-6, atol=1e-8)


def one_token(absorbed_decode, judge: Judge) -> None:
    hint = "with a single token the weight is 1 and the result is W_UV times its latent."
    decoded(absorbed_decode, case(1, 1), judge, hint)


def without_positions(absorbed_decode, judge: Judge) -> None:
    for seed in range(3):
        given = case(seed, 9)
        given[1], given[3] = torch.zeros_like(given[1]), torch.zeros_like(given[3])
        hint = "the scale is 1/sqrt(N + P), of the dot product as it was before absorbing."
        decoded(absorbed_decode, given, judge, hint)


def with_positions(absorbed_decode, judge: Judge) -> None:
    decoded(absorbed_decode, case(4, 9), judge, "the rotary parts are missing from the scores.")


def several_heads(absorbed_decode, judge: Judge) -> None:
    hint = "each head has its own W_UK and W_UV; latents and rotary keys are common to all."
    decoded(absorbed_decode, case(5, 9, heads=3), judge, hint)


def large_scores(absorbed_decode, judge: Judge) -> None:
    given = case(6, 8, heads=2)
    given[0], given[1] = given[0] * 900, given[1] * 900
    decoded(absorbed_decode, given, judge, "exp of a large score overflows: subtract the maximum, or use softmax.")


class Sizes(TorchFunctionMode):
    """Fails on a tensor that has a key or a value of every token: `tokens` times one of `widths` numbers."""

    def __init__(self, tokens: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.tokens, self.widths = tokens, widths

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() > 1:
            made = [w for w in self.widths if out.numel() and out.numel() % (self.tokens * w) == 0]
            if made and any(size % self.tokens == 0 for size in out.shape):
                raise Failed(
                    f"a tensor of shape {tuple(out.shape)} was made, which is a key or a value for each of "
                    f"{self.tokens} tokens. Absorb instead: W_UK goes to the query, W_UV behind the weighted sum."
                )
        return out


def never_makes_a_key(absorbed_decode, judge: Judge) -> None:
    given = case(7, 97, heads=4, nope=40, rope=4, latent=12, value=36)
    with Sizes(97, (40, 36)):
        got = absorbed_decode(*given)
    judge.close(got, one_by_one(*given), "with other sizes.", rtol=1e-6, atol=1e-8)


_EXPANDED = """
def absorbed_decode(q_nope, q_rope, latents, rope_keys, w_uk, w_uv):
    keys = torch.einsum("sc,hnc->hsn", latents, w_uk)
    values = torch.einsum("sc,hvc->hsv", latents, w_uv)
    scores = torch.einsum("hn,hsn->hs", q_nope, keys) + q_rope @ rope_keys.T
    weights = (scores / (q_nope.shape[1] + q_rope.shape[1]) ** 0.5).softmax(-1)
    return torch.einsum("hs,hsv->hv", weights, values)
"""

_HEAD_BY_HEAD = """
def absorbed_decode(q_nope, q_rope, latents, rope_keys, w_uk, w_uv):
    out = []
    for h in range(len(q_nope)):
        keys = torch.cat([latents @ w_uk[h].T, rope_keys], dim=1)
        query = torch.cat([q_nope[h], q_rope[h]])
        out.append(((keys @ query) / len(query) ** 0.5).softmax(0) @ (latents @ w_uv[h].T))
    return torch.stack(out)
"""

ABSORBED = Exercise(
    name="absorbed_decode",
    title="Absorbed MLA",
    chapter="08",
    difficulty=3,
    minutes=25,
    checks=[one_token, without_positions, with_positions, several_heads, large_scores, never_makes_a_key],
    mistakes=[
        Mistake("no values", "one_token", edit=('torch.einsum("hvc,hc->hv", w_uv, summed)', "summed")),
        Mistake(
            "the scale of the wide key",
            "without_positions",
            edit=("q_nope.shape[1] + q_rope", "latents.shape[1] + q_rope"),
        ),
        Mistake(
            "the scale without the rotary part",
            "without_positions",
            edit=("(q_nope.shape[1] + q_rope.shape[1])", "q_nope.shape[1]"),
        ),
        Mistake("no scale", "without_positions", edit=(" / (q_nope.shape[1] + q_rope.shape[1]) ** 0.5", "")),
        Mistake("no rotary part", "with_positions", edit=(" + q_rope @ rope_keys.T", "")),
        Mistake(
            "the first head's keys for all",
            "several_heads",
            edit=("q_nope, w_uk)", "q_nope, w_uk[:1].expand_as(w_uk))"),
        ),
        Mistake(
            "the first head's values for all", "several_heads", edit=('hv", w_uv,', 'hv", w_uv[:1].expand_as(w_uv),')
        ),
        Mistake(
            "exp without the maximum",
            "large_scores",
            edit=("weights = scores.softmax(-1)", "weights = scores.exp() / scores.exp().sum(-1, keepdim=True)"),
        ),
        Mistake("expanded", "never_makes_a_key", source=_EXPANDED),
        Mistake("expanded, head by head", "never_makes_a_key", source=_HEAD_BY_HEAD),
    ],
    forbids=("minillm.mla", "minillm.attention", "kernels"),
)
