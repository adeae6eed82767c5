"""OpenAI's routes: text from conversations and prompts, and the models."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sensorium.server.http.calls import Context
from sensorium.server.http.errors import FailureLog
from sensorium.server.http.openai.chat import answer_chat
from sensorium.server.http.openai.completions import answer_completion
from sensorium.server.http.openai.models import get_model, list_models
from sensorium.server.http.openapi import GENERATING_ERRORS, make_body, make_responses
from sensorium.server.http.protocol.chat import ChatCompletionRequest
from sensorium.server.http.protocol.completions import CompletionRequest

_MODEL_PARAMETER = {
    "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
}


def make_text_router(context: Context, failures: FailureLog) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["text"])

    @router.post(
        "/chat/completions",
        responses=make_responses("ChatCompletion", *GENERATING_ERRORS, chunk="ChatCompletionChunk"),
        openapi_extra=make_body(ChatCompletionRequest),
    )
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation. With `stream`, events of `ChatCompletionChunk`."""
        return await answer_chat(request, context, failures)

    @router.post(
        "/completions",
        responses=make_responses("Completion", *GENERATING_ERRORS, chunk="Completion"),
        openapi_extra=make_body(CompletionRequest),
    )
    async def create_completion(request: Request) -> Response:
        """Continue prompts. With `stream`, events of `Completion`."""
        return await answer_completion(request, context, failures)

    return router


def make_models_router(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["text"])

    @router.get("/models", responses=make_responses("ModelList", 401))
    async def get_models() -> Response:
        return _make_response(list_models(context))

    @router.get(
        "/models/{model:path}",
        responses=make_responses("ModelCard", 401, 404),
        openapi_extra=_MODEL_PARAMETER,
    )
    async def get_one_model(request: Request) -> Response:
        return _make_response(get_model(context, request.path_params["model"]))

    return router


def _make_response(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
