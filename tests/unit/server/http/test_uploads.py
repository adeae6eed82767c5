"""Uploads keep the limits of bodies, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from sensorium.server.http.bodies import intake as body_intake
from sensorium.server.http.bodies import multipart
from sensorium.server.http.bodies.intake import BodyIntake, BodyLimits
from sensorium.server.http.errors import ApiError
from tests.support.waiting import wait_until
from tests.unit.server.standing_in import RunningServer, serve
from tests.unit.server.transcribing import ScriptedTranscriber

PATH = "/v1/audio/transcriptions"
MEBIBYTE = 2**20
HEAD = (
    f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\n"
    "content-type: multipart/form-data; boundary=edge\r\n"
)
PART = '--edge\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'


def count_files() -> int:
    """Return how many files without a name in a folder this process has open."""
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            names.append(os.readlink(entry))
        except FileNotFoundError:  # closed meanwhile
            continue
    folder = tempfile.gettempdir()
    return sum(name.startswith(folder) and name.endswith("(deleted)") for name in names)


def check_nothing_is_left(running: RunningServer, transcriber: ScriptedTranscriber) -> None:
    wait_until(lambda: running.metrics.load == 0, "the request is still counted")
    wait_until(lambda: count_files() == 0, "a temporary file is still open")
    future = asyncio.run_coroutine_threadsafe(count_tasks(), running.loop)
    names = future.result(60)
    assert not any("keep" in name or "upload" in name for name in names), names
    assert transcriber.calls == []


async def count_tasks() -> list[str]:
    return [repr(task.get_coro()) for task in asyncio.all_tasks()]


@pytest.fixture
def transcriber() -> ScriptedTranscriber:
    return ScriptedTranscriber()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let temporary files be made in a folder that stays empty."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


def begin(running: RunningServer, content: str, *, length: int = 5 * MEBIBYTE) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", running.port), timeout=60)
    connection.sendall(f"{HEAD}content-length: {length}\r\n\r\n{content}".encode())
    return connection


@pytest.mark.usefixtures("folder")
def test_a_large_file_is_received_as_it_was_sent(transcriber: ScriptedTranscriber) -> None:
    content = os.urandom(5 * MEBIBYTE)
    with serve(transcriber=transcriber, max_body_mb=1) as running:
        assert running.post(PATH, files={"file": content}).status_code == 200
        wait_until(lambda: count_files() == 0, "a temporary file is still open")
    ((media, _, _),) = transcriber.calls
    assert media == content


@pytest.mark.usefixtures("folder")
def test_a_file_over_the_limit_is_refused(transcriber: ScriptedTranscriber) -> None:
    with serve(transcriber=transcriber, max_upload_mb=1) as running:
        response = running.post(PATH, files={"file": b"a" * MEBIBYTE})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (413, "body_too_large")
        assert "--max-upload-mb" in error["message"]
        pieces = iter([PART.encode(), *[b"a" * 2**16] * 20])
        headers = {"content-type": "multipart/form-data; boundary=edge"}
        assert running.post(PATH, content=pieces, headers=headers).status_code == 413
        check_nothing_is_left(running, transcriber)


@pytest.mark.usefixtures("folder")
def test_a_client_that_leaves_while_it_uploads_leaves_nothing(
    transcriber: ScriptedTranscriber,
) -> None:
    with serve(transcriber=transcriber) as running:
        with begin(running, PART + "a" * MEBIBYTE):
            wait_until(lambda: count_files() == 1, "no temporary file is written")
        check_nothing_is_left(running, transcriber)


@pytest.mark.usefixtures("folder")
def test_a_slow_upload_is_refused_and_leaves_nothing(
    transcriber: ScriptedTranscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_intake, "_GRACE_S", 0.5)
    with serve(transcriber=transcriber, min_body_rate=1024) as running:
        with begin(running, PART + "a" * MEBIBYTE) as connection:
            answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 408")
        check_nothing_is_left(running, transcriber)


@pytest.mark.usefixtures("folder")
def test_the_oldest_upload_makes_room(transcriber: ScriptedTranscriber) -> None:
    options = {"max_upload_mb": 2, "max_unfinished_bodies_mb": 1, "max_body_mb": 1}
    with serve(transcriber=transcriber, **options) as running:
        content = PART + "a" * (MEBIBYTE + MEBIBYTE // 4)
        with begin(running, content, length=2 * MEBIBYTE) as slow:
            wait_until(lambda: count_files() == 1, "no temporary file is written")
            with begin(running, content, length=2 * MEBIBYTE):
                answer = slow.recv(65536)
        assert answer.startswith(b"HTTP/1.1 503")
        check_nothing_is_left(running, transcriber)


@pytest.mark.usefixtures("folder")
def test_a_disk_without_room_is_a_507(
    transcriber: ScriptedTranscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(transcriber=transcriber) as running:
        with monkeypatch.context() as patch:
            opened = partial(open, "/dev/full", "w+b")
            patch.setattr(multipart.tempfile, "TemporaryFile", opened)
            response = running.post(PATH, files={"file": b"a" * MEBIBYTE})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (507, "no_disk_space")
        assert running.metrics.refusals == {"capacity": 1}
        check_nothing_is_left(running, transcriber)
        assert running.post(PATH, files={"file": b"a"}).status_code == 200
        wait_until(lambda: count_files() == 0, "a temporary file is still open")


def test_a_slow_disk_does_not_delay_others(
    transcriber: ScriptedTranscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload is held in its write until another request is answered."""
    is_writing, may_go_on = threading.Event(), threading.Event()
    feed = multipart.MultipartForm.feed

    def feed_slowly(form: multipart.MultipartForm, piece: bytes) -> None:
        is_writing.set()
        assert may_go_on.wait(60)
        feed(form, piece)

    monkeypatch.setattr(multipart.MultipartForm, "feed", feed_slowly)
    answers: list[httpx.Response] = []
    with serve(transcriber=transcriber) as running:
        thread = threading.Thread(
            target=lambda: answers.append(running.post(PATH, files={"file": b"a"}))
        )
        thread.start()
        try:
            assert is_writing.wait(60)
            assert running.get("/ping").status_code == 200
            assert answers == []
        finally:
            may_go_on.set()
            thread.join(60)
        assert answers[0].status_code == 200


