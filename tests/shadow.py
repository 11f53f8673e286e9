"""A runner without a model: a slot holds the tokens that its key and value depend on, and every read is checked."""

from __future__ import annotations

from minillm.block_pool import NULL
from minillm.request import RequestStatus


class ShadowRunner:
    """Runs schedules on a Scheduler. `token(request)` says what a request draws next.

    Raises AssertionError the moment a request would read a slot that does not hold its own tokens.
    """

    def __init__(self, scheduler, token=None) -> None:
        self.scheduler, self.slots, self.host = scheduler, {}, {}
        self.states, self.host_states = {}, {}  # what a state slot holds: the tokens that went into it
        self.token = token or (lambda r: (len(r.output_token_ids) * 7 + r.sequence * 3 + r.num_prompt) % 50 + 200)
        self.ended: list[tuple[str, int, str]] = []

    def compute(self, output) -> None:
        size = self.scheduler.config.block_size
        self._move_states(output.states)
        for block, host in output.swap_out:
            self._copy(self.slots, block, self.host, host)
        kept = dict(self.slots)
        for source, target in output.copies:
            self._copy(kept, source, self.slots, target)
        for host, block in output.swap_in:
            self._copy(self.host, host, self.slots, block)
        for part in output.scheduled:
            r = part.request
            assert r.status is RequestStatus.RUNNING
            assert part.count >= 1
            tokens = r.token_ids
            self._advance_state(part, tokens)
            for t in range(part.start, part.start + part.count):
                assert r.block_ids[t // size] != NULL
                self.slots[r.block_ids[t // size], t % size] = self._value(r, tokens, t)
        for part in output.scheduled:  # all have written: a block written by two would show here
            self._read(part)

    def _move_states(self, copies) -> None:
        kept = dict(self.states)
        for source, target in copies.forks:
            self.states[target] = kept.get(source)
        for slot, host in copies.swap_out:
            self.host_states[host] = self.states.get(slot)
        for host, slot in copies.swap_in:
            self.states[slot] = self.host_states.get(host)

    def _advance_state(self, part, tokens) -> None:
        if self.scheduler.config.num_state_slots is None:
            return
        slot, end = part.request.state_slot, part.start + part.count
        assert slot > 0, f"{part.request} runs without a state"
        if part.start:  # a sequence that begins begins from zero, whatever is there
            assert self.states.get(slot) == tokens[: part.start], f"{part.request} would go on from another's state"
        self.states[slot] = tokens[:end]

    def _copy(self, source, a, target, b) -> None:
        for slot in range(self.scheduler.config.block_size):
            target[b, slot] = source.get((a, slot))

    def _value(self, request, tokens, t):
        media = tuple(key for key in request.prefix.media if key[2] <= t)
        return (request.prefix.root, media, tuple(tokens[: t + 1]))

    def _read(self, part) -> None:
        r, size, window = part.request, self.scheduler.config.block_size, self.scheduler.config.sliding_window
        tokens, end = r.token_ids, part.start + part.count
        first = 0 if window is None else max(0, part.start - window + 1)
        for t in {*range(min(end, self.scheduler.config.attention_sinks)), *range(first, end)}:
            slot = (r.block_ids[t // size], t % size)
            assert self.slots.get(slot) == self._value(r, tokens, t), f"{r} would read another's slot at token {t}"

    def step(self) -> list:
        """One step. Returns the requests that got a token."""
        output = self.scheduler.schedule()
        self.scheduler.check()
        self._check_budget(output)
        self.compute(output)
        drawn = self.scheduler.update(output)
        assert sum(r.width for r in self.scheduler.running) <= self.scheduler.config.max_num_seqs
        for _, request in drawn:
            request.append(self.token(request))
            full = request.num_tokens >= self.scheduler.max_sequence
            if full or len(request.output_token_ids) == request.params.max_tokens:
                assert self.scheduler.finish(request, "length")
                self.ended.append((request.request_id, request.sequence, "length"))
        self.scheduler.check()
        return [request for _, request in drawn]

    def _check_budget(self, output) -> None:
        """Never above the budget; and if a running request gets less than it could use, then all of it is used."""
        config = self.scheduler.config
        assert output.num_tokens <= config.max_num_batched_tokens
        counts = {part.request: part.count for part in output.scheduled}
        for r in self.scheduler.running:
            useful = min(r.num_tokens - r.num_computed, config.long_prefill_token_threshold or r.num_tokens)
            if counts.get(r, 0) < useful:
                assert output.num_tokens == config.max_num_batched_tokens, f"{r} waits and budget is left"

    def run(self, limit: int = 3000) -> int:
        """Steps until nothing is left; returns how many."""
        steps = 0
        while self.scheduler.has_unfinished_requests():
            self.step()
            steps += 1
            assert steps < limit, "the scheduler does not come to an end"
        return steps
