"""Chapter 07, a row never held: causal attention with log-sum-exp and soft-cap, row by row in float64."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from exercises import Exercise, Failed, Judge, Mistake

from .chapter_02_ready_made import WithoutReadyMade

NOTHING = float("-inf")


class NoLarge(TorchDispatchMode):
    """Raises Failed when an operator makes a tensor of `limit` numbers or more."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.numel() >= self.limit:
                raise Failed(
                    f"a tensor of shape {tuple(t.shape)} was made, and {self.limit} numbers are too many. Likely "
                    "mistake: scores or a mask for all keys at once; go over them a tile at a time."
                )
        return out


def row_by_row(q, k, v, soft_cap) -> tuple[torch.Tensor, torch.Tensor]:
    """Each query on its own, over just the keys that it sees, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    out, lse = torch.zeros_like(q), torch.full((len(q),), NOTHING, dtype=torch.float64)
    for i, query in enumerate(q):
        seen = len(k) - len(q) + i + 1
        if seen > 0:
            scores = k[:seen] @ query / q.shape[1] ** 0.5
            scores = scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
            out[i], lse[i] = scores.softmax(0) @ v[:seen], scores.logsumexp(0)
    return out.float(), lse.float()


def attended(attention, shape: tuple[int, int, int], tile: int, judge: Judge, hint: str, **how) -> None:
    (T, S, D), soft_cap = shape, how.get("soft_cap")
    made = torch.Generator().manual_seed(31 * T + S + tile)
    q, k, v = (torch.randn(n, D, generator=made) for n in (T, S, S))
    q *= how.get("scale", 1.0)
    with WithoutReadyMade("scaled_dot_product_attention"), NoLarge(how.get("limit", 10**9)):
        got = attention(q, k, v, tile, soft_cap)
    judge.type(got, tuple)
    judge.equal(len(got), 2, "Return the output and the log-sum-exp.")
    out, lse = row_by_row(q, k, v, soft_cap)
    judge.close(got[0], out, f"in the output. Likely mistake: {hint}", rtol=1e-3, atol=1e-4)
    judge.equal(list(got[1].shape), [T], "The log-sum-exp has one number for each query.")
    blind = lse == NOTHING
    judge.equal(got[1][blind], [NOTHING] * int(blind.sum()), f"where no key is seen. Likely mistake: {hint}")
    judge.close(got[1][~blind], lse[~blind], f"in the log-sum-exp. Likely mistake: {hint}", rtol=1e-4, atol=1e-4)


def one_tile(attention, judge: Judge) -> None:
    attended(attention, (6, 6, 4), 6, judge, "the scale 1/sqrt(D), the mask, the division by l, or lse = m + log l.")


def several_tiles(attention, judge: Judge) -> None:
    hint = "what had been summed was not multiplied by exp(m_old - m_new), or the positions of a later tile's keys."
    for tile in (1, 3, 4):
        attended(attention, (12, 12, 4), tile, judge, hint, scale=3.0)


def a_shorter_last_tile(attention, judge: Judge) -> None:
    hint = "the last tile has fewer keys, and they count."
    for tile in (5, 7, 30):
        attended(attention, (11, 11, 4), tile, judge, hint)


def a_chunk(attention, judge: Judge) -> None:
    hint = "query i stands at position S - T + i."
    for T in (1, 3, 8):
        attended(attention, (T, 13, 4), 4, judge, hint)


def large_scores(attention, judge: Judge) -> None:
    attended(attention, (9, 9, 4), 3, judge, "the maximum was not taken out before exp.", scale=200.0)


def capped(attention, judge: Judge) -> None:
    hint = "scale, then cap, then mask, in this order."
    attended(attention, (8, 8, 4), 3, judge, hint, soft_cap=2.0, scale=3.0)
    attended(attention, (5, 14, 16), 4, judge, hint, soft_cap=1.0, scale=2.0)


def nothing_to_see(attention, judge: Judge) -> None:
    hint = "a query before the first key sees nothing: zeros and -inf, not NaN."
    for T, S in ((7, 3), (4, 3)):
        attended(attention, (T, S, 4), 2, judge, hint)
        attended(attention, (T, S, 4), 2, judge, hint, soft_cap=5.0)


def never_holds_a_row(attention, judge: Judge) -> None:
    attended(attention, (32, 512, 8), 32, judge, "tiles.", limit=32 * 512 // 2)


ATTENTION = Exercise(
    name="attention",
    title="A row never held",
    chapter="07",
    difficulty=4,
    minutes=35,
    checks=[
        one_tile,
        several_tiles,
        a_shorter_last_tile,
        a_chunk,
        large_scores,
        capped,
        nothing_to_see,
        never_holds_a_row,
    ],
    mistakes=[
        Mistake("no scale", "one_tile", edit=("q @ keys.T / D**0.5", "q @ keys.T")),
        Mistake("sees everything", "one_tile", edit=("(len(keys)) > position", "(len(keys)) > S")),
        Mistake("does not see itself", "one_tile", edit=("(len(keys)) > position", "(len(keys)) >= position")),
        Mistake("the maximum for the log-sum-exp", "one_tile", edit=("(m + mass.log())[:, 0]", "m[:, 0]")),
        Mistake("log-sum-exp in base 2", "one_tile", edit=("m + mass.log()", "m + mass.log2()")),
        Mistake("no correction", "several_tiles", edit=("fade, p = (m - base).exp()", "fade, p = torch.ones_like(m)")),
        Mistake("the sum is not corrected", "several_tiles", edit=("mass = mass * fade + p", "mass = mass + p")),
        Mistake("the values are not corrected", "several_tiles", edit=("o = o * fade + p", "o = o + p")),
        Mistake("the tile's own maximum", "several_tiles",
                edit=("torch.maximum(m, s.amax(1, keepdim=True))", "s.amax(1, keepdim=True)")),
        Mistake("positions within the tile", "several_tiles", edit=("first + torch.arange", "torch.arange")),
        Mistake("whole tiles alone", "a_shorter_last_tile", edit=("range(0, S, tile)", "range(0, S - tile + 1, tile)")),
        Mistake("hung from the top left", "a_chunk", edit=("torch.arange(S - T, S)", "torch.arange(T)")),
        Mistake("no maximum", "large_scores", edit=("new = torch.maximum(m, s.amax(1, keepdim=True))",
                                                    "new = torch.zeros_like(m)")),
        Mistake("ignores the cap", "capped", edit=("if soft_cap is not None", "if False")),
        Mistake("caps before the scale", "capped", edit=("s = soft_cap * (s / soft_cap).tanh()",
                "s = soft_cap * (s * D**0.5 / soft_cap).tanh() / D**0.5")),
        Mistake("clips instead", "capped", edit=("soft_cap * (s / soft_cap).tanh()", "s.clamp(-soft_cap, soft_cap)")),
        Mistake("NaN where nothing is seen", "nothing_to_see", edit=("torch.where(new == -torch.inf, 0.0, new)",
                                                                       "new")),
        Mistake("divides by nothing", "nothing_to_see", edit=("torch.where(mass == 0, 1.0, mass)", "mass")),
        Mistake("one tile of all keys", "never_holds_a_row", edit=("range(0, S, tile)", "range(0, S, tile := S)")),
    ],
    forbids=("kernels", "minillm.attention"),
)  # fmt: skip
