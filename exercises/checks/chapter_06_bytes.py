"""Chapter 06, bytes before and after fusing. The right answer runs the chain and writes every access down."""

from __future__ import annotations

import random

from exercises import Exercise, Judge, Mistake


def written_down(operators: list, sizes: dict, kept: list) -> tuple[int, int]:
    """Every crossing in a list: once with memory between the operators, once with registers."""
    apart, fused, registers = [], [], []
    for output, inputs in operators:
        for name in sizes:
            if name in inputs:
                apart.append(name)
                if name not in registers:
                    fused.append(name)
                    registers.append(name)
        apart.append(output)
        registers.append(output)
    fused += kept
    return sum(map(sizes.get, apart)), sum(map(sizes.get, fused))


def moved(bytes_moved, operators: list, sizes: dict, kept: list, judge: Judge, hint: str) -> None:
    got = bytes_moved(operators, sizes, kept)
    judge.type(got, (tuple, list))
    want = written_down(operators, sizes, kept)
    for i, name in enumerate(("apart", "fused")):
        judge.equal(len(got), 2, "Two numbers are wanted, (apart, fused).")
        judge.equal(got[i], want[i], f"({name}) for bytes_moved({operators}, {sizes}, {kept}). Likely mistake: {hint}")


def one_operator(bytes_moved, judge: Judge) -> None:
    hint = "an operator reads its inputs and writes its output; alone it moves the same fused or not."
    moved(bytes_moved, [("z", ["x", "y"])], {"x": 400, "y": 400, "z": 400}, ["z"], judge, hint)
    moved(bytes_moved, [("y", ["x"])], {"x": 64, "y": 2}, ["y"], judge, hint)


def a_chain(bytes_moved, judge: Judge) -> None:
    chain = [("b", ["a"]), ("c", ["b"]), ("d", ["c"])]
    sizes = {"a": 100, "b": 30, "c": 7, "d": 1}
    moved(bytes_moved, chain, sizes, ["d"], judge, "what is made and used up within the chain stays in registers.")


def twice_in_one_operator(bytes_moved, judge: Judge) -> None:
    moved(bytes_moved, [("y", ["x", "x"])], {"x": 40, "y": 40}, ["y"], judge, "x * x reads x once.")


def used_again_later(bytes_moved, judge: Judge) -> None:
    chain = [("s", ["x", "x"]), ("m", ["s"]), ("n", ["x", "m"]), ("y", ["n", "w"])]
    sizes = {"x": 400, "w": 100, "s": 400, "m": 4, "n": 400, "y": 400}
    moved(bytes_moved, chain, sizes, ["y"], judge, "apart, x is read by each operator; fused, once.")


def kept_on_the_way(bytes_moved, judge: Judge) -> None:
    chain = [("h", ["x", "r"]), ("m", ["h"]), ("y", ["h", "m"])]
    sizes = {"x": 400, "r": 500, "h": 600, "m": 4, "y": 700}
    hint = "a kept result is written once in the fused kernel, and not read back."
    moved(bytes_moved, chain, sizes, ["y", "h"], judge, hint)


def any_chain(bytes_moved, judge: Judge) -> None:
    rng = random.Random(6)
    for _ in range(30):
        names, operators, used = [f"in{i}" for i in range(rng.randint(1, 3))], [], set()
        for i in range(rng.randint(1, 6)):
            inputs = rng.choices(names, k=rng.randint(1, 3))
            used |= set(inputs)
            operators.append((f"t{i}", inputs))
            names.append(f"t{i}")
        kept = [output for output, _ in operators if output not in used or rng.random() < 0.2]
        sizes = {name: rng.randint(1, 99) for name in names}
        moved(bytes_moved, operators, sizes, kept, judge, "see the checks before; here they come together.")


BYTES = Exercise(
    name="bytes_moved",
    title="Bytes before and after",
    chapter="06",
    difficulty=2,
    minutes=20,
    checks=[one_operator, a_chain, twice_in_one_operator, used_again_later, kept_on_the_way, any_chain],
    mistakes=[
        Mistake("outputs not counted", "one_operator", edit=("sizes[output] + sum", "sum")),
        Mistake(
            "inputs not counted", "one_operator", edit=("fused = sum(sizes[name] for name in outside) +", "fused =")
        ),
        Mistake("intermediates are read", "a_chain", edit=(" - made", "")),
        Mistake("x * x reads twice", "twice_in_one_operator", edit=("in set(inputs)", "in inputs")),
        Mistake(
            "fused, each operator reads anew",
            "used_again_later",
            edit=(
                "outside = {name for _, inputs in operators for name in inputs} - made",
                "outside = [name for _, inputs in operators for name in set(inputs) if name not in made]",
            ),
        ),
        Mistake(
            "apart, each tensor is read once",
            "used_again_later",
            edit=(
                "sum(sizes[output] + sum(sizes[name] for name in set(inputs)) for output, inputs in operators)",
                "sum(sizes[o] for o, _ in operators) + sum(map(sizes.get, {n for _, ins in operators for n in ins}))",
            ),
        ),
        Mistake(
            "only the last result is written",
            "kept_on_the_way",
            edit=("sum(sizes[name] for name in kept)", "sizes[operators[-1][0]]"),
        ),
        Mistake(
            "what is kept is read back",
            "kept_on_the_way",
            edit=(" - made", " - (made - set(kept))"),
        ),
    ],
)
