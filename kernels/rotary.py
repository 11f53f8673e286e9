"""Rotary embedding: pair p of a head turns by its token's angle, (a, b) -> (a·cos - b·sin, b·cos + a·sin).

Shapes     x, y (T, H, D); cos, sin (T, R/2) float32, one angle a pair; R = rotary_dim ≤ D, the rest is copied
Bytes      2·T·H·D·b + 4·T·R (cos and sin once for all heads of a token)
FLOPs      3·T·H·R: memory-bound
Trap       Two layouts. Half-split (Hugging Face): pair p is (x[p], x[p + R/2]). Interleaved (GGUF, GPT-J): it is
           (x[2p], x[2p + 1]). The wrong one still gives unit-norm rotations and a model that almost works. The halves
           are those of R, not of D. q and k usually are slices of one matmul's output, each with strides of its own.

Source: Su et al. 2021 (arXiv 2104.09864), equation 34.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.catalog import Bench, Case, Compilation, Trial, Work, normal, spaced_rows, swapped
from kernels.launch import (
    KernelError,
    accumulator,
    check_contiguous_rows,
    check_dtype,
    check_shape,
    on_device,
    require,
    tl,
    triton,
    use_triton,
)

TILE = 4096  # elements of x in one program, as many heads as fit


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    wide = accumulator(x.dtype)
    pairs = cos.shape[-1]
    cos, sin = cos.to(wide)[:, None], sin.to(wide)[:, None]  # (T, 1, R/2), the same for every head
    turned, rest = x[..., : 2 * pairs].to(wide), x[..., 2 * pairs :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :pairs], turned[..., pairs:])
    a, b = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack((a, b), dim=-1).flatten(-2) if interleaved else torch.cat((a, b), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


@triton.jit
def rotary_kernel(
    x_ptr, y_ptr, cos_ptr, sin_ptr,
    x_t, x_h, y_t, y_h, cos_t, sin_t,
    heads, d, pairs,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Program (t, j) turns heads j · HEADS ... of token t. REST: columns past R, 0 when there are none."""
    t = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    p = tl.arange(0, PAIRS)
    cos = tl.load(cos_ptr + t * cos_t + p, mask=p < pairs, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + t * sin_t + p, mask=p < pairs, other=0.0).to(tl.float32)[None, :]
    x_ptr += t * x_t + head * x_h
    y_ptr += t * y_t + head * y_h
    if INTERLEAVED:  # one wide load, taken apart in registers: two loads of every other element waste half of each
        i = tl.arange(0, 2 * PAIRS)[None, :]
        inside = (head < heads) & (i < 2 * pairs)
        x = tl.load(x_ptr + i, mask=inside, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (HEADS, PAIRS, 2)))
        turned = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (HEADS, 2 * PAIRS))
        tl.store(y_ptr + i, turned.to(y_ptr.dtype.element_ty), mask=inside)
    else:
        i = p[None, :]
        inside = (head < heads) & (i < pairs)
        a = tl.load(x_ptr + i, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + pairs + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + i, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=inside)
        tl.store(y_ptr + pairs + i, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=inside)
    if REST > 0:
        i = 2 * pairs + tl.arange(0, REST)[None, :]
        inside = (head < heads) & (i < d)
        tl.store(y_ptr + i, tl.load(x_ptr + i, mask=inside, other=0.0), mask=inside)


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False, backend: str = "auto"
) -> Tensor:
    """x (T, H, D), cos and sin (T, R/2) -> (T, H, D): a new tensor, or x itself when inplace. Raises KernelError."""
    launch = use_triton(backend, x, cos, sin)
    check_dtype(x=x)
    check_dtype((torch.float32,), cos=cos, sin=sin)
    check_shape("x", x, None, None, None)
    check_shape("cos", cos, x.shape[0], None)
    check_shape("sin", sin, *cos.shape)
    if not 0 < 2 * cos.shape[-1] <= x.shape[-1]:
        raise KernelError(f"cos has {cos.shape[-1]} pairs but x has heads of {x.shape[-1]}; 1 to D/2 pairs are needed")
    if not launch:
        y = rotary_reference(x, cos, sin, interleaved)
        return x.copy_(y) if inplace else y
    check_contiguous_rows(x=x, cos=cos, sin=sin)
    require(x.shape[-1] <= TILE, f"x has heads of {x.shape[-1]}; the kernel takes up to {TILE}")
    return _launch(x, x if inplace else torch.empty(x.shape, dtype=x.dtype, device=x.device), cos, sin, interleaved)


