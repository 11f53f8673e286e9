"""Schedule, run, sample, append: one step of many requests. `Engine` has the loop, `LLM` is the user's front door.

Names and meanings are vLLM's. A request's answer is the one that generate.py gives it alone, token for token.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch

from . import checkpoint
from .batching import Scheduler, SchedulerConfig
from .errors import EngineError, OverloadedError, RequestError
from .events import EventLog
from .generate import encode_prompt
from .outputs import RequestMetrics, RequestOutput
from .request import Request
from .request_group import RequestGroup, SequenceText
from .runner import ModelRunner, cache_dtype
from .sampling import SamplingError, SamplingParams, SamplingState, sample
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
    ) -> None:
        config = config or SchedulerConfig()
        context = model.config.max_position_embeddings
        windows = {model.config.window(layer) for layer in range(model.config.num_hidden_layers)}
        only = next(iter(windows)) if len(windows) == 1 else None  # a full layer still needs what a window dropped
        config = replace(config, max_model_len=min(config.max_model_len, context), sliding_window=only)
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.scheduler = Scheduler(config, events)
        self.events = self.scheduler.events
        self.runner = ModelRunner(
            model, config.num_blocks, config.block_size, config.num_host_blocks, batch_invariant, kv_cache_dtype
        )
        self.pace = self.runner.pace
        if config.host_reuse == "measured":
            self.scheduler.host.pays = self.pace.reload_pays
        self.vocab_size = min(model.config.vocab_size, tokenizer.vocab_size)
        self._groups: dict[str, RequestGroup] = {}
        self._sequences: dict[Request, tuple[RequestGroup, SequenceText]] = {}

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
        if request_id in self._groups:
            raise RequestError(f"request id {request_id!r} is in use; give each request its own")
        text, ids = self._encode(prompt)
        params = (params or SamplingParams()).seeded()
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
        tokens, ahead = self.scheduler.queued_before(request)
        predicted = self.pace.predicted_ttft(tokens, ahead)
        if predicted > slo:
            self.events.append("refused", request.label, predicted_ttft_s=predicted)
            raise OverloadedError(
                f"the first token would come after about {predicted:.3g} s and {slo:g} s are promised; try again later",
                retry_after_s=predicted - slo,
            )

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            prompt = prompt.get("prompt_token_ids") or prompt.get("prompt") or ""
        if not isinstance(prompt, str | Sequence):
            raise RequestError(f"the prompt is a {type(prompt).__name__}; give text or a list of token ids")
        return prompt if isinstance(prompt, str) else None, encode_prompt(self.model, self.tokenizer, prompt)

    def _follow(self, group: RequestGroup, request: Request) -> SequenceText:
        decoder = StreamDecoder(self.tokenizer, skip_special=True)
        limit = self.scheduler.max_sequence
        checker = StopChecker(request.params, self.tokenizer.eos_ids, limit, request.num_prompt)
        sequence = SequenceText(request, decoder, checker)
        group.sequences.append(sequence)
        self._sequences[request] = group, sequence
        return sequence

    def has_unfinished_requests(self) -> bool:
        return bool(self._groups)

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
        group.first.width = 1
        return self._emit(group)

    def _finish(self, sequence: SequenceText, reason: str) -> None:
        sequence.finish_reason = reason
        self.scheduler.finish(sequence.request, reason)
        del self._sequences[sequence.request]

    def _emit(self, group: RequestGroup) -> RequestOutput:
        if group.finished:
            group.metrics.finished_time = time.perf_counter()
            group.metrics.num_preemptions = sum(s.request.num_preemptions for s in group.sequences)
            del self._groups[group.request_id]
        return group.output()

    def step(self) -> list[RequestOutput]:
        """One step. Returns the requests that got a token or ended in it.

        A request whose logits cannot be sampled from ends with an error and the others go on. If the model itself
        fails, all requests of the step do, since none can be singled out.
        """
        if not self.scheduler.has_unfinished_requests():
            return []
        started = time.perf_counter()
        output = self.scheduler.schedule()
        try:
            logits = self.runner.run(output)
        except Exception as error:
            return self._fail(output, error)
        sampling = self.scheduler.update(output)
        self._observe(output, time.perf_counter() - started)
        self._note_first(output)
        if not sampling:
            return []
        touched = self._append(*self._sample(logits, sampling))
        return [self._emit(group) for group in touched]

    def _fail(self, output: SchedulerOutput, error: Exception) -> list[RequestOutput]:
        ids = dict.fromkeys(request.request_id for request in self.scheduler.discard(output))
        message = f"the model failed in this step: {type(error).__name__}: {error}"
        return [self._end(self._groups[i], "error", message) for i in ids]

    def _observe(self, output: SchedulerOutput, seconds: float) -> None:
        self.pace.observe_step(seconds, output.prefill_tokens)
        admitted = sum(self._is_first(part) for part in output.scheduled)
        self.pace.observe_admissions(seconds, admitted, len(self.scheduler.waiting))

    @staticmethod
    def _is_first(part: Scheduled) -> bool:
        """Is this the first step of the request?"""
        return part.request.num_preemptions == 0 and part.start == (part.request.num_cached or 0)

    def _note_first(self, output: SchedulerOutput) -> None:
        for part in output.scheduled:
            if self._is_first(part):
                metrics = self._groups[part.request.request_id].metrics
                metrics.first_scheduled_time = metrics.first_scheduled_time or time.perf_counter()

    def _sample(self, logits: torch.Tensor, sampling: list[tuple[int, Request]]):
        """(requests with their tokens, requests with the error that they met)."""
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
            return list(zip(requests, tokens, strict=True)), failed
        return [], failed

    def _append(self, drawn, failed) -> Iterable[RequestGroup]:
        now, touched = time.perf_counter(), {}
        for request, token in drawn:
            group, sequence = self._sequences.get(request) or self._fork(request)
            request.append(token.id)
            sequence.push(token, now)
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
            labels = [request.label for request, _ in drawn]
            self.events.append("sampled", requests=labels, tokens=[token.id for _, token in drawn])
        return touched.values()

    def _fork(self, request: Request) -> tuple[RequestGroup, SequenceText]:
        """The scheduler made this sequence out of the request's first."""
        group = self._groups[request.request_id]
        return group, self._follow(group, request)


