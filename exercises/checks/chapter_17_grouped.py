"""Chapter 17's last exercise: pairs sorted into tiles of one expert, through the experts, and back to their tokens. The
right answer takes one token and one choice at a time, and the experts write down what they were given."""

from __future__ import annotations

import torch

from exercises import Exercise, Judge, Mistake


class Experts:
    """Experts that are not linear, remember their calls, and return NaN for padding: it is not to be used."""

    def __init__(self, num_experts: int, d: int) -> None:
        generator = torch.Generator().manual_seed(17)
        self.weight = torch.randn(num_experts, d, d, generator=generator) / d**0.5
        self.calls: list[tuple[int, torch.Tensor]] = []

    def of(self, e: int, row: torch.Tensor) -> torch.Tensor:
        return torch.tanh(row @ self.weight[e]) + 0.1 * (e + 1)

    def __call__(self, e: int, rows: torch.Tensor) -> torch.Tensor:
        self.calls.append((int(e), rows.clone()))
        padding = (rows == 0).all(-1, keepdim=True)
        return self.of(int(e), rows).masked_fill(padding, torch.nan)


def one_by_one(x, experts, weights, run: Experts) -> torch.Tensor:
    out = torch.zeros_like(x)
    for t, row in enumerate(experts.tolist()):
        for j, e in enumerate(row):
            if e >= 0:
                out[t] += weights[t, j] * run.of(e, x[t : t + 1])[0]
    return out


def expected_calls(x, experts, num_experts: int, block: int) -> list[tuple[int, torch.Tensor]]:
    calls = []
    for e in range(num_experts):
        tokens = [t for t, row in enumerate(experts.tolist()) if e in row]
        for first in range(0, len(tokens), block):
            mine = tokens[first : first + block]
            calls.append((e, torch.cat([x[mine], torch.zeros(block - len(mine), x.shape[1])])))
    return calls


def draw(tokens: int, k: int, num_experts: int, d: int = 5, seed: int = 0, dropped: float = 0.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, d, generator=generator)
    experts = torch.rand(tokens, num_experts, generator=generator).topk(k).indices
    experts[torch.rand(tokens, k, generator=generator) < dropped] = -1
    weights = torch.rand(tokens, k, generator=generator) + 0.1
    return x, experts, weights


def through(grouped, judge: Judge, case: tuple, num_experts: int, block: int, hint: str, tiles: str = "") -> None:
    x, experts, weights = case
    run = Experts(num_experts, x.shape[1])
    got = grouped(x, experts, weights, num_experts, block, run)
    what = f"experts {experts.tolist()}, tiles of {block}"
    if tiles:
        want = expected_calls(x, experts, num_experts, block)
        shapes = [list(rows.shape) for _, rows in run.calls]
        judge.true(
            all(shape == [block, x.shape[1]] for shape in shapes),
            f"run was given rows of shapes {shapes} with tiles of {block}. Likely mistake: {tiles}",
        )
        owners = [e for e, _ in run.calls]
        judge.equal(owners, [e for e, _ in want], f"for the experts of the calls; {what}. Likely mistake: {tiles}")
        for (e, rows), (_, right) in zip(run.calls, want, strict=True):
            judge.close(rows, right, f"for the rows of a tile of expert {e}; {what}. Likely mistake: {tiles}")
    judge.close(got, one_by_one(x, experts, weights, run), f"for {what}. Likely mistake: {hint}", rtol=1e-4, atol=1e-5)


def one_choice_each(grouped, judge: Judge) -> None:
    hint = "results left in the order of the experts, or of the wrong token, or padding among them."
    x, experts, weights = draw(6, 1, 3)
    through(grouped, judge, (x, experts, torch.ones_like(weights)), 3, 4, hint)


def several_choices(grouped, judge: Judge) -> None:
    hint = "a pair given to another token than p // k, or the choices of a token overwrite each other."
    x, experts, weights = draw(7, 3, 5, seed=1)
    through(grouped, judge, (x, experts, torch.ones_like(weights)), 5, 16, hint)


def weighed_once_and_after(grouped, judge: Judge) -> None:
    hint = "the weight left out, applied twice, taken from another choice, or applied before the expert."
    x, experts, weights = draw(5, 2, 4, seed=2)
    weights[0] = torch.tensor([3.0, 0.0])
    through(grouped, judge, (x, experts, weights), 4, 8, hint)


