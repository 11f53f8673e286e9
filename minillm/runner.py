"""Where the tensors are: computes a schedule in one pass of the model and returns logits of the rows that sample.

Exact mode (`batch_invariant`) promises bitwise the same logits for a request whatever its batch-mates, its chunks and
its cache hits. It runs the model on tiles of TILE rows, one sequence at a time, with the token at position p always in
row p % TILE, other rows zero. Every kernel then sees one shape, and a token one place in it, however it came there;
no property of a kernel is relied on but that a row's value does not depend on what the other rows hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .backend import step_class
from .delta_state import DeltaStates
from .errors import EngineError, short
from .moe import with_experts
from .pace import Pace
from .paging import PagedCache, SequenceStep, StepMetadata, move_blocks, move_slots
from .state_slots import StateCopies
from .step_plan import Scheduled, SchedulerOutput
from .transformer import Transformer

# (part, position of the first row, hidden (T, d)): the tensor is a view of a step's.
Watch = Callable[[Scheduled, int, Tensor], None]

TILE = 16
CACHE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTIZED = ("int8", "fp8", "int4")  # quantization/kv.py
KEY_GROUP = 32  # tokens of a block of an int4 cache, where nobody says otherwise: KIVI's group


def cache_dtype(model: Transformer, name: str = "auto") -> torch.dtype | str:
    """How keys and values are stored: a dtype, or a name of QUANTIZED. "auto" is the model's own type, or bfloat16
    where its matrices multiply many rows in bfloat16 anyway: half the bytes that attention reads. Raises EngineError
    for a name that is none of these."""
    if name == "auto":
        return torch.bfloat16 if "bfloat16" in model.layout else model.dtype
    check_cache_dtype(name)
    return CACHE_DTYPES.get(name, name)


def check_cache_dtype(name: str) -> None:
    """Raises EngineError for a name that is not known."""
    if not isinstance(name, str) or name not in ("auto", *CACHE_DTYPES, *QUANTIZED):
        known = ", ".join(("auto", *CACHE_DTYPES, *QUANTIZED))
        raise EngineError(f"kv_cache_dtype {short(repr(name))} is not known; choose one of {known}")


def make_cache(
    model: Transformer, num_blocks: int, block_size: int, name: str = "auto", device="cpu", state_slots: int = 0
) -> PagedCache:
    """The paged cache for `name`. Raises EngineError for a format that does not suit the model."""
    dtype, steps = cache_dtype(model, name), step_class(model)
    if isinstance(dtype, torch.dtype):
        return PagedCache(model.config, num_blocks, block_size, dtype, device, steps, state_slots)
    from .quantization.kv_paged import QuantizedPagedCache

    read = cache_dtype(model)  # what attention would compute with otherwise
    return QuantizedPagedCache(model.config, num_blocks, block_size, dtype, read, device, steps, state_slots)


def bytes_of_block(model: Transformer, block_size: int, name: str = "auto") -> int:
    """What one more block costs."""
    dtype = cache_dtype(model, name)
    if isinstance(dtype, torch.dtype):
        return PagedCache.bytes_of_block(model.config, block_size, dtype)
    from .quantization.kv import block_bytes

    return block_bytes(model.config, dtype, block_size)


def bytes_of_slot(model: Transformer, block_size: int, name: str = "auto") -> int:
    """What one more running sequence costs beside its blocks: linear layers' states, the newest tokens of int4."""
    states = DeltaStates.bytes_of_slot(model.config)
    if name != "int4":
        return states
    from .quantization.kv_tails import tail_bytes

    return states + tail_bytes(model.config, block_size, cache_dtype(model))


