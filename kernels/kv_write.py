"""KV write: each new token's key and value go to their slot in the paged cache, as they are, as int8 or as fp8.

Shapes     k, v (T, Hkv, D); k_cache, v_cache (blocks, block_size, Hkv, D), any strides; slot_mapping (T,) int64:
           block · block_size + place in it, -1 writes nothing; for int8 also k_scales, v_scales (blocks, block_size,
           Hkv) float32
Formula    int8   scale = max(absmax of the head's D numbers / 127, 1e-10), code = round(x / scale)
           fp8    code = e4m3(clamp(x, ±448))
Bytes      2·T·Hkv·D·(b + b_cache) + 8·T, int8 another 8·T·Hkv for the scales
FLOPs      none to a few per element: memory-bound, and a launch or two of time for a decode step
Trap       -1 is padding, and taken for an address it is the last slot of the block before the cache. An all-zero head
           has absmax 0, and 0 / 0 is NaN in every later score. e4m3 has no infinity: beyond 448 it is NaN, so clamp.
           block · stride passes 2³¹ in caches of a few GB, so addresses are int64. k is often a slice of the fused
           projection's output, so every tensor has its own strides. The hardware's own cast to e4m3 begins with
           sm_89; rounding in integers gives the same bits everywhere, and is hidden behind the bytes.

Sources: Kwon et al. 2023 (arXiv 2309.06180), section 4.3; Micikevicius et al. 2022 (arXiv 2209.05433), table 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.catalog import Bench, Case, Compilation, Trial, Work, normal, spaced_rows, swapped
from kernels.launch import (
    FLOATS,
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

FP8_MAX = tl.constexpr(448.0)
SCALE_FLOOR = tl.constexpr(1e-10)
TILE = 1024  # elements of k, and as many of v, in one program
FORMATS = {torch.int8: 1, torch.float8_e4m3fn: 2}  # other types are stored as they are: 0


def kv_write_reference(k, v, k_cache, v_cache, slot_mapping, k_scales=None, v_scales=None):
    """-> (k_cache, v_cache) or (k_cache, v_cache, k_scales, v_scales), as copies."""
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    block, place = slots // k_cache.shape[1], slots % k_cache.shape[1]
    caches, scales = [], []
    for x, cache, scale in ((k, k_cache, k_scales), (v, v_cache, v_scales)):
        x, cache = x[written].to(accumulator(x.dtype)), cache.clone()
        if scale is not None:
            scale, step = scale.clone(), (x.abs().amax(-1) / 127).clamp(min=1e-10)
            scale[block, place] = step.to(scale.dtype)
            x = (x / step[..., None]).round()
            scales.append(scale)
        elif cache.dtype == torch.float8_e4m3fn:
            x = x.clamp(-448, 448)
        cache[block, place] = x.to(cache.dtype)
        caches.append(cache)
    return (*caches, *scales)


@triton.jit
def _round(x):
    """To the nearest integer, ties to even, for |x| < 2²²: 1.5 · 2²³ leaves no room for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _e4m3(x):
    """float32 -> the bits of e4m3 in uint8: nearest, ties to even, clamped; NaN stays NaN."""
    size = tl.minimum(tl.abs(x), FP8_MAX)
    bits = size.to(tl.uint32, bitcast=True)
    # Above 2⁻⁶: drop 20 of the 23 digits, rounding by adding just under half (a carry runs on into the exponent,
    # as it should), and move the exponent's zero from 127 to 7. Below: steps of 2⁻⁹.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    small = _round(size * 512.0).to(tl.uint32)
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x != x, 0x7F, code)
    return (code | ((x.to(tl.uint32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def widen(x, dtype: tl.constexpr):
    """What a cache holds, as numbers of `dtype`: for those who read it. Bytes are e4m3, `_e4m3` undone.

    Moved up by 7 bits they are a float16 of the same digits, whose exponent counts from 15 instead of 7: times 2⁸.
    All of them are exact, subnormals too. Only the NaN of e4m3 is an ordinary 480 there.
    """
    if x.dtype == tl.uint8:
        bits = x.to(tl.uint16)
        size = bits & 0x7F
        number = ((size << 7) | ((bits & 0x80) << 8)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where(size == 0x7F, float("nan"), number).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def _write(x, cache_ptr, scale_ptr, at, scale_at, inside, heads_inside, FORMAT: tl.constexpr):
    """x (heads, D) to cache_ptr + at; for int8 its scales (heads,) to scale_ptr + scale_at."""
    if FORMAT == 1:
        wide = x.to(tl.float32)
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(wide), axis=1), 127.0), SCALE_FLOOR)
        tl.store(scale_ptr + scale_at, scale, mask=heads_inside)
        code = _round(tl.div_rn(wide, tl.broadcast_to(scale[:, None], wide.shape))).to(tl.int8)
    elif FORMAT == 2:
        code = _e4m3(x.to(tl.float32))
    else:
        code = x.to(cache_ptr.dtype.element_ty)
    tl.store(cache_ptr + at, code, mask=inside)


@triton.jit
def kv_write_kernel(
    k_ptr, v_ptr, kc_ptr, vc_ptr, ks_ptr, vs_ptr, slots_ptr,
    k_t, k_h, v_t, v_h, kc_b, kc_s, kc_h, vc_b, vc_s, vc_h, ks_b, ks_s, vs_b, vs_s,  # strides: token, head, block, slot
    block_size, heads, d,
    FORMAT: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (t, j) writes heads j · BLOCK_H ... of token t."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + t)
    if slot < 0:
        return
    block, place = slot // block_size, slot % block_size
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, BLOCK_D)[None, :]
    inside = (h < heads)[:, None] & (i < d)
    k = tl.load(k_ptr + t * k_t + h[:, None] * k_h + i, mask=inside, other=0.0)
    at = block * kc_b + place * kc_s + h[:, None] * kc_h + i
    _write(k, kc_ptr, ks_ptr, at, block * ks_b + place * ks_s + h, inside, h < heads, FORMAT)
    v = tl.load(v_ptr + t * v_t + h[:, None] * v_h + i, mask=inside, other=0.0)
    at = block * vc_b + place * vc_s + h[:, None] * vc_h + i
    _write(v, vc_ptr, vs_ptr, at, block * vs_b + place * vs_s + h, inside, h < heads, FORMAT)


def kv_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """Writes in place -> (k_cache, v_cache), with int8 caches also the scales. A slot beyond the cache is not looked
    for, as that would wait for the device. Raises KernelError."""
    given = {"k_scales": k_scales, "v_scales": v_scales}
    scales = {name: t for name, t in given.items() if t is not None}
    tensors = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slot_mapping, **scales}
    launch = use_triton(backend, *tensors.values())
    _check(k, v, k_cache, v_cache, slot_mapping, scales)
    if not launch:
        results = kv_write_reference(k, v, k_cache, v_cache, slot_mapping, k_scales, v_scales)
        targets = (k_cache, v_cache, *scales.values())
        return tuple(target.copy_(result) for target, result in zip(targets, results, strict=True))
    check_contiguous_rows(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping, **scales)
    _launch(k, v, k_cache, v_cache, slot_mapping, k_scales, v_scales)
    return (k_cache, v_cache, *scales.values())


def as_loaded(*caches: Tensor) -> tuple[Tensor, ...]:
    """Caches as a kernel with `widen` takes them: e4m3 as it is where the hardware converts it, two numbers in one
    instruction; as bytes before sm_89, for which Triton refuses the type, and in the interpreter."""
    if caches[0].dtype != torch.float8_e4m3fn or converts_e4m3(caches[0]):
        return caches
    return tuple(cache.view(torch.uint8) for cache in caches)


def converts_e4m3(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (8, 9)


def _check(k, v, k_cache, v_cache, slot_mapping, scales) -> None:
    check_dtype(k=k, v=v)
    check_dtype((*FLOATS, *FORMATS), k_cache=k_cache, v_cache=v_cache)
    check_dtype((torch.int64,), slot_mapping=slot_mapping)
    check_shape("k", k, None, None, None)
    check_shape("v", v, *k.shape)
    check_shape("k_cache", k_cache, None, None, *k.shape[1:])
    check_shape("v_cache", v_cache, *k_cache.shape)
    check_shape("slot_mapping", slot_mapping, k.shape[0])
    wanted = 2 if k_cache.dtype == torch.int8 else 0
    require(
        len(scales) == wanted,
        f"{len(scales)} scale tensors with a cache of {k_cache.dtype}; int8 takes both, other types none",
    )
    for name, t in scales.items():
        check_dtype((torch.float32,), **{name: t})
        check_shape(name, t, *k_cache.shape[:3])


def _launch(k, v, k_cache, v_cache, slot_mapping, k_scales, v_scales) -> None:
    tokens, heads, d = k.shape
    if not k.numel():
        return
    block_h, block_d = configuration(heads, d)
    form = FORMATS.get(k_cache.dtype, 0)
    if form == 2:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    if form != 1:  # no scales: any pointer will do
        k_scales, v_scales = k_cache, v_cache
    strides = [s for t in (k, v) for s in t.stride()[:2]]
    strides += [s for t in (k_cache, v_cache) for s in t.stride()[:3]]
    strides += [s for t in (k_scales, v_scales) for s in t.stride()[:2]]
    with on_device(k):
        kv_write_kernel[(tokens, triton.cdiv(heads, block_h))](
            k, v, k_cache, v_cache, k_scales, v_scales, slot_mapping, *strides, k_cache.shape[1], heads, d,
            FORMAT=form, BLOCK_H=block_h, BLOCK_D=block_d, num_warps=4,
        )  # fmt: skip


def configuration(heads: int, d: int) -> tuple[int, int]:
    """KV heads, head size -> BLOCK_H, BLOCK_D: whole heads, because an int8 scale belongs to one."""
    block_d = triton.next_power_of_2(d)
    return min(triton.next_power_of_2(heads), max(TILE // block_d, 1)), block_d


# What the tools take from here -------------------------------------------------------------------------------------


def inputs(device, dtype, generator, t, heads, d, stored=None, blocks=5, block_size=16) -> tuple:
    """Arguments of kv_write: random slots, every third token padding, caches full of old numbers."""
    k, v = (normal(generator, t, heads, d, device=device, dtype=dtype) for _ in range(2))
    slots = torch.randperm(blocks * block_size, generator=generator, device="cpu")[:t]
    slots[1::3] = -1
    shape, slots = (blocks, block_size, heads, d), slots.to(device)
    if stored == torch.int8:
        caches = [torch.full(shape, 99, dtype=torch.int8, device=device) for _ in range(2)]
        return (k, v, *caches, slots, *(torch.full(shape[:3], 9.0, device=device) for _ in range(2)))
    return (k, v, *(torch.full(shape, 9.0, device=device).to(stored or dtype) for _ in range(2)), slots)


def _case(name, t, heads, d, stored=None, layout=lambda x: x, scale=1.0) -> Case:
    def make(device, dtype, generator):
        k, v, k_cache, v_cache, *rest = inputs(device, dtype, generator, t, heads, d, stored)
        k, v = layout(k * scale), layout(v)
        return Trial(kv_write, kv_write_reference, (k, v, k_cache, swapped(v_cache), *rest))

    return Case(name, make)


FP8, INT8 = torch.float8_e4m3fn, torch.int8
CASES = [
    _case("plain, odd sizes", 33, 3, 81),
    _case("plain, swapped", 9, 5, 64, layout=swapped),
    _case("plain, one token", 1, 1, 256),
    _case("no tokens", 0, 3, 64),
    _case("int8, odd sizes", 33, 3, 81, stored=INT8, layout=spaced_rows),
    _case("int8, swapped", 9, 17, 128, stored=INT8, layout=swapped),
    _case("fp8, odd sizes", 33, 3, 81, stored=FP8, layout=spaced_rows),
    _case("fp8, beyond its range", 9, 2, 96, stored=FP8, scale=400.0),
]


def _compile_args(form):
    def make(dtype):
        cache = (dtype, torch.int8, torch.uint8)[form]
        scales = torch.float32 if form == 1 else cache
        strides = (6144, 128, 6144, 128) + (16384, 1024, 128) * 2 + (128, 8) * 2
        return (dtype, dtype, cache, cache, scales, scales, torch.int64, *strides, 16, 8, 128)

    return make


COMPILE = [
    Compilation(
        f"kv_write_{name}",
        kv_write_kernel,
        _compile_args(form),
        {"FORMAT": form, "BLOCK_H": configuration(8, 128)[0], "BLOCK_D": configuration(8, 128)[1]},
    )
    for form, name in enumerate(("plain", "int8", "fp8"))
]


def _bench(device, dtype, heads, d, t=8192, stored=None) -> Work:
    generator, blocks = torch.Generator().manual_seed(0), t // 16
    k, v, k_cache, v_cache, slots, *scales = inputs(device, dtype, generator, t, heads, d, stored, blocks)
    slots = torch.randperm(t, generator=generator, device="cpu").to(device)
    flat = [c.view(-1, heads, d) for c in (k_cache, v_cache)]
    plain = {"torch index_copy_": lambda: [c.index_copy_(0, slots, x) for c, x in zip(flat, (k, v), strict=True)]}
    return Work(
        kernel=lambda: kv_write(k, v, k_cache, v_cache, slots, *scales, backend="triton"),
        rivals=plain if stored is None else {},
        bytes=2 * (k.nbytes + k_cache.nbytes) + slots.nbytes + sum(s.nbytes for s in scales),
        flops=0,
    )


SIZES = {"SmolLM2-135M": {"heads": 3, "d": 64}, "Llama-3-8B": {"heads": 8, "d": 128}}
BENCHES = [
    Bench("KV write", _bench, {"Qwen3-0.6B": {"heads": 8, "d": 128, "t": 4096}, **SIZES}, goal=0.85),
    Bench("KV write, int8", _bench, {n: s | {"stored": INT8} for n, s in SIZES.items()}, goal=0.85),
    Bench("KV write, fp8", _bench, {n: s | {"stored": FP8} for n, s in SIZES.items()}, goal=0.85),
]
