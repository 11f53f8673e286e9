"""Who computes how many tokens in the next step. Plain Python, no tensors: a schedule can be tested in microseconds.

    schedule()  -> SchedulerOutput     counts, block tables, copies to make first
    the runner computes it
    update(output) -> who samples      progress moves, full blocks are published, n > 1 forks
    request.append(id) or finish(request, reason)

Rules:

* Running requests come before waiting ones, decodes before prefill chunks, so that a long prompt cannot stall those
  who are already answering: between two tokens of a running request lies at most one step of the token budget.
* One order decides everything: who runs first is admitted first and preempted last. Only the last running request is
  ever preempted, and any admitted request fits into the pool alone; so the first always advances, and all finish.
* Nothing is published before it is computed. A request scheduled beside its twin does not hit the twin's blocks.
* A request is admitted when blocks for all its known tokens are there, beyond those that running prefills still need.
Source: Yu et al. 2022, "Orca", section 3; Agrawal et al. 2024, "Sarathi-Serve" (arXiv 2403.02310), for the chunks.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from operator import attrgetter

from .admission import refuse
from .block_pool import NULL, BlockError, BlockPool
from .errors import EngineError
from .events import EventLog
from .host_tier import HostTier
from .prefix_cache import make_prefix_cache
from .request import Request, RequestStatus
from .scheduler_config import SchedulerConfig
from .state_slots import StateSlots
from .step_plan import Plan, Scheduled, SchedulerOutput

__all__ = ["Scheduled", "Scheduler", "SchedulerConfig", "SchedulerOutput"]

_ORDER = attrgetter("order")


class Scheduler:
    """Holds the queues and the block pool. One thread at a time."""

    def __init__(self, config: SchedulerConfig, events: EventLog | None = None) -> None:
        self.config, self.events = config, events if events is not None else EventLog()
        self.pool = BlockPool(config.num_blocks, config.block_size, config.eviction, self.events)
        self.prefix_cache = make_prefix_cache(config.prefix_cache, self.pool)
        self.host = HostTier(config.num_host_blocks, config.block_size, config.eviction, config.host_reuse, self.events)
        self.states = StateSlots(config.num_state_slots or 0)
        if self.states.total and not config.states_of_blocks and config.prefix_cache != "off":
            raise EngineError("a model with states cannot take prefixes from a cache; set prefix_cache to 'off'")
        if self.host.keeps:
            self.prefix_cache.on_evict = self.host.offload
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._arrivals = 0
        # the last token of a sequence is never an input, so it needs no slot
        self.max_sequence = min(config.max_model_len, self.pool.total * config.block_size + 1)

    # --- requests come and go ---

    def add(self, request: Request) -> None:
        """Into the queue. Raises RequestError, with the reason, for what could never run."""
        self._refuse(request)
        request.order = self._order(request)
        self._arrivals += 1
        insort(self.waiting, request, key=_ORDER)
        self.events.append("added", request.label, tokens=request.num_prompt, priority=request.priority)

    def _refuse(self, request: Request) -> None:
        refuse(request, self.config, self.max_sequence, len(self.waiting))

    def queued_before(self, request: Request) -> tuple[int, int]:
        """(prompt tokens to compute up to the end of this request's, admissions up to its own; 0 if it could start with
        the next step). Cached tokens count as if computed, since what it will find is known only when it starts."""
        ahead = [r for r in self.waiting if r.order < self._order(request)]
        running = sum(max(0, r.num_tokens - r.num_computed - 1) for r in self.running)
        tokens = running + sum(r.num_tokens - r.num_computed for r in ahead) + request.num_tokens
        full = sum(r.width for r in self.running) + request.width > self.config.max_running
        return tokens, len(ahead) + bool(ahead or full)

    def _order(self, request: Request) -> tuple[int, int, int]:
        places = request.priority * self.config.priority_places if self.config.policy == "priority" else 0
        return (self._arrivals + places, self._arrivals, 0)

    def finish(self, request: Request, reason: str) -> bool:
        """Ends a request in whatever state it is and frees its blocks. False if it had ended before."""
        if request.status is RequestStatus.FINISHED:
            return False
        (self.running if request.status is RequestStatus.RUNNING else self.waiting).remove(request)
        self._let_go(request)
        if request.host_blocks is not None:
            self._let_go_host(request)
        request.status, request.finish_reason = RequestStatus.FINISHED, reason
        self.events.append("finished", request.label, reason=reason, tokens=len(request.output_token_ids))
        return True

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.running)

    # --- one step ---

    def schedule(self) -> SchedulerOutput:
        """Decides the next step and reserves its blocks. Every call must be followed by `update`, or by `discard`."""
        self.events.step += 1
        plan = Plan(self.config.max_num_batched_tokens)
        prefills = []
        for request in list(self.running):
            if request.num_tokens - request.num_computed == 1:
                self._continue(request, plan)
            else:
                prefills.append(request)
        for request in prefills:
            self._continue(request, plan)
        if not plan.preempted and (self.config.continuous_batching or not self.running):
            self._admit(plan)
        for request in list(plan.parts):
            if request.drafts:
                self._guess(request, plan)
        output = SchedulerOutput(
            list(plan.parts.values()), *self.host.take_copies(), plan.preempted, self.states.take_copies()
        )
        if output.scheduled:
            labels = [part.request.label for part in output.scheduled]
            counts = [part.count for part in output.scheduled]
            self.events.append("scheduled", requests=labels, tokens=counts, **self.pool.counts)
        elif self.has_unfinished_requests():
            raise BlockError("requests are left and none can run: this must never happen")
        return output

    def _continue(self, request: Request, plan: Plan) -> None:
        """The next tokens of a running request; the last in order give up their blocks if there are none."""
        if request.status is not RequestStatus.RUNNING or not plan.budget:
            return
        start, known = request.num_computed, request.num_tokens
        while True:
            count = self._chunk(known - start, plan.budget)  # a victim's tokens come back into the budget
            copies = self._reserve(request, count)
            if copies is not None:
                break
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is request:
                return
        plan.add(Scheduled(request, start, count, start + count == known, copies))

    def _guess(self, request: Request, plan: Plan) -> None:
        """Drafts of a request that decodes, from what budget and blocks are left: nobody waits or gives way for it."""
        if plan.parts[request].count > 1:
            return
        count = min(len(request.drafts), plan.budget)
        while count and self._reserve(request, 1 + count) is None:
            count -= 1
        if count:
            plan.extend(request, request.drafts[:count])

    def _chunk(self, remaining: int, budget: int) -> int:
        """Tokens of this step out of the remaining ones; 0 where a prompt has to be taken whole and does not fit."""
        config = self.config
        if not config.enable_chunked_prefill:
            return remaining if remaining <= budget else 0
        return min(remaining, budget, config.long_prefill_token_threshold or remaining)

    def _reserve(self, request: Request, count: int) -> tuple[tuple[int, int], ...] | None:
        """Blocks for `count` more tokens, and a copy of a shared block that they start in. None if there are none."""
        pool, table = self.pool, request.block_ids
        start, size = request.num_computed, pool.block_size
        more = -(-(start + count) // size) - len(table)
        index = start // size
        shared = start % size != 0 and pool.ref_counts[table[index]] > 1
        if more <= 0 and not shared:
            return ()
        if more + shared > pool.available:
            return None
        copies = ()
        if shared:
            copies = ((table[index], pool.copy_on_write(table[index], request.label)),)
            table[index] = copies[0][1]
        if more:
            table.extend(pool.allocate(more, request.label))
        return copies

    def _preempt(self, request: Request, plan: Plan) -> None:
        """Takes a running request's blocks. Swapped out it resumes where it was, otherwise it computes all again."""
        part = plan.drop(request)
        # A dropped part's copy-on-write will not be made, so the table's new block holds nothing that could be saved.
        whole = part is None or not part.copies
        swaps = self.config.preemption == "swap" and whole and self._swap_out(request)
        lost = 0 if swaps else request.num_computed
        self._let_go(request)
        if not swaps:
            request.num_computed = 0
        request.num_preemptions, request.drafts = request.num_preemptions + 1, ()
        request.status = RequestStatus.PREEMPTED
        self.running.remove(request)
        insort(self.waiting, request, key=_ORDER)
        plan.preempted.append(request)
        how = "swap" if swaps else "recompute"
        self.events.append("preempted", request.label, how=how, lost=lost)

    def _swap_out(self, request: Request) -> bool:
        if not self.states.can_swap_out:
            return False
        written = request.block_ids[: self.pool.blocks_for(request.num_computed)]
        request.host_blocks = self.host.swap_out(written)
        if request.host_blocks is not None:
            self.states.swap_out(request)
        return request.host_blocks is not None

    def _let_go(self, request: Request) -> None:
        self.pool.release(request.block_ids, request.label)
        request.block_ids, request.num_published = [], 0
        self.states.release(request)

    def _let_go_host(self, request: Request) -> None:
        self.host.release(request.host_blocks)
        request.host_blocks = None
        self.states.release_host(request)

    # --- admission ---

    def _admit(self, plan: Plan) -> None:
        slots = self.config.max_running - sum(r.width for r in self.running)
        owed = sum(max(0, self.pool.blocks_for(r.num_tokens) - len(r.block_ids)) for r in self.running)
        while self.waiting and plan.budget and self.waiting[0].width <= slots:
            request = self.waiting[0]
            if not self._start(request, plan, owed):
                return
            self.waiting.pop(0)
            insort(self.running, request, key=_ORDER)
            slots -= request.width
            owed += self.pool.blocks_for(request.num_tokens) - len(request.block_ids)

    def _start(self, request: Request, plan: Plan, owed: int) -> bool:
        pool, swapped = self.pool, request.host_blocks is not None
        hits, reloads = ([], []) if swapped else self._match(request)
        computed = request.num_computed if swapped else (len(hits) + len(reloads)) * pool.block_size
        count = self._chunk(request.num_tokens - computed, plan.budget)
        spare = int(self.config.watermark * pool.total) if self.running else 0
        available = pool.available - sum(pool.ref_counts[b] == 0 for b in hits) - owed - spare
        if not count or pool.blocks_for(request.num_tokens) - len(hits) > available:
            return False
        pool.share(hits, request.label)
        request.block_ids, request.num_published = hits, len(hits)
        if swapped:
            self._swap_in(request)
        else:
            self.states.take(request)
            if reloads:
                self._reload(request, reloads)
        request.num_computed = computed
        self._reserve(request, count)  # never a copy: what is found are full blocks, what comes back has its own
        self._note_admission(request, "swap" if swapped else "recompute", len(reloads) * pool.block_size)
        request.status = RequestStatus.RUNNING
        plan.add(Scheduled(request, computed, count, computed + count == request.num_tokens))
        return True

    def _match(self, request: Request) -> tuple[list[int], list[int]]:
        """Cached blocks of its known tokens, the last one excepted: its logits must be computed. Those on the device
        and, behind them, those in host memory that are worth copying back."""
        blocks = (request.num_tokens - 1) // self.pool.block_size
        if not blocks:
            return [], []
        tokens = request.token_ids
        hits = self.prefix_cache.match(request.prefix, tokens, blocks)
        return hits, self.host.match(request.prefix, tokens, len(hits), blocks)

    def _reload(self, request: Request, reloads: list[int]) -> None:
        """Takes blocks for a prefix found in host memory. They are published when the copies are made."""
        self.host.hold(reloads)  # before anything is allocated, which may push blocks out to the host
        blocks = self.pool.allocate(len(reloads), request.label)
        request.block_ids.extend(blocks)
        self.host.load(reloads, blocks)

    def _swap_in(self, request: Request) -> None:
        kept = sum(block != NULL for block in request.host_blocks)
        request.block_ids = self.host.swap_in(request.host_blocks, self.pool.allocate(kept, request.label))
        request.host_blocks = None
        self.states.swap_in(request)

    def _note_admission(self, request: Request, how: str, from_host: int) -> None:
        resumed, cached = request.num_preemptions > 0, request.num_computed
        if how == "recompute":
            self.prefix_cache.stats.record(request.num_tokens, cached, resumed, from_host)
        if from_host:
            self.events.append("reloaded", request.label, tokens=from_host)
        if request.num_cached is None:
            request.num_cached = cached
        if resumed:
            self.events.append("resumed", request.label, how=how, cached=cached, tokens=request.num_tokens)
        else:
            self.events.append("admitted", request.label, cached=cached, tokens=request.num_tokens)

    # --- after the step ---

    def update(self, output: SchedulerOutput) -> list[tuple[int, Request]]:
        """The step was computed. Returns (row, request) of those that need a token now; row is the first of its logits.
        What was drafted is not part of a sequence yet: `advance` follows when it has been verified.

        Requests that were aborted since `schedule` are passed over. A request with n > 1 that reaches the end of its
        prompt becomes n running ones here, all of which sample from the one row.
        """
        sampling, row, size = [], 0, self.pool.block_size
        self.host.settle()
        for part in output.scheduled:
            request, first, row = part.request, row, row + part.rows
            if request.status is not RequestStatus.RUNNING:
                continue
            request.num_computed = done = part.start + part.known
            if done // size > request.num_published:
                self._publish(request)
            if self.config.sliding_window:
                self._drop_fallen(request)
            if part.samples:
                sampling.append((first, request))
                if request.width > 1:
                    sampling += [(first, child) for child in self._fork(request)]
        return sampling

    def advance(self, request: Request, kept: int) -> None:
        """`kept` drafts are tokens now. Slots of the others are written again; blocks of nothing else are let go."""
        request.num_computed += kept
        if request.num_computed // self.pool.block_size > request.num_published:
            self._publish(request)
        needed = self.pool.blocks_for(request.num_computed)
        if spare := request.block_ids[needed:]:
            del request.block_ids[needed:]
            self.pool.release(spare, request.label)
        if self.config.sliding_window:
            self._drop_fallen(request)

    def discard(self, output: SchedulerOutput) -> list[Request]:
        """The step failed, and nothing can be said of what it wrote. Returns those that it computed, and forks whose
        state it was to copy, for the caller to end; a request that it swapped out computes all its tokens again."""
        self.host.settle(done=False)
        for request in output.preempted:
            if request.host_blocks is not None:
                self._let_go_host(request)
                request.num_computed = 0
        copied = {slot for _, slot in output.states.forks}
        forks = [request for request in self.running if request.state_slot in copied]
        return [part.request for part in output.scheduled] + forks

    def reset_prefix_cache(self) -> None:
        """Forgets what is cached on the device and in host memory."""
        self.prefix_cache.clear()
        self.host.cache.clear()

    def _publish(self, request: Request) -> None:
        full = request.num_computed // self.pool.block_size
        self.prefix_cache.publish(request.prefix, request.token_ids, request.block_ids, request.num_published, full)
        request.num_published = full

    def _drop_fallen(self, request: Request) -> None:
        """Releases blocks that no later query can see: the next one, at num_computed, sees `window` tokens back, and
        the first `attention_sinks`."""
        seen_from = request.num_computed + 1 - self.config.sliding_window
        kept = self.pool.blocks_for(self.config.attention_sinks)
        table, fallen = request.block_ids, []
        for index in range(seen_from // self.pool.block_size - 1, kept - 1, -1):
            if table[index] == NULL:
                break
            fallen.append(table[index])
            table[index] = NULL
        if fallen:
            self.pool.release(fallen[::-1], request.label)

    def _fork(self, request: Request) -> list[Request]:
        width, request.width = request.width, 1
        children = [request.fork(sequence) for sequence in range(1, width)]
        for child in children:
            self.pool.share(child.block_ids, child.label)
            self.states.fork(request, child)
            insort(self.running, child, key=_ORDER)
        self.events.append("forked", request.label, children=[child.label for child in children])
        return children

    # --- what can be read off ---

    def requests(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting

    def occupancy(self):
        """Blocks by state, and the exact waste within those held."""
        return self.pool.occupancy((r.block_ids, r.num_computed) for r in self.running)

    def check(self) -> None:
        """Every invariant, block by block. Raises BlockError."""
        self.pool.check([r.block_ids for r in self.running])
        self.host.check([r.host_blocks for r in self.waiting if r.host_blocks is not None])
        self.prefix_cache.check()
        self.states.check(self.running, self.waiting)
        for request in self.waiting:
            if request.block_ids or request.status is RequestStatus.RUNNING:
                raise BlockError(f"{request} waits and holds blocks")
        for request in self.running:
            room = len(request.block_ids) * self.pool.block_size
            if request.status is not RequestStatus.RUNNING or not request.num_computed <= room:
                raise BlockError(f"{request} runs with room for {room} tokens")
