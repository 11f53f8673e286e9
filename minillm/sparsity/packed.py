"""2:4 stored as what is left: half the values, and where in its four columns each of them belongs.

Layout of a (rows, columns) matrix, four columns a group:

values   (rows, columns / 2): the two kept numbers of each group, the left one first
indices  (rows, ceil(columns / 8)) uint8: four bits a group, two groups a byte, the left group in the low half;
         in its four bits the left number's place (0-3) is in the low two. The left place is always the smaller.

A group with fewer than two numbers is filled up with zeros from its left. So a weight of b bits costs b/2 + 1: of 16
bits, 9 (0.5625 of the dense matrix); of 8 bits, 5 (0.625); of 4 bits, 3 (0.75). NVIDIA's tensor cores read the same
two bits a value in an order of their own, which torch.sparse.to_sparse_semi_structured makes (Mishra et al. 2021,
arXiv 2104.08378, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import SparsityError

CUDA_DTYPES = (torch.float16, torch.bfloat16)
CUDA_ROWS, CUDA_COLUMNS = 32, 64  # what must divide the matrix, for CUTLASS and cuSPARSELt alike


@dataclass(frozen=True)
class Packed24:
    """See the layout above."""

    shape: tuple[int, int]
    values: Tensor
    indices: Tensor

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.indices.nbytes

    def unpack(self) -> Tensor:
        """(rows, columns) of the values' type; every number where it was."""
        rows, columns = self.shape
        halves = torch.stack([self.indices & 15, self.indices >> 4], dim=-1).view(rows, -1)[:, : columns // 4]
        places = torch.stack([halves & 3, halves >> 2], dim=-1).to(torch.int64)  # (rows, groups, 2)
        dense = self.values.new_zeros(rows, columns // 4, 4)
        return dense.scatter_(2, places, self.values.view(rows, -1, 2)).view(rows, columns)


def packed_bytes(rows: int, columns: int, bits: int = 16) -> int:
    """What the format takes for values of so many bits."""
    return rows * (columns // 2 * bits // 8 + -(-columns // 8))


def pack_2_4(weight: Tensor, name: str = "the weight") -> Packed24:
    """weight (rows, columns) with at most two numbers in each four columns. Raises SparsityError."""
    if weight.dim() != 2 or weight.shape[1] % 4:
        raise SparsityError(f"{name} has shape {tuple(weight.shape)}; 2:4 needs a matrix whose columns 4 divides")
    rows, columns = weight.shape
    groups = weight.reshape(rows, -1, 4)
    zero = groups == 0
    if (crowded := (~zero).sum(-1) > 2).any():
        row, group = crowded.nonzero()[0].tolist()
        raise SparsityError(
            f"{name} has more than two numbers in columns {4 * group} to {4 * group + 3} of row {row}; "
            'sparsify it with pattern="2:4" first'
        )
    # a stable sort brings the numbers to the front, in their order; the first two places, in order, are the group's
    places = zero.to(torch.uint8).argsort(dim=-1, stable=True)[..., :2].sort(dim=-1).values  # (rows, groups, 2)
    values = groups.gather(2, places).reshape(rows, columns // 2)
    halves = (places[..., 0] | (places[..., 1] << 2)).to(torch.uint8)  # (rows, groups), four bits each
    halves = F.pad(halves, (0, halves.shape[1] % 2))
    return Packed24((rows, columns), values, halves[:, ::2] | (halves[:, 1::2] << 4))


class SparseLinear(nn.Module):
    """x (T, d_in) -> (T, d_out), W held as 2:4.

    On CUDA in 16 bits it multiplies through the sparse tensor cores. A CPU has none: there W is unpacked for every
    call, which costs more than a dense layer. It saves memory at rest and nothing else.
    """

    def __init__(self, packed: Packed24, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = packed.shape
        self.values = nn.Parameter(packed.values, requires_grad=False)  # follows the model's type
        self.register_buffer("indices", packed.indices)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._on_cuda: Tensor | None = None

    @property
    def packed(self) -> Packed24:
        return Packed24((self.out_features, self.in_features), self.values.data, self.indices)

    @property
    def stored_bytes(self) -> int:
        return self.values.nbytes + self.indices.nbytes

    @property
    def weight_bytes(self) -> int:
        """Bytes that a step of one row moves here: without hardware the dense matrix is written and read as well."""
        dense = 0 if self.values.is_cuda else 2 * self.values.element_size() * self.out_features * self.in_features
        return self.stored_bytes + dense

    def forward(self, x: Tensor) -> Tensor:
        weight = self._hardware_weight() if self.values.is_cuda else self.packed.unpack()
        return F.linear(x, weight, self.bias)

    def _hardware_weight(self) -> Tensor:
        """The tensor that F.linear hands to the sparse tensor cores; made at the first call."""
        if self._on_cuda is None or self._on_cuda.dtype != self.values.dtype:
            rows, columns = self.out_features, self.in_features
            if self.values.dtype not in CUDA_DTYPES:
                raise SparsityError(f"2:4 runs on CUDA in float16 or bfloat16, not in {self.values.dtype}")
            if rows % CUDA_ROWS or columns % CUDA_COLUMNS:
                raise SparsityError(
                    f"a matrix of {rows} x {columns} has no 2:4 kernel on CUDA: {CUDA_ROWS} must divide its rows and "
                    f"{CUDA_COLUMNS} its columns; leave the zeros in place (pack=False)"
                )
            self._on_cuda = torch.sparse.to_sparse_semi_structured(self.packed.unpack())
        return self._on_cuda

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, 2:4, {self.values.dtype}"
