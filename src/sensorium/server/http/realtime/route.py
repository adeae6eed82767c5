"""The route `/v1/realtime`: speech that is transcribed while it is spoken, over a WebSocket."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from starlette.websockets import WebSocket, WebSocketDisconnect

from sensorium.server.http.calls import Context, check_model
from sensorium.server.http.errors import ApiError
from sensorium.server.http.openai.audio import get_transcriber
from sensorium.server.http.realtime.connection import UNREAD, Deadlines, RealtimeConnection
from sensorium.server.http.realtime.dialects import Dialect
from sensorium.server.http.realtime.openai_dialect import OpenAIDialect
from sensorium.server.http.realtime.vllm_dialect import VllmDialect
from sensorium.speech.live.session import LiveSource

_SUBPROTOCOL = "realtime"  # the one that OpenAI's clients in browsers offer, beside their key


async def serve_realtime(websocket: WebSocket, context: Context) -> None:
    """Serve one live session, or raise an `ApiError` before the WebSocket is accepted."""
    source = _get_source(context)
    dialect = _choose_dialect(websocket, context, source)
    options, state = context.options, websocket.scope["state"]
    offered = websocket.scope.get("subprotocols") or ()
    await websocket.accept(_SUBPROTOCOL if _SUBPROTOCOL in offered else None)
    with context.metrics.track_websocket():
        clock = context.metrics.start_session()
        connection = RealtimeConnection(
            websocket=websocket,
            dialect=dialect,
            session=source.open(dialect.options),
            deadlines=Deadlines(
                options.realtime_idle_timeout, options.realtime_max_session, time.monotonic()
            ),
            clock=clock,
            failures=context.failures,
            draining=state.get("draining") or asyncio.Event(),
            send_timeout_s=options.stream_timeout or None,
        )
        end = "internal"
        try:
            ending = await connection.run()
            end = ending.name
        finally:
            clock.end(end)
    if ending is UNREAD and "abort" in state:
        state["abort"]()
    elif ending.code is not None:
        with suppress(WebSocketDisconnect, RuntimeError):  # the client has left meanwhile
            await websocket.close(ending.code, ending.words)


def _get_source(context: Context) -> LiveSource:
    get_transcriber(context, "transcribe")  # raises if the model does not transcribe
    if context.live is None:
        raise ApiError("This server has no live sessions.", code="unsupported_route")
    return context.live


def _choose_dialect(websocket: WebSocket, context: Context, source: LiveSource) -> Dialect:
    """Return the dialect that the address asks for, because both greet before the client speaks."""
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
