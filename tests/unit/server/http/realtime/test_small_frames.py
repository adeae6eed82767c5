"""Live sessions with very small frames: accepted within limits, else closed."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest

from tests.support.talking import Talker
from tests.unit.server.http.realtime.clients import begin, get_ends, wait_until_empty
from tests.unit.server.http.realtime.test_close_codes import get_close
from tests.unit.server.standing_in import RunningServer
from tests.unit.server.transcribing import ScriptedTranscriber

MASK = bytes(4)
FRAGMENT = b"\x00\x81" + MASK + b" "
FLOODS = {
    "fragments": (1009, b"\x01\x81" + MASK + b" " + FRAGMENT * 30_000),
    "pings": (1008, b"\x89\x80" + MASK),
    "pongs": (1008, b"\x8a\x80" + MASK),
}


def send_raw(talker: Talker, content: bytes) -> None:
    with suppress(ConnectionError):  # the server may end it before it has all
        talker.socket.socket.sendall(content)


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_is_closed_with_its_code(
    server: RunningServer, transcriber: ScriptedTranscriber, kind: str
) -> None:
    code, content = FLOODS[kind]
    with begin(server) as talker, begin(server) as neighbour:
        send_raw(talker, content if kind == "fragments" else content * 30_000)
        assert get_close(talker).code == code
        assert neighbour.set_input(turn_detection=None)["type"] == "session.updated"
    wait_until_empty(server, transcriber)
    assert get_ends(server, "client") == 2


def test_a_message_in_a_thousand_fragments_with_pings_between_is_taken(
    server: RunningServer,
) -> None:
    text = json.dumps({"type": "input_audio_buffer.clear", "event_id": "a" * 1000}).encode()
    pieces = [b"\x00\x81" + MASK + bytes([each]) for each in text]
    pieces[0] = b"\x01" + pieces[0][1:]
    pieces[-1] = b"\x80" + pieces[-1][1:]
    with begin(server) as talker:
        talker.socket.socket.sendall((b"\x89\x80" + MASK).join(pieces[:100]))
        talker.socket.socket.sendall(b"".join(pieces[100:]))
        assert talker.receive()["type"] == "input_audio_buffer.cleared"


def test_very_many_messages_in_one_read_are_all_answered(server: RunningServer) -> None:
    number = 3000
    message = json.dumps({"type": "input_audio_buffer.clear"}).encode()
    frame = b"\x81" + bytes([0x80 + len(message)]) + MASK + message
    with begin(server) as talker:
        talker.socket.socket.sendall(frame * number)
        types = {talker.receive()["type"] for _ in range(number)}
        assert types == {"input_audio_buffer.cleared"}