class ModelRunner:
    """Owns the model, the device's cache and, as a second tier, the host's; `pace` keeps what it measures, and `watch`,
    if there is one, is shown every hidden state that is computed."""

    def __init__(
        self,
        model: Transformer,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        batch_invariant: bool = False,
        kv_cache_dtype: str = "auto",
        budget: int = 512,
        num_state_slots: int = 0,
    ) -> None:
        if batch_invariant:  # an expert's rows would otherwise be as many as chose it
            model = with_experts(model, "fixed")
        self.model, self.block_size, self.batch_invariant = model, block_size, batch_invariant
        self.cache = make_cache(model, num_blocks, block_size, kv_cache_dtype, model.device, num_state_slots)
        self.host = None
        if num_host_blocks:
            self.host = make_cache(model, num_host_blocks, block_size, kv_cache_dtype, state_slots=num_state_slots)
        self.pace = Pace(block_size, budget)
        self.watch: Watch | None = None
        if self.host is not None:
            self._time_a_copy()

    def _time_a_copy(self) -> None:
        """A first figure for the cost of copying back, from a few blocks that hold nothing yet."""
        pairs = [(block, block) for block in range(1, min(5, self.host.num_blocks, self.cache.num_blocks))]
        for _ in range(2):  # the first also touches the memory
            started = time.perf_counter()
            move_blocks(self.host, self.cache, pairs)
            self._synchronize()
            elapsed = time.perf_counter() - started
        self.pace.copy.observe(elapsed, len(pairs))

    def _synchronize(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()

    @torch.inference_mode()
    def run(self, output: SchedulerOutput) -> Tensor | None:
        """Logits (rows, V) float32, a row for each part that samples and for each of its drafts, in their order; None
        if there is none."""
        self._move_states(output.states)
        if output.swap_out:
            move_blocks(self.cache, self.host, output.swap_out)
        self.cache.copy_blocks(output.copies)
        if output.swap_in:
            started = time.perf_counter()
            move_blocks(self.host, self.cache, output.swap_in)
            self._synchronize()
            self.pace.copy.observe(time.perf_counter() - started, len(output.swap_in))
        logits = self._exact(output.scheduled) if self.batch_invariant else self._packed(output.scheduled)
        self._synchronize()  # whoever times a step means the step, not the time to launch it
        return logits

    def _move_states(self, copies: StateCopies) -> None:
        move_slots(self.cache, self.cache, copies.forks)
        if self.host is not None:
            move_slots(self.cache, self.host, copies.swap_out)
            move_slots(self.host, self.cache, copies.swap_in)

    def _packed(self, parts: Sequence[Scheduled]) -> Tensor | None:
        """All tokens of the step laid end to end, once through the model."""
        tokens, positions, sequences, wanted = [], [], [], {}
        # single tokens first, by context: what attention takes together then lies together
        for part in sorted(parts, key=lambda part: (part.count > 1, part.start)):
            request, start, count = part.request, part.start, part.count
            sequences.append(SequenceStep(len(tokens), count, start, request.block_ids, request.state_slot))
            tokens += part.tokens(start, start + count)
            positions += range(start, start + count)
            wanted[request] = range(len(tokens) - part.rows, len(tokens))
        hidden = self._forward(tokens, positions, StepMetadata(sequences, self.block_size, device=self.model.device))
        if self.watch is not None:
            for part in parts:
                end = wanted[part.request].stop
                self.watch(part, part.start, hidden[end - part.count : end])
        sampled = [row for part in parts for row in wanted[part.request]]
        return self.model.logits(hidden[sampled]) if sampled else None

    def _forward(self, tokens: list[int], positions: list[int], metadata: StepMetadata, exact: bool = False) -> Tensor:
        device = self.model.device
        cache = self.cache.step(metadata, exact)
        return self.model(torch.tensor(tokens, device=device), torch.tensor(positions, device=device), cache)

    def _exact(self, parts: Sequence[Scheduled]) -> Tensor | None:
        rows = [logits for part in parts if (logits := self._exact_part(part)) is not None]
        return torch.cat(rows) if rows else None

    def _exact_part(self, part: Scheduled) -> Tensor | None:
        start, end = part.start, part.start + part.count
        found = []
        while start < end:
            row, count = start % TILE, min(end - start, TILE - start % TILE)
            hidden = self._tile(part, start, row, count)
            if self.watch is not None:
                self.watch(part, start, hidden[row : row + count])
            start += count
            if (wanted := min(count, start - (end - part.rows))) > 0:  # the tile's last ones
                found.append(self.model.logits(hidden)[row + count - wanted : row + count])
        return torch.cat(found) if found else None

    def _tile(self, part: Scheduled, start: int, row: int, count: int) -> Tensor:
        """Hidden states (TILE, d) of `count` tokens from `start` on, which stand in rows from `row` on."""
        tokens, positions = [0] * TILE, [0] * TILE
        tokens[row : row + count] = part.tokens(start, start + count)
        positions[row : row + count] = range(start, start + count)
        request = part.request
        sequence = SequenceStep(row, count, start, request.block_ids, request.state_slot)
        metadata = StepMetadata([sequence], self.block_size, TILE, self.model.device)
        return self._forward(tokens, positions, metadata, exact=True)
