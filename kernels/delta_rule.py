"""Gated delta rule: linear attention whose state forgets, and corrects what it holds before it adds.

Shapes     q, k (T, Hk, Dk), v, out (T, Hv, Dv), Hv a multiple of Hk; g, beta (T, Hv) float32, g <= 0 the log of the
           decay; query_starts (B + 1,) int32, sequences end to end; states (slots, Hv, Dk, Dv) float32, in place;
           slots (B,) int32, each sequence's state, -1: padding, untouched and zeros out. k comes normalised.
Formula    S <- exp(g) S;  u = beta (v - Sᵀk);  S <- S + k uᵀ;  out = scale · Sᵀq
           In a chunk of C tokens, with d_ij = exp(g_{j+1} + ... + g_i) and S₀ the state before it:
           (I + A) U = beta (V - d_i0 K S₀),  A_ij = beta_i d_ij k_i·k_j for j < i
           out = scale (d_i0 Q S₀ + (d_ij q_i·k_j)_{j <= i} U),   S = d_C0 S₀ + (d_Cj k_j)ᵀ U
Bytes      recurrent: each state read and written, 8·Hv·Dk·Dv a sequence and step; chunked: that once a sequence, beside
           q, k, v, out and 2·C·Hv·b a token for two triangles, written and read
FLOPs      recurrent 7·Hv·Dk·Dv a token, no matrix instruction; chunked 6·Hv·Dk·Dv + 4·C·Hv·(Dk + Dv), nearly all
           in one, and all but the k, q products twice for the two numbers (see the trap)
Trap       The decay comes before the delta: u corrects the faded state. exp(Σg up to i) / exp(Σg up to j) is 0 / 0
           after a strong gate, so d_ij is the exponential of the sum between them, and never of a difference.
           (I + A)⁻¹ by forward substitution: powers of A, which need fewer steps, reach 3·10⁸ where keys repeat.
           The state stays in float32, or what a token adds is rounded away; matrix instructions take it as the sum of
           two 16-bit numbers, since rounding it to one would cost more than rounding the output does.

Sources: Yang et al. 2024 (arXiv 2412.06464), equations 10 and 17; Yang et al. 2024 (arXiv 2406.06484), section 3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.catalog import Bench, Case, Compilation, Trial, Work, normal, swapped
from kernels.launch import (
    accumulator,
    check_contiguous_rows,
    check_dtype,
    check_multiple,
    check_shape,
    on_device,
    require,
    tl,
    triton,
    use_triton,
)

CHUNK = 32  # half as much in float32, where registers hold the operands of a product
MAX_HEAD = 128
METHODS = ("auto", "recurrent", "chunked")


def gated_delta_rule_reference(q, k, v, g, beta, states, query_starts, slots=None, scale=None, method="auto"):
    """The recurrence, token by token -> (out, states), the states as a copy."""
    wide, out, states = accumulator(q.dtype), torch.zeros_like(v), states.clone()
    scale, share = q.shape[2] ** -0.5 if scale is None else scale, v.shape[1] // max(k.shape[1], 1)
    q, k = (x.to(wide).repeat_interleave(share, dim=1) for x in (q, k))
    starts = query_starts.tolist()
    slots = range(len(starts) - 1) if slots is None else slots.tolist()
    for s, slot in enumerate(slots):
        if slot < 0:
            continue
        S = states[slot].to(wide)
        for t in range(starts[s], starts[s + 1]):
            S = S * g[t].to(wide).exp()[:, None, None]
            u = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", S, k[t]))
            S = S + k[t, :, :, None] * u[:, None, :]
            out[t] = (scale * torch.einsum("hkv,hk->hv", S, q[t])).to(v.dtype)
        states[slot] = S
    return out, states


def chunked_reference(q, k, v, g, beta, states, query_starts, slots=None, scale=None, method="auto"):
    """The same a chunk at a time, operands of matrix products rounded to the type of q, as tensor cores take them."""
    wide, out, states = accumulator(q.dtype), torch.zeros_like(v), states.clone()
    scale, share = q.shape[2] ** -0.5 if scale is None else scale, v.shape[1] // max(k.shape[1], 1)
    starts, low = query_starts.tolist(), lambda x: x.to(q.dtype).to(wide)
    for s, slot in enumerate(range(len(starts) - 1) if slots is None else slots.tolist()):
        for first in range(starts[s], starts[s + 1] if slot >= 0 else 0, CHUNK):
            rows = slice(first, min(first + CHUNK, starts[s + 1]))
            Q, K = (x[rows].to(wide).repeat_interleave(share, dim=1).transpose(0, 1) for x in (q, k))  # (Hv, C, Dk)
            V, S, G, b = v[rows].to(wide).transpose(0, 1), states[slot].to(wide), g[rows].to(wide).T, beta[rows].T
            later = torch.ones(G.shape[1], G.shape[1], dtype=torch.bool, device=q.device).tril(-1)
            decay = torch.where(later, G[:, :, None], 0).cumsum(1).exp().tril()  # [i, j]: what is left at i of j
            A = (K @ K.mT * decay).tril(-1) * b[:, :, None]  # its diagonal counts as ones below
            inverse = torch.linalg.solve_triangular(A, torch.diag_embed(b.to(wide)), upper=False, unitriangular=True)
            since = G.cumsum(1).exp()[:, :, None]
            U = low(inverse) @ low(V - since * (K @ low(S)))
            outs = scale * since * (Q @ low(S)) + low(scale * decay * (Q @ K.mT)) @ low(U)
            out[rows] = outs.transpose(0, 1).to(v.dtype)
            states[slot] = S * since[:, -1:] + K.mT @ low(decay[:, -1, :, None] * U)
    return out, states


@triton.jit
def recurrent_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, state_ptr, starts_ptr, slots_ptr, out_ptr,
    q_t, q_h, k_t, k_h, v_t, v_h, g_t, beta_t, state_s, state_h, state_k, out_t, out_h,  # strides
    share, dk, dv, scale, SLOTS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (sequence, head, columns): BLOCK_V columns of one state, which know nothing of the others."""
    s, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = s
    if SLOTS:
        slot = tl.load(slots_ptr + s).to(tl.int64)
        if slot < 0:
            return
    i, j = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (i < dk)[:, None] & (j < dv)[None, :]
    state_at = state_ptr + slot * state_s + h * state_h + i[:, None] * state_k + j[None, :]
    S = tl.load(state_at, mask=inside, other=0.0)
    begin = tl.load(starts_ptr + s)
    for n in range(0, tl.load(starts_ptr + s + 1) - begin):
        row = begin.to(tl.int64) + n
        k = tl.load(k_ptr + row * k_t + h // share * k_h + i, mask=i < dk, other=0.0).to(tl.float32)
        q = tl.load(q_ptr + row * q_t + h // share * q_h + i, mask=i < dk, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + row * v_t + h * v_h + j, mask=j < dv, other=0.0).to(tl.float32)
        S *= tl.exp(tl.load(g_ptr + row * g_t + h))
        u = tl.load(beta_ptr + row * beta_t + h) * (v - tl.sum(S * k[:, None], axis=0))
        S += k[:, None] * u[None, :]
        out = tl.sum(S * q[:, None], axis=0) * scale
        tl.store(out_ptr + row * out_t + h * out_h + j, out.to(out_ptr.dtype.element_ty), mask=j < dv)
    tl.store(state_at, S, mask=inside)


@triton.jit
def triangles_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, starts_ptr, inverse_ptr, scores_ptr,
    q_t, q_h, k_t, k_h, g_t, beta_t, heads, share, sequences, dk, scale,
    C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (chunk, head), all at once: (I + A)⁻¹ diag(beta) and the decayed scores, (C, C) each.

    Sequence s begins at chunk query_starts[s] // C + s, which leaves each at least as many as it needs.
    """
    chunk, h = tl.program_id(0), tl.program_id(1)
    lo, hi = 0, sequences - 1
    while lo < hi:
        middle = (lo + hi + 1) // 2
        begins = tl.load(starts_ptr + middle) // C + middle <= chunk
        lo = tl.where(begins, middle, lo)
        hi = tl.where(begins, hi, middle - 1)
    begin = tl.load(starts_ptr + lo)
    first = begin + (chunk - begin // C - lo) * C
    count = tl.load(starts_ptr + lo + 1) - first
    if count <= 0:
        return

    r, i = tl.arange(0, C), tl.arange(0, BLOCK_K)
    rows = (first + r).to(tl.int64)
    there = r < count
    inside = there[:, None] & (i < dk)[None, :]
    k = tl.load(k_ptr + (rows * k_t + h // share * k_h)[:, None] + i[None, :], mask=inside, other=0.0)
    q = tl.load(q_ptr + (rows * q_t + h // share * q_h)[:, None] + i[None, :], mask=inside, other=0.0)
    g = tl.load(g_ptr + rows * g_t + h, mask=there, other=0.0)
    beta = tl.load(beta_ptr + rows * beta_t + h, mask=there, other=0.0)

    # Transposed, [j, i] for what token j left to token i: its rows are then what the substitution sums over.
    between = tl.where(r[None, :] > r[:, None], g[None, :], 0.0)
    decay = tl.exp(tl.cumsum(between, axis=1))
    A = tl.dot(k, tl.trans(k), input_precision="ieee") * decay * beta[None, :]
    A = tl.where(r[None, :] > r[:, None], A, 0.0)
    inverse = tl.where(r[None, :] == r[:, None], 1.0, 0.0)
    for n in range(1, tl.minimum(count, C)):
        column = tl.sum(tl.where(r[None, :] == n, A, 0.0), axis=1)
        inverse -= tl.where(r[:, None] == n, tl.sum(column[:, None] * inverse, axis=0)[None, :], 0.0)
    at = (chunk.to(tl.int64) * heads + h) * C * C + r[:, None] * C + r[None, :]
    tl.store(inverse_ptr + at, (inverse * beta[None, :]).to(k.dtype))
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * tl.trans(decay) * scale
    tl.store(scores_ptr + at, tl.where(r[:, None] >= r[None, :], scores, 0.0).to(k.dtype))


@triton.jit
def _dot(a, b, c):
    """a · b + c, where b is float32 and a may be 16 bits wide: b is then two numbers of that width, head and rest."""
    head = b.to(a.dtype)
    c += tl.dot(a, head, input_precision="ieee")
    if a.dtype != tl.float32:
        c = tl.dot(a, (b - head.to(tl.float32)).to(a.dtype), c)
    return c


@triton.jit
def chunked_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, state_ptr, starts_ptr, slots_ptr, inverse_ptr, scores_ptr, out_ptr,
    q_t, q_h, k_t, k_h, v_t, v_h, g_t, state_s, state_h, state_k, out_t, out_h,  # strides
    heads, share, dk, dv, scale,
    SLOTS: tl.constexpr, C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program (sequence, head, columns): chunk after chunk, BLOCK_V columns of the state in registers."""
    s, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = s
    if SLOTS:
        slot = tl.load(slots_ptr + s).to(tl.int64)
        if slot < 0:
            return
    begin, end = tl.load(starts_ptr + s), tl.load(starts_ptr + s + 1)
    r, i, j = tl.arange(0, C), tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    state_at = state_ptr + slot * state_s + h * state_h + i[:, None] * state_k + j[None, :]
    S = tl.load(state_at, mask=(i < dk)[:, None] & (j < dv)[None, :], other=0.0)
    triangle = ((begin // C + s) * heads + h) * C * C + r[:, None] * C + r[None, :]
    for first in range(begin, end, C):
        rows, there = (first + r).to(tl.int64), first + r < end
        keys, values = there[:, None] & (i < dk)[None, :], there[:, None] & (j < dv)[None, :]
        k = tl.load(k_ptr + (rows * k_t + h // share * k_h)[:, None] + i[None, :], mask=keys, other=0.0)
        v = tl.load(v_ptr + (rows * v_t + h * v_h)[:, None] + j[None, :], mask=values, other=0.0)
        g = tl.load(g_ptr + rows * g_t + h, mask=there, other=0.0)
        later = tl.load(g_ptr + (rows + 1) * g_t + h, mask=(first + r + 1 < end) & (r + 1 < C), other=0.0)
        since = tl.exp(tl.cumsum(g, axis=0))  # what is left at token i of the state before the chunk
        until = tl.exp(tl.cumsum(later, axis=0, reverse=True))  # what is left at the chunk's end of token j
        u = v.to(tl.float32) - since[:, None] * _dot(k, S, 0.0)
        u = _dot(tl.load(inverse_ptr + triangle), u, 0.0)
        q = tl.load(q_ptr + (rows * q_t + h // share * q_h)[:, None] + i[None, :], mask=keys, other=0.0)
        out = _dot(q, S, 0.0) * (since * scale)[:, None]
        out = _dot(tl.load(scores_ptr + triangle), u, out)
        tl.store(out_ptr + (rows * out_t + h * out_h)[:, None] + j[None, :], out.to(out_ptr.dtype.element_ty), values)
        S = _dot(tl.trans(k), until[:, None] * u, S * tl.exp(tl.sum(g, axis=0)))
        triangle += heads * C * C
    tl.store(state_at, S, mask=(i < dk)[:, None] & (j < dv)[None, :])


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, query_starts: Tensor,
    slots: Tensor | None = None, scale: float | None = None, method: str = "auto", backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> (out (T, Hv, Dv), states), the states updated in place. `scale` is Dk^-0.5 unless given. Raises KernelError.

    method: "recurrent", "chunked", or "auto", which takes the first where a sequence has four tokens on average.
    """
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "states": states, "query_starts": query_starts}
    tensors |= {} if slots is None else {"slots": slots}
    launch = use_triton(backend, *tensors.values())
    _check(q, k, v, g, beta, states, query_starts, slots)
    require(method in METHODS, f"method is {method!r}; use one of {', '.join(METHODS)}")
    scale = q.shape[2] ** -0.5 if scale is None else scale
    if not launch:
        out, updated = gated_delta_rule_reference(q, k, v, g, beta, states, query_starts, slots, scale)
        return out, states.copy_(updated)
    check_contiguous_rows(**tensors)
    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)  # padding belongs to no program
    sequences = query_starts.shape[0] - 1
    if out.numel() and sequences:
        recurrent = method == "recurrent" or (method == "auto" and q.shape[0] <= 4 * sequences)
        with on_device(q):
            (_recurrent if recurrent else _chunked)(q, k, v, g, beta, states, query_starts, slots, scale, out)
    return out, states


def _check(q, k, v, g, beta, states, query_starts, slots) -> None:
    check_dtype(q=q, k=k, v=v)
    check_dtype((torch.float32,), g=g, beta=beta, states=states)
    check_dtype((torch.int32,), query_starts=query_starts)
    check_shape("q", q, None, None, None)
    check_shape("k", k, *q.shape)
    check_shape("v", v, q.shape[0], None, None)
    require(q.shape[1] > 0, "q has no heads; give at least one")
    check_multiple("number of value heads", v.shape[1], q.shape[1])
    for name, t in (("g", g), ("beta", beta)):
        check_shape(name, t, *v.shape[:2])
    check_shape("states", states, None, v.shape[1], q.shape[2], v.shape[2])
    check_shape("query_starts", query_starts, None)
    sequences = query_starts.shape[0] - 1
    require(q.shape[2] <= MAX_HEAD, f"q has heads of {q.shape[2]}; the kernel takes up to {MAX_HEAD}")
    if slots is None:
        require(states.shape[0] == sequences, f"{states.shape[0]} states for {sequences} sequences; give slots")
    else:
        check_dtype((torch.int32,), slots=slots)
        check_shape("slots", slots, sequences)


def _sizes(dk: int, dv: int, widest: int) -> tuple[int, int, int]:
    block_v = min(max(triton.next_power_of_2(dv), 16), widest)
    return max(triton.next_power_of_2(dk), 16), block_v, triton.cdiv(dv, block_v)


def _recurrent(q, k, v, g, beta, states, starts, slots, scale, out) -> None:
    block_k, block_v, columns = _sizes(q.shape[2], v.shape[2], 32)
    strides = [s for t in (q, k, v) for s in t.stride()[:2]]
    strides += [g.stride(0), beta.stride(0), *states.stride()[:3], *out.stride()[:2]]
    recurrent_kernel[(starts.shape[0] - 1, v.shape[1], columns)](
        q, k, v, g, beta, states, starts, starts if slots is None else slots, out, *strides,
        v.shape[1] // q.shape[1], q.shape[2], v.shape[2], scale,
        SLOTS=slots is not None, BLOCK_K=block_k, BLOCK_V=block_v, num_warps=4,
    )  # fmt: skip


def _chunked(q, k, v, g, beta, states, starts, slots, scale, out) -> None:
    (tokens, heads, dv), dk, sequences = v.shape, q.shape[2], starts.shape[0] - 1
    block_k, block_v, columns = _sizes(dk, dv, 16)
    size, warps = configuration(q.element_size())
    share, chunks = heads // q.shape[1], tokens // size + sequences
    inverse, scores = (torch.empty(chunks, heads, size, size, dtype=q.dtype, device=q.device) for _ in range(2))
    qk = [s for t in (q, k) for s in t.stride()[:2]]
    triangles_kernel[(chunks, heads)](
        q, k, g, beta, starts, inverse, scores, *qk, g.stride(0), beta.stride(0), heads, share, sequences, dk, scale,
        C=size, BLOCK_K=block_k, num_warps=8,
    )  # fmt: skip
    chunked_kernel[(sequences, heads, columns)](
        q, k, v, g, states, starts, starts if slots is None else slots, inverse, scores, out,
        *qk, *v.stride()[:2], g.stride(0), *states.stride()[:3], *out.stride()[:2], heads, share, dk, dv, scale,
        SLOTS=slots is not None, C=size, BLOCK_K=block_k, BLOCK_V=block_v,
        num_warps=warps, num_stages=1,
    )  # fmt: skip


def configuration(itemsize: int) -> tuple[int, int]:
    """Bytes a number -> C, num_warps of the chunked kernel."""
    return (CHUNK, 4) if itemsize == 2 else (CHUNK // 2, 8)


# What the tools take from here -------------------------------------------------------------------------------------


def inputs(device, dtype, generator, counts, key_heads, heads, dk, dv, slots=None, gate=0.3) -> tuple:
    """Arguments of gated_delta_rule: keys of length 1, initial states, and a NaN state that belongs to nobody."""
    draw = lambda *shape: normal(generator, *shape, device=device, dtype=torch.float32)  # noqa: E731
    tokens, normed = sum(counts), torch.nn.functional.normalize
    q, k = (normed(draw(tokens, key_heads, dk), dim=-1).to(dtype) for _ in range(2))
    v, g, beta = draw(tokens, heads, dv).to(dtype), draw(tokens, heads).abs() * -gate, draw(tokens, heads).sigmoid()
    states = draw(len(counts) + (slots is not None), heads, dk, dv)
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    if slots is not None:
        states[[n for n in range(len(states)) if n not in slots]] = float("nan")
        slots = torch.tensor(slots, dtype=torch.int32, device=device)
    return q, k, v, g, beta, states, starts, slots


def _case(name, counts, key_heads, heads, dk, dv, method, layout=lambda x: x, **options) -> Case:
    def make(device, dtype, generator):
        q, *rest = inputs(device, dtype, generator, counts, key_heads, heads, dk, dv, **options)
        reference = chunked_reference if method == "chunked" else gated_delta_rule_reference
        return Trial(gated_delta_rule, reference, (layout(q), *rest), {"method": method})

    return Case(name, make)


CASES = [
    _case("one step, slots and padding", [1, 1, 1], 1, 2, 64, 33, "recurrent", slots=[2, -1, 0]),
    _case("recurrent, ragged", [5, 0, 1], 2, 2, 17, 81, "recurrent", layout=swapped),
    _case("chunked, ragged", [CHUNK + 17, 0, 1, CHUNK], 1, 2, 64, 33, "chunked"),
    _case("chunked, slots, strong gates", [33, 17], 2, 2, 33, 64, "chunked", slots=[2, 0], gate=30.0, layout=swapped),
    _case("no tokens", [], 1, 1, 32, 32, "auto"),
]

_QK, _V, _STATE = (2048, 128, 2048, 128), (4096, 128), (32 * 128 * 128, 128 * 128, 128)
_F32, _I32 = torch.float32, torch.int32


def _settings(dtype) -> dict:
    """On sm_75 Triton has no matrix instruction, and none for float32 anywhere."""
    return {"min_sm": 80} | ({"dtypes": (dtype,)} if dtype else {"matrix": "any"})


def _triangles(dk, dtype) -> Compilation:
    return Compilation(
        f"delta_rule_triangles_{dk}{'_fp32' if dtype else ''}",
        triangles_kernel,
        lambda d: (d, d, _F32, _F32, _I32, d, d, *(16 * dk, dk) * 2, 32, 32, 32, 2, 3, dk, 0.1),
        {"C": configuration(4 if dtype else 2)[0], "BLOCK_K": dk},
        num_warps=8,
        **_settings(dtype),
    )


def _chunked_compilation(slots, dtype) -> Compilation:
    size, warps = configuration(4 if dtype else 2)
    return Compilation(
        f"delta_rule_chunked{'_slots' if slots else ''}{'_fp32' if dtype else ''}",
        chunked_kernel,
        lambda d: (d, d, d, _F32, _F32, _I32, _I32, d, d, d, *_QK, *_V, 32, *_STATE, *_V, 32, 2, 128, 128, 0.1),
        {"SLOTS": slots, "C": size, "BLOCK_K": 128, "BLOCK_V": 16},
        num_warps=warps,
        num_stages=1,
        **_settings(dtype),
    )


COMPILE = [
    Compilation(
        "delta_rule_recurrent",
        recurrent_kernel,
        lambda d: (d, d, d, _F32, _F32, _F32, _I32, _I32, d, *_QK, *_V, 32, 32, *_STATE, *_V, 2, 128, 128, 0.1),
        {"SLOTS": True, "BLOCK_K": 128, "BLOCK_V": 32},
    ),
    *(_triangles(dk, dtype) for dk in (64, 128) for dtype in (None, _F32)),
    *(_chunked_compilation(slots, dtype) for slots in (True, False) for dtype in (None, _F32)),
]


def _bench(device, dtype, counts, method) -> Work:
    args = inputs(device, dtype, torch.Generator().manual_seed(0), counts, 16, 32, 128, 128)
    moved = sum(t.nbytes for t in args[:5]) + args[2].nbytes + 2 * args[5].nbytes
    return Work(
        kernel=lambda: gated_delta_rule(*args, method=method, backend="triton"),
        rivals={},
        bytes=moved,
        flops=sum(counts) * 32 * (8 * 128 * 128 if method == "recurrent" else 6 * 128 * 128 + 8 * CHUNK * 128),
    )


BENCHES = [
    Bench("delta rule, one step", _bench, {"Qwen3-Next": {"counts": [1] * 64, "method": "recurrent"}}, goal=0.85),
    Bench("delta rule, chunks", _bench, {"Qwen3-Next": {"counts": [4096] * 4, "method": "chunked"}}, bound="compute"),
]