def test_an_upload_counts_as_a_request_when_it_is_complete(
    transcriber: ScriptedTranscriber,
) -> None:
    with (
        serve(transcriber=transcriber, max_concurrent_requests=1) as running,
        begin(running, PART),
    ):
        wait_until(lambda: running.metrics.load == 1, "the upload does not begin")
        assert running.post(PATH, files={"file": b"a"}).status_code == 200


def make_limits(**given: Any) -> BodyLimits:
    defaults = {"max_bytes": 1000, "timeout_s": 600.0, "min_bytes_per_s": 8192}
    return BodyLimits(**{**defaults, "max_unfinished_bytes": 1000, **given})


def test_an_abandoned_upload_ends_with_its_next_piece() -> None:
    async def run() -> None:
        intake = BodyIntake(make_limits())
        is_kept, may_go_on = asyncio.Event(), asyncio.Event()
        pieces: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        others: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

        async def keep_slowly(_: bytes) -> None:
            is_kept.set()
            await may_go_on.wait()

        async def drop(_: bytes) -> None:
            pass

        message = {"type": "http.request", "body": b"a" * 700, "more_body": True}
        old = asyncio.ensure_future(intake.receive_into(pieces.get, keep_slowly))
        pieces.put_nowait(message)
        await is_kept.wait()
        new = asyncio.ensure_future(intake.receive_into(others.get, drop))
        others.put_nowait(message)
        await asyncio.sleep(0.01)
        may_go_on.set()
        with pytest.raises(ApiError, match="Retry later"):
            await old
        others.put_nowait({"type": "http.request", "body": b"a"})
        await new

    asyncio.run(run())
