"""Embedding: y[t] = weight[ids[t]], a gather of rows.

Shapes     ids (T) int32 or int64; weight (V, d); y (T, d)
Bytes      2·T·d·b + 4 or 8·T (each row read once and written once; rows asked for twice come from the cache)
FLOPs      none: memory-bound, and the reads are scattered, whole rows of d·b bytes each
Trap       id · stride passes 2³¹ at 2³¹ elements, which a vocabulary of 256,000 reaches at d = 8,389: ids count in
           int64 whatever type they come in. An id outside 0 ... V - 1 would read somebody else's memory, and a kernel
           cannot raise: it reads nothing and writes NaN over the row, which no later layer can hide. On the CPU, where
           looking costs no synchronisation, the launcher refuses instead.

Source: Mikolov et al. 2013 (arXiv 1301.3781), the projection layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.catalog import Bench, Case, Compilation, Trial, Work, normal, spaced_rows
from kernels.launch import (
    KernelError,
    check_contiguous_rows,
    check_dtype,
    check_shape,
    on_device,
    require,
    tl,
    triton,
    use_triton,
)

MAX_BLOCK = 4096  # columns of one program


def embedding_reference(ids: Tensor, weight: Tensor) -> Tensor:
    outside = (ids < 0) | (ids >= len(weight))
    y = weight[ids.long().masked_fill(outside, 0)] if len(weight) else weight.new_zeros(len(ids), weight.shape[1])
    return y.masked_fill(outside[:, None], float("nan"))


@triton.jit
def embedding_kernel(ids_ptr, w_ptr, y_ptr, ids_t, w_v, y_t, vocabulary, d, BLOCK: tl.constexpr):
    """Program (t, j) copies columns j · BLOCK ... of row ids[t]."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + t * ids_t).to(tl.int64)
    readable = tl.where((row >= 0) & (row < vocabulary), d, 0)
    values = tl.load(w_ptr + row * w_v + i, mask=i < readable, other=float("nan"))
    tl.store(y_ptr + t * y_t + i, values, mask=i < d)


def embedding(ids: Tensor, weight: Tensor, backend: str = "auto") -> Tensor:
    """ids (T) int32 or int64, weight (V, d) -> (T, d), contiguous.

    Raises KernelError, on the CPU also for an id outside the vocabulary; on a GPU that id's row is NaN.
    """
    launch = use_triton(backend, ids, weight)
    check_dtype((torch.int32, torch.int64), ids=ids)
    check_dtype(weight=weight)
    check_shape("ids", ids, None)
    check_shape("weight", weight, None, None)
    if not ids.is_cuda:
        _check_ids(ids, len(weight))
    if not launch:
        return embedding_reference(ids, weight)
    check_contiguous_rows(weight=weight)
    require(len(weight) > 0, "weight has no rows; an embedding needs a vocabulary")
    return _launch(ids, weight)


def _check_ids(ids: Tensor, vocabulary: int) -> None:
    outside = ids[(ids < 0) | (ids >= vocabulary)]
    if len(outside):
        raise KernelError(f"ids holds {outside[0]}, outside 0 to {vocabulary - 1}; encode with this model's tokenizer")


def _launch(ids: Tensor, weight: Tensor) -> Tensor:
    (vocabulary, d), y = weight.shape, torch.empty(len(ids), weight.shape[1], dtype=weight.dtype, device=weight.device)
    if y.numel():
        block, warps = configuration(d)
        with on_device(weight):
            embedding_kernel[(len(ids), triton.cdiv(d, block))](
                ids, weight, y, ids.stride(0), weight.stride(0), y.stride(0), vocabulary, d,
                BLOCK=block, num_warps=warps,
            )  # fmt: skip
    return y


def configuration(d: int) -> tuple[int, int]:
    """Row length -> BLOCK, num_warps: eight elements a thread, which is one 16-byte load in 16 bits."""
    block = min(triton.next_power_of_2(d), MAX_BLOCK)
    return block, min(max(block // 256, 1), 16)


# What the tools take from here -------------------------------------------------------------------------------------


def _case(name, t, v, d, index=torch.int64, layout=lambda x: x, ids_layout=lambda x: x) -> Case:
    def make(device, dtype, generator):
        ids = torch.randint(0, max(v, 1), (t,), generator=generator, device="cpu").to(device, index)
        weight = layout(normal(generator, v, d, device=device, dtype=dtype))
        return Trial(embedding, embedding_reference, (ids_layout(ids), weight))

    return Case(name, make)


def _every_other(x: Tensor) -> Tensor:
    return torch.stack((x, torch.full_like(x, torch.iinfo(x.dtype).max)), dim=1)[:, 0]


CASES = [
    _case("int64", 7, 33, 81),
    _case("int32", 7, 33, 81, index=torch.int32),
    _case("wider than a block", 3, 5, MAX_BLOCK + 17),
    _case("one token", 1, 9, 576),
    _case("no tokens", 0, 9, 64),
    _case("weight of spaced rows", 6, 17, 49, layout=spaced_rows),
    _case("ids of a column", 6, 17, 49, ids_layout=_every_other),
]

COMPILE = [
    Compilation(
        f"embedding_{d}_{index.itemsize * 8}",
        embedding_kernel,
        lambda dtype, d=d, index=index: (index, dtype, dtype, 1, d, d, 128256, d),
        {"BLOCK": configuration(d)[0]},
        num_warps=configuration(d)[1],
    )
    for d, index in ((576, torch.int64), (4096, torch.int64), (4096, torch.int32))
]


def _bench(device, dtype, v, d, t=16384) -> Work:
    weight, ids = torch.randn(v, d, device=device, dtype=dtype), torch.randint(v, (t,), device=device)
    distinct = len(ids.unique())
    return Work(
        kernel=lambda: embedding(ids, weight, backend="triton"),
        rivals={"torch embedding": lambda: torch.nn.functional.embedding(ids, weight)},
        bytes=(distinct + t) * d * weight.element_size() + ids.nbytes,
    )


BENCHES = [
    Bench(
        "embedding",
        _bench,
        {
            "SmolLM2-135M": {"v": 49152, "d": 576},
            "Qwen3-0.6B": {"v": 151936, "d": 1024},
            "Llama-3-8B": {"v": 128256, "d": 4096},
        },
        goal=0.85,
    )
]
