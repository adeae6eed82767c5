"""The routes that a server without an engine lacks: they say so, and where to go."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sensorium.server.http.errors import ApiError

GENERATING_PATHS = ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate")


def make_refusing_router() -> APIRouter:
    router = APIRouter()

    async def refuse(request: Request) -> Response:
        # 404, not 501: clients repeat what a server failed at, and this one never will.
        raise ApiError(
            f"{request.url.path}: this server only renders, no model runs here. Ask a server that "
            "was started with `sensorium serve`",
            status=404,
            code="render_only",
            reason="not_found",
        )

    for path in GENERATING_PATHS:
        router.add_api_route(path, refuse, methods=["POST"], include_in_schema=False)
    router.add_api_route("/", refuse, methods=["GET", "HEAD"], include_in_schema=False)
    return router
