"""The engine's outputs → one body. Outputs are cumulative, so the last one of each prompt is its whole answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from typing import Any

from ..async_engine import AsyncEngine
from ..outputs import CompletionOutput, RequestOutput
from ..tokenizer import Tokenizer
from .errors import ApiError, draining, from_engine
from .logprobs import Offsets, chat_logprobs, completion_logprobs
from .metrics import Metrics
from .responses import ChatCompletion, Completion, Usage
from .translate import Job

Outputs = AsyncIterator[tuple[int, RequestOutput]]  # (which prompt, it so far)


async def run_job(engine: AsyncEngine, job: Job, metrics: Metrics) -> Outputs:
    """Runs all prompts of a job. Leaving early aborts them. Raises ApiError for what the engine refuses or breaks.

    Between two readings an output may be passed over in favour of a newer one; nothing is queued.
    """
    newest: dict[int, RequestOutput] = {}
    streams = [
        engine.generate(prompt, job.params, f"{job.id}-{i}", job.priority, job.extra_keys, job.arrival)
        for i, prompt in enumerate(job.prompts)
    ]
    try:
        async with aclosing(_merge(streams)) as merged:
            async for i, output in merged:
                if i not in newest:
                    metrics.first_token(output)
                newest[i] = output
                _check(output)
                yield i, output
    except Exception as error:
        raise from_engine(error) from error
    finally:
        for output in newest.values():
            metrics.ended(output)


async def _merge(streams: list[AsyncIterator[RequestOutput]]) -> Outputs:
    """Whichever has something next. A stream is asked again only when its last output was taken."""
    if len(streams) == 1:  # the usual case, without a task for each output
        async with aclosing(streams[0]) as stream:
            async for output in stream:
                yield 0, output
        return
    waiting = {asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                i = waiting.pop(task)
                try:
                    output = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(streams[i]))] = i
                yield i, output
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


def _check(output: RequestOutput) -> None:
    """A sequence that broke or was cut short from outside is no answer."""
    reasons = {choice.finish_reason for choice in output.outputs}
    if "error" in reasons:
        raise ApiError(500, output.error or "the model failed", "generation_failed")
    if "abort" in reasons:
        raise draining()


def usage(newest: Mapping[int, RequestOutput]) -> Usage:
    outputs = newest.values()
    prompt = sum(len(o.prompt_token_ids) for o in outputs)
    completion = sum(choice.count for o in outputs for choice in o.outputs)
    cached = sum(o.num_cached_tokens or 0 for o in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


async def whole(job: Job, outputs: Outputs, tokenizer: Tokenizer) -> Completion | ChatCompletion:
    """Waits for all answers; choice n·i + k is the k-th of prompt i."""
    newest: dict[int, RequestOutput] = {}
    async with aclosing(outputs):
        async for i, output in outputs:
            newest[i] = output
    newest = dict(sorted(newest.items()))
    make = _chat_choice if job.is_chat else _completion_choice
    return {
        "id": job.id,
        "object": "chat.completion" if job.is_chat else "text_completion",
        "created": job.created,
        "model": job.model,
        "choices": [make(index, choice, tokenizer) for index, choice in _numbered(job, newest.values())],
        "usage": usage(newest),
    }


def _numbered(job: Job, outputs: Iterable[RequestOutput]) -> list[tuple[int, CompletionOutput]]:
    return [(i * job.params.n + c.index, c) for i, output in enumerate(outputs) for c in output.outputs]


def _completion_choice(index: int, output: CompletionOutput, tokenizer: Tokenizer) -> dict[str, Any]:
    tokens = output.tokens
    listed = completion_logprobs(tokenizer, tokens, Offsets(tokenizer)) if tokens[0].logprob is not None else None
    return {"index": index, "text": output.text, "logprobs": listed, **ending(output)}


def _chat_choice(index: int, output: CompletionOutput, tokenizer: Tokenizer) -> dict[str, Any]:
    tokens = output.tokens
    listed = chat_logprobs(tokenizer, tokens) if tokens[0].logprob is not None else None
    message = {"role": "assistant", "content": output.text, "refusal": None}
    return {"index": index, "message": message, "logprobs": listed, **ending(output)}


def ending(output: CompletionOutput) -> dict[str, Any]:
    return {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
