"""The sampling kernel against minillm.sampling: the same survivors, the same tokens, the same distribution."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import sampling
from kernels.launch import KernelError
from minillm.sampling import SamplingState, probabilities, sample, uniform
from minillm.sampling_params import SamplingParams
from tests.kernels import harness


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def draw(logits, rows, backend="triton", **kwargs):
    return sampling.sampling(logits, **sampling.parameters(rows, logits.device), **kwargs, backend=backend)


def params(row) -> SamplingParams:
    names = {"temperature", "top_k", "top_p", "min_p"}
    return SamplingParams(**{k: v for k, v in row.items() if k in names}, seed=row.get("seeds", 0))


def survivors_of_minillm(logits, rows):
    wanted = [probabilities(row, params(p)) > 0 for row, p in zip(logits.double(), rows, strict=True)]
    return torch.stack(wanted)


def test_stays_in_bounds():
    harness.check_bounds("kernels.sampling")


@pytest.mark.parametrize(("case", "dtype"), harness.trials(sampling))
def test_against_a_full_sort(case, dtype):
    harness.check(case, dtype)


@pytest.mark.parametrize(("backend", "count"), [("triton", 20), ("torch", 400)])
def test_survivors_are_those_of_minillm(backend, count):
    """Logits in steps of a quarter, 100 in 24 values: every edge falls among ties."""
    pick = torch.Generator("cpu").manual_seed(count)
    number = lambda low, high: low + (high - low) * torch.rand((), generator=pick, device="cpu").item()  # noqa: E731
    logits = (torch.randn(count, 100, generator=pick, device="cpu") * 4).round().to(harness.DEVICE) / 4
    rows = [
        {"temperature": number(0.3, 2), "top_k": int(number(-1, 90)), "top_p": number(0.1, 1), "min_p": number(0, 0.1)}
        for _ in range(count)
    ]
    _, kept = draw(logits, rows, backend, survivors=True)
    assert torch.equal(kept, survivors_of_minillm(logits, rows))


def test_ties_go_to_the_lower_id():
    logits = torch.tensor([0.0, 1, 1, 1, 1, 0, -0.0, 0]).repeat(8, 1)
    rows = [{"top_k": 2}, {"top_k": 6}, {"top_p": 0.25}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.5}]
    rows += [{"temperature": 0.0}, {"min_p": 1.0}, {"top_k": 0}]
    expected = [[1, 2], [0, 1, 2, 3, 4, 5], [1, 2], [1, 2, 3], [1, 2], [1], [1, 2, 3, 4], list(range(8))]
    ids, kept = draw(logits, rows, survivors=True)
    assert [row.nonzero().flatten().tolist() for row in kept] == expected
    assert all(kept[i, token] for i, token in enumerate(ids.tolist()))
    assert torch.equal(kept, survivors_of_minillm(logits, rows))


def test_ties_across_blocks():
    """1000 zeros every fourth column of 4113, which are three blocks: the 700th is in the second, at column 2796."""
    logits = torch.full((1, 4113), -1.0)
    logits[0, :4000:4] = 0.0
    _, kept = draw(logits, [{"top_k": 700}], survivors=True)
    assert kept.nonzero()[:, 1].tolist() == list(range(0, 2800, 4))


def test_one_token_always_survives():
    logits = torch.randn(3, 50)
    rows = [{"top_p": 1e-6}, {"min_p": 1.0}, {"top_k": 1, "top_p": 1e-6, "min_p": 1.0}]
    ids, kept = draw(logits, rows, survivors=True)
    assert torch.equal(kept.sum(dim=1), torch.ones(3, dtype=torch.int64))
    assert torch.equal(ids, logits.argmax(dim=1))


def test_k_counts_only_what_is_unmasked():
    logits = torch.full((2, 40), float("-inf"))
    logits[:, [3, 30]] = torch.tensor([-2.0, 5.0])
    _, kept = draw(logits, [{"top_k": 7}, {}], survivors=True)
    assert kept.nonzero().tolist() == [[0, 3], [0, 30], [1, 3], [1, 30]]


def test_padding_is_never_drawn():
    logits = torch.zeros(2, 64)
    logits[:, 50:] = torch.tensor([9.0, float("nan")]).repeat(7)
    rows = [{"seeds": 3}, {"temperature": 0.0}]
    ids, kept = draw(logits, rows, survivors=True, vocab_size=50)
    assert kept.sum(dim=1).tolist() == [50, 1]
    assert not kept[:, 50:].any()
    assert ids[0] < 50
    assert ids[1] == 0


def test_rows_without_a_token_are_minus_one():
    logits = torch.randn(4, 33)
    logits[0, 20], logits[1, 0], logits[2] = float("nan"), float("inf"), float("-inf")
    for backend in ("triton", "torch"):
        ids, kept = draw(logits, [{"top_k": 5}] * 4, backend, survivors=True)
        assert ids[:3].tolist() == [-1, -1, -1]
        assert kept.sum(dim=1).tolist() == [0, 0, 0, 5]
        assert 0 <= ids[3] < 33


def test_it_draws_what_minillm_draws():
    """To the token, unless the number falls within float32's rounding of an edge of the distribution."""
    logits = torch.randn(16, 200) * 2
    rows = [row | {"seeds": (-1) ** i * 2**61 + i, "positions": 1 + i} for i, row in enumerate(2 * sampling.EVERY_KIND)]
    ids = draw(logits, rows).tolist()
    for i, row in enumerate(rows):
        edges = probabilities(logits[i].double(), params(row)).cumsum(0).tolist()
        u = uniform(row["seeds"], row["positions"])
        low = edges[ids[i] - 1] if ids[i] else 0.0
        assert low - 1e-5 <= u <= edges[ids[i]] + 1e-5
    states = [SamplingState(prompt_ids=[0] * row["positions"]) for row in rows]
    by_minillm = [t.id for t in sample(logits, [params(row) for row in rows], states)]
    assert sum(a == b for a, b in zip(ids, by_minillm, strict=True)) >= 15


