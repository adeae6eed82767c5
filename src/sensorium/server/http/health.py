"""Routes for those who watch the server."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from sensorium import __version__
from sensorium.server.http.calls import Context
from sensorium.server.http.errors import RETRY_AFTER_S, ApiError
from sensorium.server.http.middleware.authentication import METRICS_PATH
from sensorium.server.http.openapi import make_responses


def make_health_router(context: Context) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get("/health", responses=make_responses(None, 503))
    async def health() -> Response:
        """Whether the engine is there, and moves on."""
        if not context.engine.is_connected:
            raise _make_unhealthy("the engine is not there", code="engine_lost")
        if context.engine.is_stalled:
            words = "the engine makes no progress; it is started again if that goes on"
            raise _make_unhealthy(words, code="engine_stalled")
        return JSONResponse({})

    @router.get("/ping", responses=make_responses(None))
    @router.post("/ping", responses=make_responses(None))
    async def ping() -> Response:
        """Whether this process is there."""
        return JSONResponse({})

    @router.get("/version", responses=make_responses(None))
    async def get_version() -> Response:
        """The version, and by which kernels the engine computes."""
        info = context.engine.info
        kernels = {} if info is None else info.kernels
        return JSONResponse({"version": __version__, **({"kernels": kernels} if kernels else {})})

    @router.get("/load", responses=make_responses(None, 401))
    async def get_load() -> Response:
        """Requests for text in all frontends, from their arrival to their last byte."""
        load = await asyncio.to_thread(context.metrics.get_load)
        return JSONResponse({"server_load": load})

    @router.get(METRICS_PATH, include_in_schema=False)
    async def get_metrics() -> Response:
        body, content_type = await asyncio.to_thread(context.metrics.render)
        return Response(body, headers={"content-type": content_type})

    return router


def _make_unhealthy(message: str, *, code: str) -> ApiError:
    return ApiError(
        message,
        status=503,
        code=code,
        reason=None,
        headers={"retry-after": str(RETRY_AFTER_S)},
    )
