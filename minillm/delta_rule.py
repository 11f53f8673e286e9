"""Linear attention that corrects itself: a state of constant size where full attention keeps every token.

A head's state S (Dk, Dv) is a memory: Sᵀk is what it holds under the key k. Each token lets it fade, reads what it
holds under its own key, and writes the part of its value that was missing there:

    S <- exp(g) S      u = beta (v - Sᵀk)      S <- S + k uᵀ      out = scale · Sᵀq

g <= 0 is the logarithm of the decay: one number a head in the gated delta rule (T, Hv), one a key channel in Kimi
Delta Attention (T, Hv, Dk). The decay comes before the delta, so u corrects what is left and not what was.

`recurrent` takes tokens one by one, `chunked` many at once as matrix products; the two are the same function.
Shapes of one sequence: q, k (T, Hk, Dk) with k of length 1, v (T, Hv, Dv), beta (T, Hv), state (Hv, Dk, Dv); Hv is a
multiple of Hk. Computed in float32 at least, since what a token adds to the state would be rounded away in less.
Sources: Yang et al. 2024 (arXiv 2412.06464), equation 10; Kimi Team 2025 (arXiv 2510.26692), section 3; the chunked
form: Yang et al. 2024 (arXiv 2406.06484), section 3.2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import RequestError

CHUNK = 32
METHODS = ("auto", "recurrent", "chunked")


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(Σx² + eps) over the last dimension: keys of length 1 keep the state's correction stable."""
    wide = x.to(_wide(x))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def log_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """g = -exp(A_log) · softplus(a + dt_bias) in float32, never above 0. a (T, Hv), or (T, Hv, Dk) for Kimi's gate with
    dt_bias (Hv, Dk) and A_log (Hv, 1)."""
    return -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())


def causal_conv(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Each channel as a weighted sum of its last K inputs: y[t] = Σ_j weight[:, j] · x[t - K + 1 + j].

    x (..., T, C), weight (C, K), state (..., K - 1, C): the inputs before x -> (y like x, the new state). Products and
    sums stay apart, so that a token's bits do not depend on where in a batch it stands.
    """
    T, K = x.shape[-2], weight.shape[1]
    inputs = torch.cat([state, x.to(state.dtype)], dim=-2)  # (..., K - 1 + T, C)
    taps = weight.to(state.dtype)
    y = inputs[..., :T, :] * taps[:, 0]
    for j in range(1, K):
        y = y + inputs[..., j : j + T, :] * taps[:, j]
    return y.to(x.dtype), inputs[..., T:, :]


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """One token of each of any number of sequences: q, k (..., Hk, Dk), state (..., Hv, Dk, Dv) -> (out, state)."""
    wide, out_dtype = _wide(q), v.dtype
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = _spread(q, k, v.shape[-2])
    q, k, v, g, beta, state = (x.to(wide) for x in (q, k, v, g, beta, state))
    state = state * _channels(g, v).exp()[..., None]
    u = beta[..., None] * (v - (k[..., None, :] @ state).squeeze(-2))
    state = state + k[..., None] * u[..., None, :]
    out = scale * (q[..., None, :] @ state).squeeze(-2)
    return out.to(out_dtype), state


def recurrent(q, k, v, g, beta, state=None, scale=None) -> tuple[Tensor, Tensor]:
    """Token by token -> (out (T, Hv, Dv), state). Without a state the sequence begins here."""
    state = _begin(q, v) if state is None else state
    out = torch.empty_like(v)
    for t in range(q.shape[0]):
        out[t], state = delta_step(q[t], k[t], v[t], g[t], beta[t], state, scale)
    return out, state


def chunked(q, k, v, g, beta, state=None, scale=None, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """The same, `chunk` tokens at a time: only the state goes from one chunk to the next."""
    wide = _wide(q)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    state = (_begin(q, v) if state is None else state).to(wide)
    out = torch.empty_like(v)
    q, k = _spread(q, k, v.shape[1])
    g = _channels(g, v)
    for first in range(0, q.shape[0], chunk):
        rows = slice(first, first + chunk)
        Q, K, V, G, B = (x[rows].to(wide).transpose(0, 1) for x in (q, k, v, g, beta[..., None]))  # (H, C, ...)
        found, state = _chunk(Q, K, V, G, B, state, scale)
        out[rows] = found.transpose(0, 1).to(v.dtype)
    return out, state


def _chunk(Q: Tensor, K: Tensor, V: Tensor, G: Tensor, B: Tensor, S: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One chunk of C tokens, (H, C, ...) each. With d_ij what is left at token i of what token j wrote:

    u_i = beta_i (v_i - d_i0 Sᵀk_i - Σ_{j<i} d_ij (k_i·k_j) u_j), a triangular system whose solution is every u.
    """
    C = G.shape[1]
    later = torch.ones(C, C, dtype=torch.bool, device=G.device).tril(-1)[:, :, None]
    # a sum of the gates between, never a difference of two sums from the start: after a strong gate that is 0 / 0
    decay = torch.where(later, G[:, :, None], 0).cumsum(1).exp()  # (H, C, C, 1 or Dk)
    since = G.cumsum(1).exp()  # of the state before the chunk, at each token
    A = _pairs(K, K, decay).tril(-1) * B
    U = torch.linalg.solve_triangular(A, B * (V - (since * K) @ S), upper=False, unitriangular=True)
    out = scale * ((since * Q) @ S + _pairs(Q, K, decay).tril() @ U)
    return out, since[:, -1, :, None] * S + (decay[:, -1] * K).mT @ U


def _pairs(a: Tensor, b: Tensor, decay: Tensor) -> Tensor:
    """Σ_d a_id b_jd d_ijd for all i and j: one matrix product where all channels of a head fade alike."""
    if decay.shape[-1] == 1:
        return (a @ b.mT) * decay[..., 0]
    return torch.einsum("hid,hjd,hijd->hij", a, b, decay)


def gated_delta_rule(q, k, v, g, beta, state=None, scale=None, method: str = "auto") -> tuple[Tensor, Tensor]:
    """-> (out (T, Hv, Dv), state (Hv, Dk, Dv)), the state given left as it was. `scale` is Dk^-0.5 unless given.

    method: "recurrent", "chunked", or "auto", which takes the first for up to four tokens. Raises RequestError.
    """
    if method not in METHODS:
        raise RequestError(f"method is {method!r}; use one of {', '.join(METHODS)}")
    one_by_one = method == "recurrent" or (method == "auto" and q.shape[0] <= 4)
    return (recurrent if one_by_one else chunked)(q, k, v, g, beta, state, scale)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _begin(q: Tensor, v: Tensor) -> Tensor:
    return torch.zeros(v.shape[1], q.shape[2], v.shape[2], dtype=_wide(q), device=q.device)


def _spread(q: Tensor, k: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Each query and key head serves its share of consecutive value heads."""
    share = heads // k.shape[-2]
    return (q, k) if share == 1 else (q.repeat_interleave(share, dim=-2), k.repeat_interleave(share, dim=-2))


def _channels(g: Tensor, v: Tensor) -> Tensor:
    """g (..., Hv) as (..., Hv, 1), so that one number a head and one a channel are written alike."""
    return g[..., None] if g.dim() == v.dim() - 1 else g
