"""Compiled decoding: the small operators between two multiplies become one function each.

A decode step of a small model is some forty operators a layer, of which four read weights. The others touch a few
kilobytes and cost what it takes to start them. A compiler that sees them together writes one loop for all:

    turn      qkv_proj's result      finish, rotary                     -> q, k, v
    ready     attention's result     prepare                            -> what o_proj multiplies
    after     x, o_proj's result     finish, add, norm, prepare         -> x, and what gate_up_proj multiplies
    activate  gate_up_proj's result  finish, silu, times up, prepare    -> what down_proj multiplies
    after     x, down_proj's result  the same with the next layer's norm  -> x, and what its qkv_proj multiplies

Multiplies stay torch's own kernels, and the cache still does the attending, so any layout and any cache will do.
`prepare` and `finish` are a kernel's own small operators, such as rounding x to int8: see quantization/kernels.py.

Code is made ahead of time (torch.export, AOTInductor) and kept in the cache folder under a key of all that went into
it. One piece of code serves every layer of the same shapes. There is code for a single row, and for any number of
them; a step looks its code up by its rows and never compiles: `compiled` has done that, and says what it took.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Attention
from .errors import CompilationError
from .layers import RMSNorm, SwiGLU, apply_rotary
from .piece_store import EXAMPLE_ROWS, MANY, ONE, PieceStore, Run
from .transformer import Transformer


@dataclass
class Report:
    """What `compiled` did: pieces made here, pieces found in the cache folder, and the seconds of both together."""

    made: int
    found: int
    seconds: float
    store: PieceStore

    @property
    def pieces(self) -> int:
        return self.made + self.found

    def sources(self) -> dict[str, str]:
        """Piece -> the C++ that the compiler wrote for it: where to see what was fused."""
        return self.store.sources()

    def break_even(self, before_s: float, after_s: float) -> float:
        """Requests after which compiling has paid, where one took `before_s` and takes `after_s`; inf for never."""
        return self.seconds / (before_s - after_s) if after_s < before_s else math.inf


class Ends:
    """The two ends of one linear layer's multiply, as functions that a compiler can trace, and the multiply itself.

    A kernel with its own `prepare` makes (codes, scale) of x and gets codes; others get x rounded to their type.
    """

    def __init__(self, layer: nn.Module, kind: str) -> None:
        few, many = getattr(layer, "few", layer), getattr(layer, "many", layer)
        kernel = few if kind == ONE else many
        self.kernel, self.scaled = type(kernel), hasattr(kernel, "prepare")
        dtypes = {getattr(k, "input_dtype", torch.float32) for k in ({kernel} if kind == ONE else {few, many})}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32  # float32 suits every kernel
        self.bias = kernel.bias if self.scaled else None  # other kernels have added it by then
        # a single row has one kernel; for many the layer chooses, unless their codes come prepared
        self.multiply = kernel.multiply if self.scaled else kernel if kind == ONE else layer
        self.rows, self.columns = EXAMPLE_ROWS[kind], shape_of(layer)[1]
        self.about = [self.kernel.__name__, str(self.dtype), self.bias is not None, *shape_of(layer)]

    def prepare(self, x: Tensor) -> list[Tensor]:
        return list(self.kernel.prepare(x)) if self.scaled else [x.to(self.dtype)]

    def __call__(self, operand: list[Tensor]) -> list[Tensor]:
        """What `prepare` gave -> what `finish` takes: [y], or [y, scale], or [y, scale, bias]."""
        if not self.scaled:
            return [self.multiply(operand[0])]
        rest = [operand[1]] if self.bias is None else [operand[1], self.bias]
        return [self.multiply(operand[0]), *rest]

    def finish(self, y: Tensor, scale: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        y = y.to(torch.float32) if scale is None else self.kernel.finish(y, scale)
        return y if bias is None else y + bias

    def example(self) -> list[Tensor]:
        return self(self.prepare(torch.zeros(self.rows, self.columns)))


def shape_of(layer: nn.Module) -> tuple[int, int]:
    """(d_out, d_in)."""
    return (layer.out_features, layer.in_features) if hasattr(layer, "in_features") else tuple(layer.weight.shape)


class _Piece(nn.Module):
    """Small operators between two multiplies. Inputs and outputs are flat lists of tensors, as the loader takes them.

    of: the multiply whose result comes in, into: the one that is fed, attention: the layer between, which turns that
    many numbers of each head.
    """

    def __init__(
        self, of: Ends | None = None, into: Ends | None = None, attention=None, eps: float = 0.0, turned: int = 0
    ) -> None:
        super().__init__()
        self.of, self.into, self.eps = of, into, eps
        if attention is not None:
            self.heads = [attention.heads, attention.kv_heads, attention.kv_heads]
            self.head_dim, self.turned = attention.head_dim, turned or attention.head_dim

    def about(self) -> dict:
        return {
            "of": self.of and self.of.about, "into": self.into and self.into.about, "eps": self.eps,
            "heads": [*getattr(self, "heads", ()), getattr(self, "head_dim", 0), getattr(self, "turned", 0)],
        }  # fmt: skip


class Begin(_Piece):
    """x, gain -> what the first multiply takes."""

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        x, gain = inputs
        return self.into.prepare(_norm(x, gain, self.eps))

    def example(self) -> list[Tensor]:
        return [torch.zeros(self.into.rows, self.into.columns), torch.ones(self.into.columns)]


class After(_Piece):
    """x, gain, a multiply's result -> x with it added, and its norm as the next multiply takes it."""

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        x, gain, *result = inputs
        x = x + self.of.finish(*result)
        return [x, *self.into.prepare(_norm(x, gain, self.eps))]

    def example(self) -> list[Tensor]:
        return [torch.zeros(self.into.rows, self.into.columns), torch.ones(self.into.columns), *self.of.example()]


