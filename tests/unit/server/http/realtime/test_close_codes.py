"""The close codes of live sessions that fail, or that the server can't wait for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.frames import Close

from sensorium.engine.speech.live import TurnSession, TurnSource
from sensorium.speech.live.session import LiveEvent, LiveOptions
from sensorium.types.errors import SensoriumError
from tests.support.talking import LoudnessDetector, Talker
from tests.support.waiting import wait_until
from tests.unit.server.http.realtime.clients import (
    OPENAI,
    SPOKEN,
    begin,
    get_ends,
    get_refusal,
    wait_until_empty,
)
from tests.unit.server.standing_in import RunningServer, serve
from tests.unit.server.transcribing import ScriptedTranscriber


def get_close(talker: Talker) -> Close:
    """Return the close frame that the server sends, behind all messages."""
    with pytest.raises(ConnectionClosed) as caught:
        talker.receive_until("a close frame, which is no message")
    assert caught.value.rcvd is not None
    return caught.value.rcvd


@pytest.mark.parametrize("is_fragmented", [False, True])
def test_text_that_is_no_utf8_is_closed_with_its_code(
    server: RunningServer,
    transcriber: ScriptedTranscriber,
    is_fragmented: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with begin(server) as talker, begin(server) as neighbour:
        # Masked frames with two bytes that are no text, in one piece or in two. The mask is zero.
        pieces = (b"\x01\x81", b"\x80\x81") if is_fragmented else (b"\x81\x82",)
        bodies = (b"\xff", b"\xfe") if is_fragmented else (b"\xff\xfe",)
        for head, body in zip(pieces, bodies, strict=True):
            talker.socket.socket.sendall(head + bytes(4) + body)
        assert get_close(talker).code == 1007
        assert neighbour.set_input(turn_detection=None)["type"] == "session.updated"
    wait_until_empty(server, transcriber)
    assert get_ends(server, "client") == 2
    assert [record for record in caplog.records if record.exc_info] == []


class BrokenSession(TurnSession):
    """A session with a bug: its events can't be read."""

    async def get_events(self) -> AsyncIterator[LiveEvent]:
        raise ZeroDivisionError("a bug")
        yield


class BrokenSource(TurnSource):
    """A source of sessions with a bug. Without `is_open` it opens none at all."""

    def __init__(self, transcriber: ScriptedTranscriber, *, is_open: bool) -> None:
        super().__init__(transcriber, make_detector=LoudnessDetector)
        self._is_open = is_open

    def open(self, options: LiveOptions) -> TurnSession:
        if not self._is_open:
            raise SensoriumError("the network that finds voices is not installed")
        return BrokenSession(self._transcriber, options, make_detector=LoudnessDetector)


def test_a_session_that_fails_is_closed_with_its_code(transcriber: ScriptedTranscriber) -> None:
    source = BrokenSource(transcriber, is_open=True)
    with serve(transcriber=transcriber, live=source) as server:
        with Talker(server.url, OPENAI) as talker:
            close = get_close(talker)
            assert (close.code, close.reason) == (
                1011,
                "The server failed. Its log has the reason.",
            )
        wait_until_empty(server, transcriber)
        assert get_ends(server, "internal") == 1


def test_a_session_that_can_not_be_opened_is_refused(transcriber: ScriptedTranscriber) -> None:
    source = BrokenSource(transcriber, is_open=False)
    with serve(transcriber=transcriber, live=source) as server:
        assert get_refusal(server).status_code == 500
        wait_until_empty(server, transcriber)


def test_a_session_that_outlasts_the_shutdown_is_closed(
    make_server: Callable[..., RunningServer], transcriber: ScriptedTranscriber
) -> None:
    def wait(_: int) -> Any:
        return asyncio.sleep(3600)

    transcriber.between = wait
    server = make_server(shutdown_s=1)
    with begin(server) as talker:
        talker.say(SPOKEN)
        wait_until(lambda: transcriber.num_open == 1, "it is being transcribed")
        server.stop()
        assert get_close(talker).code == 1012
    wait_until_empty(server, transcriber)
    assert get_ends(server, "draining") == 1
