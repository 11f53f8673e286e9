"""Chapter 17, mixture of experts: experts read, a router with groups, balancing by bias, sorted tiles.

The right answers come from every way that tokens can choose, from plain lists sorted by hand, and from one token and
one choice at a time.
"""

from __future__ import annotations

import itertools
import math

import torch

from exercises import Exercise, Judge, Mistake

from .chapter_17_grouped import GROUPED

# --- experts_read


def by_enumeration(chances: list, tokens: int) -> float:
    """All the ways in which tokens choose or leave each expert, with their probabilities."""
    expected = 0.0
    for chance in chances:
        for way in itertools.product((True, False), repeat=tokens):
            expected += math.prod(chance if chosen else 1 - chance for chosen in way) * any(way)
    return expected


def read(experts_read, chances: list, tokens: int, judge: Judge, hint: str) -> None:
    got = experts_read(chances, tokens)
    judge.type(got, (float, int))
    want = by_enumeration(chances, tokens)
    judge.close(got, want, f"for experts_read({chances}, {tokens}). Likely mistake: {hint}")


def one_token(experts_read, judge: Judge) -> None:
    hint = "the chance to be left alone for the chance to be read; one token reads the sum of the chances."
    read(experts_read, [0.5, 0.5], 1, judge, hint)
    hint = "the chance to be left alone for the chance to be read; one token reads the sum of the chances."
    read(experts_read, [0.25] * 8, 1, judge, hint)


def several_tokens(experts_read, judge: Judge) -> None:
    for tokens in (2, 3, 6):
        hint = "an expert counted once for each token that chooses it, or the chances of the tokens added up."
        read(experts_read, [0.25] * 8, tokens, judge, hint)


def popular_and_rare(experts_read, judge: Judge) -> None:
    hint = "the mean of the chances used for all experts; each has its own."
    read(experts_read, [0.9, 0.5, 0.05, 0.55], 4, judge, hint)


def never_and_always(experts_read, judge: Judge) -> None:
    hint = "an expert counted that nobody ever chooses, or one left out that all choose."
    read(experts_read, [0.0, 1.0, 0.5], 3, judge, hint)
    read(experts_read, [0.3, 1.0, 0.7], 0, judge, "a step without tokens counted as if it had one; it reads nothing.")


READ = Exercise(
    name="experts_read",
    title="Experts read",
    chapter="17",
    difficulty=1,
    minutes=15,
    checks=[one_token, several_tokens, popular_and_rare, never_and_always],
    mistakes=[
        Mistake("the experts left alone", "one_token", edit=("1.0 - (1.0 - chance)", "(1.0 - chance)")),
        Mistake("all tokens choose it", "several_tokens", edit=("1.0 - (1.0 - chance) ** tokens", "chance ** tokens")),
        Mistake(
            "chances added up",
            "several_tokens",
            edit=("1.0 - (1.0 - chance) ** tokens", "min(1.0, chance * tokens)"),
        ),
        Mistake("one token too many", "one_token", edit=("** tokens", "** (tokens + 1)")),
        Mistake(
            "mean chance",
            "popular_and_rare",
            edit=("(1.0 - chance) ** tokens", "(1.0 - sum(chances) / len(chances)) ** tokens"),
        ),
        Mistake("at least one token", "never_and_always", edit=("** tokens", "** max(tokens, 1)")),
    ],
    forbids=("minillm.analysis", "minillm.moe_measure"),
)


# --- choose_experts


