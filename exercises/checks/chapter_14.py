"""Chapter 14, better rounding: one step of GPTQ, a folded factor, the direction of a scale.

The right answers come from minimising numerically, from multiplying out, and from loops over single numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exercises import Exercise, Judge, Mistake

LIBRARY = ("minillm.quantization",)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moments(K: int, seed: int = 0) -> Tensor:
    x = draw(3 * K, K, seed=seed) @ (draw(K, K, seed=seed + 1) + 2 * torch.eye(K, dtype=torch.float64))
    return x.T @ x / len(x)


def damage(difference: Tensor, H: Tensor) -> float:
    return ((difference @ H) * difference).sum().item()


# --- make_up


def worked_example(make_up, judge: Judge) -> None:
    H = torch.tensor([[1.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    got = make_up(torch.tensor([[0.4, 1.0]], dtype=torch.float64), 0, torch.zeros(1, dtype=torch.float64), H)
    judge.close(
        got,
        torch.tensor([[0.0, 1.2]], dtype=torch.float64),
        "Likely mistake: the sign (0.8 instead of 1.2: the other column must lean against the error), or column j left "
        "as it was.",
    )


def earlier_columns_stay(make_up, judge: Judge) -> None:
    weight, H = draw(3, 7), moments(7)
    got = make_up(weight, 3, weight[:, 3].round(), H)
    judge.close(
        got[:, :3],
        weight[:, :3],
        "Columns before j are on the grid and must not move. Likely mistake: solving with the whole of H.",
    )
    judge.close(got[:, 3], weight[:, 3].round(), "Column j becomes `rounded`.")


def nothing_does_better(make_up, judge: Judge) -> None:
    for j, seed in ((0, 2), (2, 3), (4, 4)):
        weight, H = draw(4, 6, seed=seed), moments(6, seed)
        got = make_up(weight, j, weight[:, j].round(), H)
        judge.close(
            got,
            by_descent(weight, j, weight[:, j].round(), H),
            f"With six columns and j = {j}. Likely mistake: the diagonal of H alone, the inverse of the whole H in "
            "place of that of its free part, or only the next column moved.",
            rtol=1e-5,
            atol=1e-6,
        )


def by_descent(weight: Tensor, j: int, rounded: Tensor, H: Tensor) -> Tensor:
    """The best free columns, found by going downhill one column at a time until nothing moves."""
    change = torch.zeros_like(weight)
    change[:, j] = rounded - weight[:, j]
    for _ in range(2000):
        for k in range(j + 1, weight.shape[1]):
            others = change @ H[:, k] - change[:, k] * H[k, k]
            change[:, k] = -others / H[k, k]
    return weight + change


def the_last_column_is_alone(make_up, judge: Judge) -> None:
    weight, H = draw(2, 5), moments(5)
    got = make_up(weight, 4, weight[:, 4].round(), H)
    judge.close(got[:, :4], weight[:, :4], "After the last column there is nothing left to move.")


MAKE_UP = Exercise(
    name="make_up",
    title="Make up for a column",
    chapter="14",
    difficulty=4,
    minutes=30,
    checks=[worked_example, earlier_columns_stay, nothing_does_better, the_last_column_is_alone],
    mistakes=[
        Mistake("leans with the error", "worked_example", edit=("-= error", "+= error")),
        Mistake("column j not replaced", "worked_example", edit=("    new[:, j] = rounded\n", "")),
        Mistake(
            "solves with all columns",
            "earlier_columns_stay",
            source="import torch\n\ndef make_up(weight, j, rounded, H):\n    new = weight.clone()\n"
            "    error = rounded - weight[:, j]\n    inverse = torch.linalg.inv(H)\n"
            "    return new + error[:, None] * inverse[j] / inverse[j, j]\n",
        ),
        Mistake(
            "the diagonal alone",
            "nothing_does_better",
            edit=("torch.linalg.solve(H[j + 1 :, j + 1 :], H[j + 1 :, j])", "H[j + 1 :, j] / H.diagonal()[j + 1 :]"),
        ),
        Mistake(
            "the inverse of the whole H",
            "worked_example",
            edit=(
                "torch.linalg.solve(H[j + 1 :, j + 1 :], H[j + 1 :, j])",
                "torch.linalg.inv(H)[j + 1 :, j + 1 :] @ H[j + 1 :, j]",
            ),
        ),
        Mistake(
            "only the next column",
            "nothing_does_better",
            edit=("new[:, j + 1 :] -= error[:, None] * direction", "new[:, j + 1] -= error * direction[0]"),
        ),
    ],
    forbids=LIBRARY,
)


# --- fold


def folded(fold, gain: Tensor, weights: list[Tensor], s: Tensor, judge: Judge) -> tuple[Tensor, list[Tensor]]:
    """What came back, after making sure that it can be multiplied."""
    new_gain, new_weights = judge.parts(fold(gain, weights, s), "the gain", "the list of matrices")
    judge.type(new_weights, (list, tuple), "new_weights")
    hint = "Every matrix that reads the norm must multiply by s, and all are returned."
    judge.equal(len(new_weights), len(weights), hint)
    for name, got, given in (
        ("new_gain", new_gain, gain),
        *(("a matrix", *pair) for pair in zip(new_weights, weights)),
    ):
        judge.type(got, Tensor, name)
        judge.equal(list(got.shape), list(given.shape), f"the shape of {name}.")
        judge.true(got.dtype == given.dtype, f"{name} is {got.dtype}, must be {given.dtype} as it was.")
    return new_gain, new_weights


def product_is_kept(fold, judge: Judge) -> None:
    for K, rows in ((6, (4, 3)), (5, (5,)), (3, (7, 2, 3))):
        gain, weights, s = draw(K), [draw(N, K, seed=N) for N in rows], draw(K, seed=3).abs() + 0.5
        new_gain, new_weights = folded(fold, gain, weights, s, judge)
        x = draw(K, seed=4)
        for before, after in zip(weights, new_weights, strict=True):
            judge.close(
                after @ (new_gain * x),
                before @ (gain * x),
                "Likely mistake: both multiplied, both divided, or rows of the matrix in place of its columns.",
            )


def the_output_shrinks(fold, judge: Judge) -> None:
    gain, s = draw(5), draw(5, seed=6).abs() + 2
    new_gain, _ = folded(fold, gain, [draw(2, 5)], s, judge)
    judge.close(new_gain, gain / s, "The norm's output is divided by s. Likely mistake: the two exchanged.")


FOLD = Exercise(
    name="fold",
    title="Fold a factor",
    chapter="14",
    difficulty=2,
    minutes=15,
    checks=[product_is_kept, the_output_shrinks],
    mistakes=[
        Mistake("both divided", "product_is_kept", edit=("weight * s", "weight / s")),
        Mistake("both multiplied", "product_is_kept", edit=("gain / s", "gain * s")),
        Mistake("nothing folded", "the_output_shrinks", edit=("gain / s, [weight * s", "gain, [weight")),
        Mistake(
            "the two exchanged",
            "the_output_shrinks",
            source="def fold(gain, weights, s):\n    return gain * s, [weight / s for weight in weights]\n",
        ),
        Mistake(
            "only the first matrix",
            "product_is_kept",
            edit=("[weight * s for weight in weights]", "[weights[0] * s, *weights[1:]]"),
        ),
        Mistake(
            "rows for columns", "product_is_kept", edit=("[weight * s for", "[(weight.T * s[: len(weight)]).T for")
        ),
        Mistake("matrices stacked", "product_is_kept", edit=("[weight * s for", "[torch.cat(weights) * s for")),
        Mistake(
            "the gain in place",
            "product_is_kept",
            source="def fold(gain, weights, s):\n    gain /= s\n    return gain, [weight * s for weight in weights]\n",
        ),
    ],
    forbids=LIBRARY,
)


# --- round_cache


def one_by_one(keys: Tensor, values: Tensor, size: int, recent: int) -> tuple[Tensor, Tensor]:
    T, D = keys.shape
    new_keys, new_values = keys.clone(), values.clone()
    first = 0
    while first + size <= T - recent:
        for channel in range(D):
            for t, number in enumerate(rounded(keys[first : first + size, channel].tolist())):
                new_keys[first + t, channel] = number
        for t in range(first, first + size):
            for left in range(0, D, size):
                for c, number in enumerate(rounded(values[t, left : left + size].tolist())):
                    new_values[t, left + c] = number
        first += size
    return new_keys, new_values


def rounded(numbers: list[float]) -> list[float]:
    low, high = min(numbers), max(numbers)
    step = (high - low) / 15
    return [low if step == 0 else low + round((x - low) / step) * step for x in numbers]


def read(round_cache, keys: Tensor, values: Tensor, size: int, recent: int, judge: Judge) -> tuple[Tensor, Tensor]:
    return judge.parts(round_cache(keys, values, size, recent), "keys", "values")


def keys_by_channel(round_cache, judge: Judge) -> None:
    keys, values = draw(8, 4), draw(8, 4, seed=1)
    keys[:, 1] *= 50  # an outlier channel
    got, _ = read(round_cache, keys, values, 4, 0, judge)
    wanted, _ = one_by_one(keys, values, 4, 0)
    judge.close(
        got,
        wanted,
        "Keys, 8 tokens, groups of 4. Likely mistake: the group runs along a token's channels, so that one large "
        "channel coarsens the others; 16 steps instead of 15; or cutting instead of rounding.",
    )


def values_by_token(round_cache, judge: Judge) -> None:
    keys, values = draw(8, 8), draw(8, 8, seed=1)
    values[3] *= 50
    _, got = read(round_cache, keys, values, 4, 0, judge)
    _, wanted = one_by_one(keys, values, 4, 0)
    judge.close(got, wanted, "Values, groups of 4 channels of one token. Likely mistake: rounded like the keys.")


def the_newest_are_left_alone(round_cache, judge: Judge) -> None:
    for T, size, recent in ((10, 4, 3), (12, 4, 4), (7, 4, 0), (3, 4, 0), (5, 4, 9)):
        keys, values = draw(T, 8, seed=T), draw(T, 8, seed=T + 1)
        whole = max(0, T - recent) // size * size
        for name, given, got, wanted in zip(
            ("keys", "values"),
            (keys, values),
            read(round_cache, keys, values, size, recent, judge),
            one_by_one(keys, values, size, recent),
            strict=True,
        ):
            judge.close(
                got,
                wanted,
                f"{name}, {T} tokens, groups of {size}, {recent} recent. Likely mistake: a group that is not whole is "
                "rounded, or one that reaches into the newest tokens.",
            )
            exactly = (
                f"{name} from token {whole} on, which stay exactly as they are. Likely mistake: float32 on the way."
            )
            judge.equal(got[whole:], given[whole:], exactly)


def equal_numbers(round_cache, judge: Judge) -> None:
    keys = torch.full((4, 4), 2.5, dtype=torch.float64)
    for got in read(round_cache, keys, keys.clone(), 4, 0, judge):
        judge.close(got, keys, "All numbers of a group are equal. Likely mistake: 0 / 0.")


ROUND_CACHE = Exercise(
    name="round_cache",
    title="The direction of a scale",
    chapter="14",
    difficulty=3,
    minutes=25,
    checks=[keys_by_channel, values_by_token, the_newest_are_left_alone, equal_numbers],
    mistakes=[
        Mistake(
            "keys by token",
            "keys_by_channel",
            edit=(
                "four_bits(keys[:n].reshape(n // size, size, D), 1)",
                "four_bits(keys[:n].reshape(n, D // size, size), 2)",
            ),
        ),
        Mistake("sixteen steps", "keys_by_channel", edit=("(high - low) / 15", "(high - low) / 16")),
        Mistake("cuts instead of rounding", "keys_by_channel", edit=(".round()", ".floor()")),
        Mistake(
            "values by channel",
            "values_by_token",
            edit=(
                "four_bits(values[:n].reshape(n, D // size, size), 2)",
                "four_bits(values[:n].reshape(n // size, size, D), 1)",
            ),
        ),
        Mistake(
            "forgets the recent tokens", "the_newest_are_left_alone", edit=("max(0, T - recent) // size", "T // size")
        ),
        Mistake(
            "rounds into the recent tokens",
            "the_newest_are_left_alone",
            edit=("max(0, T - recent) // size * size", "min(T, -(-max(0, T - recent) // size) * size) // size * size"),
        ),
        Mistake("divides zero by zero", "equal_numbers", edit=("torch.where(step > 0, step, 1)", "step")),
        Mistake(
            "nothing to round, nothing copied",
            "the_newest_are_left_alone",
            edit=("    if n:\n", "    if not n:\n        return keys, values\n    if n:\n"),
        ),
        Mistake(
            "one tensor for both",
            "keys_by_channel",
            edit=("return new_keys, new_values", "return torch.stack([new_keys, new_values])"),
        ),
        Mistake(
            "by way of float32",
            "the_newest_are_left_alone",
            edit=("keys.clone(), values.clone()", "keys.float(), values.float()"),
        ),
        Mistake("keys alone", "keys_by_channel", edit=("return new_keys, new_values", "return new_keys")),
    ],
    forbids=LIBRARY,
    fresh=True,
)

EXERCISES = [MAKE_UP, FOLD, ROUND_CACHE]
