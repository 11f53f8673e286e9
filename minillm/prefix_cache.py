"""Who already computed this? Blocks of earlier prompts, found again by what their contents depend on.

Keys and values of a block depend on every token up to its end, and on whatever else shaped them: an adapter and its
version, a tenant's salt, the media behind a placeholder. Two implementations share one interface:

HashChainCache    block key = hash(key of the block before, token ids, extra keys); one dictionary look-up a block
RadixCache        a tree whose edges are runs of blocks, compared by their tokens

Both hand out whole blocks only, and learn of a block after it was written (`publish`), so what they hand out is there.
A caller asks for one token less than it knows, because somebody must compute the logits of the last one.
Sources: vLLM's automatic prefix caching; Zheng et al. 2023, "SGLang" (arXiv 2312.07104), section 3.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from .block_pool import NULL, BlockError, BlockPool
from .errors import EngineError, RequestError

ExtraKey = tuple  # ("adapter", name, version), ("salt", s), ("media", digest, token offset)


def root_key(extra_keys: Sequence[ExtraKey] = ()) -> bytes:
    """The digest that a chain starts from. Each extra key is tagged by its kind, so an adapter named S is not a salt S.

    The text hashed is Python's repr of sorted tuples of str, int and bytes: the same in every process, unlike hash(),
    and no two different keys share it. Raises RequestError for anything else.
    """
    for key in extra_keys:
        kinds = isinstance(key, tuple) and len(key) >= 2 and isinstance(key[0], str)
        if not kinds or not all(type(part) in (str, int, bytes) for part in key):
            raise RequestError(f"extra key {key!r} must be a tuple of a kind and its values, as ('salt', 'tenant-1')")
    return hashlib.blake2b(_text(extra_keys), digest_size=16).digest()


def _text(keys: Iterable[ExtraKey]) -> bytes:
    return repr(sorted(set(keys), key=repr)).encode(errors="surrogatepass")


def block_key(parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
    """16 bytes that stand for everything up to this block's end. With 2^40 blocks a collision has chance 2^-49."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes() + extra, digest_size=16).digest()


