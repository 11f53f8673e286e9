"""Does it fit: weights + KV cache + activations + workspace + communication buffers + headroom, for each GPU.

All figures are whole bytes of one GPU. Weights and KV cache are exact for the config; activations are the largest
set that is live at once in a plain implementation; workspace and headroom are assumptions, stated as arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..config import ModelConfig
from ..errors import RequestError, short
from .formats import format_of
from .hardware import Hardware, find_hardware
from .kv_size import kv_bytes, kv_heads_per_rank
from .numbers import MOST, is_number, whole_number
from .op_cost import LOGIT_BYTES
from .parameters import expert_layers, weight_bytes

PARTS = ("weights", "kv", "activations", "workspace", "communication", "headroom")
_MOST_GPUS = 1024


@dataclass(frozen=True)
class MemoryPlan:
    """What is to be served, and how. `tokens` is the length of each of `sequences` sequences, prompt and output.

    `step_tokens` is the most tokens one step computes (the chunk of a chunked prefill); `workspace` bytes are the
    device context, library workspaces and graph pools; `headroom` is the fraction of the GPU left to the allocator.
    `kept` and `keep` are those of `weight_bytes`; `reserved` gives sliding layers full length, as some engines do.
    """

    config: ModelConfig
    tokens: int
    sequences: int
    gpu: Hardware
    weight_dtype: Any = "bfloat16"
    kv_dtype: Any = "bfloat16"
    activation_dtype: Any = "bfloat16"
    tensor_parallel: int = 1
    block_size: int = 16
    step_tokens: int = 8192
    workspace: int = 1 << 30
    headroom: float = 0.1
    kept: Any = None
    keep: tuple[str, ...] = ("embedding", "head")
    reserved: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.config, ModelConfig):
            raise RequestError(f"config is {short(repr(self.config))}; give a ModelConfig, such as model_config(name)")
        for name in ("tokens", "sequences", "tensor_parallel", "block_size", "step_tokens"):
            whole_number(name, getattr(self, name), 1)
        whole_number("workspace", self.workspace, 0)
        if not is_number(self.headroom) or not 0 <= self.headroom < 1:
            raise RequestError(f"headroom is {short(repr(self.headroom))}; it must be a fraction from 0 to below 1")
        heads, ranks = self.config.num_attention_heads, self.tensor_parallel
        if heads % ranks:
            raise RequestError(f"tensor_parallel is {ranks}; it must divide the model's {heads} attention heads")

    @property
    def kv_per_sequence(self) -> int:
        """KV bytes of one sequence on one GPU, in whole blocks."""
        return math.ceil(
            kv_bytes(
                self.config, self.tokens, self.kv_dtype, self.reserved, self.tensor_parallel, block_size=self.block_size
            )
        )

    def parts(self) -> dict[str, int]:
        """Bytes of each part on one GPU."""
        weights = weight_bytes(self.config, self.weight_dtype, self.kept, self.keep, self.tensor_parallel)
        return {
            "weights": weights,
            "kv": self.sequences * self.kv_per_sequence,
            "activations": _activations(self),
            "workspace": self.workspace,
            "communication": _communication(self),
            "headroom": math.ceil(self.headroom * self.gpu.memory_bytes),
        }

    @property
    def fits(self) -> bool:
        return sum(self.parts().values()) <= self.gpu.memory_bytes


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes on each GPU by part, and the verdict.

    `max_sequences` is how many sequences of this length fit on the GPUs given (0 if not even one does),
    `gpus_needed` the smallest power of two of ranks on which the wanted sequences fit (None if no number helps).
    """

    plan: MemoryPlan
    weights: int
    kv: int
    activations: int
    workspace: int
    communication: int
    headroom: int
    kv_per_sequence: int
    gpu_bytes: int
    max_sequences: int
    gpus_needed: int | None

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    @property
    def free(self) -> int:
        """Bytes left on each GPU; negative if it does not fit."""
        return self.gpu_bytes - self.total

    @property
    def fits(self) -> bool:
        return self.free >= 0

    def parts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in PARTS}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plan = self.plan
        return {
            "gpu": plan.gpu.name,
            "gpu_figures_checked": plan.gpu.checked,
            "gpu_bytes": self.gpu_bytes,
            "tensor_parallel": plan.tensor_parallel,
            "tokens": plan.tokens,
            "sequences": plan.sequences,
            "weight_format": format_of(plan.weight_dtype).name,
            "kv_format": format_of(plan.kv_dtype).name,
            "bytes_per_gpu": self.parts(),
            "kv_bytes_per_sequence": self.kv_per_sequence,
            "total_bytes": self.total,
            "free_bytes": self.free,
            "fits": self.fits,
            "max_sequences": self.max_sequences,
            "gpus_needed": self.gpus_needed,
        }


