"""Audio with and without voices, a detector that only looks at loudness, and WebSocket clients."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from websockets.sync.client import ClientConnection, connect

from sensorium.utils.silences import Samples

RATE = 16_000
QUIET, LOUD = 0.0, 0.25
WAIT_S = 120.0


class LoudnessDetector:
    """A stand-in for a detector of voices, which takes everything loud for one."""

    def detect(self, frames: Samples) -> Sequence[float]:
        return [float(np.abs(frame).mean() > 0.01) for frame in frames]


def make_tones(*parts: tuple[float, float], rate: int = RATE) -> Samples:
    """Return audio of parts (loudness, seconds): a tone of 440 Hz."""
    pieces = []
    for loudness, seconds in parts:
        times = np.arange(round(seconds * rate)) / rate
        pieces.append(loudness * np.sin(2 * np.pi * 440 * times))
    return np.concatenate(pieces).astype(np.float32)


def to_pcm16(samples: Samples) -> bytes:
    return np.clip(np.rint(samples * 32767), -32768, 32767).astype("<i2").tobytes()


class Talker:
    """A plain WebSocket client of `/v1/realtime`, which sends and receives JSON."""

    def __init__(self, url: str, query: str = "", **options: Any) -> None:
        address = url.replace("http://", "ws://") + "/v1/realtime" + query
        options = {"open_timeout": WAIT_S, "max_size": None, "compression": None, **options}
        self.socket: ClientConnection = connect(address, **options)

    def __enter__(self) -> Talker:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, kind: str, **fields: Any) -> None:
        self.socket.send(json.dumps({"type": kind, **fields}))

    def append(self, audio: bytes) -> None:
        self.send("input_audio_buffer.append", audio=base64.b64encode(audio).decode())

    def say(self, samples: Samples, *, step: int = 1600) -> None:
        """Send samples as PCM16, in chunks of `step` samples."""
        for start in range(0, len(samples), step):
            self.append(to_pcm16(samples[start : start + step]))

    def commit(self, **fields: Any) -> None:
        self.send("input_audio_buffer.commit", **fields)

    def update(self, **session: Any) -> dict[str, Any]:
        """Send `session.update`, and return the answer."""
        self.send("session.update", session={"type": "transcription", **session})
        return self.receive()

    def set_input(self, **fields: Any) -> dict[str, Any]:
        return self.update(audio={"input": fields})

    def receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self.socket.recv(timeout=WAIT_S))
        return message

    def receive_until(self, kind: str) -> list[dict[str, Any]]:
        """Return all messages up to the first one of this type."""
        found = [self.receive()]
        while found[-1]["type"] != kind:
            found.append(self.receive())
        return found
