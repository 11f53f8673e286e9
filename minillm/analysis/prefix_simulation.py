"""What a prefix cache would have found: a trace of block hashes, replayed through the shipped cache.

A request is the list of its block hashes. The hash of a block stands for everything up to the block's end, so the
longest run of known hashes from the first on is what need not be computed. The cache, its pool and its eviction
policies are those of the engine (prefix_cache.py, block_pool.py), with the trace's hashes as keys.

Simplified: a request is over before the next one arrives, and what it generated is stored only when a later prompt
contains it. A prompt longer than the whole cache leaves its first `capacity` blocks.
Trace schema: Qin et al. 2025, "Mooncake" (FAST'25): one JSON object a line with timestamp (ms), input_length,
output_length (tokens) and hash_ids, one for each block of 512 tokens, the last of which may be partly filled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..block_pool import BlockPool
from ..errors import RequestError, short
from ..prefix_cache import HashChainCache, Prefix, root_key
from .numbers import is_number, whole_number

BLOCK = 512  # tokens that one hash of a Mooncake trace stands for


class TraceRequest(NamedTuple):
    """One line of a trace. Times in milliseconds, lengths in tokens."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def load_trace(path: str | Path, block_size: int = BLOCK, limit: int | None = None) -> list[TraceRequest]:
    """Requests of a JSON-lines file in the Mooncake schema, at most `limit` of them.

    Raises RequestError that names the line, for a file that is not there, is no such trace, or contradicts itself.
    """
    whole_number("block_size", block_size, 1)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"trace {short(path)} cannot be read: {short(error)}; give a JSON-lines file") from None
    requests = []
    for number, line in enumerate(text.splitlines(), 1):
        if limit is not None and len(requests) >= limit:
            break
        if line.strip():
            requests.append(_request(line, f"{short(Path(path).name)}, line {number}", block_size))
    if not requests:
        raise RequestError(f"trace {short(path)} holds no requests; give a JSON-lines file, one request a line")
    return requests


def _request(line: str, where: str, block_size: int) -> TraceRequest:
    try:
        raw = json.loads(line)
        return _checked(TraceRequest(raw["timestamp"], raw["input_length"], raw["output_length"],
                                     tuple(raw["hash_ids"])), block_size)  # fmt: skip
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        detail = short(f"{type(error).__name__}: {error}")
        raise RequestError(
            f"{where}: {detail}; a line is an object with timestamp, input_length, output_length and hash_ids"
        ) from None


def _checked(request: TraceRequest, block_size: int) -> TraceRequest:
    timestamp, tokens, output, ids = request
    if not is_number(timestamp) or not 0 <= timestamp < 1e15:
        raise RequestError(f"timestamp is {short(repr(timestamp))}; it must be milliseconds from 0 on")
    whole_number("input_length", tokens, 1)
    whole_number("output_length", output, 0)
    for hash_id in ids:
        whole_number("a hash id", hash_id, 0, (1 << 64) - 1)
    if len(ids) != -(-tokens // block_size):
        raise RequestError(
            f"{tokens} tokens are {-(-tokens // block_size)} blocks of {block_size}, and there are {len(ids)} hash "
            "ids; give the block size of the trace"
        )
    if len(set(ids)) != len(ids):
        raise RequestError("a hash id occurs twice; the hash of a block must stand for all that comes before it")
    return request


@dataclass
class Replay:
    """What was found of each request, in order. Lists run over requests; blocks and tokens are counts."""

    capacity: int | None
    eviction: str
    blocks: list[int] = field(default_factory=list)
    hit_blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    hit_tokens: list[int] = field(default_factory=list)
    evictions: int = 0

    @property
    def block_hit_rate(self) -> float:
        """Blocks found over blocks asked for, of all requests together."""
        return sum(self.hit_blocks) / sum(self.blocks) if self.blocks else 0.0

    @property
    def token_hit_rate(self) -> float:
        """Tokens that need not be computed over tokens asked for. The last token of a prompt always is."""
        return sum(self.hit_tokens) / sum(self.tokens) if self.tokens else 0.0

    @property
    def request_rates(self) -> list[float]:
        """The share of each request's tokens that was found."""
        return [hit / tokens for hit, tokens in zip(self.hit_tokens, self.tokens, strict=True)]


def replay(
    requests: Iterable[TraceRequest], capacity: int | None = None, eviction: str = "lru", block_size: int = BLOCK
) -> Replay:
    """The requests, one after another, through a cache of `capacity` blocks (None: no limit).

    eviction: "lru" or "lfu". Raises RequestError for a capacity below one or a request that contradicts itself, and
    EngineError for an unknown policy.
    """
    whole_number("block_size", block_size, 1)
    requests = [_checked(request, block_size) for request in requests]
    if capacity is not None:
        whole_number("capacity", capacity, 1)
    distinct = distinct_blocks(requests)
    room = max(1, distinct if capacity is None else min(capacity, distinct))  # more could never be filled
    pool = BlockPool(room + 1, block_size, eviction)  # and the null block
    cache, root = HashChainCache(pool), root_key()
    result = Replay(capacity, eviction)
    for request in requests:
        keys = [hash_id.to_bytes(8, "big") for hash_id in request.hash_ids]
        hits = _pass_through(pool, cache, Prefix(root, keys=keys), min(len(keys), room))
        result.blocks.append(len(keys))
        result.hit_blocks.append(hits)
        result.tokens.append(request.input_length)
        result.hit_tokens.append(min(hits * block_size, request.input_length - 1))
    result.evictions = pool.evictions
    return result


def _pass_through(pool: BlockPool, cache: HashChainCache, prefix: Prefix, stored: int) -> int:
    """Finds what is there, computes the rest, publishes it and lets go. Returns the number of blocks found."""
    table = cache.match(prefix, (), stored)
    found = len(table)
    pool.share(table)
    table += pool.allocate(stored - found)
    cache.publish(prefix, (), table, found, stored)
    pool.release(table)
    return found


def distinct_blocks(requests: Iterable[TraceRequest]) -> int:
    """Different blocks in a trace: the capacity from which on nothing is ever evicted."""
    return len({hash_id for request in requests for hash_id in request.hash_ids})


def hit_rate_curve(
    requests: Sequence[TraceRequest], capacities: Sequence[int], eviction: str = "lru", block_size: int = BLOCK
) -> list[float]:
    """Block hit rate at each capacity, in blocks. One replay each."""
    return [replay(requests, capacity, eviction, block_size).block_hit_rate for capacity in capacities]


def to_jsonl(requests: Iterable[TraceRequest], path: str | Path) -> Path:
    """Writes a trace in the same schema, for other tools and for `load_trace`."""
    lines: list[dict[str, Any]] = [r._asdict() | {"hash_ids": list(r.hash_ids)} for r in requests]
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return Path(path)