class Turn(_Piece):
    """cos, sin, the gains of q_norm and k_norm where the model has them, qkv_proj's result -> q, k, v."""

    normed = False

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        cos, sin, *inputs = inputs
        gains, result = (inputs[:2], inputs[2:]) if self.normed else ([], inputs)
        qkv = self.of.finish(*result).unflatten(1, (sum(self.heads), self.head_dim))
        q, k, v = qkv.split(self.heads, dim=1)
        if gains:
            q, k = _norm(q, gains[0], self.eps), _norm(k, gains[1], self.eps)
        return [apply_rotary(q, (cos, sin)), apply_rotary(k, (cos, sin)), v.clone()]

    def example(self) -> list[Tensor]:
        angle, gain = torch.zeros(self.of.rows, 1, self.turned), torch.ones(self.head_dim)
        return [angle, angle.clone(), *([gain, gain.clone()] if self.normed else []), *self.of.example()]


class TurnNormed(Turn):
    normed = True


class Ready(_Piece):
    """Attention's result (T, H, D) -> what o_proj takes."""

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        return self.into.prepare(inputs[0].flatten(1))

    def example(self) -> list[Tensor]:
        return [torch.zeros(self.into.rows, self.heads[0], self.head_dim)]


class Activate(_Piece):
    """gate_up_proj's result -> what down_proj takes."""

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        gate, up = self.of.finish(*inputs).chunk(2, dim=-1)
        return self.into.prepare(F.silu(gate) * up)

    def example(self) -> list[Tensor]:
        return self.of.example()


def _norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain


@dataclass
class _Layer:
    """A block as one kind of step runs it: multiplies, pieces, and what the pieces need of this layer."""

    qkv: Ends
    o: Ends
    gate_up: Ends
    down: Ends
    head_gains: list[Tensor]
    turn: Run
    ready: Run
    ffn_gain: Tensor
    after_attention: Run
    activate: Run
    next_gain: Tensor
    after_mlp: Run


@dataclass
class _Plan:
    begin: Begin
    layers: list[_Layer]


