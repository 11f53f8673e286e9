"""A whole decode step under torch.compile: shapes that never change, so code that is never made again.

torch.compile runs Python once on stand-ins, writes down the operators it meets, and makes code of them. With the code
go guards: what was true of the arguments and need not be true next time. A call that breaks one compiles again, in the
middle of somebody's request. So nothing that changes from step to step may be something that a guard is about:

    what changes                    a guard would be     here it is
    position of each sequence       its Python int       a tensor: its numbers are data, only its shape is guarded
    length of the cache             a slice's size       all `max_tokens` rows, those not yet written masked out
    number of sequences             a tensor's size      padded up to the next bucket, each compiled before serving
    number of the layer             its Python int       never read here, so thirty layers are traced as one

What stays and is guarded: sizes of a bucket, types, strides, the device, and torch's own switches, of which the number
of threads is one. After warm-up the compiler is told to fail rather than compile, and `compiles` counts its calls.

The price is padding: a step computes rows and reads cache that no sequence has. See chapter 18 for what it wins, and
compilation.py for the other cut, the small operators alone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .compilation import unusual_part
from .config import ModelConfig
from .errors import CompilationError, RequestError, short
from .generate import next_logits
from .kv_cache import ContiguousCache, check_max_tokens
from .layers import Linear
from .piece_store import need_compiler
from .transformer import Block, Transformer

BUCKETS = (1, 2, 4, 8)
Layer = tuple[Tensor, Tensor, Tensor]  # keys and values (bucket, max_tokens, Hkv, D), and who may look at them


class OneLayer:
    """The cache as one layer of a static step sees it: row i of the step is sequence i, one token each.

    keys, values (B, S, Hkv, D); visible (B, S) booleans; positions (B,).
    """

    def __init__(self, keys: Tensor, values: Tensor, visible: Tensor, positions: Tensor) -> None:
        self.keys, self.values, self.visible, self.positions = keys, values, visible, positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, keep=None) -> Tensor:
        """q (B, H, D), k and v (B, Hkv, D) -> (B, H, D). A group's query heads stand where queries stand. Who reads
        `layer` makes a guard of it, and each layer is traced anew."""
        (B, H, D), Hkv = q.shape, k.shape[1]
        rows = torch.arange(B, device=q.device)
        self.keys[rows, self.positions] = k.to(self.keys.dtype)
        self.values[rows, self.positions] = v.to(self.values.dtype)
        out = F.scaled_dot_product_attention(
            q.view(B, Hkv, H // Hkv, D).to(self.keys.dtype),
            self.keys.transpose(1, 2),  # (B, Hkv, S, D)
            self.values.transpose(1, 2),
            attn_mask=self.visible[:, None, None],
            scale=scale,
        )
        return out.reshape(B, H, D).to(q.dtype)


def visible(positions: Tensor, room: int, window: int | None, sinks: int) -> Tensor:
    """(B, room) booleans: which of its cache's rows the query at `positions` (B,) may look at. attention.causal_mask
    with a position that is data."""
    query, key = positions[:, None], torch.arange(room, device=positions.device)[None]
    seen = key <= query
    return seen if window is None else seen & ((key > query - window) | (key < sinks))


@torch.compiler.nested_compile_region  # traced for the first layer, and used again for all that are like it
def _block(block: Block, x: Tensor, rotation: tuple[Tensor, Tensor], layer: Layer, positions: Tensor) -> Tensor:
    return block(x, rotation, OneLayer(*layer, positions))


def step_function(model: Transformer) -> Callable[[Tensor, Tensor, list[tuple[Tensor, Tensor]]], Tensor]:
    """The step that is compiled: tokens (B,), positions (B,), a layer's keys and values each -> logits (B, V).

    It writes the tokens' keys and values into the cache that it is handed.
    """
    config, blocks = model.config, list(model.blocks)
    sights = [(config.window(i), config.sinks(i)) for i in range(len(blocks))]

    def decode_step(tokens: Tensor, positions: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        x, rotation = F.embedding(tokens, model.embedding), model.rotary(positions)
        room = cache[0][0].shape[1]
        masks = {sight: visible(positions, room, *sight) for sight in set(sights)}
        for block, sight, (keys, values) in zip(blocks, sights, cache, strict=True):
            x = _block(block, x, rotation, (keys, values, masks[sight]), positions)
        return model.logits(x)

    return decode_step


class CountingBackend:
    """Hands each graph on to a backend of torch.compile, and counts them: one graph, one compilation."""

    def __init__(self, name: str) -> None:
        self.compiler, self.graphs = torch._dynamo.lookup_backend(name), 0

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable:
        self.graphs += 1
        return self.compiler(graph, example_inputs)


class Replay:
    """One bucket's step as a CUDA graph: its launches recorded once, with their addresses, and replayed by one call.

    Inputs are copied into the tensors it was recorded with; the result lies where it lay then, until the next replay.
    Graphs that share a `pool` may use each other's scratch memory, so one runs at a time and its result is copied out.
    """

    def __init__(self, step: Callable, bucket: int, cache: list[tuple[Tensor, Tensor]], pool=None) -> None:
        device = cache[0][0].device
        self.tokens = torch.zeros(bucket, dtype=torch.long, device=device)
        self.positions = torch.zeros_like(self.tokens)
        side = torch.cuda.Stream(device)  # what a first run sets up, such as a library's workspace, is not recorded
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(3):
                step(self.tokens, self.positions, cache)
        torch.cuda.current_stream(device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.logits = step(self.tokens, self.positions, cache)

    def __call__(self, tokens: Tensor, positions: Tensor, cache: list) -> Tensor:
        self.tokens.copy_(tokens)
        self.positions.copy_(positions)
        self.graph.replay()
        return self.logits.clone()


class CompiledStep:
    """Sequences side by side in one static cache, and a compiled step that takes all of them one token further.

        logits = step.add(ids)           prefill of one more sequence, as called; its row is the last -> (V,)
        logits = step([token, ...])      the next token of each sequence, in the order of rows -> (n, V)
        step.remove(row)                 the last sequence moves into that row

    Keys and values of a layer are (largest bucket, max_tokens, Hkv, D), each a tensor of its own: a region that is
    traced once may not be handed two views of the same memory. `compiles` counts calls of the compiler, `seconds` holds
    what each bucket's warm-up took. Made by `compile_step`.
    """

    def __init__(self, model: Transformer, buckets: tuple[int, ...], max_tokens: int, backend: str) -> None:
        config: ModelConfig = model.config
        like = {"dtype": model.dtype, "device": model.device}
        self.model, self.buckets, self.max_tokens = model, buckets, max_tokens
        shape = (buckets[-1], max_tokens, config.num_key_value_heads, config.head_dim)
        self.cache = [(torch.zeros(shape, **like), torch.zeros(shape, **like)) for _ in range(config.num_hidden_layers)]
        self.lengths: list[int] = []  # of each sequence, in the order of rows; the step gets them as a tensor
        self.seconds: dict[int, float] = {}
        self._counting = CountingBackend(backend)
        self._step = torch.compile(
            step_function(model), backend=self._counting, fullgraph=True, dynamic=False,
            recompile_limit=len(buckets), isolate_recompiles=True,
        )  # fmt: skip
        self._caches = {bucket: [(keys[:bucket], values[:bucket]) for keys, values in self.cache] for bucket in buckets}
        self._pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None
        self._run = {bucket: self._warm_up(bucket) for bucket in buckets}

    @property
    def compiles(self) -> int:
        return self._counting.graphs

    def __len__(self) -> int:
        """Sequences that it holds."""
        return len(self.lengths)

    @torch.inference_mode()
    def _warm_up(self, bucket: int) -> Callable:
        started = time.perf_counter()
        zeros = torch.zeros(bucket, dtype=torch.long, device=self.model.device)
        self._step(zeros, zeros.clone(), self._caches[bucket])
        run = self._step
        if self.model.device.type == "cuda":
            run = Replay(self._step, bucket, self._caches[bucket], self._pool)
        self.seconds[bucket] = time.perf_counter() - started
        return run

    def add(self, ids: Sequence[int]) -> Tensor:
        """Prefill: ids (T,) of one more sequence -> logits (V,) of the token after them. Runs as called, since every
        length is a shape. Raises RequestError when all rows are taken, or ids do not fit."""
        if len(self) == self.buckets[-1]:
            raise RequestError(f"all {self.buckets[-1]} rows are taken; remove a sequence, or compile a larger bucket")
        if not 1 <= len(ids) <= self.max_tokens:
            raise RequestError(f"the prompt has {len(ids)} tokens; a row holds 1 to {self.max_tokens} (max_tokens)")
        cache = ContiguousCache(self.model.config, len(ids), self.model.dtype, self.model.device)
        logits = next_logits(self.model, ids, cache)
        for sides, prefilled in zip(self.cache, cache.storage, strict=True):
            for side, found in zip(sides, prefilled, strict=True):
                side[len(self), : len(ids)] = found
        self.lengths.append(len(ids))
        return logits

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """The next token of every sequence, in the order of rows -> logits (n, V) of the token after it.

        Raises RequestError for another number of tokens than sequences and for one that has no room left,
        CompilationError when a guard does not hold that held at warm-up.
        """
        n, longest = len(tokens), max(self.lengths, default=0)
        if n != len(self) or not n:
            raise RequestError(f"{n} tokens for {len(self)} sequences; give one for each")
        if longest == self.max_tokens:
            raise RequestError(
                f"a sequence has {longest} tokens, the static cache's room; compile with more max_tokens"
            )
        bucket = bucket_of(n, self.buckets)
        padding = [0] * (bucket - n)  # their rows hold no sequence, and what they write the next prefill overwrites
        padded = torch.tensor([[*tokens, *padding], [*self.lengths, *padding]], device=self.model.device)
        try:
            with torch.compiler.set_stance("fail_on_recompile"):
                logits = self._run[bucket](padded[0], padded[1], self._caches[bucket])
        except RuntimeError as error:  # the stance has no class of its own
            if "Detected recompile" not in str(error):
                raise
            raise CompilationError(
                f"a step would compile again; since warm-up this changed: {_cause(error)}"
            ) from error
        self.lengths = [length + 1 for length in self.lengths]
        return logits[:n]

    def remove(self, row: int) -> None:
        """Ends a sequence. The last one takes its row, so that rows stay without a gap. Raises RequestError."""
        if not 0 <= row < len(self):
            raise RequestError(f"there is no row {row!r}: the step holds {len(self)} sequences")
        length = self.lengths.pop()
        if row < len(self):
            for keys, values in self.cache:
                keys[row, :length] = keys[len(self), :length]
                values[row, :length] = values[len(self), :length]
            self.lengths[row] = length


def compile_step(
    model: Transformer, buckets: Sequence[int] = BUCKETS, max_tokens: int = 512, backend: str = "inductor"
) -> CompiledStep:
    """Compiles a decode step of up to max(buckets) sequences of up to `max_tokens` tokens, one graph a bucket.

    All compiling happens here, seconds a layer shape and bucket; no step compiles. On CUDA each bucket is a CUDA graph
    too. `backend` is torch.compile's: "inductor" makes code, "eager" and "aot_eager" run the graph as it is and need no
    compiler. Raises CompilationError for a model it is not made for and where there is no compiler, RequestError for
    buckets or room that are none.
    """
    _check(model)
    check_max_tokens(max_tokens)
    if not buckets or any(isinstance(b, bool) or not isinstance(b, int) or b < 1 for b in buckets):
        raise RequestError(f"buckets are {short(buckets)}; give whole numbers of sequences, such as {BUCKETS}")
    if backend == "inductor" and model.device.type == "cpu":
        need_compiler()
    return CompiledStep(model, tuple(sorted(set(buckets))), max_tokens, backend)


def bucket_of(rows: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds so many rows. Raises RequestError for more than the largest."""
    fitting = [bucket for bucket in buckets if bucket >= rows]
    if not fitting:
        raise RequestError(f"{rows} sequences, and the largest bucket holds {max(buckets)}; compile a larger one")
    return min(fitting)


