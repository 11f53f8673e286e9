"""Host memory as a second tier of blocks: for requests swapped out, and for cached prefixes that the device gave up.

A published block that the device takes for new contents is copied here first (`offload`) under the same key, and a
later prompt finds it behind what it found on the device (`match`). Whether it is then copied back or computed again is
`pays`'s decision: reload when bytes / bandwidth < the time to compute the same tokens. Integers only, as in
block_pool.py; the copies are the runner's.

Copies happen at the start of a step and in one order, out before in. So a host block that this step reads or writes
belongs to the step until it was carried out (`settle`): nobody may be given it, and nobody finds it, before.
Source: Qin et al. 2025, "Mooncake" (FAST '25), section 4.2, equation 2 for the inequality.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .block_pool import NULL, BlockPool
from .events import EventLog
from .prefix_cache import HashChainCache, Prefix


class HostTier:
    """`num_blocks` blocks, the null block included; fewer than 2 is no host memory. `reuse` says whether prefixes
    are kept here at all; swapped-out requests always may be, and then push cached ones out."""

    def __init__(self, num_blocks: int, block_size: int, eviction: str, reuse: str, events: EventLog) -> None:
        self.pool = BlockPool(max(2, num_blocks), block_size, eviction)
        self.cache = HashChainCache(self.pool)
        self.keeps = num_blocks >= 2 and reuse != "never"
        self.pays: Callable[[int], bool] = lambda tokens: True
        self.events = events
        self.outgoing: list[tuple[int, int]] = []  # (block, host block)
        self.incoming: list[tuple[int, int]] = []  # (host block, block)
        self._arriving: dict[bytes, int] = {}
        self._busy: list[int] = []

    # --- prefixes ---

    def offload(self, block: int, key: bytes) -> None:
        """The device is about to lose a published block: a copy of it, if there is room and none yet."""
        if self.cache.knows(key) or key in self._arriving or not self.pool.available:
            return
        (host,) = self.pool.allocate(1)
        self.outgoing.append((block, host))
        self._arriving[key] = host
        self.events.append("offloaded", pairs=[(block, host)])

    def match(self, prefix: Prefix, token_ids: Sequence[int], start: int, blocks: int) -> list[int]:
        """Host blocks that continue a prefix of `start` blocks found on the device, up to `blocks` in all."""
        if not self.keeps:
            return []
        found = self.cache.match(prefix, token_ids, blocks, start)
        return found if found and self.pays(len(found) * self.pool.block_size) else []

    def load(self, found: Sequence[int], blocks: Sequence[int]) -> None:
        """Plans the copies of matched host blocks into the device's. `hold` them before blocks are allocated."""
        self.incoming += zip(found, blocks, strict=True)

    def hold(self, found: Sequence[int]) -> None:
        self.pool.share(found)
        self._busy += found

    # --- swapped requests ---

    def swap_out(self, table: Sequence[int]) -> list[int] | None:
        """Host blocks for the written blocks of a table, or None if there is no room."""
        kept = [block for block in table if block != NULL]
        if not kept or len(kept) > self.pool.available:
            return None
        pairs = list(zip(kept, self.pool.allocate(len(kept)), strict=True))
        self.outgoing += pairs
        host = dict(pairs)
        return [host.get(block, NULL) for block in table]

    def swap_in(self, host_table: Sequence[int], blocks: Sequence[int]) -> list[int]:
        """The device's table again, of freshly allocated `blocks`; the host's go back once they were read."""
        device = iter(blocks)
        table = [next(device) if block != NULL else NULL for block in host_table]
        self.incoming += [(h, b) for h, b in zip(host_table, table, strict=True) if h != NULL]
        self._busy += host_table
        return table

    def release(self, host_table: Sequence[int]) -> None:
        self.pool.release(host_table)

    # --- the step ---

    def take_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(outgoing, incoming) of the step that was just planned."""
        copies = self.outgoing, self.incoming
        self.outgoing, self.incoming = [], []
        return copies

    def settle(self, done: bool = True) -> None:
        """The step's copies were made, or, if it failed, cannot be relied on."""
        for key, host in self._arriving.items():
            if done:
                self.cache.publish_key(key, host)
        self.pool.release(list(self._arriving.values()))
        self.pool.release(self._busy)
        self._arriving, self._busy = {}, []

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """As BlockPool.check; `tables` are those of swapped-out requests."""
        in_step = [[host] for host in [*self._busy, *self._arriving.values()]]
        self.pool.check([*tables, *in_step])
        self.cache.check()