class LLM:
    """Offline inference: `LLM().generate(prompts, SamplingParams(...))`.

    model is a loaded Transformer (then tokenizer is needed), a path or hub name, or None for the default model.
    Memory for the cache is `num_blocks` blocks, or as many as `kv_cache_bytes` hold, and no more than `max_num_seqs`
    sequences of `max_model_len` can use. Further keywords are those of SchedulerConfig.
    """

    def __init__(
        self,
        model: Transformer | str | Path | None = None,
        tokenizer: Tokenizer | None = None,
        dtype: str = "auto",
        kv_cache_bytes: int = 1 << 30,
        enable_prefix_caching: bool = True,
        batch_invariant: bool = False,
        kv_cache_dtype: str = "auto",
        device: str = "cpu",
        **options,
    ) -> None:
        if not isinstance(model, Transformer):
            model, found = checkpoint.load(model, dtype, device)
            tokenizer = tokenizer or found
        if tokenizer is None:
            raise EngineError("a loaded model was given without its tokenizer; pass both, or a path")
        if not enable_prefix_caching:
            options["prefix_cache"] = "off"
        config = scheduler_config(model, kv_cache_bytes, options, kv_cache_dtype)
        self.engine = Engine(model, tokenizer, config, batch_invariant, kv_cache_dtype=kv_cache_dtype)
        self._ids = count()

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """The finished requests, in the order of the prompts. A list of ints is one prompt of token ids.

        Raises RequestError, before anything runs, if one of them can never be served.
        """
        ids = self._add(prompts, sampling_params, priority)
        done = {output.request_id: output for output in self._run(ids) if output.finished}
        return [done[i] for i in ids]

    def stream(self, prompts, sampling_params=None, priority=None) -> Iterator[RequestOutput]:
        """Outputs as they grow, of all prompts mixed; `outputs[i].text_from(n)` is what is new since n tokens."""
        return self._run(self._add(prompts, sampling_params, priority))

    def chat(
        self,
        messages: Sequence[Mapping] | Sequence[Sequence[Mapping]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **variables,
    ) -> list[RequestOutput]:
        """As generate, of one conversation or several, through the model's own template."""
        several = [messages] if isinstance(messages[0], Mapping) else messages
        encode = self.engine.tokenizer.encode_chat
        return self.generate([encode(m, **variables) for m in several], sampling_params)

    def _add(self, prompts, sampling_params, priority) -> list[str]:
        prompts = _prompt_list(prompts)
        params = sampling_params if isinstance(sampling_params, Sequence) else [sampling_params] * len(prompts)
        priority = [0] * len(prompts) if priority is None else priority
        if not len(prompts) == len(params) == len(priority):
            raise RequestError(
                f"{len(prompts)} prompts, {len(params)} sampling_params and {len(priority)} priorities: give one each"
            )
        ids = []
        try:
            for prompt, p, level in zip(prompts, params, priority, strict=True):
                name = str(next(self._ids))
                self.engine.add_request(name, prompt, p, level)
                ids.append(name)
        except BaseException:
            self.engine.abort_request(ids)
            raise
        return ids

    def _run(self, ids: Sequence[str]) -> Iterator[RequestOutput]:
        left = set(ids)
        try:
            while left:
                for output in self.engine.step():
                    if output.request_id in left:
                        left -= {output.request_id} if output.finished else set()
                        yield output
        finally:
            self.engine.abort_request(left)  # the caller stopped reading


def _prompt_list(prompts) -> list[Prompt]:
    """One prompt becomes a list of one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    prompts = list(prompts)
    return [prompts] if prompts and all(isinstance(i, int) for i in prompts) else prompts


def scheduler_config(
    model: Transformer, kv_cache_bytes: int, options: Mapping, kv_cache_dtype: str = "auto"
) -> SchedulerConfig:
    """Settings with `num_blocks` filled in from the memory, where it is not given."""
    try:
        config = SchedulerConfig(**options)
    except TypeError as error:
        raise EngineError(f"{error}; the options are the fields of SchedulerConfig") from None
    if "num_blocks" in options:
        return config
    c = model.config
    values = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * config.block_size
    size = values * cache_dtype(model, kv_cache_dtype).itemsize
    longest = min(config.max_model_len, c.max_position_embeddings)
    useful = config.max_num_seqs * -(-longest // config.block_size)
    return replace(config, num_blocks=1 + max(1, min(useful, kv_cache_bytes // size)))
