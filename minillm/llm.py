"""`LLM`, the front door: prompts in, finished requests out. Names and meanings are vLLM's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from itertools import count
from pathlib import Path

from tqdm import tqdm

from . import checkpoint
from .engine import Engine, Prompt
from .errors import EngineError, RequestError
from .outputs import RequestOutput
from .runner import KEY_GROUP, bytes_of_block, bytes_of_slot
from .sampling_params import SamplingParams
from .scheduler_config import SchedulerConfig
from .speculative.settings import SpeculativeConfig
from .tokenizer import Tokenizer
from .transformer import Transformer

_VLLM = {  # its name -> ours, where they differ
    "num_gpu_blocks_override": "num_blocks",
    "gpu_memory_utilization": "kv_cache_bytes, which is a number of bytes",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "scheduling_policy": "policy",
    "swap_space": "num_host_blocks, which is a number of blocks",
    "enforce_eager": "compile, which is off unless asked for",
    "seed": "SamplingParams(seed=...), one for each request",
    "tensor_parallel_size": "nothing: the engine runs on one device",
}


class LLM:
    """Offline inference: `LLM().generate(prompts, SamplingParams(...))`.

    model is a loaded Transformer (then tokenizer is needed), a path or hub name, or None for the default model.
    Memory for the cache is `num_blocks` blocks, or as many as `kv_cache_bytes` hold, and no more than `max_num_seqs`
    sequences of `max_model_len` can use; of a model with linear layers up to half of it is states. `kv_cache_dtype` is
    auto, float32, bfloat16, float16, or quantized: int8, fp8, int4 (quantization/kv.py). `backend` is "triton", "torch"
    or "auto", and None a loaded model's own. `compile` is for a model that is loaded here (see checkpoint.load); give
    compilation.compiled(model) otherwise. Further keywords are those of SchedulerConfig.
    `speculative` is a SpeculativeConfig; what came of it is in `engine.speculation.stats`.
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
        backend: str | None = None,
        speculative: SpeculativeConfig | None = None,
        compile: bool = False,
        **options,
    ) -> None:
        if not isinstance(model, Transformer):
            model, found = checkpoint.load(model, dtype, device, backend or "auto", compile)
            tokenizer = tokenizer or found
        elif compile:
            raise EngineError("compile is for a model that is loaded here; pass compilation.compiled(model) instead")
        if tokenizer is None:
            raise EngineError("a loaded model was given without its tokenizer; pass both, or a path")
        if not enable_prefix_caching:
            options["prefix_cache"] = "off"
        config = scheduler_config(model, kv_cache_bytes, options, kv_cache_dtype)
        self.engine = Engine(model, tokenizer, config, batch_invariant, None, kv_cache_dtype, backend, speculative)
        self._ids = count()
        self._newest: dict[str, RequestOutput | None] = {}  # of every request that some call is waiting for

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """The finished requests, in the order of the prompts. A list of ints is one prompt of token ids.

        Raises RequestError, before anything runs, if one of them can never be served.
        """
        ids = self._add(prompts, sampling_params, priority)
        done = {}
        with tqdm(total=len(ids), unit="request", disable=not use_tqdm) as bar:
            for output in self._run(ids):
                if output.finished:
                    done[output.request_id] = output
                    bar.update()
        if gone := [i for i in ids if i not in done]:
            raise EngineError(f"request {gone[0]} was aborted by somebody else; its outputs went there")
        return [done[i] for i in ids]

    def reset_prefix_cache(self) -> None:
        """As Engine.reset_prefix_cache."""
        self.engine.reset_prefix_cache()

    def stream(self, prompts, sampling_params=None, priority=None) -> Iterator[RequestOutput]:
        """Outputs as they grow, of all prompts mixed; `outputs[i].text_from(n)` is what is new since n tokens."""
        return self._run(self._add(prompts, sampling_params, priority))

    def chat(
        self,
        messages: Sequence[Mapping] | Sequence[Sequence[Mapping]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        **variables,
    ) -> list[RequestOutput]:
        """As generate, of one conversation or several, through the model's own template."""
        if not messages:
            raise RequestError("there are no messages; give at least one, as {'role': 'user', 'content': ...}")
        several = [messages] if isinstance(messages[0], Mapping) else messages
        encode = self.engine.tokenizer.encode_chat
        return self.generate([encode(m, **variables) for m in several], sampling_params, use_tqdm=use_tqdm)

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
        """Steps the engine until these requests have ended. Outputs of others are kept for those who wait for them,
        the newest of each, which says everything so far."""
        self._newest.update(dict.fromkeys(ids))
        left = list(ids)
        try:
            while left:
                for name in list(left):
                    output, self._newest[name] = self._newest[name], None
                    if output is not None:
                        if output.finished:
                            left.remove(name)
                        yield output
                if left and not any(self._newest[name] for name in left):
                    left = self._step(left)
        finally:
            self.engine.abort_request(left)  # the caller stopped reading
            for name in ids:
                self._newest.pop(name, None)

    def _step(self, left: list[str]) -> list[str]:
        """One step. Returns those of `left` that can still bring an output."""
        for output in self.engine.step():
            if output.request_id in self._newest:
                self._newest[output.request_id] = output
        return [name for name in left if self._newest[name] is not None or self.engine.knows(name)]


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
    known = [f.name for f in fields(SchedulerConfig)]
    for name in options:
        if name not in known:
            meant = _VLLM.get(name) or next(iter(get_close_matches(name, known, 1)), None)
            hint = f"use {meant}" if meant else f"the options are {', '.join(known)}"
            raise EngineError(f"{name} is no option of this engine; {hint}")
    if kv_cache_dtype == "int4":
        options = {"block_size": KEY_GROUP} | options
    config = SchedulerConfig(**options)
    if "num_blocks" in options:
        return config
    context = model.config.max_position_embeddings
    size = bytes_of_block(model, config.block_size, kv_cache_dtype)
    longest = min(config.max_model_len, context)
    if state := bytes_of_slot(model, config.block_size, kv_cache_dtype):  # half at most; what they leave is for blocks
        slots = config.num_state_slots or max(1, min(config.max_num_seqs, kv_cache_bytes // (2 * state) - 1))
        config = replace(config, num_state_slots=slots)
        kv_cache_bytes = max(0, kv_cache_bytes - (1 + slots) * state)
    useful = config.max_running * -(-longest // config.block_size)
    return replace(config, num_blocks=1 + max(1, min(useful, kv_cache_bytes // size)))
