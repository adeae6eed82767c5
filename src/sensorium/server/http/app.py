"""Makes the HTTP application: its routes, and the middleware that every request passes first.

The middleware from the outside in: the request's id and time, CORS, the response to errors, the
check of the origin, the API key, and the limit of concurrent requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from sensorium.engine.async_engine import AsyncEngine
from sensorium.render.answers.format import PLAIN, AnswerFormat
from sensorium.server.http.access import Authentication, OriginGuard, OriginPolicy
from sensorium.server.http.bodies.intake import BodyIntake, BodyLimits
from sensorium.server.http.calls import TRACE_HEADER, Context, Transcriber
from sensorium.server.http.connections import measure_loop_lag
from sensorium.server.http.errors import ApiError, FailureLog
from sensorium.server.http.middleware import (
    HEADER,
    WARNING_HEADER,
    Admission,
    ErrorBoundary,
    RequestCount,
    RequestTracking,
)
from sensorium.server.http.routes import COUNTED_PATHS, make_routes
from sensorium.server.metrics.frontend import FrontendMetrics
from sensorium.server.options import ServeOptions
from sensorium.speech.live.session import LiveSource
from sensorium.types.model_kind import PROMPT_TASKS, Task

_KIBIBYTE = 2**10
_MEBIBYTE = 2**20


def make_app(
    engine: AsyncEngine,
    options: ServeOptions,
    metrics: FrontendMetrics,
    *,
    answers: AnswerFormat = PLAIN,
    count: RequestCount | None = None,
    sessions: RequestCount | None = None,
    transcriber: Transcriber | None = None,
    live: LiveSource | None = None,
    tasks: frozenset[Task] = PROMPT_TASKS,
) -> Starlette:
    """Return the ASGI application that serves this engine over HTTP.

    `count` and `sessions` count the requests and the live sessions of all frontends; without them
    this frontend is the only one. `Context` explains the other arguments.
    """
    count = RequestCount([0.0]) if count is None else count
    sessions = RequestCount([0.0]) if sessions is None else sessions
    context = Context(
        engine=engine,
        answers=answers,
        options=options,
        metrics=metrics,
        failures=FailureLog(metrics),
        bodies=BodyIntake(_get_body_limits(options)),
        uploads=BodyIntake(_get_upload_limits(options)),
        started=int(time.time()),
        transcriber=transcriber,
        live=live,
        tasks=tasks,
    )

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(measure_loop_lag(metrics.observe_loop_lag))
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    app = Starlette(
        routes=make_routes(context),
        lifespan=lifespan,
        middleware=_make_middleware(options, metrics, context.failures, count, sessions),
        exception_handlers={HTTPException: _answer_http_exception},  # type: ignore[dict-item]
    )
    app.router.redirect_slashes = False
    return app


def _get_body_limits(options: ServeOptions) -> BodyLimits:
    # One body of the allowed size must always fit, even if the option is smaller.
    max_unfinished_mb = max(options.max_unfinished_bodies_mb, options.max_body_mb)
    return BodyLimits(
        max_bytes=options.max_body_mb * _MEBIBYTE,
        timeout_s=options.body_timeout,
        min_bytes_per_s=options.min_body_rate * _KIBIBYTE,
        max_unfinished_bytes=max_unfinished_mb * _MEBIBYTE,
    )


def _get_upload_limits(options: ServeOptions) -> BodyLimits:
    max_unfinished_mb = max(options.max_unfinished_bodies_mb, options.max_upload_mb)
    return replace(
        _get_body_limits(options),
        max_bytes=options.max_upload_mb * _MEBIBYTE,
        max_unfinished_bytes=max_unfinished_mb * _MEBIBYTE,
        size_option="--max-upload-mb",
    )


def _make_middleware(
    options: ServeOptions,
    metrics: FrontendMetrics,
    failures: FailureLog,
    count: RequestCount,
    sessions: RequestCount,
) -> list[Middleware]:
    layers = [Middleware(RequestTracking, metrics=metrics)]
    if options.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*", "authorization", HEADER, TRACE_HEADER],
            expose_headers=[HEADER, WARNING_HEADER],
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
    admission = Middleware(
        Admission,
        paths=COUNTED_PATHS,
        limit=options.max_concurrent_requests,
        count=count,
        session_limit=options.max_realtime_sessions,
        sessions=sessions,
        metrics=metrics,
    )
    return [*layers, admission]


async def _answer_http_exception(request: Request, error: HTTPException) -> Response:
    """Return the response for an unknown path or method, which Starlette's router refuses."""
    return ApiError(
        f"{error.detail}: {request.method} {request.url.path[:200]}",
        status=error.status_code,
        code={404: "route_not_found", 405: "method_not_allowed"}.get(error.status_code),
        headers=error.headers or {},
    ).make_response()
