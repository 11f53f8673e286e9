"""A decoder-only transformer: packed tokens in, hidden states out, and a head that makes logits of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Attention
from .config import DENSE, EXPERTS, HYBRID, ModelConfig
from .errors import CheckpointError, ConfigError, short
from .hybrid import hybrid_attention
from .layers import RMSNorm, Rotary, SwiGLU, region
from .mla import latent_attention
from .moe_loading import experts_from
from .packing import Weight, as_float, linear_maker


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)): each half adds its finding to the residual stream."""

    def __init__(self, attn_norm: RMSNorm, attention: nn.Module, ffn_norm: RMSNorm, mlp: nn.Module) -> None:
        super().__init__()
        self.attn_norm, self.attention = attn_norm, attention
        self.ffn_norm, self.mlp = ffn_norm, mlp

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache) -> Tensor:
        with region("attn_norm"):
            h = self.attn_norm(x)
        found = self.attention(h, rotation, cache)
        with region("residual"):
            x = x + found
        with region("ffn_norm"):
            h = self.ffn_norm(x)
        found = self.mlp(h)
        with region("residual"):
            return x + found


class Transformer(nn.Module):
    """`model(tokens, positions, cache)` -> hidden (T, d); `model.logits(hidden)` -> (rows, V) float32.

    The two are apart because a prefill of 500 tokens needs the logits of one row, and the head is the widest matrix
    of a small model. Built from a mapping of tensors with Hugging Face's names; see `from_tensors`.
    """

    backend = "torch"  # whose arithmetic it runs on: see backend.py

    def __init__(
        self, config: ModelConfig, embedding: nn.Parameter, blocks: list[Block], final_norm: RMSNorm, head: nn.Module
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = embedding
        self.rotary = Rotary(config, config.rotary_dim)
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = final_norm
        self.lm_head = head
        self.layout = "float32"  # how its matrices are stored, in words: see packing.py

    def forward(self, tokens: Tensor, positions: Tensor, cache) -> Tensor:
        """tokens (T,) ids, positions (T,) of each within its sequence -> hidden (T, d), before the final norm."""
        with region("embed"):
            x = F.embedding(tokens, self.embedding)
        rotation = self.rotary(positions)  # the same for every layer
        for block in self.blocks:
            x = block(x, rotation, cache)
        cache.advance(len(tokens))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (rows, d) -> (rows, V) float32: unnormalised log-probabilities of the next token."""
        with region("final_norm"):
            h = self.final_norm(hidden)
        with region("lm_head"):
            return self.lm_head(h).float()

    def place(self, device: str | torch.device, dtype: torch.dtype) -> Transformer:
        """Moves it to a device, its parameters in `dtype`. What is derived from the config stays float32: in bfloat16
        an angle of rotary embedding is wrong by a radian at position 256."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)  # before it moves: half the bytes there
        return self.to(device)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the residual stream and of a cache made for this model."""
        return self.embedding.dtype

    def linears(self) -> list[nn.Module]:
        """Every weight matrix that a decode step multiplies by, head included."""
        return [module for module in self.modules() if hasattr(module, "weight_bytes")]

    def decode_bytes(self, tokens: int = 1) -> int:
        """Weight bytes that a decode step of `tokens` sequences reads: each matrix and each norm once, a row of the
        embedding a token. Of experts those that are expected to be chosen by someone: exact for one token."""
        matrices = self.linears()
        elsewhere = {id(p) for matrix in matrices for p in matrix.parameters()} | {id(self.embedding)}
        vectors = sum(p.nbytes for p in self.parameters() if id(p) not in elsewhere)
        row = self.embedding.nbytes // self.embedding.shape[0]
        idle = sum(layer.idle_bytes(tokens) for layer in self.modules() if hasattr(layer, "idle_bytes"))
        return sum(matrix.weight_bytes for matrix in matrices) - round(idle) + vectors + tokens * row


def from_tensors(config: ModelConfig, tensors: Mapping[str, Weight], make_linear=None) -> Transformer:
    """Builds the model from Hugging Face's tensor names, taking each tensor once.

    `make_linear(parts, bias)` decides how a matrix, given as parts to stack by rows, is stored; by default as it is,
    in float32. Raises CheckpointError for a missing, surplus or
    misshapen tensor, ConfigError for an architecture that minillm sizes but does not run.
    """
    runs = DENSE | EXPERTS | HYBRID
    if config.model_type not in runs:
        raise ConfigError(
            f"model_type {config.model_type!r} can be sized but not run yet; minillm runs {', '.join(sorted(runs))}"
        )
    make_linear = make_linear or linear_maker("float32", int4_codes=False)[0]
    taken = _Taken(tensors, config)
    embedding = as_float(taken("model.embed_tokens.weight", (config.vocab_size, config.hidden_size)))
    embedding = nn.Parameter(embedding, requires_grad=False)
    blocks = [_block(config, i, taken, make_linear) for i in range(config.num_hidden_layers)]
    head = taken.optional("lm_head.weight", (config.vocab_size, config.hidden_size))
    if config.tie_word_embeddings or head is None:
        if not config.tie_word_embeddings:
            raise CheckpointError("tensor lm_head.weight is missing and the config does not tie it; get the whole file")
        head = embedding  # a copy in the file is ignored: tied means tied
    final_norm = _norm(config, taken, "model.norm", config.hidden_size)
    taken.finish()
    return Transformer(config, embedding, blocks, final_norm, make_linear([head], None)).eval()


def _norm(config: ModelConfig, taken: _Taken, name: str, size: int) -> RMSNorm:
    weight = taken(f"{name}.weight", (size,))
    return RMSNorm(weight + 1 if config.is_hybrid else weight, config.rms_norm_eps)  # Qwen3-Next stores w - 1


def _block(config: ModelConfig, layer: int, taken: _Taken, make_linear) -> Block:
    c, prefix = config, f"model.layers.{layer}."

    def linear(names: dict[str, int], columns: int, bias: bool) -> nn.Module:
        """One matrix of several that share their input, stacked by rows."""
        weights = [taken(f"{prefix}{name}.weight", (rows, columns)) for name, rows in names.items()]
        biases = [taken(f"{prefix}{name}.bias", (rows,)) for name, rows in names.items()] if bias else []
        return make_linear(weights, torch.cat(biases) if bias else None)

    def norm(name: str, size: int) -> RMSNorm:
        return _norm(c, taken, prefix + name, size)

    def attention() -> nn.Module:
        if c.is_mla:
            return latent_attention(c, layer, taken, make_linear)
        if c.is_hybrid:
            return hybrid_attention(c, layer, lambda name, *shape: taken(prefix + name, shape), norm, make_linear)
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        qkv = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
        return Attention(
            c,
            layer,
            linear(qkv, c.hidden_size, c.attention_bias),
            linear({"self_attn.o_proj": c.hidden_size}, queries, c.attention_out_bias),
            norm("self_attn.q_norm", c.head_dim) if c.qk_norm else None,
            norm("self_attn.k_norm", c.head_dim) if c.qk_norm else None,
        )

    gate_up = {"mlp.gate_proj": c.intermediate_size, "mlp.up_proj": c.intermediate_size}

    def dense() -> SwiGLU:
        return SwiGLU(
            linear(gate_up, c.hidden_size, c.mlp_bias),
            linear({"mlp.down_proj": c.hidden_size}, c.intermediate_size, c.mlp_bias),
        )

    mlp = experts_from(c, layer, taken, make_linear) if c.is_expert_layer(layer) else dense()
    return Block(
        norm("input_layernorm", c.hidden_size), attention(), norm("post_attention_layernorm", c.hidden_size), mlp
    )


class _Taken:
    """Hands out tensors by name, checks their shapes, and at the end says what nobody asked for."""

    IGNORED = ("rotary_emb.inv_freq",)  # old files carry it; it follows from the config

    def __init__(self, tensors: Mapping[str, Weight], config: ModelConfig) -> None:
        self.tensors = tensors
        guessing = range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers)
        unread = tuple(f"model.layers.{layer}." for layer in guessing)
        self.left = {name for name in tensors if not name.startswith(unread)}

    def has(self, name: str) -> bool:
        return name in self.left

    def optional(self, name: str, shape: tuple[int, ...]) -> Weight | None:
        return self(name, shape) if name in self.left else None

    def __call__(self, name: str, shape: tuple[int, ...]) -> Weight:
        if name not in self.left:
            raise CheckpointError(f"tensor {name} is missing from the checkpoint; download the whole model again")
        tensor = self.tensors[name]
        self.left.discard(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"tensor {name} has shape {tuple(tensor.shape)}, the config says {shape}")
        return tensor

    def finish(self) -> None:
        surplus = sorted(name for name in self.left if not name.endswith(self.IGNORED))
        if surplus:
            raise CheckpointError(
                f"the checkpoint holds {len(surplus)} tensors that this architecture does not have, "
                f"such as {short(surplus[0])}; it is a different model than its config says"
            )
