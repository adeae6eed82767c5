"""Row 20: audio longer than a model's window is never truncated silently."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest

from tests.support.media import RATE, make_melody, write_audio
from tests.support.server import ServerProcess

pytestmark = pytest.mark.xdist_group("mini")


@pytest.fixture(scope="module")
def server(mini_server: ServerProcess) -> ServerProcess:
    return mini_server


def send(server: ServerProcess, seconds: list[float], path: str = "") -> httpx.Response:
    parts: list[dict[str, Any]] = []
    for number, duration_s in enumerate(seconds):
        melody = make_melody(round(duration_s * RATE), pitch=300.0 + 40 * number)
        data = base64.b64encode(write_audio(melody, "WAV", "PCM_16")).decode()
        parts.append({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
    content = [*parts, {"type": "text", "text": "What do you hear?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
    return server.post(f"/v1/chat/completions{path}", body)


@pytest.mark.parametrize("path", ["", "/render"])
def test_audio_beyond_the_window_is_refused_with_both_lengths(
    server: ServerProcess, path: str
) -> None:
    for seconds in (41.2, 30.2, 120.0):
        response = send(server, [seconds], path)
        assert response.status_code == 400, response.text
        message = response.json()["error"]["message"]
        expected = f"the audio is {seconds:.4g} s long; this model takes at most 30 s"
        assert message.endswith(f"{expected}: send it in pieces")


def test_audio_as_long_as_the_window_is_answered(server: ServerProcess) -> None:
    assert send(server, [30.0]).status_code == 200


def test_long_audio_in_pieces_is_answered(server: ServerProcess) -> None:
    response = send(server, [8.0, 8.0])
    assert response.status_code == 200, response.text
