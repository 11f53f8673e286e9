"""Expert layers from the tensors of a checkpoint, under each name that they go by.

Mixtral          block_sparse_moe.gate, block_sparse_moe.experts.E.w1 (gate), w3 (up), w2 (down)
Qwen, DeepSeek   mlp.gate, mlp.experts.E.gate_proj, up_proj, down_proj; mlp.shared_experts, or Qwen's mlp.shared_expert
                 with mlp.shared_expert_gate; DeepSeek's mlp.gate.e_score_correction_bias
fused            mlp.experts.gate_up_proj (E, 2f, d), mlp.experts.down_proj (E, d, f), as transformers 5 holds them
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from .config import ModelConfig
from .moe import Expert, ExpertLayer, SharedExpert
from .moe_router import Gate, Router, RouterSettings
from .packing import Weight, as_float

NAMES = {"block_sparse_moe": ("w1", "w3", "w2"), "mlp": ("gate_proj", "up_proj", "down_proj")}


def experts_from(config: ModelConfig, layer: int, taken: Callable, make_linear: Callable) -> ExpertLayer:
    """The expert layer `layer`. taken(name, shape) hands out a tensor, `make_linear(parts, bias)` stores a matrix.

    Raises CheckpointError for a missing or misshapen tensor, or a router that is not finite; ConfigError for settings
    that no choice can be made by.
    """
    source = _Source(config, f"model.layers.{layer}.", taken, make_linear)
    settings = RouterSettings.of(config)
    router = Router(settings, source.router(), source.correction())
    return ExpertLayer(layer, router, nn.ModuleList(source.experts()), source.shared())


class _Source:
    def __init__(self, config: ModelConfig, prefix: str, taken: Callable, make_linear: Callable) -> None:
        self.config, self.taken, self.make_linear = config, taken, make_linear
        mixtral = taken.has(f"{prefix}block_sparse_moe.gate.weight")
        self.home = "block_sparse_moe" if mixtral else "mlp"
        self.prefix = f"{prefix}{self.home}."

    def router(self) -> Tensor:
        return _aligned(self.taken(f"{self.prefix}gate.weight", (self.config.num_experts, self.config.hidden_size)))

    def correction(self) -> Tensor | None:
        """DeepSeek-V3's sigmoid comes with a bias; a softmax has none."""
        if self.config.scoring_func == "softmax":
            return None
        return as_float(self.taken(f"{self.prefix}gate.e_score_correction_bias", (self.config.num_experts,)))

    def experts(self) -> list[Expert]:
        if self.taken.has(f"{self.prefix}experts.gate_up_proj"):
            return self._fused()
        names = NAMES[self.home]
        width = self.config.moe_intermediate_size
        return [self._expert(f"experts.{e}.", names, width) for e in range(self.config.num_experts)]

    def _expert(self, name: str, names: tuple[str, str, str], width: int) -> Expert:
        gate, up, down = (f"{self.prefix}{name}{part}.weight" for part in names)
        d = self.config.hidden_size
        stacked = [self.taken(gate, (width, d)), self.taken(up, (width, d))]
        return Expert(self.make_linear(stacked, None), self.make_linear([self.taken(down, (d, width))], None))

    def _fused(self) -> list[Expert]:
        experts, d, width = self.config.num_experts, self.config.hidden_size, self.config.moe_intermediate_size
        gate_up = self.taken(f"{self.prefix}experts.gate_up_proj", (experts, 2 * width, d))
        down = self.taken(f"{self.prefix}experts.down_proj", (experts, d, width))
        pairs = zip(gate_up.unbind(), down.unbind(), strict=True)
        return [Expert(self.make_linear([g.contiguous()], None), self.make_linear([w.contiguous()], None))
                for g, w in pairs]  # fmt: skip

    def shared(self) -> SharedExpert | None:
        width = self.config.shared_width
        if not width:
            return None
        if not self.config.shared_expert_intermediate_size:
            return SharedExpert(self._expert("shared_experts.", NAMES["mlp"], width))
        gate = self.taken(f"{self.prefix}shared_expert_gate.weight", (1, self.config.hidden_size))
        return SharedExpert(self._expert("shared_expert.", NAMES["mlp"], width), Gate(_aligned(gate)))


def _aligned(weight: Weight) -> Tensor:
    """In memory of its own: a file puts tensors at any multiple of their type's size, and BLAS sums the rows of a small
    matrix by where it begins. Which experts are chosen should follow from the numbers alone."""
    return as_float(weight).clone()
