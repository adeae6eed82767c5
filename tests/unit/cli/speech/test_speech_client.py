"""A server may answer anything, and files may have any name: each costs its own file only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from sensorium.cli.speech.speech_client import ServerError, SpeechClient
from sensorium.cli.speech.transcript_writer import AudioFile, TranscriptWriter

DONE = b'data: {"type": "transcript.text.done", "text": "Hello."}\n\n'


@contextmanager
def answer(content: bytes) -> Iterator[str]:
    """Run a server that answers every request with the same content; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def transcribe(url: str, *names: str, form: str = "text", key: str | None = None) -> int:
    """Send files to a server, and return how many of them failed."""
    audios = [AudioFile(name) for name in names]
    writer = TranscriptWriter(audios, form, None, is_headed=False)  # type: ignore[arg-type]
    fields = {"response_format": form}
    SpeechClient(url, key=key, task="transcribe", fields=fields).run(audios, writer)
    return writer.num_failed


@pytest.fixture
def audio(tmp_path: Path) -> str:
    path = tmp_path / "a.wav"
    path.write_bytes(b"sound")
    return str(path)


@pytest.mark.parametrize(
    ("content", "form"),
    [
        (b"data: no JSON\n\n", "text"),
        (b'data: {"object": "transcription.chunk", "choices": []}\n\n', "text"),
        (b"data: [1]\n\n", "text"),
        (b'data: {"error": "a text"}\n\n', "text"),
        (b"\xff\xfe", "srt"),
    ],
)
def test_an_answer_of_another_kind_of_server_is_named(
    audio: str, content: bytes, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answer(content) as url:
        assert transcribe(url, audio, form=form) == 1
    assert f"{audio}: the server's answer can't be understood" in capsys.readouterr().err


def test_names_and_keys_may_have_any_bytes(
    audio: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / os.fsdecode(b"\xff.wav")
    other.write_bytes(b"sound")
    with answer(DONE) as url:
        assert transcribe(url, str(other), audio, key="ключ") == 0
    assert capsys.readouterr().out == "Hello.\nHello.\n"


def test_a_wrong_address_is_named(audio: str) -> None:
    with pytest.raises(ServerError, match="is no address of a server"):
        transcribe("http://[::1", audio)