def by_hand(logits, bias, k: int, groups: int, top_groups: int, scale: float) -> tuple[list, list]:
    """One token after the other, with sorted lists."""
    chosen, weights = [], []
    for row in logits.double().tolist():
        scores = [1 / (1 + math.exp(-logit)) for logit in row]
        ranks = [score + b for score, b in zip(scores, bias.double().tolist(), strict=True)]
        size = len(row) // groups
        worth = {g: sum(sorted(ranks[g * size : (g + 1) * size])[-2:]) for g in range(groups)}
        best = sorted(worth, key=worth.get, reverse=True)[:top_groups]
        open_to = [e for e in range(len(row)) if e // size in best]
        mine = sorted(open_to, key=lambda e: ranks[e], reverse=True)[:k]
        together = sum(scores[e] for e in mine)
        chosen.append(mine)
        weights.append([scale * scores[e] / together for e in mine])
    return chosen, weights


def chosen(choose_experts, judge: Judge, hint: str, weighing: str, bias=None, seed=0, tokens=9, experts=12, k=3,
           groups=1, top_groups=1, scale=1.0) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(tokens, experts, generator=generator)
    bias = torch.zeros(experts) if bias is None else bias(torch.randn(experts, generator=generator))
    settings = (k, groups, top_groups, scale)
    got = choose_experts(logits, bias, *settings)
    judge.type(got, tuple)
    judge.true(len(got) == 2, "Return the pair (experts, weights).")
    want, weights = by_hand(logits, bias, *settings)
    judge.type(got[0], torch.Tensor, "experts")
    judge.true(got[0].dtype == torch.int64, f"experts are {got[0].dtype}; they are indices, int64.")
    where = f"k {k}, {groups} groups of which {top_groups} stay, scale {scale}"
    judge.equal(got[0].tolist(), want, f"for the experts chosen with {where}. Likely mistake: {hint}")
    judge.close(got[1], torch.tensor(weights), f"for the weights with {where}. Likely mistake: {weighing}", rtol=1e-4)


def plain_top_k(choose_experts, judge: Judge) -> None:
    weighing = (
        "weights that do not sum to the scale over a token's chosen experts, or a softmax in place of the sigmoid."
    )
    chosen(choose_experts, judge, "not the k largest, in descending order.", weighing)


def the_bias_chooses(choose_experts, judge: Judge) -> None:
    hint = "the bias left out of the choice, or added to the logit instead of to the score."
    weighing = "the bias is in the weights; it chooses, the score alone weighs."
    chosen(choose_experts, judge, hint, weighing, bias=lambda b: 0.4 * b, seed=1)


def groups_come_first(choose_experts, judge: Judge) -> None:
    hint = "a group judged by its best expert or by all of them, not by its two best; or groups interleaved."
    weighing = "divided by the scores of more experts than the chosen ones."
    for seed in range(4):
        chosen(
            choose_experts, judge, hint, weighing, bias=lambda b: 0.1 * b, seed=seed, experts=20, groups=5, top_groups=2
        )


def negative_ranks(choose_experts, judge: Judge) -> None:
    hint = "experts outside the chosen groups were set to 0, which beats a negative rank; set them to minus infinity."
    chosen(
        choose_experts, judge, hint, "see above.", bias=lambda b: b - 4, seed=2, experts=16, k=4, groups=4, top_groups=2
    )


def scaled(choose_experts, judge: Judge) -> None:
    weighing = "the scale left out, or divided away with the sum."
    chosen(choose_experts, judge, "see above.", weighing, seed=3, k=4, scale=2.5)


CHOOSE = Exercise(
    name="choose_experts",
    title="Router with groups",
    chapter="17",
    difficulty=3,
    minutes=25,
    checks=[plain_top_k, the_bias_chooses, groups_come_first, negative_ranks, scaled],
    mistakes=[
        Mistake("softmax", "plain_top_k", edit=("logits.sigmoid()", "logits.softmax(-1)")),
        Mistake("not renormalised", "plain_top_k", edit=(" / weights.sum(-1, keepdim=True)", "")),
        Mistake(
            "divided by all scores",
            "plain_top_k",
            edit=("weights.sum(-1, keepdim=True)", "scores.sum(-1, keepdim=True)"),
        ),
        Mistake("no bias", "the_bias_chooses", edit=("(scores + bias)", "scores")),
        Mistake(
            "bias in the weights",
            "the_bias_chooses",
            edit=("weights = scores.gather", "weights = (scores + bias).gather"),
        ),
        Mistake("bias on the logits", "the_bias_chooses", edit=("(scores + bias)", "(logits + bias).sigmoid()")),
        Mistake("best expert of a group", "groups_come_first", edit=("topk(2, dim=-1)", "topk(1, dim=-1)")),
        Mistake("whole group", "groups_come_first", edit=("ranked.topk(2, dim=-1).values.sum(-1)", "ranked.sum(-1)")),
        Mistake(
            "groups by score",
            "groups_come_first",
            edit=("worth = ranked.topk", "worth = scores.unflatten(1, (groups, -1)).topk"),
        ),
        Mistake("outside is zero", "negative_ranks", edit=("-torch.inf", "0.0")),
        Mistake("no scale", "scaled", edit=("scale * weights", "weights")),
    ],
    forbids=("minillm.moe_router", "minillm.moe"),
)


# --- move_bias


def moved(move_bias, bias, experts, speed: float, judge: Judge, hint: str) -> None:
    got = move_bias(bias, experts, speed)
    flat = [e for row in experts.tolist() for e in row if e >= 0]
    loads = [flat.count(e) for e in range(len(bias))]
    want = []
    for value, load in zip(bias.tolist(), loads, strict=True):
        above, below = load * len(loads) > len(flat), load * len(loads) < len(flat)
        want.append(value - speed * above + speed * below)
    judge.close(got, torch.tensor(want), f"for loads {loads}, speed {speed}. Likely mistake: {hint}")


def against_the_load(move_bias, judge: Judge) -> None:
    experts = torch.tensor([[0, 1], [0, 1], [0, 1], [0, 2]])
    moved(
        move_bias, torch.zeros(4), experts, 0.5, judge, "the wrong direction, or a step in proportion to the distance."
    )


def from_where_it_was(move_bias, judge: Judge) -> None:
    experts = torch.tensor([[2, 1], [2, 0], [2, 1], [2, 1]])
    bias = torch.tensor([0.3, -0.2, 0.7])
    moved(move_bias, bias, experts, 0.01, judge, "the change alone returned, or a bias made anew each step.")


def exactly_the_mean(move_bias, judge: Judge) -> None:
    experts = torch.tensor([[0, 1], [0, 2], [0, 1], [3, 2]])
    moved(move_bias, torch.zeros(4), experts, 0.5, judge, "an expert with exactly the mean moved.")


def nobody_chose_the_last(move_bias, judge: Judge) -> None:
    experts = torch.tensor([[0, 1], [0, 2]])
    hint = "experts that nobody chose left out of the loads or of the mean."
    moved(move_bias, torch.zeros(7), experts, 0.1, judge, hint)
    moved(move_bias, torch.zeros(5), torch.tensor([[0, 1], [2, 3], [2, 0], [1, 3]]), 0.1, judge, hint)


def dropped_count_for_nobody(move_bias, judge: Judge) -> None:
    hint = "a dropped choice, -1, counted for the last expert or in the mean."
    moved(move_bias, torch.zeros(4), torch.tensor([[0, 1], [0, 1], [0, 2], [0, -1]]), 0.5, judge, hint)
    experts = torch.tensor([[0, -1], [1, -1], [0, -1], [1, -1], [2, -1]])
    moved(move_bias, torch.zeros(3), experts, 0.5, judge, hint)


BIAS = Exercise(
    name="move_bias",
    title="Balancing by bias",
    chapter="17",
    difficulty=2,
    minutes=15,
    checks=[against_the_load, from_where_it_was, exactly_the_mean, nobody_chose_the_last, dropped_count_for_nobody],
    mistakes=[
        Mistake("with the load", "against_the_load", edit=("counts.mean() - counts", "counts - counts.mean()")),
        Mistake(
            "in proportion",
            "against_the_load",
            edit=("torch.sign(counts.mean() - counts)", "(counts.mean() - counts)"),
        ),
        Mistake("the change alone", "from_where_it_was", edit=("return bias + speed", "return speed")),
        Mistake(
            "the mean goes down",
            "exactly_the_mean",
            edit=("torch.sign(counts.mean() - counts)", "torch.where(counts < counts.mean(), 1.0, -1.0)"),
        ),
        Mistake(
            "mean of the chosen experts",
            "nobody_chose_the_last",
            edit=("counts.mean()", "counts[counts > 0].mean()"),
        ),
        Mistake(
            "dropped go to the last",
            "dropped_count_for_nobody",
            edit=("experts[experts >= 0]", "(experts % len(bias)).flatten()"),
        ),
        Mistake(
            "dropped are in the mean",
            "dropped_count_for_nobody",
            edit=("counts.mean() -", "experts.numel() / len(bias) -"),
        ),
    ],
    forbids=("minillm.moe_router", "minillm.moe_measure"),
)


EXERCISES = [READ, CHOOSE, BIAS, GROUPED]
