"""Multi-head latent attention: what is kept of a token is one short row, from which all heads make keys and values.

A row is [latent (C) | rotary key (P)], 512 + 64 numbers for DeepSeek-V3 where its 128 heads would keep 32,768. The
projection kv_b (H, N + V, C) holds for each head W_UK (N, C), which makes the key's part without position, and W_UV
(V, C), which makes the value. The same attention can be computed in two forms:

expanded    keys and values of every head from every row, then attention with H heads of width N + P
absorbed    q · (W_UK c) = (W_UKᵀ q) · c, so W_UK goes to the query, and Σ w (W_UV c) = W_UV Σ w c, so W_UV goes behind
            the attention: what is left is attention with one KV head, whose key is the row and whose value is its
            first C entries

The scale is (N + P)^-0.5 in both: a matrix that changes sides does not change the dot product.
Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .attention import naive_attention
from .config import ModelConfig
from .layers import Linear, RMSNorm, apply_rotary, region
from .packing import as_float

LATENT_NORM_EPS = 1e-6  # of the two inner norms, whatever the config's rms_norm_eps: so the published code has it


def mla_expanded(q: Tensor, rows: Tensor, kv_b: Tensor, scale: float | None = None, attention=naive_attention):
    """Per-head keys and values, then plain attention. Many queries: the cheaper form.

    q (T, H, N + P), rows (S, C + P), kv_b (H, N + V, C) -> (T, H, V). The last P of q and of a row carry the rotation.
    """
    return attention(q, *expand(rows, kv_b, _nope(q, rows, kv_b)), scale=scale)


def mla_absorbed(q: Tensor, rows: Tensor, kv_b: Tensor, scale: float | None = None, attention=naive_attention):
    """One KV head over the rows as they are. Few queries: the cheaper form. Arguments and result as in mla_expanded."""
    nope, latent = _nope(q, rows, kv_b), kv_b.shape[2]
    scale = q.shape[2] ** -0.5 if scale is None else scale  # before q widens: 192^-0.5, not 576^-0.5
    key = rows[:, None]  # (S, 1, C + P)
    return values_of(attention(absorb(q, kv_b, nope), key, key[..., :latent], scale=scale), kv_b, nope)


def _nope(q: Tensor, rows: Tensor, kv_b: Tensor) -> int:
    """N, the part of a query without position."""
    return q.shape[2] - (rows.shape[1] - kv_b.shape[2])


def expand(rows: Tensor, kv_b: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    """rows (S, C + P) -> keys (S, H, N + P), values (S, H, V). The rotary key is the same for all heads."""
    heads, wide, latent = kv_b.shape
    both = (rows[:, :latent] @ kv_b.flatten(0, 1).T).view(-1, heads, wide)  # (S, H, N + V)
    rotary = rows[:, None, latent:].expand(-1, heads, -1)
    return torch.cat([both[..., :nope], rotary], dim=-1), both[..., nope:]


def absorb(q: Tensor, kv_b: Tensor, nope: int) -> Tensor:
    """q (T, H, N + P) -> (T, H, C + P), to be compared with rows."""
    return torch.cat([torch.einsum("thn,hnc->thc", q[..., :nope], kv_b[:, :nope]), q[..., nope:]], dim=-1)


def values_of(out: Tensor, kv_b: Tensor, nope: int) -> Tensor:
    """Weighted sums of latents (T, H, C) -> of values (T, H, V)."""
    return torch.einsum("thc,hvc->thv", out, kv_b[:, nope:])


def softmax_scale(config: ModelConfig) -> float:
    """(N + P)^-0.5, times mscale² where YaRN's settings name mscale_all_dim: there the temperature that other models
    put on cos and sin stands here, since it is meant for the whole dot product and not for its rotary part alone."""
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    scaling = config.rope_scaling or {}
    if scaling.get("mscale_all_dim") and scaling["factor"] > 1:
        scale *= (0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1) ** 2
    return scale


class LatentAttention(nn.Module):
    """MLA of one layer. `cache` remembers the rows.

    One rule picks the form, a step at a time: expanded if nothing was cached before the step (`cache.fresh`), absorbed
    otherwise. In a fresh step each row is expanded once, which costs what absorbing costs, and the attention itself is
    narrower. After that expanding would expand the cached rows again in every step.
    """

    rotate = staticmethod(apply_rotary)  # a backend may have its own: see triton_layers.py

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        queries: nn.Module,
        kv_a_proj: nn.Module,
        kv_a_norm: RMSNorm,
        kv_b_proj: Linear,
        o_proj: nn.Module,
    ) -> None:
        super().__init__()
        self.layer, self.heads, self.latent = layer, config.num_attention_heads, config.kv_lora_rank
        self.nope, self.rope, self.scale = config.qk_nope_head_dim, config.qk_rope_head_dim, softmax_scale(config)
        self.queries, self.kv_a_proj, self.kv_a_norm = queries, kv_a_proj, kv_a_norm
        self.kv_b_proj, self.o_proj = kv_b_proj, o_proj

    def linears(self) -> list[nn.Module]:
        return [*self.queries.linears(), self.kv_a_proj, self.kv_b_proj, self.o_proj]

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache) -> Tensor:
        """x (T, d) -> (T, d)."""
        T, H = x.shape[0], self.heads
        kv_b = self.kv_b_proj.weight.view(H, -1, self.latent)
        q, row = self._query_and_row(x, rotation)
        if cache.fresh:
            with region("kv_b_proj"):
                k, v = expand(row, kv_b, self.nope)
            with region("attention"):
                out = cache.attend(self.layer, q, k, v, self.scale, keep=row[:, None])  # (T, H, V)
        else:
            with region("q_absorb"):
                q = absorb(q, kv_b, self.nope)
            with region("attention"):
                out = cache.attend(self.layer, q, row[:, None], None, self.scale)  # (T, H, C)
            with region("v_absorb"):
                out = values_of(out, kv_b, self.nope)
        with region("o_proj"):
            return self.o_proj(out.reshape(T, -1))

    def _query_and_row(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(T, H, N + P) and (T, C + P), the last P of both turned."""
        q = self.queries(x).view(x.shape[0], self.heads, -1)
        with region("kv_a_proj"):
            row = self.kv_a_proj(x)
        with region("kv_a_norm"):
            latent = self.kv_a_norm(row[:, : self.latent])
        with region("rotary"):
            turned = torch.cat([q[..., self.nope :], row[:, None, self.latent :]], dim=1)  # queries and keys turn alike
            turned = self.rotate(turned, rotation)
            q = torch.cat([q[..., : self.nope], turned[:, :-1]], dim=-1)
            return q, torch.cat([latent, turned[:, -1]], dim=-1)


