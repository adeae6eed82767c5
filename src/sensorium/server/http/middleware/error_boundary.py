"""Answers every error that nobody else has answered."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sensorium.server.http.errors import ClientGoneError, FailureLog
from sensorium.types.errors import CapacityError


class ErrorBoundary:
    """What comes after the status can't be answered any more, and goes on. A call is cancelled
    when the server stops and can't wait for it: for a body that comes slowly, or a client that
    does not read.
    """

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
        except asyncio.CancelledError:
            if not is_started:
                stopping = CapacityError("the server is stopping")
                answer = self._failures.report(stopping, scope["state"])
                await answer.make_response()(scope, receive, send)
        except Exception as error:  # the boundary: nothing may pass it unanswered
            answer = self._failures.report(error, scope["state"])
            if not is_started:
                await answer.make_response()(scope, receive, send)
            else:
                raise
