"""What a client may send: OpenAI's fields, and vLLM's additions under vLLM's names.

Types are strict (true is no number, "1" is no integer), null means the default, and an unknown name is refused with
the nearest known one: a misspelt option that is ignored costs its author an afternoon. Value ranges that SamplingParams
knows are stated here again, so that the published schema is true; the tests hold the two together.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from .errors import nearest
from .unsupported import CHAT, COMPLETION, MESSAGE, Table, asks_for_nothing, schema

MAX_PROMPTS = 128
_INT32, _INT64 = (1 << 31) - 1, (1 << 63) - 1

Text = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, le=_INT32)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Several = Field(min_length=1, max_length=MAX_PROMPTS)
Prompt = Text | Annotated[list[Text], Several] | TokenIds | Annotated[list[TokenIds], Several]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]  # each is searched for at each token
Stop = StopText | Annotated[list[StopText], Field(max_length=16)]
BiasId = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Count = Annotated[int, Field(ge=1, le=_INT32)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class Strict(BaseModel):
    """Refuses unknown names with a hint, and known but unsupported ones with the reason."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    unsupported: ClassVar[Table] = {}

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = {}
        for name, value in data.items():
            if name in cls.model_fields:
                known[name] = value
            elif name not in cls.unsupported:
                hint = nearest(name, [*cls.model_fields, *cls.unsupported])
                raise _refusal("unknown_parameter", name, f"{name[:60]!r} is no field of this request{hint}")
            elif not asks_for_nothing(value, cls.unsupported[name][0]):
                reason = cls.unsupported[name][1] or "leave it out"
                raise _refusal("unsupported_parameter", name, f"{name} is not supported: {reason}")
        return known

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema, handler) -> dict[str, Any]:
        found = handler(core_schema)
        handler.resolve_ref_schema(found).setdefault("properties", {}).update(schema(cls.unsupported))
        return found


def _refusal(code: str, param: str, message: str) -> PydanticCustomError:
    text = message.replace("{", "{{").replace("}", "}}")  # pydantic fills in templates
    return PydanticCustomError(code, text, {"code": code, "param": param})


class StreamOptions(Strict):
    include_usage: bool | None = None


class _Generation(Strict):
    """What both kinds of request share. The first block is SamplingParams's, name for name."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-_INT64 - 1, le=_INT64)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_INT32)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None

    model: str | None = None
    max_tokens: Count | None = None
    logit_bias: Annotated[dict[BiasId, Bias], Field(max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-_INT32, le=_INT32)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(_Generation):
    """POST /v1/completions."""

    unsupported: ClassVar[Table] = COMPLETION

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    unsupported: ClassVar[Table] = MESSAGE

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]


class ChatCompletionRequest(_Generation):
    """POST /v1/chat/completions."""

    unsupported: ClassVar[Table] = CHAT

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None


GenerationRequest = CompletionRequest | ChatCompletionRequest