def chi_square(counts, expected) -> float:
    return float(((counts - expected) ** 2 / expected)[expected > 0].sum())


def test_the_distribution_is_that_of_minillm():
    logits = torch.tensor([0.5, 2, 1, 1, -3, 2, 0, 1.5])
    row, draws = {"temperature": 1.3, "top_p": 0.9}, 160
    ids = draw(logits.repeat(draws, 1), [row | {"seeds": 5, "positions": i} for i in range(draws)])
    counts = ids.bincount(minlength=8).double()
    expected = probabilities(logits.double(), params(row)) * draws
    assert (counts[expected == 0] == 0).all()
    freedom = int((expected > 0).sum()) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3  # 99.9%, Wilson-Hilferty
    assert chi_square(counts, expected) < limit
    untempered = probabilities(logits.double(), params(row | {"temperature": 0.5, "top_p": 1.0})) * draws
    assert chi_square(counts, untempered) > limit, "the test is too weak to tell"


def test_the_number_depends_on_seed_position_and_sequence_alone():
    logits = torch.zeros(1, 1000)
    base = {"seeds": 2**40 + 1, "positions": 2**33 + 5, "sequences": 2}
    others = [base | {"seeds": 2**41 + 1}, base | {"positions": 2**34 + 5}, base | {"sequences": 3}, base]
    ids = draw(logits.expand(5, 1000).contiguous(), [base, *others]).tolist()
    assert ids[0] == ids[4]
    assert len(set(ids)) == 4
    assert ids[0] == int(1000 * uniform(base["seeds"], base["positions"], 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logits": torch.ones(2, 32, dtype=torch.int32)}, "logits is int32; convert it"),
        ({"logits": torch.ones(32, 2).t()}, "logits has stride 2 in its last dimension"),
        ({"top_k": torch.ones(2, dtype=torch.int64)}, "top_k is int64; convert it to one of int32"),
        ({"top_p": torch.ones(3)}, r"top_p has shape \(3,\); \(2\) is needed"),
        ({"seeds": torch.ones(2)}, "seeds is float32"),
        ({"vocab_size": 33}, "vocab_size is 33; 1 to the 32 columns"),
        ({"vocab_size": 0}, "vocab_size is 0"),
    ],
)
def test_wrong_input_is_one_clear_error(arguments, message):
    good = sampling.parameters([{}, {}], harness.DEVICE) | {"logits": torch.ones(2, 32), "backend": "triton"}
    with pytest.raises(KernelError, match=message):
        sampling.sampling(**(good | arguments))
