"""The OpenAPI document, made from the table of routes and the types of requests and answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import msgspec

from sensorium import __version__
from sensorium.server.http.bodies.multipart import FORM_TYPE
from sensorium.server.http.bodies.reading import MSGPACK_TYPES
from sensorium.server.http.calls import Handler
from sensorium.server.http.protocol.answers import ErrorResponse
from sensorium.server.http.protocol.requests import (
    MESSAGE_TYPES,
    MESSAGE_UNIONS,
    StructuredOutputs,
    refer_to,
)

_BINARY = {"type": "string", "format": "binary"}
_ERRORS = {
    400: "The request is not valid; the error names the field.",
    401: "The API key is missing or wrong.",
    403: "The origin or the host is not allowed.",
    404: "There is no such model or route.",
    408: "The body came too slowly.",
    409: "A media item without data, named by its uuid or hash, is not in the cache.",
    413: "The body is too large.",
    422: "The media at a URL can't be fetched.",
    426: "The request does not ask for a WebSocket.",
    429: "Too many requests are being served; retry later.",
    500: "The server failed; its log has the reason.",
    503: "The engine is not connected, or has no room; retry later.",
    507: "The disk of the server has no room for the upload.",
}
_PARAMETER = re.compile(r"{(\w+)(:\w+)?}")


@dataclass(frozen=True, slots=True)
class Route:
    """A path of the server, with its handler and its description for the OpenAPI document."""

    path: str
    handler: Handler
    tag: str = ""
    summary: str = ""  # a route without one is not in the document
    _: KW_ONLY
    methods: tuple[str, ...] = ("GET",)
    request: type[msgspec.Struct] | None = None  # the body
    answers: tuple[type[msgspec.Struct], ...] = ()  # the answer is one of them; empty: any object
    answers_list: bool = False  # the answer is a list of them
    chunk: type[msgspec.Struct] | None = None  # of a stream
    errors: tuple[int, ...] = ()
    takes_msgpack: bool = False
    takes_form: bool = False  # the body is a form with a file
    answers_text: bool = False  # the answer may also be plain text
    answers_msgpack: bool = False
    needs_engine: bool = False  # a server that only renders refuses it
    is_upgrade: bool = False  # the answer is a WebSocket, which OpenAPI can't describe
    queries: tuple[str, ...] = ()  # the parameters in the address
    is_counted: bool = False  # it counts among the requests that are served at once
    name: str = ""  # of the operation; by default it is made from the handler and the path

    def get_operation_id(self, method: str) -> str:
        path = _PARAMETER.sub(r"{\1}", self.path)
        named = f"{getattr(self.handler, '__name__', '')}{path}_{method.lower()}"
        return self.name or re.sub(r"\W", "_", named)


def make_document(
    routes: Iterable[Route], *, needs_key: bool, model_names: Sequence[str]
) -> dict[str, Any]:
    """Return the OpenAPI document of all routes that have a summary.

    `model_names` are the values that the field `model` of a request may have.
    """
    shown = [route for route in routes if route.summary]
    paths: dict[str, Any] = {}
    for route in shown:
        path = _PARAMETER.sub(r"{\1}", route.path)
        paths[path] = {method.lower(): _make_operation(route, method) for method in route.methods}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Sensorium", "version": __version__},
        "paths": paths,
        "components": {"schemas": _make_schemas(shown, model_names)},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _make_operation(route: Route, method: str) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "tags": [route.tag],
        "summary": route.summary,
        "operationId": route.get_operation_id(method),
        "responses": _make_responses(route),
    }
    if route.request is not None:
        schema = refer_to(route.request.__name__)
        content = _make_content(schema, has_msgpack=route.takes_msgpack)
        if route.takes_form:
            content = {FORM_TYPE: {"schema": schema}}
        operation["requestBody"] = {"required": True, "content": content}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name, _ in _PARAMETER.findall(route.path)
    ]
    parameters += [
        {"name": name, "in": "query", "schema": {"type": "string"}} for name in route.queries
    ]
    return operation | ({"parameters": parameters} if parameters else {})


def _make_responses(route: Route) -> dict[str, Any]:
    references = [refer_to(answer.__name__) for answer in route.answers]
    schema: dict[str, Any] = {"type": "object"}
    if references:
        schema = references[0] if len(references) == 1 else {"anyOf": references}
    if route.answers_list:
        schema = {"type": "array", "items": schema}
    content = _make_content(schema, has_msgpack=route.answers_msgpack)
    if route.answers_text:
        content["text/plain"] = {"schema": {"type": "string"}}
    if route.chunk is not None:
        content["text/event-stream"] = {"itemSchema": _make_event(route.chunk)}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    if route.is_upgrade:
        responses = {"101": {"description": "A WebSocket. docs/realtime.md has its messages."}}
    content = _make_content(refer_to(ErrorResponse.__name__))
    for status in route.errors:
        responses[str(status)] = {"description": _ERRORS[status], "content": content}
    return responses


def _make_content(schema: dict[str, Any], *, has_msgpack: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if has_msgpack:
        content[MSGPACK_TYPES[0]] = {"schema": _BINARY}
    return content


def _make_event(chunk: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the schema of one event: a chunk or an error as JSON, or `[DONE]` at the end."""
    text = {"type": "string", "contentMediaType": "application/json"}
    kinds = (chunk, ErrorResponse)
    texts = [{**text, "contentSchema": refer_to(kind.__name__)} for kind in kinds]
    data = {"anyOf": [{"const": "[DONE]", "type": "string"}, *texts]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _make_schemas(routes: Iterable[Route], model_names: Sequence[str]) -> dict[str, Any]:
    requests = {route.request for route in routes if route.request is not None}
    answers = {kind for route in routes for kind in (*route.answers, route.chunk) if kind}
    kinds: list[Any] = [*requests, *answers, ErrorResponse]
    _, schemas = msgspec.json.schema_components(
        [*kinds, *MESSAGE_TYPES, StructuredOutputs], ref_template=refer_to("{name}")["$ref"]
    )
    for name, members in MESSAGE_UNIONS.items():
        schemas[name] = {"anyOf": [refer_to(member.__name__) for member in members]}
    for request in requests:
        properties = schemas[request.__name__]["properties"]
        if "model" in properties:
            properties["model"] = {"enum": [*model_names, None], "default": None}
    return schemas
