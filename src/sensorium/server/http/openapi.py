"""The OpenAPI document: bodies are read by hand, so their schemas are put in by hand too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from sensorium.server.http.bodies.body import MSGPACK_TYPES
from sensorium.server.http.protocol.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ErrorResponse,
    ModelCard,
    ModelList,
)
from sensorium.server.http.protocol.chat import ChatCompletionRequest
from sensorium.server.http.protocol.completions import CompletionRequest
from sensorium.server.http.protocol.derender import (
    DerenderChatRequest,
    DerenderCompletionRequest,
    DerenderedChatChunk,
    DerenderedCompletionChunk,
)
from sensorium.server.http.protocol.generating import WireModel
from sensorium.server.http.protocol.message_schemas import MESSAGE_SCHEMAS
from sensorium.server.http.protocol.rendering import ChatRenderRequest, CompletionRenderRequest
from sensorium.server.http.protocol.token_wire import (
    GenerateRequest,
    GenerateResponse,
    RenderedRequest,
)
from sensorium.server.http.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)

_REF = "#/components/schemas/{name}"
_REQUESTS: tuple[type[WireModel], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateRequest,
    ChatRenderRequest,
    CompletionRenderRequest,
    TokenizeRequest,
    DetokenizeRequest,
    DerenderChatRequest,
    DerenderCompletionRequest,
)
_ANSWERS = (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ErrorResponse,
    GenerateResponse,
    ModelCard,
    ModelList,
    RenderedRequest,
    TokenizeResponse,
    DetokenizeResponse,
    DerenderedChatChunk,
    DerenderedCompletionChunk,
)
_BINARY = {"type": "string", "format": "binary"}
_ERRORS = {
    400: "The request can't be served as it is.",
    401: "The API key is missing or wrong.",
    404: "There is no such model or route.",
    405: "The route knows other methods.",
    408: "The body came too slowly.",
    409: "Media said to be cached is not.",
    413: "The body is too large.",
    422: "Media can't be fetched.",
    429: "Too many requests are being served.",
    500: "A bug of the server.",
    503: "The engine is not there, or has no room.",
}
GENERATING_ERRORS = (400, 401, 404, 408, 409, 413, 422, 429, 500, 503)
RENDERING_ERRORS = GENERATING_ERRORS
ResponseDocuments = dict[int | str, dict[str, Any]]


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(name=name)}


# What has no type of its own among the answers.
_NAMED: dict[str, Any] = {
    "RenderedRequestList": {"type": "array", "items": _ref("RenderedRequest")},
    "DerenderedChat": {"anyOf": [_ref("ChatCompletion"), _ref("DerenderedChatChunk")]},
    "DerenderedCompletion": {"anyOf": [_ref("Completion"), _ref("DerenderedCompletionChunk")]},
}


def make_responses(
    answer: str | None, *errors: int, chunk: str | None = None, has_msgpack: bool = False
) -> ResponseDocuments:
    """Of a route whose answer has the schema `answer` (`None`: an object), and whose stream, if it
    has one, has events of the schema `chunk`. `has_msgpack`: it comes so to who asks for it.
    """
    schema = {"type": "object"} if answer is None else _ref(answer)
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if chunk is not None:
        content["text/event-stream"] = {"itemSchema": _make_event(chunk)}
    if has_msgpack:
        content[MSGPACK_TYPES[0]] = {"schema": _BINARY}
    documents: ResponseDocuments = {200: {"description": "The answer.", "content": content}}
    for status in errors:
        documents[status] = {
            "description": _ERRORS[status],
            "content": {"application/json": {"schema": _ref("ErrorResponse")}},
        }
    return documents


def _make_event(chunk: str) -> dict[str, Any]:
    """A chunk, an error after the first of them, or the end."""
    texts = [
        {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": _ref(name),
        }
        for name in (chunk, "ErrorResponse")
    ]
    data = {"anyOf": [{"const": "[DONE]", "type": "string"}, *texts]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def make_body(request: type[WireModel], *, has_msgpack: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _ref(request.__name__)}}
    if has_msgpack:
        content[MSGPACK_TYPES[0]] = {"schema": _BINARY}
    return {"requestBody": {"required": True, "content": content}}


def install_openapi(app: FastAPI, *, needs_key: bool, model_names: Sequence[str]) -> None:
    def make_document() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            components = document.setdefault("components", {})
            components.setdefault("schemas", {}).update(_make_schemas(model_names))
            if needs_key:
                components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                document["security"] = [{"key": []}]
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = make_document  # type: ignore[method-assign]


def _make_schemas(model_names: Sequence[str]) -> dict[str, Any]:
    _, requests = models_json_schema(
        [(request, "validation") for request in _REQUESTS],
        ref_template=_REF.format(name="{model}"),
    )
    for schema in requests["$defs"].values():
        if "model" in schema["properties"]:
            schema["properties"]["model"] = {"enum": [*model_names, None], "default": None}
    _, answers = msgspec.json.schema_components(_ANSWERS, ref_template=_REF)
    return {**requests["$defs"], **answers, **_NAMED, **MESSAGE_SCHEMAS}
