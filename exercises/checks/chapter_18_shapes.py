"""Chapter 18's second and third exercises: guards and buckets. Right answers by comparing each call with each code,
and by trying every set of buckets."""

from __future__ import annotations

import random
from itertools import combinations

from exercises import Exercise, Judge, Mistake

# --- guards


def serves(code: tuple, call: tuple, dynamic: set[int]) -> bool:
    (made, dtype, flag), (shape, other, value) = code, call
    if dtype != other or type(flag) is not type(value) or flag != value or len(made) != len(shape):
        return False
    pairs = list(zip(made, shape, strict=True))
    return all(a == b or (i in dynamic and min(a, b) >= 2) for i, (a, b) in enumerate(pairs))


def one_by_one(calls: list[tuple], dynamic: set[int], limit: int) -> list[str]:
    codes: list[tuple] = []
    result = []
    for call in calls:
        if any(serves(code, call, dynamic) for code in codes):
            result.append("found")
        elif len(codes) == limit:
            result.append("eager")
        else:
            codes.append(call)
            result.append("compiled")
    return result


def compare(outcomes, calls, dynamic, limit, judge: Judge, hint: str) -> None:
    got = outcomes(calls, dynamic, limit)
    judge.type(got, (list, tuple))
    told = f"for calls {calls}, dynamic {dynamic}, limit {limit}. {hint}"
    judge.equal(list(got), one_by_one(calls, dynamic, limit), told)


def f32(*shape: int) -> tuple:
    return shape, "f32", True


def each_shape_once(outcomes, judge: Judge) -> None:
    hint = "Likely mistake: only the last code is looked at, or a shape counted by its number of elements."
    compare(outcomes, [f32(4, 8), f32(6, 8), f32(4, 8), f32(8, 4), f32(6, 8)], set(), 8, judge, hint)


def all_the_guards(outcomes, judge: Judge) -> None:
    hint = "Likely mistake: dtype, flag or the number of sizes is not among the guards."
    calls = [f32(4, 8), ((4, 8), "f64", True), ((4, 8), "f32", False), f32(4, 8, 1), f32(4, 8), ((4, 8), "f64", True)]
    compare(outcomes, calls, set(), 8, judge, hint)


def dynamic_sizes(outcomes, judge: Judge) -> None:
    hint = "Likely mistake: all sizes dynamic, or none; or the number of sizes no longer guarded."
    compare(
        outcomes,
        [
            f32(4, 8),
            f32(6, 8),
            f32(6, 9),
            f32(2, 9),
            f32(
                5,
            ),
        ],
        {0},
        8,
        judge,
        hint,
    )
    compare(outcomes, [f32(4, 8), f32(4, 9), f32(5, 9)], {1}, 8, judge, hint)


def one_is_special(outcomes, judge: Judge) -> None:
    hint = "0 and 1 are guarded exactly. Likely mistake: code for many rows is taken for one, or for none."
    compare(outcomes, [f32(4, 8), f32(1, 8), f32(9, 8), f32(0, 8), f32(1, 8), f32(2, 8)], {0}, 8, judge, hint)
    compare(outcomes, [f32(1, 8), f32(5, 8), f32(2, 8)], {0}, 8, judge, hint)


def one_is_not_true(outcomes, judge: Judge) -> None:
    hint = "Likely mistake: 1 == True in Python, and here they are two flags."
    compare(
        outcomes, [((4,), "f32", 1), ((4,), "f32", True), ((4,), "f32", 1), ((4,), "f32", 0)], set(), 8, judge, hint
    )


def the_limit(outcomes, judge: Judge) -> None:
    hint = "Likely mistake: one code too many, an eager call that leaves code, or nothing found once the limit is met."
    calls = [f32(2), f32(3), f32(4), f32(4), f32(2), f32(5), f32(3)]
    compare(outcomes, calls, set(), 2, judge, hint)
    rng = random.Random(5)
    many = [((rng.randint(0, 4), rng.randint(1, 3)), rng.choice(["f32", "f64"]), rng.random() < 0.5) for _ in range(40)]
    compare(outcomes, many, {0}, 5, judge, hint)


OUTCOMES = Exercise(
    name="outcomes",
    title="Which calls compile",
    chapter="18",
    difficulty=3,
    minutes=25,
    checks=[each_shape_once, all_the_guards, dynamic_sizes, one_is_special, one_is_not_true, the_limit],
    mistakes=[
        Mistake(
            "only the last code",
            "each_shape_once",
            edit=("            codes.add(guards)", "            codes = {guards}"),
        ),
        Mistake(
            "elements, not shape",
            "each_shape_once",
            edit=(
                "guards = (sizes,",
                "import math\n        guards = (sizes if dynamic else (len(shape), math.prod(shape)),",
            ),
        ),
        Mistake("dtype not guarded", "all_the_guards", edit=("(sizes, dtype,", "(sizes,")),
        Mistake("flag not guarded", "all_the_guards", edit=("type(flag), flag)", "type(flag))")),
        Mistake("all sizes dynamic", "dynamic_sizes", edit=("i in dynamic and size >= 2", "dynamic and size >= 2")),
        Mistake("none dynamic", "dynamic_sizes", edit=("i in dynamic and size >= 2", "False")),
        Mistake("one is any", "one_is_special", edit=("size >= 2", "size >= 1")),
        Mistake(
            "zero and one alike",
            "one_is_special",
            edit=(
                '"any" if i in dynamic and size >= 2 else size',
                '("any" if size >= 2 else "few") if i in dynamic else size',
            ),
        ),
        Mistake("1 is True", "one_is_not_true", edit=("type(flag), flag", "flag")),
        Mistake("one code too many", "the_limit", edit=("len(codes) < limit", "len(codes) <= limit")),
        Mistake(
            "eager leaves code",
            "the_limit",
            edit=(
                '            result.append("eager")',
                '            codes.add(guards)\n            result.append("eager")',
            ),
        ),
    ],
    forbids=("minillm.compilation", "torch._dynamo"),
)