def _launch(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    tokens, heads, d = x.shape
    if x.numel():
        blocks = configuration(heads, d, cos.shape[-1])
        with on_device(x):
            rotary_kernel[(tokens, triton.cdiv(heads, blocks["HEADS"]))](
                x, y, cos, sin, *x.stride()[:2], *y.stride()[:2], cos.stride(0), sin.stride(0), heads, d, cos.shape[-1],
                INTERLEAVED=interleaved, **blocks, num_warps=4,
            )  # fmt: skip
    return y


def configuration(heads: int, d: int, pairs: int) -> dict[str, int]:
    up = triton.next_power_of_2
    rest = d - 2 * pairs
    return {"HEADS": min(up(heads), max(TILE // up(d), 1)), "PAIRS": up(pairs), "REST": up(rest) if rest else 0}


# What the tools take from here -------------------------------------------------------------------------------------


def angles(tokens: int, pairs: int, device: str) -> tuple[Tensor, Tensor]:
    turns = torch.arange(3, 3 + tokens)[:, None] * 10000 ** (-torch.arange(pairs) / pairs)
    return turns.cos().to(device), turns.sin().to(device)


def _case(name, t, heads, d, rotary_dim=None, interleaved=False, layout=lambda x: x) -> Case:
    def make(device, dtype, generator):
        x = layout(normal(generator, t, heads, d, device=device, dtype=dtype))
        return Trial(rotary, rotary_reference, (x, *angles(t, (rotary_dim or d) // 2, device), interleaved))

    return Case(name, make)


CASES = [
    _case("half-split", 5, 9, 64),
    _case("interleaved", 5, 9, 64, interleaved=True),
    _case("half-split, a third turns", 3, 4, 146, rotary_dim=50),
    _case("interleaved, a third turns", 3, 4, 146, rotary_dim=50, interleaved=True),
    _case("one token, head of 96", 1, 3, 96),
    _case("no tokens", 0, 3, 64),
    _case("heads before tokens", 4, 3, 34, layout=swapped),
    _case("heads apart, interleaved", 4, 3, 34, interleaved=True, layout=spaced_rows),
    _case("more heads than a program takes", 2, 33, 128),
]

COMPILE = [
    Compilation(
        f"rotary_{d}{'_interleaved' if interleaved else ''}{'_partial' if 2 * pairs < d else ''}",
        rotary_kernel,
        lambda dtype, d=d, pairs=pairs: (
            dtype, dtype, torch.float32, torch.float32, 32 * d, d, 32 * d, d, pairs, pairs, 32, d, pairs
        ),
        {"INTERLEAVED": interleaved, **configuration(32, d, pairs)},
    )
    for d, pairs, interleaved in ((64, 32, False), (128, 64, False), (128, 64, True), (128, 32, False))
]  # fmt: skip


def _bench(device, dtype, heads, d) -> Work:
    t = 2**26 // (heads * d)  # 128 MiB a tensor, far more than any L2 cache
    x = torch.randn(t, heads, d, device=device, dtype=dtype)
    cos, sin = angles(t, d // 2, device)
    wide = [torch.cat((c, c), dim=-1)[:, None].to(dtype) for c in (cos, sin)]

    def by_torch():
        a, b = x.chunk(2, dim=-1)
        return x * wide[0] + torch.cat((-b, a), dim=-1) * wide[1]

    return Work(
        kernel=lambda: rotary(x, cos, sin, backend="triton"),
        rivals={"torch, rotate_half": by_torch},
        bytes=2 * x.nbytes + cos.nbytes + sin.nbytes,
        flops=3 * x.numel(),
    )


BENCHES = [
    Bench(
        "rotary",
        _bench,
        {
            "SmolLM2-135M": {"heads": 9, "d": 64},
            "Qwen3-0.6B": {"heads": 16, "d": 128},
            "Llama-3-8B": {"heads": 32, "d": 128},
        },
        goal=0.85,
    )
]
