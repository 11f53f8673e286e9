"""How big the KV cache is: bytes a token, bytes a sequence, for every kind of attention layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..config import ModelConfig
from .formats import Format, format_of
from .numbers import whole_number

STATE_ELEMENT_BYTES = 4  # states are float32 whatever keys and values are


def kv_heads_per_rank(config: ModelConfig, tensor_parallel: int) -> int:
    """KV heads one rank stores: max(1, H_kv / ranks), rounded up."""
    return -(-config.num_key_value_heads // tensor_parallel)


def cache_format(config: ModelConfig, name: str, block_size: int = 32) -> Format:
    """What an engine with this `kv_cache_dtype` stores, scales included, for `kv` below (quantization/kv.py).

    int8: a float32 scale for each token and head. int4: a scale and a minimum in 16 bits for each group of 32 numbers,
    of keys no more than a block of tokens. Other names are those of `format_of`.
    """
    if name == "int8":
        return Format("int8 cache", 8, config.kv_shape[2], scale_bits=32)
    if name == "int4":
        bits = 32 * (1 / min(32, block_size) + 1 / 32) / 2  # of a number of keys, of values
        return Format("int4 cache", 4 + bits)
    return format_of(name)


def kv_row_bytes(layers: int, kv_heads: int, head_dim: int, kv: Any = "bfloat16") -> float:
    """The bare formula 2·L·H_kv·D·b: keys and values of one token, for multi-head, grouped and multi-query attention.

    Wrong for MLA and, beyond the window, for sliding layers: `kv_bytes_per_token` and `kv_bytes` know both.
    """
    return 2 * layers * kv_heads * head_dim * format_of(kv).bytes_per_element


def kv_layer_row_bytes(config: ModelConfig, kv: Any = "bfloat16", tensor_parallel: int = 1) -> float:
    """Bytes of one token in one layer's cache on one rank. MLA keeps one latent and one rotary key for all heads,
    which no rank can split."""
    if config.is_mla:
        return (config.kv_lora_rank + config.qk_rope_head_dim) * format_of(kv).bytes_per_element
    return kv_row_bytes(1, kv_heads_per_rank(config, tensor_parallel), config.head_dim, kv)


def state_bytes(config: ModelConfig, tensor_parallel: int = 1) -> int:
    """Bytes that the linear layers of one sequence keep on one rank, at every length: in float32, the last K - 1 inputs
    of the convolution and the state of each value head. Ranks share whole key heads with the value heads they serve."""
    c, layers = config, len(config.linear_layers)
    if not layers:
        return 0
    key_heads = -(-c.linear_num_key_heads // tensor_parallel)
    heads = key_heads * (c.linear_num_value_heads // c.linear_num_key_heads)
    keys, values = key_heads * c.linear_key_head_dim, heads * c.linear_value_head_dim
    convolution = (c.linear_conv_kernel_dim - 1) * (2 * keys + values)
    return STATE_ELEMENT_BYTES * layers * (convolution + values * c.linear_key_head_dim)


def kv_bytes_per_token(config: ModelConfig, kv: Any = "bfloat16", reserved: bool = False) -> float:
    """Bytes that one further token adds to the KV cache of a long sequence.

    A sliding layer whose window is full adds nothing, nor does a linear one. `reserved=True` counts every layer that
    has a cache of tokens, as an engine does that reserves full length for all of them.
    """
    layers = len(config.kv_layers) if reserved else config.layer_types.count("full_attention")
    return layers * kv_layer_row_bytes(config, kv)


def kv_bytes(
    config: ModelConfig,
    tokens: int,
    kv: Any = "bfloat16",
    reserved: bool = False,
    tensor_parallel: int = 1,
    block_size: int = 1,
) -> float:
    """Bytes of the KV cache of one sequence of `tokens` tokens on one rank; a sliding layer holds min(tokens, window),
    and its attention sinks besides; linear layers hold their state (`state_bytes`).

    `block_size` rounds every layer's tokens up to whole blocks. Raises RequestError for a count that is none.
    """
    whole_number("tokens", tokens, 0)
    whole_number("block_size", block_size, 1)
    whole_number("tensor_parallel", tensor_parallel, 1)
    rows = sum(-(-held // block_size) * block_size for held in held_tokens(config, tokens, reserved))
    return rows * kv_layer_row_bytes(config, kv, tensor_parallel) + state_bytes(config, tensor_parallel)


def held_tokens(config: ModelConfig, tokens: int, reserved: bool = False) -> Iterator[int]:
    """Tokens that each layer's cache holds for a sequence of `tokens`, layer by layer; linear ones hold none."""
    for layer in config.kv_layers:
        most = None if reserved else config.visible(layer)
        yield tokens if most is None else min(tokens, most)
