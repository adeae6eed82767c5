"""Attack 21: short clips with options with which a Whisper writes without end.

A repetition penalty far below 1 makes the model repeat its prompt, in each window and at each
temperature. Without a bound, a clip of a second may then have dozens of windows, and take six
texts of 444 tokens for each of them.
"""

from __future__ import annotations

import io
import struct
import sys
import time
import wave
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np

from attacks.asking import keep_asking
from attacks.neighbours import Neighbours

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

FLAGS: tuple[str, ...] = ()
ROUTE = "/v1/audio/transcriptions"
SECONDS = 1.5
_LONG_S = 6.0
_RATE = 16_000
_NUM_CLIENTS = 4
_MAX_REQUESTS = 200  # of each client, so that the attack ends by itself
_TIMEOUT_S = 300.0
_serial_numbers = count(time.time_ns())


def make_model(directory: Path) -> str:
    """Make a tiny Whisper with random weights, and return its path."""
    from sensorium.models import ensure_torchvision

    ensure_torchvision()
    from tiny_models.speech import make_brief_whisper

    make_brief_whisper(directory)
    return str(directory)


def make_audio(seconds: float, *, is_new: bool = False) -> bytes:
    """Return a WAV file with noise, which no cache has seen if it is to be new."""
    noise = np.random.default_rng(0).normal(0, 3000, round(seconds * _RATE))
    file = io.BytesIO()
    with wave.open(file, "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(2)
        audio.setframerate(_RATE)
        audio.writeframes(noise.astype("<i2").tobytes())
    content = file.getvalue()
    if is_new:  # a chunk that readers skip
        note = str(next(_serial_numbers)).rjust(24).encode()
        content += b"note" + struct.pack("<I", len(note)) + note
        content = content[:4] + struct.pack("<I", len(content) - 8) + content[8:]
    return content


def make_request(seconds: float = SECONDS, *, is_new: bool = True, **fields: str) -> dict[str, Any]:
    """Return the form of a transcription, as arguments of `httpx.Client.post`."""
    file = ("sound.wav", make_audio(seconds, is_new=is_new))
    return {"files": {"file": file}, "data": {"language": "en", **fields}}


def make_attack(seconds: float = SECONDS) -> dict[str, Any]:
    return make_request(seconds, prompt=" ".join(ascii_lowercase), repetition_penalty="0.01")


class OpenStreams(Neighbours):
    """Three clients that have clips transcribed: a known one, a new one, and a longer new one."""

    kinds = ("known sound", "new sound", "longer sound")
    route = ROUTE

    def make_request(self, kind: str) -> dict[str, Any]:
        seconds = _LONG_S if kind == "longer sound" else SECONDS
        return make_request(seconds, is_new=kind != "known sound")

    def read_answer(self, answer: Any) -> str:
        return str(answer["text"])


def attack(url: str) -> AbstractContextManager[list[int]]:
    """Send new clips from four clients. The list fills with the answers' statuses."""
    return keep_asking(
        url,
        lambda client: client.post(ROUTE, **make_attack()),
        num_clients=_NUM_CLIENTS,
        max_requests=_MAX_REQUESTS,
        timeout_s=_TIMEOUT_S,
    )