def budget(
    config: ModelConfig, tokens: int, sequences: int = 1, gpu: str | Hardware = "H100", **options: Any
) -> MemoryBudget:
    """The memory budget of `sequences` sequences of `tokens` tokens each. `options` are the fields of MemoryPlan.

    Raises RequestError for impossible numbers, ConfigError for an unknown GPU or number format.
    """
    plan = MemoryPlan(config, tokens, sequences, find_hardware(gpu), **options)
    return MemoryBudget(
        plan,
        **plan.parts(),
        kv_per_sequence=plan.kv_per_sequence,
        gpu_bytes=plan.gpu.memory_bytes,
        max_sequences=_largest(lambda count: replace(plan, sequences=count).fits),
        gpus_needed=_gpus_needed(plan),
    )


def _largest(fits: Callable[[int], bool]) -> int:
    """Largest count that fits, by doubling and halving, MOST at most; what fits at a count fits at every smaller."""
    high = 1
    while fits(high):
        if high == MOST:
            return high
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _gpus_needed(plan: MemoryPlan) -> int | None:
    ranks = 1
    while ranks <= min(plan.config.num_attention_heads, _MOST_GPUS):
        if plan.config.num_attention_heads % ranks == 0 and replace(plan, tensor_parallel=ranks).fits:
            return ranks
        ranks *= 2
    return None


def _activations(plan: MemoryPlan) -> int:
    """The residual stream and its norm, with either the widest intermediate of a block or the logits beside them.

    Logits count twice: once as they come out, once sorted or normalised for sampling.
    """
    config = plan.config
    tokens = min(plan.step_tokens, plan.tokens * plan.sequences)
    size = format_of(plan.activation_dtype).bytes_per_element
    widest = max(_attention_width(config, plan.tensor_parallel), _ffn_width(config, plan.tensor_parallel))
    logits = 2 * plan.sequences * config.vocab_size * LOGIT_BYTES
    return math.ceil(2 * tokens * config.hidden_size * size + max(tokens * widest * size, logits))


def _attention_width(config: ModelConfig, ranks: int) -> int:
    """Numbers a token: queries, keys, values and the output of one rank's heads."""
    heads = -(-config.num_attention_heads // ranks)
    if config.is_mla:
        key = config.qk_nope_head_dim + config.qk_rope_head_dim
        return heads * 2 * (key + config.v_head_dim)
    full = 2 * (heads + kv_heads_per_rank(config, ranks)) * config.head_dim
    if not config.is_hybrid:
        return full
    gates = heads * config.head_dim
    linear = config.conv_channels + 3 * config.linear_num_value_heads * config.linear_value_head_dim
    return max(full + gates, 2 * -(-linear // ranks))  # the convolution's input and output are there at once


def _ffn_width(config: ModelConfig, ranks: int) -> int:
    """Numbers a token: gate, up and their product; for experts once for each copy, with the copy's input and output."""
    if not config.is_moe:
        return 3 * -(-config.intermediate_size // ranks)
    inner = 3 * -(-config.moe_intermediate_size // ranks)
    experts = config.num_experts_per_tok * (inner + 2 * config.hidden_size) + 3 * -(-config.shared_width // ranks)
    some = expert_layers(config) < config.num_hidden_layers
    dense = 3 * -(-config.intermediate_size // ranks) if some else 0
    return max(experts, dense)


def _communication(plan: MemoryPlan) -> int:
    """Input and output of one all-reduce of the residual stream; nothing on one GPU."""
    if plan.tensor_parallel == 1:
        return 0
    tokens = min(plan.step_tokens, plan.tokens * plan.sequences)
    return math.ceil(2 * tokens * plan.config.hidden_size * format_of(plan.activation_dtype).bytes_per_element)
