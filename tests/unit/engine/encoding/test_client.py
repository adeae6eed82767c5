"""Connections to an encoder that hangs: it is given up once, and not again by every connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from sensorium.engine.encoding import client as tested
from sensorium.engine.encoding.client import SocketEncoder
from sensorium.engine.encoding.service import EncoderCounts
from sensorium.engine.encoding.wire import PROTOCOL, Counted, Hello, Identity, encode_message
from sensorium.multimodal.pool.channel import Channel, ChannelError
from sensorium.types.errors import EncoderLostError

IDENTITY = Identity(weights="weights", dtype="float32", versions=(), processing=())
COUNTS = EncoderCounts(num_asked=1, num_kept=0, num_processed=1, num_encoded=1)


@contextmanager
def listening(path: Path, answer: Callable[[Channel], None]) -> Iterator[None]:
    """Listen as an encoder that introduces itself and then answers as given, in a thread each."""
    open_channels: list[Channel] = []

    def serve(channel: Channel) -> None:
        try:
            channel.send(encode_message(Hello(PROTOCOL, IDENTITY)))
            while True:
                channel.receive()
                answer(channel)
        except (ChannelError, OSError):
            return

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            open_channels.append(Channel(connection))
            threading.Thread(target=serve, args=(open_channels[-1],), daemon=True).start()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)
        for channel in open_channels:
            channel.close()


def test_a_connection_that_is_idle_is_not_used_after_another_one_has_hung(tmp_path: Path) -> None:
    both, hangs = threading.Barrier(2), threading.Event()

    def answer(channel: Channel) -> None:
        if not hangs.is_set():
            both.wait(60)  # so that each question needs a connection of its own
            channel.send(encode_message(Counted(COUNTS)))

    path = tmp_path / "encoder.sock"
    encoder = SocketEncoder(f"unix:{path}", IDENTITY, None, timeout_s=120.0)
    with listening(path, answer), ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(encoder.get_counts) for _ in range(2)]
        assert [each.result(60) for each in asked] == [COUNTS, COUNTS]
        hangs.set()
        encoder._timeout_s = 0.5
        with pytest.raises(EncoderLostError, match="did not answer in time"):
            encoder.get_counts()
        with pytest.raises(EncoderLostError, match="can't be reached"):
            encoder.get_counts()
        encoder.close()


def test_pauses_become_longer_while_an_encoder_only_introduces_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tested, "_FIRST_PAUSE_S", 0.01)
    works = threading.Event()

    def answer(channel: Channel) -> None:
        if works.is_set():
            channel.send(encode_message(Counted(COUNTS)))

    path = tmp_path / "encoder.sock"
    encoder = SocketEncoder(f"unix:{path}", IDENTITY, None, timeout_s=0.05)
    with caplog.at_level("INFO"), listening(path, answer):
        for _ in range(4):
            encoder._pause.until = 0.0  # the pause is over
            with pytest.raises(EncoderLostError, match="did not answer in time"):
                encoder.get_counts()
        assert encoder._pause.length_s == pytest.approx(0.08)
        works.set()
        encoder._timeout_s = 120.0
        encoder._pause.until = 0.0
        assert encoder.get_counts() == COUNTS
        assert encoder._pause.length_s == 0.0
        encoder.close()
    logged = [record.getMessage() for record in caplog.records]
    assert ["can't be used" in line for line in logged] == [True, False]
    assert "is used again" in logged[1]
