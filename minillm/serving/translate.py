"""A request's fields → prompts of token ids and SamplingParams: what the engine understands."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

from ..engine import Engine
from ..generate import encode_prompt
from ..sampling_params import SamplingParams
from .errors import ApiError, invalid
from .protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest, Message
from .settings import ServerSettings

_SAME = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "n",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One HTTP request's work: each prompt becomes a request of the engine, `id-0`, `id-1` and so on."""

    id: str
    model: str
    prompts: list[list[int]]
    params: SamplingParams
    priority: int
    extra_keys: tuple[tuple, ...]
    arrival: float  # of time.perf_counter, the engine's clock
    is_chat: bool = False
    include_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))


def make_job(body: GenerationRequest, engine: Engine, settings: ServerSettings, arrival: float) -> Job:
    """Tokenizes, which may take long: not for the event loop. Raises ApiError or MinillmError."""
    _check_together(body, engine, settings)
    is_chat = isinstance(body, ChatCompletionRequest)
    params = sampling_params(body)
    params.validate(engine.vocab_size)
    prompts = [_chat_prompt(body, engine, settings)] if is_chat else _prompts(body, engine, settings)
    if body.max_tokens is not None or is_chat:
        _check_room(prompts, params.max_tokens, engine)
    name = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
    salt = () if body.cache_salt is None else (("salt", body.cache_salt),)
    return Job(
        name, settings.model_name, prompts, params, body.priority or 0, salt, arrival, is_chat, body.include_usage
    )


def _check_together(body: GenerationRequest, engine: Engine, settings: ServerSettings) -> None:
    """Fields that are right alone and wrong beside each other or under this server's settings."""
    if body.model is not None and body.model != settings.model_name:
        message = f"the model {body.model[:80]!r} is not here; this server has {settings.model_name!r}"
        raise ApiError(404, message, "model_not_found", "model")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is given without stream; set stream to true", param="stream_options")
    if body.priority and engine.config.policy != "priority":
        raise invalid(
            f"priority is {body.priority} and the server schedules first come, first served; leave it out, or start "
            "the server with --policy priority",
            param="priority",
        )


def sampling_params(body: GenerationRequest) -> SamplingParams:
    """Raises RequestError for values that SamplingParams does not take."""
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    max_tokens, logprobs = body.max_tokens, body.logprobs
    if isinstance(body, ChatCompletionRequest):
        max_tokens, logprobs = _chat_max_tokens(body), _chat_logprobs(body)
    elif max_tokens is None:
        max_tokens = 16  # OpenAI's; a chat's is as many as the context holds
    return SamplingParams(**given, logit_bias=bias, max_tokens=max_tokens, logprobs=logprobs)


def _chat_max_tokens(body: ChatCompletionRequest) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        message = f"max_tokens is {old} and max_completion_tokens {new}; they mean the same, so give one"
        raise invalid(message, param="max_completion_tokens")
    return old if new is None else new


def _chat_logprobs(body: ChatCompletionRequest) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs is given without logprobs; set logprobs to true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _chat_prompt(body: ChatCompletionRequest, engine: Engine, settings: ServerSettings) -> list[int]:
    _check_choices(1, body.n or 1, settings)
    messages = [{"role": _role(m), "content": _content(m)} for m in body.messages]
    ids = engine.tokenizer.encode_chat(messages, body.add_generation_prompt is not False)
    _check_length(len(ids), engine, settings, "messages")
    return ids


def _role(message: Message) -> str:
    """OpenAI's newer name for the system role; templates know the old one."""
    return "system" if message.role == "developer" else message.role


def _content(message: Message) -> str:
    """Parts are joined by line breaks, as vLLM does."""
    if isinstance(message.content, str):
        return message.content
    return "\n".join(part.text for part in message.content)


def _prompts(body: CompletionRequest, engine: Engine, settings: ServerSettings) -> list[list[int]]:
    single = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
    prompts = [body.prompt] if single else body.prompt
    _check_choices(len(prompts), body.n or 1, settings)
    return [_token_ids(prompt, engine, settings) for prompt in prompts]


def _token_ids(prompt: str | list[int], engine: Engine, settings: ServerSettings) -> list[int]:
    ids = engine.tokenizer.encode(prompt, add_special=True) if isinstance(prompt, str) else prompt
    _check_length(len(ids), engine, settings)
    return encode_prompt(engine.model, engine.tokenizer, ids)


def _check_choices(prompts: int, n: int, settings: ServerSettings) -> None:
    if prompts * n > settings.max_choices:
        message = f"{prompts} prompts with n {n} are more than {settings.max_choices} answers; send several requests"
        raise invalid(message, param="n")


def _check_room(prompts: list[list[int]], max_tokens: int | None, engine: Engine) -> None:
    """What was asked for must be possible; a client that wants as much as there is leaves max_tokens out."""
    longest, most = max(map(len, prompts)), engine.scheduler.max_sequence
    if max_tokens is not None and longest + max_tokens > most:
        message = f"{longest} prompt tokens and max_tokens {max_tokens} are more than the {most} that this server holds"
        raise invalid(f"{message}; lower max_tokens, or leave it out", "context_length_exceeded", "max_tokens")


def _check_length(tokens: int, engine: Engine, settings: ServerSettings, param: str = "prompt") -> None:
    limit = min(engine.scheduler.max_sequence - 1, settings.max_prompt_tokens or engine.scheduler.max_sequence)
    if tokens > limit:
        message = f"the prompt has {tokens} tokens and this server takes at most {limit}; shorten it"
        raise invalid(message, "context_length_exceeded", param)
