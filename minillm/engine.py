"""Schedule, run, sample, append: one step of many requests. The loop around it is in llm.py and async_engine.py.

Names are vLLM's where it has the same thing. A request's answer is the one that generate.py gives it alone, token for
token.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from .backend import with_backend
from .batching import Scheduler, SchedulerConfig
from .errors import EngineError, OverloadedError, RequestError
from .events import EventLog
from .generate import encode_prompt
from .outputs import RequestMetrics, RequestOutput
from .request import Request
from .request_group import RequestGroup, SequenceText
from .runner import KEY_GROUP, ModelRunner
from .sampling import SampledToken, SamplingError, SamplingState, sample
from .sampling_params import SamplingParams
from .speculative.batch import BatchSpeculation
from .speculative.settings import SpeculativeConfig
from .speculative.speculator import make_speculator
from .step_plan import Scheduled, SchedulerOutput
from .stopping import StopChecker
from .tokenizer import StreamDecoder, Tokenizer
from .transformer import Transformer

Prompt = str | Sequence[int] | Mapping


class Engine:
    """Many requests, one step at a time. One thread at a time; AsyncEngine gives it one of its own.

    Model and cache live in `runner`, queues and blocks in `scheduler`, what happened in `events`.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        config: SchedulerConfig | None = None,
        batch_invariant: bool = False,
        events: EventLog | None = None,
        kv_cache_dtype: str = "auto",
        backend: str | None = None,
        speculative: SpeculativeConfig | None = None,
    ) -> None:
        model = with_backend(model, backend)  # None: the one it was loaded for
        config = config or SchedulerConfig(**({"block_size": KEY_GROUP} if kv_cache_dtype == "int4" else {}))
        context = model.config.max_position_embeddings
        windows = {model.config.window(layer) for layer in range(model.config.num_hidden_layers)}
        only = next(iter(windows)) if len(windows) == 1 else None  # a full layer still needs what a window dropped
        config = replace(
            config, max_model_len=min(config.max_model_len, context), sliding_window=only,
            attention_sinks=model.config.attention_sinks,
        )  # fmt: skip
        config = _with_states(config, model, kv_cache_dtype)
        self.model, self.tokenizer, self.config = model, tokenizer, config
        try:
            self.runner = ModelRunner(
                model, config.num_blocks, config.block_size, config.num_host_blocks, batch_invariant, kv_cache_dtype,
                config.max_num_batched_tokens, config.num_state_slots or 0,
            )  # fmt: skip
            self.scheduler = Scheduler(config, events)
        except (MemoryError, RuntimeError):
            raise EngineError(
                f"{config.num_blocks} blocks of {config.block_size} tokens and {config.num_host_blocks} in host memory "
                f"{_and_states(config)}do not fit into memory; lower num_blocks, num_host_blocks or kv_cache_bytes"
            ) from None
        self.events = self.scheduler.events
        self.pace = self.runner.pace
        if config.host_reuse == "measured":
            self.scheduler.host.pays = self.pace.reload_pays
        self.vocab_size = min(model.config.vocab_size, tokenizer.vocab_size)
        self.speculation = None
        if speculative is not None:
            speculator = make_speculator(speculative, model, tokenizer, engine=True)
            longest = self.scheduler.max_sequence
            most = config.block_size if getattr(self.runner.cache, "tails", None) else None  # see kv_tails.py
            self.speculation = BatchSpeculation(speculator, longest, self.vocab_size, tokenizer.eos_ids, most)
            self.runner.watch = self.speculation.see if speculator.proposer.needs_hidden else None
        self._groups: dict[str, RequestGroup] = {}
        self._sequences: dict[Request, tuple[RequestGroup, SequenceText]] = {}
        self._due: list[RequestOutput] = []  # of a step that was interrupted
        self._fault: BaseException | None = None

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        priority: int = 0,
        extra_keys: Sequence[tuple] = (),
        arrival_time: float | None = None,
    ) -> None:
        """Into the queue. prompt is text, token ids, or a dict with "prompt" or "prompt_token_ids".

        `extra_keys` keep its blocks apart from those of equal tokens under other keys (prefix_cache.py).
        Raises RequestError, with the reason, for what can never be served, QueueFullError for what cannot be now, and
        OverloadedError for what would come later than `ttft_slo_s`; nothing of it stays.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"the request id is a {type(request_id).__name__}; give a str")
        if request_id in self._groups:
            raise RequestError(f"request id {request_id!r} is in use; give each request its own")
        text, ids = self._encode(prompt)
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"the parameters are a {type(params).__name__}; give SamplingParams")
        params = params.seeded()
        params.validate(self.vocab_size)
        request = Request(request_id, ids, params, priority, extra_keys)
        self._promise(request)
        self.scheduler.add(request)
        now = time.perf_counter() if arrival_time is None else arrival_time
        self._groups[request_id] = group = RequestGroup(request_id, text, request, RequestMetrics(now))
        self._follow(group, request)

    def _promise(self, request: Request) -> None:
        """Admission control by SLO: better refused now than answered too late. One that waits for nobody is taken."""
        slo = self.config.ttft_slo_s
        if slo is None or not self.scheduler.has_unfinished_requests():
            return
        predicted = self.pace.predicted_ttft(*self.scheduler.queued_before(request), len(self.scheduler.running))
        if predicted > slo:
            self.events.append("refused", request.label, predicted_ttft_s=predicted)
            raise OverloadedError(
                f"the first token would come after about {predicted:.3g} s and {slo:g} s are promised; try again later",
                retry_after_s=predicted - slo,
            )

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            ids = prompt.get("prompt_token_ids")
            prompt = prompt.get("prompt", "") if ids is None else ids
        if not isinstance(prompt, str | Sequence):
            raise RequestError(f"the prompt is a {type(prompt).__name__}; give text or a list of token ids")
        return prompt if isinstance(prompt, str) else None, encode_prompt(self.model, self.tokenizer, prompt)

    def _follow(self, group: RequestGroup, request: Request) -> SequenceText:
        decoder = StreamDecoder(self.tokenizer, skip_special=True)
        limit = self.scheduler.max_sequence
        checker = StopChecker(request.params, self.tokenizer.eos_ids, limit, request.num_prompt)
        sequence = SequenceText(request, decoder, checker, self.tokenizer)
        group.sequences.append(sequence)
        self._sequences[request] = group, sequence
        return sequence

    def has_unfinished_requests(self) -> bool:
        return bool(self._groups or self._due)

    def knows(self, request_id: str) -> bool:
        """Is it under way?"""
        return request_id in self._groups

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix, on the device and in host memory: the weights changed, or a test wants to start
        cold. Raises EngineError while requests run, whose blocks are of the old kind."""
        if self._groups:
            raise EngineError(f"{len(self._groups)} requests are under way; wait for them, or abort them first")
        self.scheduler.reset_prefix_cache()

    def abort_request(self, request_id: str | Iterable[str]) -> list[RequestOutput]:
        """Ends requests at any moment and frees their blocks. Returns their last outputs; passes over unknown ids."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        groups = [group for i in ids if (group := self._groups.get(i)) is not None]
        return [self._end(group, "abort") for group in groups]

    def _end(self, group: RequestGroup, reason: str, error: str | None = None) -> RequestOutput:
        """Ends all of a request's sequences that have not ended by themselves."""
        group.error = error or group.error
        for sequence in group.sequences:
            if sequence.finish_reason is None:
                sequence.release_text()
                self._finish(sequence, reason)
        for request in [r for r in self.scheduler.requests() if r.request_id == group.request_id]:
            self.scheduler.finish(request, reason)  # made by a fork that nobody heard of any more
        group.cut_short = True
        return self._emit(group)

    def _finish(self, sequence: SequenceText, reason: str) -> None:
        sequence.finish_reason = reason
        self.scheduler.finish(sequence.request, reason)
        del self._sequences[sequence.request]
        if self.speculation is not None:
            self.speculation.forget(sequence.request)

    def _emit(self, group: RequestGroup) -> RequestOutput:
        if group.finished:
            group.metrics.finished_time = time.perf_counter()
            group.metrics.num_preemptions = sum(s.request.num_preemptions for s in group.sequences)
            del self._groups[group.request_id]
        return group.output()

    def step(self) -> list[RequestOutput]:
        """One step. Returns the requests that got a token or ended in it.

        A request whose logits cannot be sampled from ends with an error and the others go on. If the model itself
        fails, all requests of the step do, since none can be singled out. So do they when the step is interrupted
        (Ctrl-C), and their outputs come with the next step: what a step wrote can be relied on whole or not at all.
        """
        if self._fault is not None:
            raise EngineError(
                "a step was interrupted while it was planned or undone; make a new engine"
            ) from self._fault
        if self.speculation is not None:  # changes nothing that an interrupt could leave by half
            self.speculation.draft(self.scheduler.running)
        due, self._due = self._due, []
        if not self.scheduler.has_unfinished_requests():
            return due
        try:
            output = self.scheduler.schedule()
        except BaseException as error:
            self._fault = error
            raise
        try:
            return due + self._compute(output)
        except BaseException as error:
            self._due = due + self._fail(output, error)
            if not isinstance(error, Exception):
                raise
        due, self._due = self._due, []
        return due

    def _compute(self, output: SchedulerOutput) -> list[RequestOutput]:
        started = time.perf_counter()
        logits = self.runner.run(output)
        sampling = self.scheduler.update(output)
        self._observe(output, time.perf_counter() - started)
        self._note_first(output, started)
        touched = self._append(*self._draw(output, logits, sampling)) if sampling else ()
        return [self._emit(group) for group in touched]

    def _fail(self, output: SchedulerOutput, error: BaseException) -> list[RequestOutput]:
        """Ends the requests of a step that did not come to its end."""
        what = "the model failed in this step" if isinstance(error, Exception) else "this step was interrupted"
        message = f"{what}: {type(error).__name__}: {error}".rstrip(": ")
        try:
            ids = dict.fromkeys(request.request_id for request in self.scheduler.discard(output))
            ended = [self._end(self._groups[i], "error", message) for i in ids if i in self._groups]
            self.scheduler.check()
        except BaseException as fault:
            self._fault = fault
            raise
        return ended

    def _observe(self, output: SchedulerOutput, seconds: float) -> None:
        self.pace.observe_step(seconds, output.num_tokens)
        if self.speculation is not None:
            self.speculation.observe(output, seconds)
        admitted = sum(self._is_first(part) for part in output.scheduled)
        self.pace.observe_admissions(seconds, admitted, len(self.scheduler.waiting))

    @staticmethod
    def _is_first(part: Scheduled) -> bool:
        """Is this the first step of the request?"""
        return part.request.num_preemptions == 0 and part.start == (part.request.num_cached or 0)

    def _note_first(self, output: SchedulerOutput, started: float) -> None:
        for part in output.scheduled:
            if self._is_first(part):
                metrics = self._groups[part.request.request_id].metrics
                metrics.first_scheduled_time = metrics.first_scheduled_time or started

    def _draw(self, output: SchedulerOutput, logits: torch.Tensor, sampling: list[tuple[int, Request]]):
        """(requests with their tokens, requests with the error that they met): of those with drafts, what was verified,
        and one token of each of the others."""
        drafted = {part.request: len(part.drafts) for part in output.scheduled if part.drafts}
        plain = [pair for pair in sampling if pair[1] not in drafted]
        if self.speculation is not None:
            self.speculation.note_plain(request for _, request in plain)
        drawn, failed = self._sample(logits, plain)
        if not drafted:
            return drawn, failed
        kept = {}
        for row, request in sampling:
            if count := drafted.get(request):
                try:
                    tokens = self.speculation.verify(request, logits[row : row + count + 1], count)
                except SamplingError as error:
                    failed.append((request, str(error).removeprefix("row 0: ")))
                    continue
                kept[request] = len(tokens) - 1
                drawn.append((request, tokens))
        labels = [request.label for request in kept]
        self.events.append("verified", requests=labels, drafted=[drafted[r] for r in kept], kept=list(kept.values()))
        return drawn, failed

    def _sample(self, logits: torch.Tensor, sampling: list[tuple[int, Request]]):
        """As _draw, of requests without drafts."""
        failed: list[tuple[Request, str]] = []
        while sampling:
            rows, requests = zip(*sampling, strict=True)
            chosen = logits if len(rows) == len(logits) and len(set(rows)) == len(rows) else logits[list(rows)]
            states = [SamplingState(r.prompt_token_ids, r.output_token_ids, r.sequence) for r in requests]
            try:
                tokens = sample(chosen, [r.params for r in requests], states, self.vocab_size, self.tokenizer.eos_ids)
            except SamplingError as error:
                failed.append((requests[error.row], str(error).removeprefix(f"row {error.row}: ")))
                sampling = sampling[: error.row] + sampling[error.row + 1 :]
                continue
            return [(request, [token]) for request, token in zip(requests, tokens, strict=True)], failed
        return [], failed

    def _append(self, drawn, failed) -> Iterable[RequestGroup]:
        now, touched = time.perf_counter(), {}
        labels, ids = [], []
        for request, tokens in drawn:
            group, sequence = self._sequences.get(request) or self._fork(request)
            took = self._take(request, sequence, tokens, now)
            labels += [request.label] * took
            ids += [token.id for token in tokens[:took]]
            group.metrics.first_token_time = group.metrics.first_token_time or now
            if sequence.finish_reason is not None:
                self._finish(sequence, sequence.finish_reason)
            touched[group.request_id] = group
        for request, message in failed:
            group, sequence = self._sequences.get(request) or self._fork(request)
            group.error = message
            sequence.release_text()
            self._finish(sequence, "error")
            touched[group.request_id] = group
        if drawn:
            self.events.append("sampled", requests=labels, tokens=ids)
        return touched.values()

    def _take(self, request: Request, sequence: SequenceText, tokens: Sequence[SampledToken], now: float) -> int:
        """How many of a step's tokens the sequence took: what lies behind its end is dropped."""
        took = 0
        while took < len(tokens) and sequence.finish_reason is None:
            request.append(tokens[took].id)
            sequence.push(tokens[took], now)
            took += 1
        if request.drafts:
            self.scheduler.advance(request, min(took, len(tokens) - 1))
            request.drafts = ()
        return took

    def _fork(self, request: Request) -> tuple[RequestGroup, SequenceText]:
        """The scheduler made this sequence out of the request's first."""
        group = self._groups[request.request_id]
        if self.speculation is not None:
            self.speculation.fork(group.first, request)
        return group, self._follow(group, request)


def _with_states(config: SchedulerConfig, model: Transformer, kv_cache_dtype: str) -> SchedulerConfig:
    """A slot for each sequence that runs, where it keeps something beside its blocks. With linear layers there is no
    prefix cache, since a hit would need the state that the prefix left, which no block holds; what int4 keeps is of the
    block that is not full, and a prefix has whole ones."""
    linear = bool(model.config.linear_layers)
    if not linear and kv_cache_dtype != "int4":
        return replace(config, num_state_slots=None)
    slots = min(config.num_state_slots or config.max_num_seqs, config.max_num_seqs)
    config = replace(config, num_state_slots=slots, states_of_blocks=not linear)
    return replace(config, prefix_cache="off") if linear else config


def _and_states(config: SchedulerConfig) -> str:
    return f"and {config.num_state_slots} states " if config.num_state_slots else ""
