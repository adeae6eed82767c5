"""The routes that derender: what `/inference/v1/generate` answered in, OpenAI's answer out. No
model is needed, and nothing is kept between two calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from sensorium.server.http.bodies.body import read_body
from sensorium.server.http.bodies.encoding import make_response, wants_msgpack
from sensorium.server.http.calls import Context, check_model
from sensorium.server.http.derender.chat import derender_chat
from sensorium.server.http.derender.completion import derender_completion
from sensorium.server.http.protocol.derender import DerenderChatRequest, DerenderCompletionRequest
from sensorium.server.http.protocol.reading import read_request
from sensorium.server.http.threads import run_in_thread

_Wire = TypeVar("_Wire", bound=DerenderChatRequest | DerenderCompletionRequest)


async def answer_chat_derender(http_request: Request, context: Context) -> Response:
    def wrap(body: dict[str, Any]) -> dict[str, Any]:
        return {"generate_response": body} if _is_bare(body) else body

    return await _answer(http_request, context, DerenderChatRequest, wrap, derender_chat)


async def answer_completion_derender(http_request: Request, context: Context) -> Response:
    def wrap(body: dict[str, Any]) -> dict[str, Any]:
        return {"generate_responses": [body]} if _is_bare(body) else body

    return await _answer(
        http_request, context, DerenderCompletionRequest, wrap, derender_completion
    )


def _is_bare(body: dict[str, Any]) -> bool:
    """Whether it is nothing but a generated answer."""
    return "choices" in body


async def _answer(
    http_request: Request,
    context: Context,
    kind: type[_Wire],
    wrap: Callable[[dict[str, Any]], dict[str, Any]],
    derender: Callable[[_Wire, Context], Any],
) -> Response:
    def parse(body: dict[str, Any]) -> _Wire:
        request = read_request(kind, wrap(body))
        check_model(request.model, context.options.model_names)
        return request

    request = await read_body(http_request, parse, intake=context.bodies, takes_msgpack=True)
    is_msgpack = wants_msgpack(http_request)
    return await run_in_thread(
        lambda: make_response(derender(request, context), is_msgpack=is_msgpack)
    )
