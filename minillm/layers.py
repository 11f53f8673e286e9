"""The parts of a transformer block that see one token at a time: norm, rotary embedding, linear, SwiGLU.

Tokens are packed: an input is (T, d), never (batch, T, d). None of these layers needs to know where one
sequence ends and the next begins; only attention does.
"""

from __future__ import annotations

import contextlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from .config import ModelConfig
from .errors import ConfigError, short

_NOTHING = contextlib.nullcontext()


def region(name: str):
    """Names an operator in a torch.profiler trace. Costs a fraction of a microsecond when nobody profiles.

    A compiler that reads this code cannot ask the profiler, and would cut its graph here; compiled code has no names.
    """
    if torch.compiler.is_dynamo_compiling():
        return _NOTHING
    return record_function(name) if torch.autograd._profiler_enabled() else _NOTHING


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + eps) · weight over the last dimension, in float32 whatever x is.

    Source: Zhang and Sennrich 2019 (arXiv 1910.07467), equation 4, as Llama applies it.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        size = weight.shape[0]
        self.weight, self.eps = nn.Parameter(weight, requires_grad=False), eps
        # sqrt(mean(x²) + eps) = hypot(|x|, sqrt(size · eps)) / sqrt(size), and the last factor goes into the gain:
        # four operators instead of the six of the formula as written, and at one token a step an operator costs far
        # more to start than to run.
        self.register_buffer("floor", torch.tensor(math.sqrt(size * eps)), persistent=False)
        self.register_buffer("gain", weight.to(torch.float32) * math.sqrt(size), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        y = x / torch.hypot(length, self.floor) * self.gain
        return y if y.dtype == x.dtype else y.to(x.dtype)


class Linear(nn.Module):
    """y = x Wᵀ + b. x (T, d_in), weight (d_out, d_in), y (T, d_out)."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        # a tied head is handed the embedding's own Parameter and keeps it, so that it counts once
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def weight_bytes(self) -> int:
        """Bytes that one forward pass reads of this layer."""
        return sum(p.nbytes for p in (self.weight, self.bias) if p is not None)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Rotary(nn.Module):
    """Rotary position embedding: pair i of a head turns by position · base^(-2i/D).

    The pair is (x[i], x[i + D/2]), the half-split layout of Hugging Face files. GGUF stores Llama's rows for the
    interleaved layout (x[2i], x[2i+1]); the loader puts them back.
    Source: Su et al. 2021 (arXiv 2104.09864); scaling: Llama 3.1's published code, and YaRN (arXiv 2309.00071).
    """

    def __init__(self, config: ModelConfig, dim: int | None = None) -> None:
        super().__init__()
        frequencies, self.magnitude = rotary_frequencies(config, dim or config.rotary_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions (T,) -> cos, sin, both (T, 1, D) float32; sin carries the minus sign of its first half."""
        angles = positions[:, None, None].to(torch.float32) * self.frequencies  # (T, 1, D/2)
        cos, sin = angles.cos(), angles.sin()
        cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        return (cos, sin) if self.magnitude == 1.0 else (cos * self.magnitude, sin * self.magnitude)


def apply_rotary(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turns each head of x (T, H, D) by its token's angle. One roll brings each pair's partner alongside."""
    cos, sin = rotation
    if (turned := cos.shape[-1]) < x.shape[-1]:  # partial: the rest of a head passes, and can tell tokens far apart
        return torch.cat([apply_rotary(x[..., :turned], rotation), x[..., turned:]], dim=-1)
    partner = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, partner, sin).to(x.dtype)


def rotary_frequencies(config: ModelConfig, dim: int) -> tuple[Tensor, float]:
    """Angle per position for each of the dim/2 pairs, and the factor YaRN puts on cos and sin."""
    base = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    frequencies, magnitude = _scaled(base, config.rope_scaling, config, dim)
    if not torch.isfinite(frequencies).all() or not math.isfinite(magnitude):
        raise ConfigError(f"rope_theta {config.rope_theta} and its scaling give no finite angles; check the config")
    return frequencies, magnitude


def _scaled(base: Tensor, scaling, config: ModelConfig, dim: int) -> tuple[Tensor, float]:
    if scaling is None:
        return base, 1.0
    kind = scaling["rope_type"]
    if kind == "linear":
        return base / scaling["factor"], 1.0
    if kind == "divisors":  # one for each pair, as GGUF files carry Llama 3.1's scaling
        return base / torch.tensor(scaling["divisors"]), 1.0
    if kind == "llama3":
        return _llama3_frequencies(base, scaling), 1.0
    if kind == "yarn":
        return _yarn_frequencies(base, scaling, config, dim)
    raise ConfigError(f"rope_scaling type {short(repr(kind))} is not supported; minillm knows linear, llama3 and yarn")


def _llama3_frequencies(base: Tensor, scaling) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, and those between blended."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * base / (2 * math.pi)  # turns within the old context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * base + (1 - keep) * base / factor


def _yarn_frequencies(base: Tensor, scaling, config: ModelConfig, dim: int) -> tuple[Tensor, float]:
    """As above with a ramp over the dimension index (arXiv 2309.00071, section 3.2), and a softmax temperature."""
    factor = scaling["factor"]
    context = scaling.get("original_max_position_embeddings") or config.max_position_embeddings
    fast, slow = (
        dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))
        for turns in (scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1)
    )
    if scaling.get("truncate", True):
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - fast) / max(slow - fast, 0.001)).clamp(0, 1)
    frequencies = ramp * base / factor + (1 - ramp) * base
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        m, m_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        magnitude = _yarn_scale(factor, m) / _yarn_scale(factor, m_all) if m and m_all else _yarn_scale(factor, 1.0)
    return frequencies, magnitude


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)): the feed-forward layer. gate and up share their input, so they are one matrix.

    gate_up_proj (2f, d), down_proj (d, f). Source: Shazeer 2020 (arXiv 2002.05202), section 2.
    """

    def __init__(self, gate_up_proj: nn.Module, down_proj: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj

    def forward(self, x: Tensor) -> Tensor:
        inner = x.to(_common_dtype(x, self.gate_up_proj, self.down_proj))
        with region("gate_up_proj"):
            gate, up = self.gate_up_proj(inner).chunk(2, dim=-1)  # (T, f) each
        with region("swiglu"):
            hidden = self.activate(gate, up)
        with region("down_proj"):
            return self.down_proj(hidden).to(x.dtype)

    @staticmethod
    def activate(gate: Tensor, up: Tensor) -> Tensor:
        """gate, up (T, f) -> (T, f)."""
        return F.silu(gate) * up


def _common_dtype(x: Tensor, *layers: nn.Module) -> torch.dtype:
    """What all of `layers` round their input to anyway, else x's own: rounding earlier halves the bytes that move
    between two matrices."""
    dtypes = {layer.input_dtype(x.shape[0]) if hasattr(layer, "input_dtype") else x.dtype for layer in layers}
    return dtypes.pop() if len(dtypes) == 1 else x.dtype
