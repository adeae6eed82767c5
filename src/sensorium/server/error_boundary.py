"""Answers every error that nobody else has answered."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sensorium.server.errors import ClientGoneError
from sensorium.server.failures import FailureLog


class ErrorBoundary:
    """What comes after the status can't be answered any more, and goes on."""

    def __init__(self, app: ASGIApp, failures: FailureLog) -> None:
        self._app = app
        self._failures = failures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_started = False

        async def watch_start(message: Message) -> None:
            nonlocal is_started
            is_started = is_started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watch_start)
        except ClientGoneError:
            pass  # nobody reads an answer
        except Exception as error:  # the boundary: nothing may pass it unanswered
            answer = self._failures.report(error, scope["state"])
            if not is_started:
                await answer.make_response()(scope, receive, send)
            else:
                raise