class CompiledTransformer(Transformer):
    """A Transformer whose blocks run as compiled pieces; made by `compiled`, sharing every weight with the original.

    Results differ from the original's as one order of float32 additions from another.
    """

    report: Report

    def forward(self, tokens: Tensor, positions: Tensor, cache) -> Tensor:
        plan = self._plans.get(ONE if len(tokens) == 1 else MANY)
        if plan is None:
            return super().forward(tokens, positions, cache)
        x = F.embedding(tokens, self.embedding)
        cos, sin = self.rotary(positions)
        operand = plan.begin([x, self._first_gain])
        for i, layer in enumerate(plan.layers):
            y = layer.qkv(operand)
            q, k, v = layer.turn([cos, sin, *layer.head_gains, *y])
            operand = layer.ready([cache.attend(i, q, k, v)])
            x, *operand = layer.after_attention([x, layer.ffn_gain, *layer.o(operand)])
            operand = layer.activate(layer.gate_up(operand))
            x, *operand = layer.after_mlp([x, layer.next_gain, *layer.down(operand)])
        cache.advance(len(tokens))
        return x


def compiled(
    model: Transformer, store: PieceStore | None = None, kinds: tuple[str, ...] = (ONE, MANY)
) -> CompiledTransformer:
    """A model that shares this one's weights and runs compiled code. Compiles what the cache folder does not hold.

    `kinds` of step: ONE row, or MANY; one that is left out runs as before. What it took is in `.report`, and no call of
    the result compiles anything. Raises CompilationError for a model or a device that this is not made for, and where
    there is nothing to compile with.
    """
    _check(model)
    started = time.perf_counter()
    store = store or PieceStore()
    with torch.no_grad():  # export does not take tensors made in inference mode
        plans = {kind: _plan(model, kind, store) for kind in kinds}
    new = copy.copy(model)
    new.__class__ = CompiledTransformer
    new._plans, new._first_gain = plans, model.blocks[0].attn_norm.weight
    new.report = Report(store.made, store.found, time.perf_counter() - started, store)
    return new


def _check(model: Transformer) -> None:
    if isinstance(model, CompiledTransformer):
        raise CompilationError("the model is compiled already")
    if model.device.type != "cpu":
        raise CompilationError(f"compiled pieces run on the CPU, and the model is on {model.device}; leave out compile")
    if model.backend != "torch" or model.dtype != torch.float32:
        raise CompilationError("a model on backend torch with a float32 residual stream is compiled; leave out compile")
    if (part := unusual_part(model)) is not None:
        raise CompilationError(f"{type(part).__name__} is not compiled yet; leave out compile for this model")
    if any(block.attention.gated for block in model.blocks):
        raise CompilationError("gated attention is not compiled yet; leave out compile for this model")


def unusual_part(model: Transformer) -> nn.Module | None:
    """The first part of a block that is not the plain one, such as a layer of experts: nothing here compiles those."""
    for block in model.blocks:
        for part, wanted in ((block.attention, Attention), (block.mlp, SwiGLU), (block.attn_norm, RMSNorm)):
            if type(part) is not wanted:
                return part
    return None


def _plan(model: Transformer, kind: str, store: PieceStore) -> _Plan:
    def get(piece: _Piece) -> Run:
        code = [type(piece), Turn, _Piece, Ends, _norm]
        code += [end.kernel for end in (piece.of, piece.into) if end is not None]
        name = type(piece).__name__.lower()
        return store.get(name, kind, piece.about(), code, lambda: (piece, piece.example()))

    blocks, layers, turned = list(model.blocks), [], model.config.rotary_dim
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        a, mlp = block.attention, block.mlp
        qkv, o, gate_up, down = (Ends(x, kind) for x in (a.qkv_proj, a.o_proj, mlp.gate_up_proj, mlp.down_proj))
        norm = following.attn_norm if following else model.final_norm
        into = Ends(following.attention.qkv_proj, kind) if following else qkv  # nobody uses the last one's
        normed = a.q_norm is not None
        layers.append(
            _Layer(
                qkv, o, gate_up, down,
                [a.q_norm.weight, a.k_norm.weight] if normed else [],
                get(TurnNormed(qkv, None, a, a.q_norm.eps, turned) if normed else Turn(qkv, None, a, 0.0, turned)),
                get(Ready(None, o, a)),
                block.ffn_norm.weight,
                get(After(o, gate_up, eps=block.ffn_norm.eps)),
                get(Activate(gate_up, down)),
                norm.weight,
                get(After(down, into, eps=norm.eps)),
            )
        )  # fmt: skip
    first = blocks[0]
    return _Plan(Begin(None, layers[0].qkv, eps=first.attn_norm.eps), layers)  # once a step: not worth compiling
