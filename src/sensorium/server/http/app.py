"""The HTTP application: routes, and what every request passes on its way to them.

From the outside in: an id, the time of the response, CORS, the answer to every error, the origin,
the API key, the limit of requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from sensorium import __version__
from sensorium.engine.async_engine import AsyncEngine
from sensorium.render.answers.format import PLAIN, AnswerFormat
from sensorium.server.http.admin import make_admin_router
from sensorium.server.http.bodies.body_intake import BodyIntake, BodyLimits
from sensorium.server.http.calls import TRACE_HEADER, Context
from sensorium.server.http.connections.loop_lag import measure_loop_lag
from sensorium.server.http.errors import ErrorResponse, FailureLog, get_phrase
from sensorium.server.http.health import make_health_router
from sensorium.server.http.http_options import HttpOptions
from sensorium.server.http.middleware.admission import Admission, get_limit
from sensorium.server.http.middleware.authentication import Authentication
from sensorium.server.http.middleware.error_boundary import ErrorBoundary
from sensorium.server.http.middleware.origins import OriginGuard, OriginPolicy
from sensorium.server.http.middleware.render_only import make_refusing_router
from sensorium.server.http.middleware.request_ids import HEADER, RequestIds
from sensorium.server.http.middleware.response_times import ResponseTimes
from sensorium.server.http.openai.text_routes import make_models_router, make_text_router
from sensorium.server.http.openapi import install_openapi
from sensorium.server.http.tokens.generate_route import make_generate_router
from sensorium.server.http.tokens.render_routes import make_render_router
from sensorium.server.http.welcome.welcome import make_welcome_router
from sensorium.server.metrics.frontend import FrontendMetrics

_KIBIBYTE = 2**10
_MEBIBYTE = 2**20


def make_app(
    engine: AsyncEngine,
    options: HttpOptions,
    metrics: FrontendMetrics,
    *,
    answers: AnswerFormat = PLAIN,
) -> FastAPI:
    context = Context(
        engine=engine,
        answers=answers,
        options=options,
        metrics=metrics,
        bodies=BodyIntake(_get_body_limits(options)),
        started=int(time.time()),
    )
    failures = FailureLog(metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        task = asyncio.create_task(measure_loop_lag(metrics.observe_loop_lag))
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    app = FastAPI(
        title="Sensorium",
        version=__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        middleware=_make_middleware(options, metrics, failures),
        exception_handlers={HTTPException: _answer_http_exception},
    )
    if options.is_render_only:
        app.include_router(make_refusing_router())
    else:
        app.include_router(make_text_router(context, failures))
        app.include_router(make_generate_router(context, failures))
        app.include_router(make_welcome_router())
    app.include_router(make_render_router(context, failures))
    app.include_router(make_models_router(context))
    app.include_router(make_health_router(context))
    app.include_router(make_admin_router(context))
    install_openapi(app, needs_key=bool(options.api_key), model_names=options.model_names)
    return app


def _get_body_limits(options: HttpOptions) -> BodyLimits:
    # One body of the allowed size must fit, whatever else was asked for.
    max_unfinished_mb = max(options.max_unfinished_bodies_mb, options.max_body_mb)
    return BodyLimits(
        max_bytes=options.max_body_mb * _MEBIBYTE,
        timeout_s=options.body_timeout,
        min_bytes_per_s=options.min_body_rate * _KIBIBYTE,
        max_unfinished_bytes=max_unfinished_mb * _MEBIBYTE,
    )


def _make_middleware(
    options: HttpOptions, metrics: FrontendMetrics, failures: FailureLog
) -> list[Middleware]:
    layers = [Middleware(RequestIds), Middleware(ResponseTimes, metrics=metrics)]
    if options.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*", "authorization", HEADER, TRACE_HEADER],
            expose_headers=[HEADER],
        )
        layers.append(cors)
    layers.append(Middleware(ErrorBoundary, failures=failures))
    policy = OriginPolicy(
        host=options.host,
        allowed_hosts=options.allowed_hosts,
        allowed_origins=options.allowed_origins,
    )
    layers.append(Middleware(OriginGuard, policy=policy))
    if options.api_key:
        keys = Middleware(
            Authentication,
            keys=options.api_key,
            protect_metrics=options.protect_metrics,
            shares_uuids=options.share_uuids,
        )
        layers.append(keys)
    limit = get_limit(options.max_concurrent_requests, options.api_server_count)
    layers.append(Middleware(Admission, limit=limit, metrics=metrics))
    return layers


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """What the router itself refuses: unknown routes and methods."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    words = f"{get_phrase(status)}: {request.method} {request.url.path[:200]}"
    code = {404: "route_not_found", 405: "method_not_allowed"}.get(status)
    answer = ErrorResponse(status=status, message=words, code=code, headers=headers or {})
    return answer.make_response()
