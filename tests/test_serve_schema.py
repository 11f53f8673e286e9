"""Promise: the published OpenAPI schema is true. What it draws is answered as it says; what it forbids is refused."""

from __future__ import annotations

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from minillm.serving.unsupported import CHAT, COMPLETION
from tests.serving_http import MODEL, make_chat_model, post, serving

CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance,
    response_schema_conformance, negative_data_rejection, unsupported_method, allow_header_conformance,
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A short context, so that what asks for thousands of tokens is answered at once."""
    with serving(make_chat_model(tmp_path_factory), max_model_len=24) as server:
        yield server
        assert post(server, "/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200


@pytest.fixture(scope="module")
def document(server):
    return httpx.get(server.url + "/openapi.json").json()


@pytest.fixture(scope="module")
def operations(server):
    api = schemathesis.openapi.from_url(server.url + "/openapi.json")
    return {operation.ok().path: operation.ok() for operation in api.get_all_operations()}


RIGHT, WRONG = GenerationMode.POSITIVE, GenerationMode.NEGATIVE


@pytest.mark.parametrize(
    ("path", "mode", "examples"),
    [
        ("/v1/completions", RIGHT, 70),
        ("/v1/completions", WRONG, 70),
        ("/v1/chat/completions", RIGHT, 70),
        ("/v1/chat/completions", WRONG, 70),
        ("/v1/models/{model}", RIGHT, 30),  # every text is right by the schema
    ],
)
def test_drawn_requests(operations, path, mode, examples):
    """By the schema, or against it in one place. That right ones can be served is what the tests beside this show."""
    seen = set()

    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operations[path].as_strategy(generation_mode=mode))
    def requests(case):
        seen.add(case.call_and_validate(checks=CHECKS, timeout=30).status_code)

    requests()
    if path != "/v1/models/{model}":
        assert 400 in seen
        assert (200 in seen) == (mode is RIGHT)


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics"])
def test_what_takes_no_parameters(operations, path):
    operations[path].Case().call_and_validate(checks=CHECKS, timeout=30)


def check(document, name, value):
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    jsonschema.Draft202012Validator(schema).validate(value)


def test_the_schema_is_one(document):
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert set(document["paths"]) == {
        "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{model}", "/health", "/metrics"
    }  # fmt: skip


def test_answers_are_as_the_schema_says(server, document):
    text = {"model": MODEL, "prompt": ["a", "b"], "n": 2, "logprobs": 2, "max_tokens": 4, "seed": 1, "user": "me"}
    check(document, "CompletionRequest", text)
    check(document, "Completion", post(server, "/v1/completions", text).json())
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 4}
    check(document, "ChatCompletionRequest", chat)
    check(document, "ChatCompletion", post(server, "/v1/chat/completions", chat).json())
    chat |= {"logprobs": True, "top_logprobs": 3}
    check(document, "ChatCompletion", post(server, "/v1/chat/completions", chat).json())
    check(document, "ErrorBody", post(server, "/v1/chat/completions", {}).json())
    check(document, "ModelList", httpx.get(server.url + "/v1/models").json())
    check(document, "ModelCard", httpx.get(server.url + "/v1/models/tiny").json())


def test_neutral_values_are_in_the_schema(document):
    """A client that sends the fields we do not do, asking for nothing, is right by the schema too."""
    for name, table, right in (
        ("CompletionRequest", COMPLETION, {"prompt": "a"}),
        ("ChatCompletionRequest", CHAT, {"messages": [{"role": "user", "content": "a"}]}),
    ):
        for field, (neutral, _) in table.items():
            for value in neutral:
                check(document, name, {**right, field: value})
            with pytest.raises(jsonschema.ValidationError):
                check(document, name, {**right, field: "something"})
        with pytest.raises(jsonschema.ValidationError):
            check(document, name, {**right, "unknown": None})


def test_a_key_is_in_the_schema_where_one_is_needed(tmp_path_factory, document):
    assert "securitySchemes" not in document["components"]
    with serving(make_chat_model(tmp_path_factory), {"api_keys": ("k",)}) as server:
        locked = httpx.get(server.url + "/openapi.json").json()
    (scheme,) = locked["components"]["securitySchemes"].values()
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    needs = {path: "security" in next(iter(methods.values())) for path, methods in locked["paths"].items()}
    assert all(needed == path.startswith("/v1") for path, needed in needs.items())
