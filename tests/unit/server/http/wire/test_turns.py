"""What a connection may cost in a turn of the event loop, by a clock that the test turns."""

from __future__ import annotations

import asyncio

import pytest

from sensorium.server.http.wire import http_protocol
from sensorium.server.http.wire.progress import TcpProgress
from sensorium.server.http.wire.turns import Allowance
from sensorium.server.http.wire.websocket_protocol import MAX_CONTROL_FRAMES, MAX_FRAGMENTS
from tests.unit.server.http.wire.clockwork import Line, open_http, open_websocket

READ_BYTES = 256_000  # that uvloop reads at once
MAX_TURN_BYTES = 2**15
MASK = bytes(4)
FIRST = b"\x01\x82" + MASK + b"aa"  # of a text in fragments of two bytes
FRAGMENT = b"\x00\x82" + MASK + b"aa"
LAST = b"\x80\x82" + MASK + b"aa"
PING = b"\x89\x80" + MASK
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b"1\r\na\r\n"


def make_message(text: bytes) -> bytes:
    return b"\x81\xff" + len(text).to_bytes(8, "big") + MASK + text


def fill(piece: bytes) -> bytes:
    """Return as many equal pieces as one read may bring."""
    return piece * (READ_BYTES // len(piece))


def get_turns(line: Line) -> list[int]:
    """Return how many bytes are parsed in each turn, until nothing is due any more."""
    turns = [sum(line.given)]
    while True:
        line.given.clear()
        if not line.loop.run_turn():
            return turns
        turns.append(sum(line.given))


@pytest.mark.parametrize(
    ("open_line", "beginning", "piece"),
    [
        pytest.param(open_websocket, FIRST, FRAGMENT, id="fragments"),
        pytest.param(open_websocket, b"", PING, id="pings"),
        pytest.param(open_http, CHUNKED, CHUNK, id="chunks"),
        pytest.param(open_http, b"", b"GET / HTTP/1.1\r\n\r\n", id="requests"),
    ],
)
def test_a_read_of_small_pieces_is_not_parsed_at_once(
    open_line: type[Line], beginning: bytes, piece: bytes
) -> None:
    line = open_line()
    line.protocol.data_received(beginning)
    line.given.clear()
    line.protocol.data_received(fill(piece))
    assert 0 < sum(line.given) <= 2**13  # so many pieces that they cost about a millisecond
    assert not line.transport.is_reading


def test_a_message_in_too_many_fragments_is_closed_with_its_code() -> None:
    line = open_websocket()
    line.protocol.data_received(FIRST + fill(FRAGMENT))
    turns = get_turns(line)
    assert max(turns) <= MAX_TURN_BYTES
    assert sum(turns) <= (MAX_FRAGMENTS + 256) * len(FRAGMENT)
    assert line.transport.closed is not None
    assert b"\x88" + bytes([2 + 36]) + (1009).to_bytes(2, "big") in line.transport.written
    assert line.protocol.queue.get_nowait()["code"] == 1009
    assert line.transport.aborted is not None  # later, if it does not take the close frame
    assert line.transport.aborted >= line.transport.closed + 10.0


def test_a_connection_that_broke_a_limit_is_held_unread_for_a_second() -> None:
    """Else its client would connect again at once, and send as much."""
    line = open_websocket()
    line.protocol.data_received(FIRST + fill(FRAGMENT))
    while line.protocol.queue.empty():
        assert line.loop.run_turn()
    failed_at = line.loop.now
    num_parsed = len(line.given)
    assert line.transport.closed is None
    asyncio.run(line.protocol.receive())  # the handler learns of it at once
    line.protocol.data_received(fill(FRAGMENT))  # which the transport had read before
    line.loop.run_until(failed_at + 0.9)
    assert not line.transport.is_reading
    assert line.transport.closed is None
    line.loop.run_until(failed_at + 1.1)
    assert line.transport.closed is not None
    assert len(line.given) == num_parsed


def test_a_server_that_stops_does_not_hold_a_connection_that_broke_a_limit() -> None:
    line = open_websocket()
    line.protocol.data_received(fill(PING))
    while line.protocol.queue.empty():
        assert line.loop.run_turn()
    line.protocol.shutdown()
    assert line.transport.closed is not None


def test_a_client_that_leaves_when_it_broke_a_limit_is_no_fault() -> None:
    line = open_websocket()
    write = line.transport.write

    def write_in_vain(data: bytes) -> None:
        write(data)
        if data.startswith(b"\x88"):  # the close frame
            line.transport.close()

    line.transport.write = write_in_vain  # type: ignore[method-assign]
    line.protocol.data_received(fill(PING))
    line.loop.run_until(3.0)
    assert line.protocol.queue.get_nowait()["code"] == 1008


def test_too_many_pings_are_closed_with_their_code() -> None:
    line = open_websocket()
    line.protocol.data_received(fill(PING))
    line.loop.run_until(3.0)
    assert line.transport.closed is not None
    assert line.protocol.queue.get_nowait()["code"] == 1008
    assert line.transport.written.count(b"\x8a\x00") <= MAX_CONTROL_FRAMES + 256  # pongs


def test_a_ping_a_second_is_answered_for_hours() -> None:
    line = open_websocket()
    for second in range(20_000):
        line.protocol.data_received(PING)
        line.loop.run_until(float(second))
    assert line.transport.closed is None
    assert line.transport.written == b"\x8a\x00" * 20_000


def test_pings_that_waited_behind_a_message_are_no_flood() -> None:
    """A session may not read for minutes, while its client pings all the time."""
    line = open_websocket()
    line.protocol.data_received(make_message(b"a"))
    line.loop.run_until(300.0)
    line.protocol.data_received(PING * 300)
    asyncio.run(line.protocol.receive())
    line.loop.run_until(310.0)
    assert line.transport.closed is None
    assert line.transport.written == b"\x8a\x00" * 300


def test_fragments_within_the_limits_wait_when_they_have_used_up_their_allowance() -> None:
    line = open_websocket()
    message = FIRST + FRAGMENT * 1000 + LAST
    num_taken = 0
    for _ in range(10_000):  # each a millisecond
        if line.transport.is_reading:
            line.protocol.data_received(message)
        if not line.protocol.queue.empty():
            assert asyncio.run(line.protocol.receive())["text"] == "aa" * 1002
            num_taken += 1
        line.loop.run_until(line.loop.now + 0.001)
    assert line.transport.closed is None
    assert 4 <= num_taken <= (4096 + 512 * 10) // 1000 + 1


def test_a_large_message_comes_in_turns() -> None:
    line = open_websocket()
    text = b"a" * 200_000
    line.protocol.data_received(make_message(text) + make_message(b"b") * 10)
    assert line.protocol.queue.empty()
    assert max(get_turns(line)) <= MAX_TURN_BYTES
    assert line.protocol.queue.qsize() == 11
    assert not line.transport.is_reading

    async def take() -> list[str]:
        return [(await line.protocol.receive())["text"] for _ in range(11)]

    assert asyncio.run(take()) == [text.decode(), *"b" * 10]
    assert line.transport.is_reading


def test_what_is_behind_a_message_waits_until_it_is_taken() -> None:
    line = open_websocket()
    line.protocol.data_received(make_message(b"a" * 3000) * 20)
    line.loop.run_until(10.0)
    assert sum(line.given) <= 2**12
    for number in range(20):
        assert line.protocol.queue.qsize() == 1, number
        asyncio.run(line.protocol.receive())
        line.loop.run_until(line.loop.now + 1.0)
    assert line.transport.is_reading


def test_a_body_in_small_chunks_comes_whole() -> None:
    line = open_http()
    line.protocol.data_received(CHUNKED + fill(CHUNK) + b"0\r\n\r\n")
    cycle = line.protocol.cycle
    assert max(get_turns(line)) <= MAX_TURN_BYTES
    assert (bytes(cycle.body), cycle.more_body) == (b"a" * (READ_BYTES // len(CHUNK)), False)
    assert line.transport.is_reading


def test_a_body_of_known_length_is_parsed_as_it_comes() -> None:
    """It is one piece, so there is nothing to be saved."""
    line = open_http()
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 400000\r\n\r\n"
    line.protocol.data_received(head)
    line.given.clear()
    line.protocol.data_received(b"a" * 200_000)
    line.protocol.data_received(b"a" * 200_000)
    assert line.given == [200_000, 200_000]
    assert not line.protocol.cycle.more_body
    assert line.transport.is_reading


def test_few_of_many_requests_wait_behind_one(monkeypatch: pytest.MonkeyPatch) -> None:
    here = TcpProgress(is_open=True, num_queued=0, num_acknowledged=0)
    monkeypatch.setattr(http_protocol, "read_progress", lambda _: here)
    line = open_http()
    line.protocol.data_received(fill(b"GET / HTTP/1.1\r\n\r\n"))
    for _ in range(100):
        line.protocol.flow.resume_reading()  # as the handler of the first one does
        line.loop.run_until(line.loop.now + 1.0)
    assert 16 < len(line.protocol.pipeline) <= 16 + 2**12 // 18 + 1
    assert not line.transport.is_reading


def test_nothing_is_parsed_for_a_connection_that_has_ended() -> None:
    for line, data in (
        (open_http(), CHUNKED + fill(CHUNK)),
        (open_websocket(), FIRST + fill(FRAGMENT)),
    ):
        line.protocol.data_received(data)
        line.transport.close()
        line.protocol.connection_lost(None)
        line.given.clear()
        line.loop.run_until(60.0)
        assert line.given == []


def test_an_allowance_grows_up_to_its_maximum() -> None:
    allowance = Allowance(10, per_s=2, now=0.0)
    assert allowance.take(10, 0.0) == 0.0
    assert allowance.take(4, 1.0) == 1.0
    assert allowance.take(0, 1.5) == 0.5
    assert allowance.take(10, 100.0) == 0.0
    assert allowance.take(1, 100.0) == 0.5
