"""The routes. Each says what it does in a few lines; the work is in the files beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from .. import __version__
from ..async_engine import AsyncEngine
from ..errors import MinillmError
from ..outputs import RequestOutput
from . import responses
from .answers import Outputs, run_job, whole
from .errors import ApiError, draining, from_engine, from_http, from_validation
from .gate import Gate, StrictRoute
from .guard import ClientGone, Guard
from .metrics import CONTENT_TYPE
from .protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from .settings import ServerSettings
from .state import ServerState
from .streaming import Events, EventStream
from .strict_json import dumps
from .translate import make_job

_CAUSES = {
    400: "A value, a field or the whole body is wrong; param names it.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "The queue is full; Retry-After says when to come again.",
    500: "The model failed on this request.",
    503: "The server is shutting down, or its engine has stopped.",
    504: "The request took too long and was aborted.",
}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """These, and any other 4xx in the same shape; FastAPI would add its own 422 otherwise."""
    other = {"4XX": {"model": responses.ErrorBody, "description": "Another refusal."}}
    return {status: {"model": responses.ErrorBody, "description": _CAUSES[status]} for status in statuses} | other


def _generates(shape: type, what: str) -> dict[int | str, dict[str, Any]]:
    stream = {"text/event-stream": {"schema": {"type": "string"}}}
    answer = {"model": shape, "description": what, "content": stream}
    return {200: answer, **_errors(*_CAUSES)}


def json_response(value: Any, status: int = 200) -> Response:
    return Response(dumps(value), status, media_type="application/json")


generation = APIRouter(route_class=StrictRoute)
reading = APIRouter()
watching = APIRouter()  # these need no key


@generation.post(
    "/v1/completions", response_model=None, responses=_generates(responses.Completion, "Continuations of the prompts.")
)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continues a text or token ids."""
    return await generate(body, request)


@generation.post(
    "/v1/chat/completions",
    response_model=None,
    responses=_generates(responses.ChatCompletion, "Answers to the conversation."),
)
async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
    """Answers a conversation in the model's own chat template."""
    return await generate(body, request)


async def generate(body: GenerationRequest, request: Request) -> Response:
    """Tokenizes, runs, and answers whole or as a stream. Raises ApiError, MinillmError or ClientGone."""
    state, arrival = request.app.state.server, request.scope["minillm.arrival"]
    guard = Guard(request.receive, state.stopping, state.settings.request_timeout_s, arrival)
    engine = state.engine.engine
    job = await guard.run(_in_thread(state, make_job, body, engine, state.settings, arrival))
    outputs = run_job(state.engine, job, state.metrics)
    if not body.stream:
        return json_response(await guard.run(whole(job, outputs, engine.tokenizer)))
    first = await guard.run(_next(outputs))
    return EventStream(first, outputs, Events(job, engine.tokenizer), guard)


async def _in_thread(state: ServerState, function: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(state.tokenizing, function, *arguments)


async def _next(outputs: Outputs) -> tuple[int, RequestOutput]:
    return await anext(outputs)


@reading.get("/v1/models", responses={200: {"model": responses.ModelList}, **_errors(401)}, response_model=None)
async def models(request: Request) -> Response:
    """The one model that is served."""
    return json_response({"object": "list", "data": [_card(request.app.state.server)]})


@reading.get(
    "/v1/models/{model:path}", responses={200: {"model": responses.ModelCard}, **_errors(401, 404)}, response_model=None
)
async def model_card(model: str, request: Request) -> Response:
    """The card of one model."""
    state = request.app.state.server
    if model != state.settings.model_name:
        message = f"the model {model[:80]!r} is not here; this server has {state.settings.model_name!r}"
        raise ApiError(404, message, "model_not_found", "model")
    return json_response(_card(state))


def _card(state: ServerState) -> dict[str, Any]:
    longest = state.engine.engine.scheduler.max_sequence
    name, created = state.settings.model_name, state.started
    return {"id": name, "object": "model", "created": created, "owned_by": "minillm", "max_model_len": longest}


@watching.get("/health", responses={200: {"model": responses.Health}, **_errors(503)}, response_model=None)
async def health(request: Request) -> Response:
    """200 while requests are taken and the engine runs."""
    state = request.app.state.server
    if state.draining:
        raise draining()
    if not state.engine.is_running:
        raise ApiError(503, f"the engine has stopped: {state.engine.failure}", "engine_stopped")
    return json_response({"status": "ok"})


@watching.get(
    "/metrics", response_model=None, responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
)
async def metrics(request: Request) -> Response:
    """Prometheus's text format."""
    return Response(request.app.state.server.metrics.text(), media_type=CONTENT_TYPE)


def create_app(engine: AsyncEngine, settings: ServerSettings) -> FastAPI:
    """The ASGI application. Create it where its event loop runs, and call `app.state.server.close()` after it."""
    app = FastAPI(title="minillm", version=__version__, docs_url=None, redoc_url=None)
    app.state.server = state = ServerState(engine, settings)
    stated = [Security(HTTPBearer(auto_error=False))] if settings.api_keys else []  # for the schema; Gate checks it
    app.include_router(generation, dependencies=stated)
    app.include_router(reading, dependencies=stated)
    app.include_router(watching)
    app.add_middleware(Gate, state=state)
    for kind, translate in _TRANSLATIONS.items():
        app.add_exception_handler(kind, _handler(translate))
    app.add_exception_handler(ClientGone, _nobody)
    return app


def _from_http(error: HTTPException, request: Request) -> ApiError:
    return error if isinstance(error, ApiError) else from_http(error, request.method, request.url.path)


def _from_fault(error: Exception, request: Request) -> ApiError:
    return ApiError(500, "the server met a fault of its own; its log has the traceback", "internal_error")


_TRANSLATIONS = {
    HTTPException: _from_http,
    RequestValidationError: lambda error, request: from_validation(error.errors()),
    MinillmError: lambda error, request: from_engine(error),
    Exception: _from_fault,
}


def _handler(translate):
    async def handle(request: Request, error: Exception) -> Response:
        refusal = translate(error, request)
        request.app.state.server.metrics.refused(refusal.code)
        return refusal.response()

    return handle


async def _nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nginx's number; it is never sent
