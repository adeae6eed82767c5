"""The routes that run no engine: render, tokenize, and back."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sensorium.server.http.calls import Context
from sensorium.server.http.derender.routes import answer_chat_derender, answer_completion_derender
from sensorium.server.http.errors import FailureLog
from sensorium.server.http.openapi import RENDERING_ERRORS, make_body, make_responses
from sensorium.server.http.protocol.derender import DerenderChatRequest, DerenderCompletionRequest
from sensorium.server.http.protocol.rendering import ChatRenderRequest, CompletionRenderRequest
from sensorium.server.http.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from sensorium.server.http.tokens.rendering import render_chat, render_completion
from sensorium.server.http.tokens.tokenizing import answer_detokenize, answer_tokenize

_LOCAL_ERRORS = (400, 401, 404, 408, 413, 429, 500)  # of what needs neither media nor an engine


def make_render_router(context: Context, failures: FailureLog) -> APIRouter:
    del failures
    router = APIRouter(tags=["render"])

    @router.post(
        "/v1/chat/completions/render",
        responses=make_responses("RenderedRequest", *RENDERING_ERRORS, has_msgpack=True),
        openapi_extra=make_body(ChatRenderRequest),
    )
    async def render_chat_completion(request: Request) -> Response:
        """A conversation as the model reads it: what `/inference/v1/generate` takes."""
        return await render_chat(request, context)

    @router.post(
        "/v1/completions/render",
        responses=make_responses("RenderedRequestList", *RENDERING_ERRORS, has_msgpack=True),
        openapi_extra=make_body(CompletionRenderRequest),
    )
    async def render_prompts(request: Request) -> Response:
        """Prompts as the model reads them: one request for `/inference/v1/generate` each."""
        return await render_completion(request, context)

    @router.post(
        "/tokenize",
        responses=make_responses("TokenizeResponse", *RENDERING_ERRORS),
        openapi_extra=make_body(TokenizeRequest),
    )
    async def tokenize(request: Request) -> Response:
        """The tokens of a text or a conversation, with those of its media."""
        return await answer_tokenize(request, context)

    @router.post(
        "/detokenize",
        responses=make_responses("DetokenizeResponse", *_LOCAL_ERRORS),
        openapi_extra=make_body(DetokenizeRequest),
    )
    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        return await answer_detokenize(request, context)

    @router.post(
        "/v1/chat/completions/derender",
        responses=make_responses("DerenderedChat", *_LOCAL_ERRORS, has_msgpack=True),
        openapi_extra=make_body(DerenderChatRequest, has_msgpack=True),
    )
    async def derender_chat_completion(request: Request) -> Response:
        """What `/inference/v1/generate` answered as a chat's answer. With `stream`, one chunk."""
        return await answer_chat_derender(request, context)

    @router.post(
        "/v1/completions/derender",
        responses=make_responses("DerenderedCompletion", *_LOCAL_ERRORS, has_msgpack=True),
        openapi_extra=make_body(DerenderCompletionRequest, has_msgpack=True),
    )
    async def derender_completions(request: Request) -> Response:
        """What `/inference/v1/generate` answered as completions. With `stream`, one chunk."""
        return await answer_completion_derender(request, context)

    return router
