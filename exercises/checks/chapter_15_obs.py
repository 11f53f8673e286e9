"""Chapter 15, one column removed. The right answer is least squares on the inputs, with the column left out."""

from __future__ import annotations

import torch

from exercises import Exercise, Judge, Mistake


def best_without(weight: torch.Tensor, x: torch.Tensor, j: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, loss of each row): the others fitted anew to what the layer gave before."""
    rest = [c for c in range(weight.shape[1]) if c != j]
    wanted = x @ weight.t()  # (tokens, N)
    fitted = torch.linalg.lstsq(x[:, rest], wanted).solution
    result = torch.zeros_like(weight)
    result[:, rest] = fitted.t()
    return result, ((x @ result.t() - wanted) ** 2).sum(0)


def case(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator, dtype=torch.float64) + 2 * torch.eye(columns)
    x = torch.randn(5 * columns, columns, generator=generator, dtype=torch.float64) @ mix
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64), x


def given(remove_column, weight, x, j: int, judge: Judge):
    got = remove_column(weight, x.t() @ x, j)
    judge.type(got, (tuple, list))
    judge.equal(len(got), 2, "Two tensors are wanted, (weights, loss).")
    return got, best_without(weight, x, j)


def near(remove_column, weight, x, j: int, judge: Judge, hint: str) -> None:
    (new, _), (want, _) = given(remove_column, weight, x, j, judge)
    judge.close(new, want, f"(weights) without column {j}. Likely mistake: {hint}", rtol=1e-6, atol=1e-8)


def independent_inputs(remove_column, judge: Judge) -> None:
    """H is diagonal: nobody can make up for the column."""
    weight, x = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64), torch.eye(3, dtype=torch.float64) * 2
    hint = "another column removed, the column kept, or others changed though their inputs have nothing in common."
    near(remove_column, weight, x, 1, judge, hint)


def one_row(remove_column, judge: Judge) -> None:
    weight, x = case(1, 4, 0)
    hint = "H in place of its inverse, not divided by [H^-1]_jj, or a plus for the minus."
    near(remove_column, weight, x, 0, judge, hint)


def many_rows(remove_column, judge: Judge) -> None:
    weight, x = case(5, 6, 1)
    near(remove_column, weight, x, 0, judge, "the w_j of one row used for all.")


def any_column(remove_column, judge: Judge) -> None:
    for j in (2, 5, 6):
        weight, x = case(3, 7, j)
        hint = "columns on one side alone moved; those to the left help as well as those to the right."
        near(remove_column, weight, x, j, judge, hint)


def nothing_left_over(remove_column, judge: Judge) -> None:
    # in floating point w - (w / h) · h is 0 for most numbers: many rows, so that some are not
    weight, x = case(200, 9, 3)
    (new, _), _ = given(remove_column, weight, x, 4, judge)
    left = int((new[:, 4] != 0).sum())
    judge.true(left == 0, f"column 4 is not exactly 0 in {left} of 200 rows. Likely mistake: subtracted, but not set.")


def the_loss(remove_column, judge: Judge) -> None:
    for j in (0, 3):
        weight, x = case(4, 5, 10 + j)
        (_, loss), (_, want) = given(remove_column, weight, x, j, judge)
        hint = f"(loss) without column {j}: w_j² / [H^-1]_jj for each row, which is what the sum of squares grows to."
        judge.close(loss, want, hint, rtol=1e-5, atol=1e-8)


OBS = Exercise(
    name="remove_column",
    title="Remove a column, and make up for it",
    chapter="15",
    difficulty=3,
    minutes=25,
    checks=[independent_inputs, one_row, many_rows, any_column, nothing_left_over, the_loss],
    mistakes=[
        Mistake("with a plus", "one_row", edit=("weight - step", "weight + step")),
        Mistake("the column stays", "independent_inputs", edit=("new[:, j] = 0", "new[:, j] = weight[:, j]")),
        Mistake("not divided", "one_row", edit=("(weight[:, j] / inverse[j, j], ", "(weight[:, j], ")),
        Mistake("others left alone", "one_row", edit=("new = weight - step", "new = weight.clone()")),
        Mistake("H in place of its inverse", "one_row", edit=("torch.linalg.inv(H)", "H")),
        Mistake(
            "the first row for all",
            "many_rows",
            edit=("torch.outer(weight[:, j] /", "torch.outer(weight[0, j].expand(len(weight)) /"),
        ),
        Mistake(
            "columns to the right alone",
            "any_column",
            edit=("new = weight - step", "new = weight.clone()\n    new[:, j:] -= step[:, j:]"),
        ),
        Mistake(
            "always the first", "independent_inputs", edit=("torch.linalg.inv(H)", "torch.linalg.inv(H)\n    j = 0")
        ),
        Mistake("nearly zero", "nothing_left_over", edit=("new[:, j] = 0", "new[:, j] += 1e-13")),
        Mistake("subtracted, not set", "nothing_left_over", edit=("    new[:, j] = 0\n", "")),
        Mistake("loss by magnitude", "the_loss", edit=("weight[:, j] ** 2 / inverse[j, j]", "weight[:, j] ** 2")),
        Mistake(
            "loss without the others' help",
            "the_loss",
            edit=("weight[:, j] ** 2 / inverse[j, j]", "weight[:, j] ** 2 * H[j, j]"),
        ),
        Mistake(
            "half the loss",
            "the_loss",
            edit=("weight[:, j] ** 2 / inverse[j, j]", "weight[:, j] ** 2 / inverse[j, j] / 2"),
        ),
    ],
    forbids=("minillm.sparsity", "minillm.quantization"),
)
