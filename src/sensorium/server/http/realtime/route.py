"""The route `/v1/realtime`, which transcribes speech over a WebSocket while it is spoken."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from starlette.websockets import WebSocket, WebSocketDisconnect

from sensorium.server.http.calls import Context, check_model
from sensorium.server.http.errors import ApiError
from sensorium.server.http.openai.audio import get_transcriber
from sensorium.server.http.realtime.connection import (
    CLIENT_LEFT,
    DRAINING,
    INTERNAL,
    Deadlines,
    Ending,
    RealtimeConnection,
)
from sensorium.server.http.realtime.dialects import Dialect
from sensorium.server.http.realtime.openai_dialect import OpenAIDialect
from sensorium.server.http.realtime.vllm_dialect import VllmDialect
from sensorium.server.metrics.realtime import SessionClock
from sensorium.speech.live.session import LiveSession, LiveSource

logger = logging.getLogger(__name__)
_SUBPROTOCOL = "realtime"  # the one that OpenAI's clients in browsers offer, next to their key
_CLOSE_TIMEOUT_S = 1.0  # for a close frame that waits behind data that the client did not read


async def serve_realtime(websocket: WebSocket, context: Context) -> None:
    """Serve one live session, or raise an error before the WebSocket is accepted."""
    source = _get_source(context)
    dialect = _choose_dialect(websocket, context, source)
    session = source.open(dialect.options)
    try:
        offered = websocket.scope.get("subprotocols") or ()
        await websocket.accept(_SUBPROTOCOL if _SUBPROTOCOL in offered else None)
        ending = await _run(websocket, context, dialect, session)
    finally:
        await session.close()
    await _close(websocket, ending)


async def _run(
    websocket: WebSocket, context: Context, dialect: Dialect, session: LiveSession
) -> Ending:
    """Run a session over an accepted WebSocket, measure it, and return why it ended."""
    options, state = context.options, websocket.scope["state"]
    with context.metrics.track_websocket():
        clock = context.metrics.start_session()
        _log_start(dialect, context.options.model_names[0], state["request_id"])
        ending = INTERNAL
        try:
            connection = RealtimeConnection(
                websocket=websocket,
                dialect=dialect,
                session=session,
                deadlines=Deadlines(
                    options.realtime_idle_timeout, options.realtime_max_session, time.monotonic()
                ),
                clock=clock,
                failures=context.failures,
                draining=state.get("draining") or asyncio.Event(),
                lost=state.get("lost") or asyncio.Event(),
                send_timeout_s=options.stream_timeout or None,
            )
            ending = await connection.run()
        except asyncio.CancelledError:  # the server can't wait for this session any longer
            ending = DRAINING
            await _close(websocket, ending)
            if "hang_up" in state:
                state["hang_up"]()  # the event loop ends, and can't wait for the client's answer
            raise
        finally:
            clock.end(ending.name)
            _log_end(dialect, ending, clock)
    return ending


def _log_start(dialect: Dialect, model: str, request_id: str) -> None:
    fields = {
        "session": dialect.session_id,
        "request": request_id,
        "model": model,
        "dialect": dialect.name,
    }
    logger.info(
        "live session %s opens: request %s, model %s, %s dialect",
        *fields.values(),
        extra={"fields": fields},
    )


def _log_end(dialect: Dialect, ending: Ending, clock: SessionClock) -> None:
    fields = {
        "session": dialect.session_id,
        "end": ending.name,
        "close_code": ending.code,
        "seconds": round(clock.elapsed_s, 3),
        "audio_seconds": round(clock.audio_s, 3),
        "items": clock.num_items,
        "failed_items": clock.num_failed,
    }
    logger.info(
        "live session %s ended: %s%s, after %s s with %s s of audio, %s items, %s of them failed",
        *(fields | {"close_code": f" ({ending.code})" if ending.code else ""}).values(),
        extra={"fields": fields},
    )


async def _close(websocket: WebSocket, ending: Ending) -> None:
    """Send the close frame, or drop the connection of a client that does not take it."""
    if ending.code is not None:
        with suppress(
            WebSocketDisconnect, RuntimeError, TimeoutError
        ):  # it may have left meanwhile
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await websocket.close(ending.code, ending.words)
                return
    if ending is not CLIENT_LEFT and "abort" in websocket.scope["state"]:
        websocket.scope["state"]["abort"]()


def _get_source(context: Context) -> LiveSource:
    get_transcriber(context, "transcribe")  # raises if the model does not transcribe
    if context.live is None:
        raise ApiError("This server has no live sessions.", code="unsupported_route")
    return context.live


def _choose_dialect(websocket: WebSocket, context: Context, source: LiveSource) -> Dialect:
    """Return the dialect, which the address decides because the server sends the first message."""
    query, names = websocket.query_params, context.options.model_names
    model, intent = query.get("model"), query.get("intent")
    check_model(model, names)
    if intent not in (None, "transcription"):
        raise ApiError(
            "This server has transcription sessions only: set intent to transcription.",
            param="intent",
        )
    default = "vllm" if model is None and intent is None else "openai"
    dialect = query.get("dialect", default)
    if dialect == "vllm":
        return VllmDialect(source=source, model_names=names)
    if dialect == "openai":
        max_s = context.options.realtime_max_session
        expires_at = int(time.time() + max_s) if max_s else None
        return OpenAIDialect(
            source=source, model=model or names[0], model_names=names, expires_at=expires_at
        )
    raise ApiError("The dialect must be openai or vllm.", param="dialect")
