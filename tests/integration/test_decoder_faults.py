"""A server with a bug in its decoding answers 500 and logs the traceback; a bad file is a 400."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.media import make_melody, write_audio
from tests.support.server import POOL, ServerProcess

pytestmark = pytest.mark.xdist_group("decoder-faults")

MARK = b"this file meets a bug of ours"
# The server runs this before all else, and its processes are forks. Only the marked file meets the
# bug, so that everything which the server does on its own works.
BUG = f"""
import io
import av

_open = av.open

def open(file, *args, **options):
    if isinstance(file, io.BytesIO) and {MARK!r} in file.getvalue():
        raise TypeError("open() got an unexpected keyword argument 'imagined'")
    return _open(file, *args, **options)

av.open = open
"""
SOUND = write_audio(make_melody(8000), "WAV", "PCM_16")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    server = ServerProcess("sensorium-mini", *POOL, before=BUG)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def ask(server: ServerProcess, audio: bytes) -> httpx.Response:
    data = base64.b64encode(audio).decode()
    content: list[Any] = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "text", "text": "What is said?"},
    ]
    return server.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": content}], "max_tokens": 2},
    )


def test_a_bug_in_decoding_is_a_500_and_logged(server: ServerProcess) -> None:
    answer = ask(server, SOUND + MARK)
    assert answer.status_code == 500, answer.text
    assert "imagined" not in answer.text
    assert "damaged" not in answer.text
    server.wait_for_output("open() got an unexpected keyword argument 'imagined'")
    assert "Traceback (most recent call last)" in server.output
    assert str(Path("decoding") / "guards.py") in server.output


def test_a_bad_file_is_a_400_and_a_good_one_is_answered(server: ServerProcess) -> None:
    answer = ask(server, b"RIFF" + bytes(100))
    assert answer.status_code == 400, answer.text
    assert "its format is not supported, or it is damaged" in answer.json()["error"]["message"]
    assert ask(server, SOUND).status_code == 200