def greedy(step: CompiledStep, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """`count` tokens for each prompt, all prompts side by side, always the likeliest: how a step is driven.

    Raises RequestError for more prompts than the largest bucket holds, or longer ones than its cache.
    """
    bucket_of(len(prompts), step.buckets)
    if len(step):
        raise RequestError(f"the step holds {len(step)} sequences already; remove them first")
    try:
        answers = [[int(step.add(ids).argmax())] for ids in prompts]
        for _ in range(count - 1):
            tokens = step([answer[-1] for answer in answers]).argmax(-1)
            for answer, token in zip(answers, tokens.tolist(), strict=True):
                answer.append(token)
        return answers
    finally:
        while len(step):
            step.remove(len(step) - 1)


def _cause(error: RuntimeError) -> str:
    """The guards that did not hold, as torch lists them: "- 0/1: GLOBAL_STATE changed: num_threads", without its number
    and the source line."""
    guards = re.findall(r"^\s*- \d+/\d+: ([^#\n]+)", str(error), re.M)
    return "; ".join(dict.fromkeys(guard.strip() for guard in guards)) or short(error, 300)


def _check(model: nn.Module) -> None:
    if model.backend != "torch":
        raise CompilationError(f'a step is compiled on backend "torch", not "{model.backend}"; see with_backend')
    if (part := unusual_part(model)) is not None:
        raise CompilationError(f"a step with {type(part).__name__} is not compiled whole; run it as it is")
    for layer in model.linears():
        if type(layer) is not Linear:  # inductor wants weights in a library's own layout to be constants of the code
            raise CompilationError(
                f"a step with {type(layer).__name__} is not compiled whole; load with dtype float32, "
                "or compile the operators between its multiplies (compilation.compiled)"
            )
