"""Chapter 07, FlashAttention: merging (m, l, o), the plan of tiles, merging splits, and a row that is never held.

The right answers come from all scores at once in float64, and from looking at each pair of query and key.
"""

from __future__ import annotations

import torch

from exercises import Exercise, Judge, Mistake

from .chapter_07_attention import ATTENTION
from .chapter_07_plan import PLAN

NOTHING = float("-inf")


def drawn(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- merge


def kept(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """scores (rows, keys), values (keys, D) -> m, l, o from all scores at once, in float64. No keys: -inf, 0, 0."""
    rows = len(scores)
    if scores.shape[1] == 0:
        return torch.full((rows,), NOTHING), torch.zeros(rows), torch.zeros(rows, values.shape[1])
    scores, values = scores.double(), values.double()
    most = scores.max(dim=1).values
    weights = torch.exp(scores - most[:, None])
    return most.float(), weights.sum(1).float(), (weights @ values).float()


def merged(merge, scores: torch.Tensor, cut: int, judge: Judge, hint: str) -> None:
    """The keys up to `cut` in one part, the rest in the other."""
    values = drawn(scores.shape[1], 3, seed=scores.shape[1])
    a, b = kept(scores[:, :cut], values[:cut]), kept(scores[:, cut:], values[cut:])
    compare(merge(a, b), kept(scores, values), judge, hint)


def compare(got, want, judge: Judge, hint: str) -> None:
    judge.type(got, tuple)
    judge.equal(len(got), 3, "Return m, l and o.")
    for name, mine, right in zip(("m", "l", "o"), got, want, strict=True):
        judge.close(mine, right, f"in {name}. Likely mistake: {hint}", rtol=1e-4, atol=1e-5)


def one_maximum(merge, judge: Judge) -> None:
    scores = torch.tensor([[2.0, 1.0, 2.0, -1.0]])
    merged(merge, scores, 2, judge, "with equal maxima nothing is corrected, sums add up, and nothing is divided yet.")


def the_smaller_one_shrinks(merge, judge: Judge) -> None:
    hint = "each part is multiplied by exp(its own m - the new m), l and o alike."
    merged(merge, torch.tensor([[0.5, 3.0, 1.0, 0.2]]), 2, judge, hint)
    merged(merge, torch.tensor([[0.5, 1.0, 3.0, 0.2]]), 2, judge, hint)


def rows_are_apart(merge, judge: Judge) -> None:
    hint = "one maximum or one correction for all rows; each row is a query of its own."
    merged(merge, drawn(7, 12, seed=1, scale=3.0), 5, judge, hint)
    merged(merge, torch.tensor([[20.0, 21.0], [-20.0, -21.0]]), 1, judge, hint)


def large_scores(merge, judge: Judge) -> None:
    hint = "exp of something that is not a difference to the maximum overflows."
    merged(merge, 200.0 + drawn(4, 10, seed=2, scale=20.0), 6, judge, hint)
    merged(merge, -200.0 + drawn(4, 10, seed=3, scale=20.0), 6, judge, hint)


def one_part_is_empty(merge, judge: Judge) -> None:
    hint = "a row with m = -inf counts nothing: its correction is exp(-inf) = 0."
    merged(merge, drawn(3, 6, seed=4) - 9.0, 0, judge, hint)
    merged(merge, drawn(3, 6, seed=4) - 9.0, 6, judge, hint)


def both_parts_are_empty(merge, judge: Judge) -> None:
    nothing = kept(torch.zeros(2, 0), torch.zeros(0, 3))
    m, mass, o = merge(nothing, nothing)
    hint = "two rows without keys: -inf - (-inf) is NaN."
    judge.equal(m, [NOTHING, NOTHING], f"in m. Likely mistake: {hint}")
    judge.close(mass, torch.zeros(2), f"in l. Likely mistake: {hint}")
    judge.close(o, torch.zeros(2, 3), f"in o. Likely mistake: {hint}")


MERGE = Exercise(
    name="merge",
    title="Merge two parts",
    chapter="07",
    difficulty=2,
    minutes=15,
    checks=[
        one_maximum,
        the_smaller_one_shrinks,
        rows_are_apart,
        large_scores,
        one_part_is_empty,
        both_parts_are_empty,
    ],
    mistakes=[
        Mistake("adds the maxima", "one_maximum", edit=("m = torch.maximum(m_a, m_b)", "m = m_a + m_b")),
        Mistake("divides already", "one_maximum", edit=("return m, mass, o", "return m, mass, o / mass[:, None]")),
        Mistake(
            "corrects nothing", "the_smaller_one_shrinks",
            edit=("(m_a - base).exp(), (m_b - base).exp()", "torch.ones_like(m), torch.ones_like(m)"),
        ),
        Mistake(
            "o is not corrected", "the_smaller_one_shrinks",
            edit=("o_a * fade_a[:, None] + o_b * fade_b[:, None]", "o_a + o_b"),
        ),
        Mistake("the correction upside down", "the_smaller_one_shrinks", edit=("(m_a - base)", "(base - m_a)")),
        Mistake(
            "takes a to be the larger", "the_smaller_one_shrinks",
            edit=("m = torch.maximum(m_a, m_b)", "m = m_a"),
        ),
        Mistake(
            "corrections exchanged", "the_smaller_one_shrinks",
            edit=("fade_a, fade_b = (m_a", "fade_b, fade_a = (m_a"),
        ),
        Mistake(
            "one maximum for all rows", "rows_are_apart",
            edit=("m = torch.maximum(m_a, m_b)", "m = torch.maximum(m_a, m_b).amax().expand_as(m_a)"),
        ),
        Mistake(
            "back to sums of exp(s)",
            "large_scores",
            edit=("mass = l_a * fade_a + l_b * fade_b", "mass = (l_a * m_a.exp() + l_b * m_b.exp()) / m.exp()"),
        ),
        Mistake(
            "zero for the maximum of nothing",
            "one_part_is_empty",
            edit=("m = torch.maximum(m_a, m_b)", "m = torch.maximum(m_a.nan_to_num(neginf=0.0), m_b)"),
        ),
        Mistake(
            "NaN from two empty parts", "both_parts_are_empty",
            edit=("torch.where(m == -torch.inf, 0.0, m)", "m"),
        ),
    ],
    forbids=("kernels",),
)  # fmt: skip


# --- merge_splits


def split_up(lengths: list[int], heads: int, dim: int, seed: int, scale: float = 1.0, shift: float = 0.0):
    """outs, lses of splits of these lengths, NaN where there are no keys; and out, lse of all keys at once."""
    scores = (drawn(sum(lengths), heads, seed=seed, scale=scale) + shift).double()
    values = drawn(sum(lengths), heads, dim, seed=seed + 1).double()
    outs, lses = torch.full((len(lengths), heads, dim), float("nan")), torch.full((len(lengths), heads), NOTHING)
    for s, (part, mine) in enumerate(zip(scores.split(lengths), values.split(lengths), strict=True)):
        if len(part):
            outs[s] = torch.einsum("nh,nhd->hd", part.softmax(0), mine).float()
            lses[s] = part.logsumexp(0).float()
    whole = torch.einsum("nh,nhd->hd", scores.softmax(0), values).float()
    return outs, lses, whole, scores.logsumexp(0).float()


def splits_merged(merge_splits, case: tuple, judge: Judge, hint: str) -> None:
    outs, lses, out, lse = case
    got = merge_splits(outs, lses)
    judge.type(got, tuple)
    judge.equal(len(got), 2, "Return the output and the log-sum-exp.")
    judge.close(got[0], out, f"in the output. Likely mistake: {hint}", rtol=1e-3, atol=1e-4)
    judge.close(got[1], lse, f"in the log-sum-exp. Likely mistake: {hint}", rtol=1e-5, atol=1e-5)


def two_alike(merge_splits, judge: Judge) -> None:
    case = (
        torch.tensor([[[1.0]], [[3.0]]]), torch.zeros(2, 1), torch.tensor([[2.0]]), torch.tensor([2.0]).log(),
    )  # fmt: skip
    splits_merged(merge_splits, case, judge, "a sum where a weighted mean is due, or a logarithm that is missing.")


def weights_by_log_sum_exp(merge_splits, judge: Judge) -> None:
    hint = "splits weigh as much as their sums of exp do, exp(lse - largest lse), and each head on its own."
    for lengths in ([3], [2, 9], [1, 30, 4, 12, 7]):
        splits_merged(merge_splits, split_up(lengths, 3, 5, seed=sum(lengths), scale=2.0), judge, hint)


def far_from_zero(merge_splits, judge: Judge) -> None:
    hint = "exp of a log-sum-exp overflows, or all of them become 0; take the largest out first."
    for shift in (1000.0, -1000.0):
        splits_merged(merge_splits, split_up([5, 8, 2], 2, 4, seed=7, shift=shift), judge, hint)
    outs, lses, *_ = split_up([4, 6], 2, 4, seed=8)
    lses[:, 0] += 300.0
    lses[:, 1] -= 300.0
    weights = lses.double().softmax(0)
    out = torch.einsum("sh,shd->hd", weights, outs.double()).float()
    splits_merged(merge_splits, (outs, lses, out, lses.double().logsumexp(0).float()), judge, hint)


def far_from_each_other(merge_splits, judge: Judge) -> None:
    outs, lses, *_ = split_up([4, 6, 3], 2, 4, seed=12)
    for apart in (60.0, 300.0):
        moved = lses + apart * torch.tensor([[0.0, 2.0], [1.0, 0.0], [2.0, 1.0]])
        weights, lse = moved.double().softmax(0), moved.double().logsumexp(0).float()
        out = torch.einsum("sh,shd->hd", weights, outs.double()).float()
        hint = "another split's log-sum-exp taken out than the largest; e to the rest overflows."
        splits_merged(merge_splits, (outs, moved, out, lse), judge, hint)


def some_without_keys(merge_splits, judge: Judge) -> None:
    hint = "what a split without keys holds was used; 0 · NaN is NaN."
    for lengths in ([0, 4], [5, 0, 0, 3]):
        splits_merged(merge_splits, split_up(lengths, 2, 4, seed=9), judge, hint)


def none_with_keys(merge_splits, judge: Judge) -> None:
    hint = "no split of a head has keys: zeros and -inf, not NaN."
    outs, lses, out, lse = split_up([4, 6], 3, 4, seed=10)
    outs[:, 1], lses[:, 1] = float("nan"), NOTHING
    out[1] = 0.0
    got, got_lse = merge_splits(outs, lses)
    judge.close(got, out, f"in the output. Likely mistake: {hint}", rtol=1e-3, atol=1e-4)
    judge.equal(float(got_lse[1]), NOTHING, f"in the log-sum-exp. Likely mistake: {hint}")
    judge.close(got_lse[[0, 2]], lse[[0, 2]], f"in the log-sum-exp of other heads. Likely mistake: {hint}")


SPLITS = Exercise(
    name="merge_splits",
    title="Merge splits",
    chapter="07",
    difficulty=2,
    minutes=20,
    checks=[
        two_alike, weights_by_log_sum_exp, far_from_zero, far_from_each_other, some_without_keys, none_with_keys,
    ],
    mistakes=[
        Mistake(
            "a sum, not divided", "two_alike",
            edit=(" / torch.where(total == 0, 1.0, total)[:, None]", ""),
        ),
        Mistake("returns the largest", "two_alike", edit=("base + total.log()", "base")),
        Mistake("the mean of the log-sum-exps", "two_alike", edit=("base + total.log()", "lses.mean(0)")),
        Mistake(
            "the mean of the outputs", "weights_by_log_sum_exp",
            edit=("weights = (lses - base).exp()", "weights = (lses > -torch.inf).float()"),
        ),
        Mistake(
            "weights in base 2", "weights_by_log_sum_exp",
            edit=("weights = (lses - base).exp()", "weights = (lses - base).exp2()"),
        ),
        Mistake(
            "nothing taken out",
            "far_from_zero",
            edit=("torch.where(most == -torch.inf, 0.0, most)", "0.0 * most"),
        ),
        Mistake(
            "one maximum for all heads", "far_from_zero",
            edit=("most = lses.amax(0)", "most = lses.amax().expand(lses.shape[1])"),
        ),
        Mistake("takes the smallest out", "far_from_each_other", edit=("most = lses.amax(0)", "most = lses.amin(0)")),
        Mistake("takes the first out", "far_from_each_other", edit=("most = lses.amax(0)", "most = lses[0]")),
        Mistake(
            "weighs what is not there", "some_without_keys",
            edit=("torch.where(lses[..., None] > -torch.inf, outs, 0.0)", "outs"),
        ),
        Mistake(
            "NaN where nothing is", "none_with_keys",
            edit=("base = torch.where(most == -torch.inf, 0.0, most)", "base = most"),
        ),
        Mistake(
            "divides by nothing", "none_with_keys",
            edit=("torch.where(total == 0, 1.0, total)", "total"),
        ),
        Mistake(
            "zero instead of -inf", "none_with_keys",
            edit=("base + total.log()", "base + torch.where(total == 0, 1.0, total).log()"),
        ),
    ],
    forbids=("kernels",),
)  # fmt: skip


EXERCISES = [MERGE, PLAN, SPLITS, ATTENTION]
