"""ASGI middleware for every request: its id, its time, its errors, and the limit of requests."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Container, Iterator, MutableSequence
from contextlib import ExitStack, contextmanager

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sensorium.server.http.errors import RETRY_AFTER_S, ApiError, ClientGoneError, FailureLog
from sensorium.server.metrics.frontend import FrontendMetrics
from sensorium.types.errors import StoppingError

HEADER = "x-request-id"
WARNING_HEADER = "x-sensorium-warning"  # a field of the request that is probably misspelt
SESSION_PATH = "/v1/realtime"
_MAX_LENGTH = 128
_NO_ROUTE = "none"  # unknown paths must not become time series of their own in the metrics
_KINDS = ("http", "websocket")
# The messages that begin a response; those for a WebSocket accept or refuse it.
_STARTS = ("http.response.start", "websocket.http.response.start", "websocket.accept")
_METHODS = frozenset({"GET", "POST", "OPTIONS", "HEAD", "PUT", "PATCH", "DELETE"})


class RequestTracking:
    """The outermost ASGI middleware, which gives requests an id, and counts and times responses.

    A response that is not sent to its end, because its client has left, is not counted.
    """

    def __init__(self, app: ASGIApp, metrics: FrontendMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in _KINDS:
            await self._app(scope, receive, send)
            return
        request_id = choose_request_id(scope)
        state = scope.setdefault("state", {})
        state["request_id"], state["arrived"] = request_id, time.monotonic()
        status: int | None = None

        async def send_tracked(message: Message) -> None:
            nonlocal status
            if message["type"] in _STARTS:
                status = message.get("status")  # an accepted WebSocket has none
                message.setdefault("headers", [])
                headers = MutableHeaders(scope=message)
                headers[HEADER] = request_id
                if "warning" in state:
                    headers[WARNING_HEADER] = state["warning"]
            elif status is not None and not message.get("more_body", False):
                self._observe(scope, status)
            await send(message)

        await self._app(scope, receive, send_tracked)

    def _observe(self, scope: Scope, status: int) -> None:
        route = scope.get("route")
        self._metrics.observe_response(
            handler=_NO_ROUTE if route is None else route.path,
            method=_get_method(scope),
            status=status,
            seconds=time.monotonic() - scope["state"]["arrived"],
        )


def _get_method(scope: Scope) -> str:
    """Return the method for the metrics: "other" if it is unknown, and GET for a WebSocket."""
    method: str = scope.get("method", "GET")
    return method if method in _METHODS else "other"


def choose_request_id(scope: Scope) -> str:
    """Return the request id that the client sent if it is short and printable, or a random one."""
    given = Headers(scope=scope).get(HEADER, "")
    return given if _is_sane(given) else uuid.uuid4().hex


def _is_sane(text: str) -> bool:
    return 0 < len(text) <= _MAX_LENGTH and all(" " <= character <= "~" for character in text)


class ErrorBoundary:
    """ASGI middleware that turns every exception of a request into an error response.

    If the status was already sent, the exception is raised again. A request is cancelled if the
    server stops and can't wait for it, because its body comes slowly or its client does not read.
    Then it gets the status 503. A WebSocket is refused with an error response until it is accepted.
    """

    def __init__(self, app: ASGIApp, failures: FailureLog) -> None:
        self._app = app
        self._failures = failures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in _KINDS:
            await self._app(scope, receive, send)
            return
        is_started = False

        async def watch_start(message: Message) -> None:
            nonlocal is_started
            is_started = is_started or message["type"] in _STARTS
            await send(message)

        try:
            await self._app(scope, receive, watch_start)
        except ClientGoneError:
            pass  # no response can be sent any more
        except asyncio.CancelledError:
            if not is_started:
                stopping = StoppingError("the server is stopping: try again later")
                answer = self._failures.report(stopping, scope["state"])
                await answer.make_response()(scope, receive, send)
        except Exception as error:  # every error must get an answer
            answer = self._failures.report(error, scope["state"])
            if is_started:
                raise
            await answer.make_response()(scope, receive, send)


class RequestCount:
    """The number of requests that all frontends of a server serve at present.

    `numbers` has one entry per frontend, in shared memory; each frontend changes only its own, at
    `index`. The limit is for the sum, because connections are spread unevenly over frontends.
    """

    def __init__(self, numbers: MutableSequence[float] | memoryview[float], index: int = 0) -> None:
        self._numbers = numbers
        self._index = index

    def add(self, number: int) -> None:
        self._numbers[self._index] += number

    @property
    def total(self) -> int:
        """Return the number of requests of all frontends.

        Other frontends may change their numbers meanwhile, so all together may slightly exceed a
        limit.
        """
        return int(sum(self._numbers))


class Admission:
    """ASGI middleware that limits how many POST requests to `paths` are served at once.

    A request counts from its handler's call of `request.state.admit()` until its end. If all
    frontends together serve `limit` requests, that call raises an `ApiError` with the status 429.
    All requests must run on one event loop. A WebSocket to `SESSION_PATH` counts from its start,
    and is refused in the same way, also if there are already `session_limit` of them.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        paths: Container[str],
        limit: int,
        count: RequestCount,
        session_limit: int,
        sessions: RequestCount,
        metrics: FrontendMetrics,
    ) -> None:
        self._app = app
        self._paths = paths  # the routes that are limited
        self._limit = limit
        self._count = count
        self._session_limit = session_limit
        self._sessions = sessions
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and scope["path"] == SESSION_PATH:
            with self._metrics.track_arrival(), self._admit(), self._admit_session():
                await self._app(scope, receive, send)
            return
        is_generating = scope["type"] == "http" and scope["path"] in self._paths
        if not is_generating or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        self._check()  # early, so that no large body is received only to be refused
        with self._metrics.track_arrival(), ExitStack() as held:
            scope["state"]["admit"] = lambda: held.enter_context(self._admit())
            await self._app(scope, receive, send)

    @contextmanager
    def _admit(self) -> Iterator[None]:
        self._check()
        self._count.add(1)
        try:
            yield
        finally:
            self._count.add(-1)

    @contextmanager
    def _admit_session(self) -> Iterator[None]:
        if self._sessions.total >= self._session_limit:
            raise _make_limit_error(
                f"Too many realtime sessions (limit {self._session_limit}). Retry later."
            )
        self._sessions.add(1)
        try:
            yield
        finally:
            self._sessions.add(-1)

    def _check(self) -> None:
        if self._count.total >= self._limit:
            raise _make_limit_error(
                f"Too many concurrent requests (limit {self._limit}). Retry later."
            )


def _make_limit_error(words: str) -> ApiError:
    return ApiError(
        words,
        status=429,
        code="too_many_requests",
        reason="capacity",
        headers={"retry-after": str(RETRY_AFTER_S)},
    )
