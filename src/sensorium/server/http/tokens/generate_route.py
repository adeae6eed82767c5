"""The route for tokens in and tokens out."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sensorium.server.http.calls import Context
from sensorium.server.http.errors import FailureLog
from sensorium.server.http.openapi import GENERATING_ERRORS, make_body, make_responses
from sensorium.server.http.protocol.token_wire import GenerateRequest
from sensorium.server.http.tokens.generate import answer_generate


def make_generate_router(context: Context, failures: FailureLog) -> APIRouter:
    router = APIRouter(prefix="/inference/v1", tags=["tokens"])

    @router.post(
        "/generate",
        responses=make_responses("GenerateResponse", *GENERATING_ERRORS, chunk="GenerateResponse"),
        openapi_extra=make_body(GenerateRequest, has_msgpack=True),
    )
    async def generate(request: Request) -> Response:
        """Continue token ids. With `stream`, events of `GenerateResponse`."""
        return await answer_generate(request, context, failures)

    return router
