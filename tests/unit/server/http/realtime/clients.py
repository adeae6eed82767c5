"""Clients of live sessions, and what is left of a session at a server that stands in."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus

from tests.support.talking import (
    LOUD,
    QUIET,
    Talker,
    make_tones,
)
from tests.support.waiting import wait_until
from tests.unit.server.standing_in import RunningServer
from tests.unit.server.transcribing import ScriptedTranscriber

OPENAI = "?intent=transcription"
SPOKEN = make_tones((QUIET, 0.5), (LOUD, 1.0), (QUIET, 1.0))
PCM16K = {"type": "audio/pcm", "rate": 16_000}
COMPLETED = "conversation.item.input_audio_transcription.completed"
DELTA = "conversation.item.input_audio_transcription.delta"
FAILED = "conversation.item.input_audio_transcription.failed"


def begin(server: RunningServer, **fields: Any) -> Talker:
    """Open a session in OpenAI's dialect that takes audio at 16 kHz."""
    talker = Talker(server.url, OPENAI)
    assert talker.receive()["type"] == "session.created"
    assert talker.set_input(format=PCM16K, **fields)["type"] == "session.updated"
    return talker


def get_types(messages: list[dict[str, Any]]) -> list[str]:
    return [message["type"] for message in messages]


def wait_until_empty(server: RunningServer, transcriber: ScriptedTranscriber) -> None:
    def is_empty() -> bool:
        counts = (server.metrics.load, server.metrics.num_websockets, transcriber.num_open)
        return counts == (0, 0, 0)

    wait_until(is_empty, "nothing of a session is left")
    real = server.metrics.real
    assert real.gauge("sensorium:realtime_sessions_active")._value.get() == 0
    assert real.gauge("sensorium:realtime_waiting_seconds")._value.get() == pytest.approx(0)


def get_ends(server: RunningServer, end: str) -> float:
    series = server.metrics.real.counter("sensorium:realtime_sessions_total", end)
    return float(series._value.get())


def get_refusal(server: RunningServer, query: str = OPENAI, **options: Any) -> httpx.Response:
    with pytest.raises(InvalidStatus) as caught:
        Talker(server.url, query, **options)
    answer = caught.value.response
    headers = list(answer.headers.raw_items())
    return httpx.Response(answer.status_code, headers=headers, content=bytes(answer.body))


def open_raw(server: RunningServer) -> socket.socket:
    """Open a WebSocket that never reads, with a small buffer."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", server.port))
    raw.sendall(
        b"GET /v1/realtime HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\n"
        b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    return raw


def make_frame(text: str) -> bytes:
    """Return a masked text frame, as a client sends it. The mask is zero."""
    body = text.encode()
    return b"\x81\xff" + len(body).to_bytes(8, "big") + bytes(4) + body