class Queries(nn.Module):
    """All heads' queries in one matrix: x (T, d) -> (T, H · (N + P))."""

    def __init__(self, q_proj: nn.Module) -> None:
        super().__init__()
        self.q_proj = q_proj

    def linears(self) -> list[nn.Module]:
        return [self.q_proj]

    def forward(self, x: Tensor) -> Tensor:
        with region("q_proj"):
            return self.q_proj(x)


class LowRankQueries(nn.Module):
    """The same through q_lora_rank numbers, which saves weights and keeps nothing."""

    def __init__(self, q_a_proj: nn.Module, q_a_norm: RMSNorm, q_b_proj: nn.Module) -> None:
        super().__init__()
        self.q_a_proj, self.q_a_norm, self.q_b_proj = q_a_proj, q_a_norm, q_b_proj

    def linears(self) -> list[nn.Module]:
        return [self.q_a_proj, self.q_b_proj]

    def forward(self, x: Tensor) -> Tensor:
        with region("q_a_proj"):
            q = self.q_a_proj(x)
        with region("q_a_norm"):
            q = self.q_a_norm(q)
        with region("q_b_proj"):
            return self.q_b_proj(q)


def paired_halves(weight: Tensor, heads: int, rope: int) -> Tensor:
    """Rows of a projection for half-split rotary pairs where the file has them interleaved.

    weight (heads · (… + P), d) or a bias without the d: in each head's last P rows, 0 2 4 … 1 3 5 …
    """
    first, last = weight.view(heads, -1, *weight.shape[1:]).tensor_split([weight.shape[0] // heads - rope], dim=1)
    return torch.cat([first, last[:, 0::2], last[:, 1::2]], dim=1).reshape(weight.shape)


def interleaved(weight: Tensor, heads: int, rope: int) -> Tensor:
    """What paired_halves was given: each head's last P rows as 0 P/2 1 P/2 + 1 …"""
    first, last = weight.view(heads, -1, *weight.shape[1:]).tensor_split([weight.shape[0] // heads - rope], dim=1)
    return torch.cat([first, last.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)], dim=1).reshape(weight.shape)


def latent_attention(config: ModelConfig, layer: int, taken, make_linear) -> LatentAttention:
    """The layer from tensors with Hugging Face's names; `taken` and `make_linear` as in transformer.py."""
    c, prefix = config, f"model.layers.{layer}.self_attn."
    heads, latent, rope = c.num_attention_heads, c.kv_lora_rank, c.qk_rope_head_dim
    query = heads * (c.qk_nope_head_dim + rope)

    def linear(name: str, rows: int, columns: int, bias: bool = False, turned: int = 0) -> nn.Module:
        """`turned` is the number of heads in its rows that the rotary embedding turns."""
        order = (lambda t: paired_halves(t, turned, rope)) if turned and c.rope_interleave else (lambda t: t)
        weight = taken(f"{prefix}{name}.weight", (rows, columns))
        weight = order(weight) if isinstance(weight, Tensor) else weight.map_rows(order, rows)
        return make_linear([weight], order(taken(f"{prefix}{name}.bias", (rows,))) if bias else None)

    def norm(name: str, size: int) -> RMSNorm:
        return RMSNorm(taken(f"{prefix}{name}.weight", (size,)), LATENT_NORM_EPS)

    if c.q_lora_rank is None:
        queries = Queries(linear("q_proj", query, c.hidden_size, turned=heads))
    else:
        queries = LowRankQueries(
            linear("q_a_proj", c.q_lora_rank, c.hidden_size, c.attention_bias),
            norm("q_a_layernorm", c.q_lora_rank),
            linear("q_b_proj", query, c.q_lora_rank, turned=heads),
        )
    kv_b = as_float(taken(f"{prefix}kv_b_proj.weight", (heads * (c.qk_nope_head_dim + c.v_head_dim), latent)))
    return LatentAttention(
        c,
        layer,
        queries,
        linear("kv_a_proj_with_mqa", latent + rope, c.hidden_size, c.attention_bias, turned=1),
        norm("kv_a_layernorm", latent),
        Linear(kv_b),  # as it is: the absorbed form multiplies by parts of it, which a packed layout does not give
        linear("o_proj", c.hidden_size, heads * c.v_head_dim, c.attention_out_bias),
    )
