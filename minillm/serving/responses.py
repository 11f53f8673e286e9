"""What a client gets. These are plain dictionaries; the types state their shape and make the published schema."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

_closed = with_config(ConfigDict(extra="forbid", strict=True))
Index = Annotated[int, Field(ge=0)]
FinishReason = Literal["stop", "length"]


@_closed
class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str


@_closed
class ErrorBody(TypedDict):
    error: ErrorDetail


@_closed
class PromptTokensDetails(TypedDict):
    cached_tokens: Index


@_closed
class Usage(TypedDict):
    """Tokens. cached_tokens of the prompt's were found in the prefix cache and not computed."""

    prompt_tokens: Index
    completion_tokens: Index
    total_tokens: Index
    prompt_tokens_details: PromptTokensDetails


@_closed
class CompletionLogprobs(TypedDict):
    """One entry a token. text_offset counts characters from the answer's beginning."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[Index]


@_closed
class CompletionChoice(TypedDict):
    index: Index
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


@_closed
class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


@_closed
class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


@_closed
class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


@_closed
class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


@_closed
class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


@_closed
class ChatChoice(TypedDict):
    index: Index
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


@_closed
class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


@_closed
class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


@_closed
class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


@_closed
class Health(TypedDict):
    status: Literal["ok"]