def more_rows_than_a_tile(grouped, judge: Judge) -> None:
    hint = "what follows the first tile of an expert was lost."
    through(grouped, judge, draw(23, 2, 3, seed=3), 3, 4, hint)


def tiles_are_whole(grouped, judge: Judge) -> None:
    tiles = (
        "a tile that is not full, has rows of two experts, is all padding, or rows out of order; the last is filled up."
    )
    for tokens, k, num_experts, block in ((9, 2, 5, 4), (8, 1, 1, 4), (3, 2, 9, 2)):
        case = draw(tokens, k, num_experts, seed=4)
        through(grouped, judge, case, num_experts, block, "see the tiles.", tiles)


def dropped_add_nothing(grouped, judge: Judge) -> None:
    hint = "a dropped choice went to an expert, moved the others by a place, or its weight, NaN, came into the sum."
    tiles = "dropped pairs were given to an expert, or counted where an expert's rows begin."
    x, experts, weights = draw(11, 2, 4, seed=5, dropped=0.4)
    weights[experts < 0] = torch.nan
    through(grouped, judge, (x, experts, weights), 4, 4, hint, tiles)
    x, experts, weights = draw(3, 2, 4, seed=6)
    through(
        grouped,
        judge,
        (x, torch.full_like(experts, -1), weights),
        4,
        4,
        "something added where every choice was dropped.",
        tiles,
    )


GROUPED = Exercise(
    name="grouped",
    title="Sort, run, un-sort",
    chapter="17",
    difficulty=4,
    minutes=35,
    checks=[
        one_choice_each,
        several_choices,
        weighed_once_and_after,
        more_rows_than_a_tile,
        tiles_are_whole,
        dropped_add_nothing,
    ],
    mistakes=[
        Mistake(
            "left in sorted order",
            "one_choice_each",
            edit=("y[pairs] = run", "y[first + start : first + start + len(pairs)] = run"),
        ),
        Mistake(
            "rows of the sorted place",
            "one_choice_each",
            edit=("x[pairs // k]", "x[torch.arange(first + start, first + start + len(pairs)) // k]"),
        ),
        Mistake("pairs numbered by choice", "several_choices", edit=("x[pairs // k]", "x[pairs % T]")),
        Mistake(
            "choices overwrite each other",
            "several_choices",
            edit=("sum(1)", "max(1).values"),
        ),
        Mistake(
            "no weights", "weighed_once_and_after", edit=("y.view(T, k, d) * weights[..., None]", "y.view(T, k, d)")
        ),
        Mistake(
            "weights before the expert",
            "weighed_once_and_after",
            source="""
import torch
def grouped(x, experts, weights, num_experts, block, run):
    out = torch.zeros_like(x)
    for e in range(num_experts):
        t, j = (experts == e).nonzero(as_tuple=True)
        for first in range(0, len(t), block):
            mine = slice(first, first + block)
            tile = torch.zeros(block, x.shape[1])
            tile[: len(t[mine])] = x[t[mine]] * weights[t[mine], j[mine], None]
            out.index_add_(0, t[mine], run(e, tile)[: len(t[mine])])
    return out
""",
        ),
        Mistake(
            "weight of the first choice",
            "weighed_once_and_after",
            edit=("weights[..., None]", "weights[:, :1, None]"),
        ),
        Mistake(
            "first tile only",
            "more_rows_than_a_tile",
            edit=("range(0, count, block)", "range(0, min(count, block), block)"),
        ),
        Mistake("no padding", "tiles_are_whole", edit=("run(e, tile)", "run(e, tile[: len(pairs)])")),
        Mistake(
            "a tile more",
            "tiles_are_whole",
            edit=("range(0, count, block)", "range(0, count + 1, block)"),
        ),
        Mistake(
            "unstable order",
            "tiles_are_whole",
            edit=("flat.argsort(stable=True)", "(flat * T * k - torch.arange(T * k)).argsort()"),
        ),
        Mistake("dropped not skipped", "dropped_add_nothing", edit=("first = int((flat < 0).sum())", "first = 0")),
        Mistake("NaN times zero", "dropped_add_nothing", edit=("weights.masked_fill(experts < 0, 0.0)", "weights")),
        Mistake(
            "dropped go to expert 0",
            "dropped_add_nothing",
            edit=("flat = experts.flatten()", "flat = experts.flatten().clamp(min=0)"),
        ),
    ],
    forbids=("minillm.moe",),
)
