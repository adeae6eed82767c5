"""Routes for administration: empty the caches."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from sensorium.server.http.calls import Context
from sensorium.server.http.openapi import make_responses

_LEVELS = ("mm", "encoder", "prefix")


def make_admin_router(context: Context) -> APIRouter:
    router = APIRouter(tags=["administration"])

    def add_route(level: str) -> None:
        @router.post(
            f"/reset_{level}_cache",
            responses=make_responses(None, 401, 503),
            operation_id=f"reset_{level}_cache",
        )
        async def reset_cache() -> Response:
            """Forget what is cached; what runs keeps what it has."""
            await context.engine.reset_cache(level)
            return JSONResponse({})

    for level in _LEVELS[:1] if context.options.is_render_only else _LEVELS:
        add_route(level)
    return router