@dataclass
class Prefix:
    """What one request is looked up by: its root, and the keys of its blocks as far as they were needed.

    `media` are extra keys with a token offset. They enter the chain with the block that holds that token, so that
    what comes before an image is shared with other images, and nothing after it.
    """

    root: bytes
    media: tuple[ExtraKey, ...] = ()
    keys: list[bytes] = field(default_factory=list)

    @classmethod
    def of(cls, extra_keys: Sequence[ExtraKey] = ()) -> Prefix:
        """Sorts keys by where they enter. Raises RequestError as root_key does."""
        media = tuple(key for key in extra_keys if _is_placed(key))
        root_key(media)  # their form is checked like that of the others
        return cls(root_key([key for key in extra_keys if not _is_placed(key)]), media)

    def extra(self, index: int, block_size: int) -> bytes:
        """What enters with block `index` beside its tokens; empty for most."""
        here = [key for key in self.media if key[-1] // block_size == index]
        return _text(here) if here else b""

    def extend(self, token_ids: Sequence[int], blocks: int, block_size: int) -> None:
        for i in range(len(self.keys), blocks):
            parent = self.keys[-1] if self.keys else self.root
            tokens = token_ids[i * block_size : (i + 1) * block_size]
            self.keys.append(block_key(parent, tokens, self.extra(i, block_size)))

    def copy(self) -> Prefix:
        return Prefix(self.root, self.media, list(self.keys))


def _is_placed(key: ExtraKey) -> bool:
    return isinstance(key, tuple) and len(key) == 3 and key[0] == "media" and type(key[2]) is int and key[2] >= 0


@dataclass
class PrefixStats:
    """Tokens asked for and found, of requests at their first admission; what a resumed one finds is counted apart."""

    queries: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    host_hit_tokens: int = 0  # of the hits, those copied back from host memory
    resumed_hit_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that need not be computed."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    def record(self, queried: int, hit: int, resumed: bool = False, from_host: int = 0) -> None:
        if resumed:
            self.resumed_hit_tokens += hit
            return
        self.queries += 1
        self.queried_tokens += queried
        self.hit_tokens += hit
        self.host_hit_tokens += from_host


class NoPrefixCache:
    """Finds nothing and keeps nothing: what reuse is measured against.

    `on_evict(block, key)` is called for a block that the pool takes away while its contents are still there.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool, self.stats = pool, PrefixStats()
        self.on_evict: Callable[[int, bytes], None] = lambda block, key: None

    def match(self, prefix: Prefix, token_ids: Sequence[int], blocks: int) -> list[int]:
        """Ids of the longest run of cached blocks, from the first on and at most `blocks`. Nothing is taken yet."""
        return []

    def publish(self, prefix: Prefix, token_ids: Sequence[int], table: Sequence[int], start: int, end: int) -> None:
        """Blocks start to end of this table are written. The first with a given content is kept, later ones not."""

    def clear(self) -> None:
        """Forgets everything, for example because the weights changed."""

    def check(self) -> None:
        """Raises BlockError where this cache and the pool disagree about what is published."""
        if any(self.pool.published):
            raise BlockError("blocks are published and no prefix cache is on")


class HashChainCache(NoPrefixCache):
    """One dictionary from block key to block id."""

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool)
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        pool.on_evict = self._evicted

    def match(self, prefix: Prefix, token_ids: Sequence[int], blocks: int, start: int = 0) -> list[int]:
        prefix.extend(token_ids, blocks, self.pool.block_size)
        found = []
        for key in prefix.keys[start:blocks]:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def publish(self, prefix: Prefix, token_ids: Sequence[int], table: Sequence[int], start: int, end: int) -> None:
        prefix.extend(token_ids, end, self.pool.block_size)
        for index in range(start, end):
            self.publish_key(prefix.keys[index], table[index])

    def publish_key(self, key: bytes, block: int) -> None:
        """A written block under its key, unless either is known already."""
        if block != NULL and key not in self._block_of and block not in self._key_of:
            self._block_of[key], self._key_of[block] = block, key
            self.pool.publish(block)

    def knows(self, key: bytes) -> bool:
        return key in self._block_of

    def _evicted(self, block: int) -> None:
        self.on_evict(block, self._key_of[block])
        self._forget(block)

    def _forget(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]

    def clear(self) -> None:
        for block in list(self._key_of):
            self._forget(block)
            self.pool.withdraw(block)

    def check(self) -> None:
        published = {block for block, yes in enumerate(self.pool.published) if yes}
        if published != set(self._key_of) or {b: k for k, b in self._block_of.items()} != self._key_of:
            raise BlockError("the hash chain and the pool disagree about what is published")


class _Node:
    """An edge of the tree with what hangs below it: a run of blocks, and their tokens block by block."""

    __slots__ = ("blocks", "children", "keys", "parent", "root", "runs")

    def __init__(self, parent: _Node | None, runs: list[tuple], blocks: list[int], keys: list[bytes]) -> None:
        self.parent, self.runs, self.blocks, self.keys = parent, runs, blocks, keys
        self.children: dict[tuple, _Node] = {}  # by the tokens of their first block
        self.root: bytes | None = None  # the root key, of a root


class RadixCache(NoPrefixCache):
    """A tree of token runs for each root key. An edge is split where two prompts part, always between blocks.

    Finds exactly what the hash chain finds. It compares tokens instead of trusting a digest and shows what is shared
    with whom; a published block costs a walk from the root. A block whose head was given up cannot be reached, so
    everything below goes with it.
    """

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool)
        self._roots: dict[bytes, _Node] = {}
        self._node_of: dict[int, _Node] = {}
        pool.on_evict = self._evicted

    def match(self, prefix: Prefix, token_ids: Sequence[int], blocks: int) -> list[int]:
        return self._walk(prefix.root, self._runs(prefix, token_ids, blocks))[2]

    def _runs(self, prefix: Prefix, token_ids: Sequence[int], blocks: int) -> list[tuple]:
        """Block by block the tokens, and behind them whatever else entered with the block."""
        size = self.pool.block_size
        runs = [tuple(token_ids[i * size : (i + 1) * size]) for i in range(blocks)]
        if prefix.media:
            extras = [prefix.extra(i, size) for i in range(blocks)]
            return [(*run, extra) if extra else run for run, extra in zip(runs, extras, strict=True)]
        return runs

    def _walk(self, root: bytes, runs: list[tuple]) -> tuple[_Node | None, int, list[int]]:
        """Down the tree as far as the runs agree: the last node, how many of its blocks agree, all blocks found."""
        node, depth, found = self._roots.get(root), 0, []
        while node is not None and len(found) < len(runs) and runs[len(found)] in node.children:
            node = node.children[runs[len(found)]]
            rest = runs[len(found) :]
            depth = next((i for i, (a, b) in enumerate(zip(node.runs, rest, strict=False)) if a != b), None)
            depth = min(len(node.runs), len(rest)) if depth is None else depth
            found += node.blocks[:depth]
            if depth < len(node.runs):
                break
        return node, depth, found

    def publish(self, prefix: Prefix, token_ids: Sequence[int], table: Sequence[int], start: int, end: int) -> None:
        runs = self._runs(prefix, token_ids, end)
        node, depth, found = self._walk(prefix.root, runs)
        new = table[len(found) : end]
        if not new or NULL in new or any(block in self._node_of for block in new):
            return  # all known, or its head is gone from table and tree, so that it could not be reached
        if node is None:
            node = self._roots[prefix.root] = _Node(None, [], [], [])
            node.root = prefix.root
        elif depth < len(node.runs):
            self._split(node, depth)
        prefix.extend(token_ids, end, self.pool.block_size)  # keys, for whoever keeps evicted blocks elsewhere
        child = _Node(node, runs[len(found) :], list(new), prefix.keys[len(found) : end])
        node.children[child.runs[0]] = child
        for block in new:
            self._node_of[block] = child
            self.pool.publish(block)

    def _split(self, node: _Node, depth: int) -> None:
        """The node keeps its first `depth` blocks; a new child takes the rest and everything below."""
        below = _Node(node, node.runs[depth:], node.blocks[depth:], node.keys[depth:])
        below.children, node.children = node.children, {node.runs[depth]: below}
        for child in below.children.values():
            child.parent = below
        node.runs, node.blocks, node.keys = node.runs[:depth], node.blocks[:depth], node.keys[:depth]
        self._node_of.update(dict.fromkeys(below.blocks, below))

    def _evicted(self, block: int) -> None:
        node = self._node_of[block]
        self.on_evict(block, node.keys[node.blocks.index(block)])
        self._forget(block)

    def _forget(self, block: int) -> None:
        node = self._node_of[block]
        depth = node.blocks.index(block)
        lost = [node.blocks[depth:]]
        below = list(node.children.values())
        while below:
            lower = below.pop()
            lost.append(lower.blocks)
            below += lower.children.values()
        if depth == 0:
            del node.parent.children[node.runs[0]]
            if node.parent.root and not node.parent.children:
                del self._roots[node.parent.root]
        node.runs, node.blocks, node.children = node.runs[:depth], node.blocks[:depth], {}
        node.keys = node.keys[:depth]
        for other in (b for blocks in lost for b in blocks):
            del self._node_of[other]
            if other != block:
                self.pool.withdraw(other)

    def clear(self) -> None:
        blocks, self._node_of, self._roots = list(self._node_of), {}, {}
        for block in blocks:
            self.pool.withdraw(block)

    def edges(self, root: bytes) -> list[tuple[int, list[int]]]:
        """(depth, block ids) of each edge under a root, parents before children: what a picture of the tree needs."""
        found, stack = [], [(0, child) for child in self._roots[root].children.values()] if root in self._roots else []
        while stack:
            depth, node = stack.pop()
            found.append((depth, list(node.blocks)))
            stack += [(depth + 1, child) for child in node.children.values()]
        return found

    def check(self) -> None:
        seen = [b for root in self._roots for _, blocks in self.edges(root) for b in blocks]
        published = [block for block, yes in enumerate(self.pool.published) if yes]
        if sorted(seen) != published or set(seen) != set(self._node_of):
            raise BlockError("the radix tree and the pool disagree about what is published")


PREFIX_CACHES = {"off": NoPrefixCache, "hash": HashChainCache, "radix": RadixCache}


def make_prefix_cache(kind: str, pool: BlockPool) -> NoPrefixCache:
    if kind not in PREFIX_CACHES:
        raise EngineError(f"prefix cache {kind!r} is not known; choose one of {', '.join(PREFIX_CACHES)}")
    return PREFIX_CACHES[kind](pool)