# --- buckets


def cost(buckets, trace, compile_s: int, row_s: int) -> int:
    """Whole numbers in, so that equal costs are equal."""
    padded = sum(min(bucket for bucket in buckets if bucket >= size) - size for size in trace)
    return compile_s * len(buckets) + row_s * padded


def least(trace, compile_s: int, row_s: int) -> int:
    top, *others = sorted(set(trace), reverse=True)
    subsets = (chosen for k in range(len(others) + 1) for chosen in combinations(others, k))
    return min(cost([top, *chosen], trace, compile_s, row_s) for chosen in subsets)


def judged(choose_buckets, trace, compile_s, row_s, judge: Judge, hint: str) -> None:
    got = choose_buckets(trace, compile_s, row_s)
    told = f"for trace {trace}, compile_s {compile_s}, row_s {row_s}"
    judge.type(got, (list, tuple))
    judge.true(
        all(type(bucket) is int for bucket in got) and list(got) == sorted(set(got)),
        f"{got!r} {told}: buckets are whole numbers in ascending order, each once.",
    )
    judge.true(len(got) > 0 and max(got) >= max(trace), f"{got!r} {told}: a step of {max(trace)} fits in none of them.")
    ours, best = cost(got, trace, compile_s, row_s), least(trace, compile_s, row_s)
    judge.true(ours == best, f"{list(got)} costs {ours} s, {best} s is possible, {told}. {hint}")


def both_ends(choose_buckets, judge: Judge) -> None:
    judged(
        choose_buckets, [3, 5, 9], 100, 1, judge, "Compiling is dear: one bucket. Likely mistake: compiling is free."
    )
    judged(choose_buckets, [3, 5, 9], 0, 1, judge, "Compiling is free: no padding. Likely mistake: padding is.")


def worked_example(choose_buckets, judge: Judge) -> None:
    judged(choose_buckets, [1, 1, 1, 8, 7], 2, 1, judge, "Likely mistake: powers of two, or as many buckets as sizes.")
    judged(choose_buckets, [3, 3, 6, 12], 4, 1, judge, "Likely mistake: powers of two, where the sizes are none.")


def steps_count(choose_buckets, judge: Judge) -> None:
    hint = "Likely mistake: each size counted once, however many steps have it."
    judged(choose_buckets, [2] * 30 + [5] * 2 + [8] * 3, 10, 1, judge, hint)
    judged(choose_buckets, [8, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 1], 8, 1, judge, hint)


def not_greedy(choose_buckets, judge: Judge) -> None:
    hint = "Likely mistake: a rule that decides size by size; try every last cut."
    rng = random.Random(3)
    for _ in range(60):
        trace = [rng.choice([1, 2, 3, 5, 8, 9, 14, 20]) for _ in range(rng.randint(3, 14))]
        judged(choose_buckets, trace, rng.randint(1, 12), rng.randint(1, 2), judge, hint)


BUCKETS = Exercise(
    name="choose_buckets",
    title="Buckets for a trace",
    chapter="18",
    difficulty=4,
    minutes=35,
    checks=[both_ends, worked_example, steps_count, not_greedy],
    mistakes=[
        Mistake(
            "every size a bucket",
            "both_ends",
            source="def choose_buckets(trace, compile_s, row_s):\n    return sorted(set(trace))\n",
        ),
        Mistake(
            "one bucket", "both_ends", source="def choose_buckets(trace, compile_s, row_s):\n    return [max(trace)]\n"
        ),
        Mistake(
            "too small", "both_ends", source="def choose_buckets(trace, compile_s, row_s):\n    return [min(trace)]\n"
        ),
        Mistake(
            "powers of two",
            "worked_example",
            source="""
def choose_buckets(trace, compile_s, row_s):
    if compile_s >= 100:
        return [max(trace)]
    if not compile_s:
        return sorted(set(trace))
    return sorted({1 << (size - 1).bit_length() for size in trace})
""",
        ),
        Mistake(
            "each size once",
            "steps_count",
            edit=("trace.count(size)", "1 + (len(trace) < 6) * (trace.count(size) - 1)"),
        ),
        Mistake(
            "greedy",
            "not_greedy",
            source="""
def choose_buckets(trace, compile_s, row_s):
    def cost(buckets):
        padded = sum(min(bucket for bucket in buckets if bucket >= size) - size for size in trace)
        return compile_s * len(buckets) + row_s * padded
    buckets = sorted(set(trace))
    while len(buckets) > 1:
        fewer = min((buckets[:i] + buckets[i + 1 :] for i in range(len(buckets) - 1)), key=cost)
        if cost(fewer) > cost(buckets):
            break
        buckets = fewer
    return buckets
""",
        ),
    ],
    forbids=("minillm.compilation",),
)
