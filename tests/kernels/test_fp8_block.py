"""FP8 block-scaled matmul and its quantizer against float64, and against what has gone wrong elsewhere."""

from __future__ import annotations

import pytest
import torch

from kernels import fp8_block
from kernels.launch import KernelError
from tests.kernels import harness


def test_stays_in_bounds():
    harness.check_bounds("kernels.fp8_block")


@pytest.mark.parametrize(("case", "dtype"), harness.trials(fp8_block))
def test_against_float64(case, dtype):
    harness.check(case, dtype)


def test_quantizer_and_reference_agree_bit_for_bit():
    x = fp8_block.roundable(torch.Generator().manual_seed(1), 9, 300).to(harness.DEVICE)
    (q, scale), (want, want_scale) = fp8_block.fp8_quantize(x, backend="triton"), fp8_block.quantize_reference(x)
    assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scale, want_scale)


@pytest.mark.parametrize("quantize", [lambda x: fp8_block.fp8_quantize(x, backend="triton"), fp8_block.quantize_weight])
def test_a_block_of_zeros_is_zeros(quantize):
    """kernels-community#681: without a floor its scale is 0 and its values are 0 / 0."""
    q, scale = quantize(torch.zeros(3, 130))
    assert torch.equal(q.float(), torch.zeros(3, 130))
    assert bool((scale > 0).all())
    assert bool(scale.isfinite().all())


def test_the_largest_value_survives_the_cast():
    """amax / (amax / 448) may round above 448, and one step above 464 e4m3 knows only NaN."""
    x = torch.linspace(0.1, 65000.0, 997)[:, None].repeat(1, 2) * torch.tensor([1.0, -1.0])
    for q, scale in (fp8_block.fp8_quantize(x, backend="triton"), fp8_block.quantize_reference(x)):
        assert torch.equal(q.float(), torch.tensor([[448.0, -448.0]]).expand(997, 2))
        torch.testing.assert_close(q.float() * scale, x)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_block_with_something_that_is_no_number_says_so(value):
    x = torch.ones(2, 256)
    x[1, 7] = value
    for q, scale in (fp8_block.fp8_quantize(x, backend="triton"), fp8_block.quantize_reference(x)):
        back = q.float() * scale.repeat_interleave(128, 1)
        assert bool(back[1, :128].isnan().any())
        assert torch.equal(back[0], x[0])
        assert torch.equal(back[1, 128:], x[1, 128:])


@pytest.mark.parametrize("K", [129, 145, 257])
def test_the_last_scale_block_counts(K):
    """FBGEMM#6159: it was dropped when K is no multiple of 128. Only the last inputs differ from zero here."""
    last = K - 1 - (K - 1) % 128
    x, w = torch.zeros(2, K), torch.zeros(5, K)
    x[:, last:], w[:, last:] = 3.0, 0.5
    (a, a_scale), (q, w_scale) = fp8_block.quantize_reference(x), fp8_block.quantize_weight(w)
    y = fp8_block.fp8_block_matmul(a, a_scale, q, w_scale, torch.float32, backend="triton")
    torch.testing.assert_close(y, torch.full((2, 5), 1.5 * (K - last)))


def test_every_block_meets_its_own_scales():
    """All codes are 1; rows of scales are powers of two, so that y counts which blocks were taken with which scale."""
    a, w = torch.ones(3, 384).to(fp8_block.E4M3), torch.ones(300, 384).to(fp8_block.E4M3)
    a_scale = 2.0 ** torch.arange(9.0).reshape(3, 3)
    w_scale = 2.0 ** torch.arange(0.0, -9.0, -1.0).reshape(3, 3)
    y = fp8_block.fp8_block_matmul(a, a_scale, w, w_scale, torch.float32, backend="triton")
    assert torch.equal(y, 128 * (a_scale @ w_scale.t()).repeat_interleave(128, 1)[:, :300])


@pytest.mark.parametrize(("tile", "name"), [((16, 96, 128), "BLOCK_N is 96"), ((16, 64, 256), "BLOCK_K is 256")])
def test_a_tile_across_two_scale_blocks_is_refused(tile, name):
    """sglang#39626: half of such a tile meets its neighbour's scale."""
    a, w = torch.zeros(4, 256).to(fp8_block.E4M3), torch.zeros(256, 256).to(fp8_block.E4M3)
    with pytest.raises(KernelError, match=f"{name}: such a tile straddles two scale blocks; use a divisor of 128"):
        fp8_block.fp8_block_matmul(a, torch.ones(4, 2), w, torch.ones(2, 2), tile=tile)


def test_quantized_numbers_are_as_near_as_e4m3_gets():
    """Relative error of a normal distribution: 0.0265."""
    x = torch.randn(64, 1024)
    q, scale = fp8_block.quantize_reference(x)
    error = (q.float() * scale.repeat_interleave(128, 1) - x).norm() / x.norm()
    assert 0.025 < error < 0.028


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"a": torch.zeros(4, 200)}, "a is float32; convert it to one of float8_e4m3fn"),
        ({"weight": torch.zeros(8, 201).to(fp8_block.E4M3)}, r"weight has shape \(8, 201\); \(any, 200\) is needed"),
        ({"a_scale": torch.ones(4, 1)}, r"a_scale has shape \(4, 1\); \(4, 2\) is needed"),
        ({"w_scale": torch.ones(8, 2)}, r"w_scale has shape \(8, 2\); \(1, 2\) is needed"),
        ({"a_scale": torch.ones(4, 2).half()}, "a_scale is float16"),
        ({"out_dtype": torch.int8}, "out_dtype is torch.int8"),
        ({"weight": torch.zeros(200, 8).to(fp8_block.E4M3).t()}, r"call weight.contiguous\(\)"),
    ],
)
def test_wrong_input_is_one_clear_error(arguments, message):
    good = {"a": torch.zeros(4, 200).to(fp8_block.E4M3), "weight": torch.zeros(8, 200).to(fp8_block.E4M3)}
    good |= {"a_scale": torch.ones(4, 2), "w_scale": torch.ones(1, 2), "backend": "triton"}
    with pytest.raises(KernelError, match=message):
        fp8_block.fp8_block_matmul(**(good | arguments))
