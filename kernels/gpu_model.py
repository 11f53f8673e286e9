"""The model end to end on the GPU: scheduler, runner, paged cache and argmax, with the kernels and with torch.

Random weights at the shapes of real models: as many bytes and FLOPs, and nothing to download. A row is a median step
of what the engine does between tokenizer and sampling, host work included, beside the least time that the measured
roofline allows: bytes (each weight and each cached key and value once) over the copy bandwidth, or FLOPs over the
matmul peak, whichever is longer. For decode `graph_ms` is one step's kernels alone, replayed from a CUDA graph: what
the difference to `ms` holds is Python and launches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from kernels import gpu
from minillm.analysis import Step, kv_bytes, model_config, step_costs, total
from minillm.backend import with_backend
from minillm.batching import Scheduler, SchedulerConfig
from minillm.config import ModelConfig
from minillm.paging import SequenceStep, StepMetadata
from minillm.request import Request
from minillm.runner import ModelRunner
from minillm.sampling_params import SamplingParams
from minillm.transformer import Transformer, from_tensors

SHAPES = ("SmolLM2-135M", "Qwen3-0.6B", "Llama-3-8B")
BACKENDS = ("triton", "torch")
BATCHES = (1, 32)
CONTEXT, CHUNK = 1024, 2048  # tokens before decoding; of a prompt that is prefilled, and of a step at most
STEPS, SECONDS = 40, 3.0  # measured for a row, whichever ends first
BLOCK = 16
DISAGREEMENT = 0.1  # of the two backends' logits, relative; bfloat16 through tens of layers differs by 0.01 to 0.03


def rows(roof: Mapping[str, float]) -> Iterator[tuple[str, Callable[[], dict]]]:
    """(name, call) of each measurement; a call returns the row. One model is in memory at a time."""
    for name in SHAPES:
        subject = Subject(model_config(name))
        for backend in BACKENDS:
            yield f"{name}, prefill of {CHUNK}, {backend}", partial(prefill, subject, backend, roof)
        for batch in BATCHES:
            for backend in BACKENDS:
                yield f"{name}, decode, batch {batch}, {backend}", partial(decode, subject, backend, batch, roof)
        del subject


class Subject:
    """A model made when first asked for, and the logits that each backend gave for the same prompt."""

    def __init__(self, config: ModelConfig) -> None:
        self.config, self._model = config, None
        self.logits: dict[str, Tensor] = {}

    def model(self, backend: str) -> Transformer:
        if self._model is None:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # of the model before this one
            self._model = from_tensors(self.config, RandomWeights(self.config)).place(gpu.DEVICE, torch.bfloat16)
        return with_backend(self._model, backend)


class RandomWeights(Mapping):
    """Names -> random bfloat16 on the GPU, each drawn when it is taken."""

    def __init__(self, config: ModelConfig) -> None:
        self.shapes = shapes(config)
        self.generator = torch.Generator(gpu.DEVICE).manual_seed(0)

    def __len__(self) -> int:
        return len(self.shapes)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __getitem__(self, name: str) -> Tensor:
        shape, like = self.shapes[name], {"device": gpu.DEVICE, "dtype": torch.bfloat16}
        if len(shape) == 1:
            return torch.ones(shape, **like)
        return torch.randn(shape, generator=self.generator, **like) * shape[1] ** -0.5


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face's names -> shapes, of a dense model with grouped attention."""
    c, d, f, head = config, config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = c.num_attention_heads * head, c.num_key_value_heads * head
    layer = {
        "input_layernorm": (d,), "post_attention_layernorm": (d,),
        "self_attn.q_proj": (queries, d), "self_attn.k_proj": (keys, d), "self_attn.v_proj": (keys, d),
        "self_attn.o_proj": (d, queries),
        "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f),
    } | ({"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)} if c.qk_norm else {})  # fmt: skip
    every = {f"model.layers.{i}.{n}.weight": s for i in range(c.num_hidden_layers) for n, s in layer.items()}
    ends = {"model.embed_tokens.weight": (c.vocab_size, d), "model.norm.weight": (d,)}
    return every | ends | ({} if c.tie_word_embeddings else {"lm_head.weight": (c.vocab_size, d)})


class Session:
    """Requests under way: what Engine is without a tokenizer, and greedy."""

    def __init__(self, model: Transformer, batch: int, prompt: int, output: int) -> None:
        blocks = 2 + batch * -(-(prompt + output) // BLOCK)
        limits = SchedulerConfig(blocks, BLOCK, batch, CHUNK, prefix_cache="off", watermark=0.0)
        self.scheduler = Scheduler(limits)
        self.runner = ModelRunner(model, blocks, BLOCK, budget=CHUNK)
        self.prompt, self.params = prompt, SamplingParams(temperature=0, max_tokens=output)
        self.logits: Tensor | None = None
        self.added = 0

    def add(self) -> None:
        generator = torch.Generator().manual_seed(self.added)
        ids = torch.randint(self.runner.model.config.vocab_size, (self.prompt,), generator=generator, device="cpu")
        self.scheduler.add(Request(str(self.added), ids.tolist(), self.params))
        self.added += 1

    def step(self) -> float:
        """Seconds of one step, tokens on the host."""
        started = time.perf_counter()
        output = self.scheduler.schedule()
        logits = self.runner.run(output)
        sampling = self.scheduler.update(output)
        tokens = [] if logits is None else logits.argmax(-1).tolist()
        for row, request in sampling:
            request.append(tokens[row])
            if len(request.output_token_ids) == self.params.max_tokens:
                self.scheduler.finish(request, "length")
        self.logits = logits
        return time.perf_counter() - started

    @property
    def decoding(self) -> bool:
        """Has every request its first token?"""
        running = self.scheduler.running
        return not self.scheduler.waiting and all(request.output_token_ids for request in running)


def prefill(subject: Subject, backend: str, roof: Mapping[str, float]) -> dict:
    """A prompt of CHUNK tokens in one step. The logits of the two backends must agree."""
    step = Step.prefill(CHUNK)
    if skipped := _too_large(subject.config, step):
        return skipped
    session = Session(subject.model(backend), 1, CHUNK, 1)

    def one() -> float:
        session.add()
        return session.step()

    one()  # compiles the kernels
    subject.logits[backend] = session.logits
    row = {"backend": backend} | _row(subject, _median(one), CHUNK, step, roof)
    if len(subject.logits) == len(BACKENDS):
        ours, theirs = (subject.logits[name] for name in BACKENDS)
        row["disagreement"] = float((ours - theirs).norm() / theirs.norm())
        if not row["disagreement"] < DISAGREEMENT:
            row["error"] = f"the logits of the backends differ by {row['disagreement']:.3g} of their size"
    return row


def decode(subject: Subject, backend: str, batch: int, roof: Mapping[str, float]) -> dict:
    """One token for each of `batch` sequences of about CONTEXT tokens."""
    step = Step.decode(CONTEXT + STEPS // 2, batch)
    if skipped := _too_large(subject.config, step):
        return skipped
    session = Session(subject.model(backend), batch, CONTEXT, STEPS + batch + 8)  # the first decode while others fill
    for _ in range(batch):
        session.add()
    while not session.decoding:
        session.step()
    session.step()  # compiles the decode kernel
    row = {"backend": backend, "batch": batch} | _row(subject, _median(session.step), batch, step, roof)
    try:
        row["graph_ms"] = graph_ms(session)
        row["graph_fraction"] = row["least_ms"] / row["graph_ms"]
    except Exception as error:  # a step that cannot be captured still has its time
        row["graph_error"] = f"{type(error).__name__}: {error}"[:300]
    return row


def _median(call: Callable[[], float]) -> float:
    times: list[float] = []
    while len(times) < 3 or (sum(times) < SECONDS and len(times) < STEPS):
        times.append(call())
    return statistics.median(times)


def _row(subject: Subject, seconds: float, tokens: int, step: Step, roof: Mapping[str, float]) -> dict:
    """Time, speed and what they are of the least time."""
    model = subject.model("torch")
    moved = model.decode_bytes() + step.context * kv_bytes(subject.config, 1, "bfloat16")
    flops = total(step_costs(subject.config, step)).flops
    memory, compute = moved / roof["copy_bytes_per_s"], flops / roof["matmul_flops_per_s"]
    return {
        "ms": seconds * 1e3,
        "tokens_per_s": tokens / seconds,
        "least_ms": max(memory, compute) * 1e3,
        "bound": "memory" if memory > compute else "compute",
        "fraction": max(memory, compute) / seconds,
        "bytes": moved,
        "flops": flops,
    }


@torch.inference_mode()
def graph_ms(session: Session) -> float:
    """The session's last step once more, as a CUDA graph: no Python, no launches from the host."""
    runner, requests = session.runner, session.scheduler.running
    positions = [request.num_computed - 1 for request in requests]
    tokens = torch.tensor([r.token_ids[at] for r, at in zip(requests, positions, strict=True)], device=gpu.DEVICE)
    places = torch.tensor(positions, device=gpu.DEVICE)
    sequences = [SequenceStep(i, 1, at, r.block_ids) for i, (at, r) in enumerate(zip(positions, requests, strict=True))]
    step = runner.cache.step(StepMetadata(sequences, BLOCK, device=gpu.DEVICE))

    return _captured(lambda: runner.model.logits(runner.model(tokens, places, step)))


def _captured(forward: Callable[[], Tensor]) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # capturing wants everything compiled and allocated
        for _ in range(3):
            forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    return gpu.milliseconds(graph.replay)


def memory_bytes() -> int:
    return torch.cuda.get_device_properties(0).total_memory


def _too_large(config: ModelConfig, step: Step) -> dict | None:
    """A GPU that holds only the smaller models is no failure."""
    weights = total(step_costs(config, Step.decode(1))).weight_bytes
    need = weights + step.context * kv_bytes(config, 1, "bfloat16") + (2 << 30)
    if need < memory_bytes():
        return None
    return {"skipped": f"needs about {need / 2**30:.0f} GiB of GPU memory"}
