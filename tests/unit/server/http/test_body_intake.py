"""Bodies that come slowly, and bodies that fill the memory together."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from sensorium.server.http.bodies import intake as body_intake
from sensorium.server.http.bodies.intake import BodyIntake, BodyLimits
from sensorium.server.http.errors import ApiError, ClientGoneError
from tests.support.waiting import wait_until
from tests.unit.server.standing_in import RunningServer, read_answer, serve

PATH = "/v1/completions"
HEAD = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
MEGABYTE = 1_000_000


def make_limits(**given: Any) -> BodyLimits:
    defaults = {"max_bytes": 1000, "timeout_s": 600.0, "min_bytes_per_s": 8192}
    return BodyLimits(**{**defaults, "max_unfinished_bytes": 1000, **given})


class Client:
    """A client that sends a body in pieces to an intake."""

    def __init__(self, intake: BodyIntake) -> None:
        self._pieces: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.body = asyncio.ensure_future(intake.receive(self._pieces.get))

    async def send(self, num_bytes: int, *, is_last: bool = False) -> None:
        message = {"type": "http.request", "body": b"a" * num_bytes, "more_body": not is_last}
        self._pieces.put_nowait(message)
        await let_all_run()

    async def leave(self) -> None:
        self._pieces.put_nowait({"type": "http.disconnect"})
        await let_all_run()


async def let_all_run() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_an_honest_upload_on_a_slow_line_is_always_in_time() -> None:
    """20 MB at 1 Mbit/s, with the limits of a server that was started without flags."""
    limits = make_limits()
    bytes_per_s = 125_000
    for num_bytes in range(0, 20 * MEGABYTE, 10_000):
        assert limits.get_time_s(num_bytes) > (num_bytes + 10_000) / bytes_per_s


def test_a_trickling_body_is_ended_soon_and_every_body_eventually() -> None:
    limits = make_limits()
    assert limits.get_time_s(0) == limits.get_time_s(60) - 60 / 8192 == 30
    assert limits.get_time_s(500 * MEGABYTE) == 600


def test_the_oldest_body_makes_room_for_the_others() -> None:
    async def run() -> None:
        intake = BodyIntake(make_limits())
        slow, other = Client(intake), Client(intake)
        await slow.send(600)
        await other.send(300)
        assert not slow.body.done()
        await other.send(300)
        assert not other.body.done()
        with pytest.raises(ApiError, match="fill the 1000 bytes") as caught:
            await slow.body
        assert (caught.value.status, caught.value.headers) == (503, {"retry-after": "1"})
        await other.send(400, is_last=True)
        assert len(await other.body) == 1000

    asyncio.run(run())


def test_a_body_that_is_itself_the_oldest_is_refused() -> None:
    async def run() -> None:
        intake = BodyIntake(make_limits(max_bytes=5000))
        large, small = Client(intake), Client(intake)
        await small.send(0)
        await large.send(1001)
        with pytest.raises(ApiError, match="fill the 1000 bytes"):
            await large.body
        await small.send(1000, is_last=True)
        assert len(await small.body) == 1000

    asyncio.run(run())


def test_a_body_that_has_ended_takes_no_room() -> None:
    async def run() -> None:
        intake = BodyIntake(make_limits())
        for _ in range(5):
            gone, whole, large = (Client(intake) for _ in range(3))
            await gone.send(300)
            await whole.send(300)
            await gone.leave()
            await whole.send(300, is_last=True)
            await large.send(900)
            await large.send(200)
            with pytest.raises(ClientGoneError):
                await gone.body
            assert len(await whole.body) == 600
            with pytest.raises(ApiError, match="larger than 1000 bytes"):
                await large.body

    asyncio.run(run())


def send(running: RunningServer, content: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", running.port), timeout=60)
    connection.sendall(content.encode())
    return connection


@pytest.mark.parametrize("is_overall", [False, True], ids=["least rate", "overall deadline"])
def test_a_body_that_arrives_too_slowly_is_abandoned(
    monkeypatch: pytest.MonkeyPatch, is_overall: bool
) -> None:
    monkeypatch.setattr(body_intake, "_GRACE_S", 600.0 if is_overall else 0.05)
    with serve(body_timeout=0.05 if is_overall else 600.0) as running:
        with send(running, HEAD + "content-length: 9\r\n\r\n{") as connection:
            answer = read_answer(connection)
            assert answer.startswith(b"HTTP/1.1 408")
            assert b"only 1 bytes have arrived" in answer
        wait_until(lambda: running.metrics.load == 0, "the request is still counted")


def test_unfinished_bodies_do_not_take_the_place_of_others() -> None:
    with serve(max_concurrent_requests=2) as running:
        drips = [send(running, HEAD + "content-length: 9\r\n\r\n{") for _ in range(8)]
        wait_until(lambda: running.metrics.load == 8, "the bodies have begun")
        assert running.complete().status_code == 200
        assert running.engine.num_started == 1
        for connection in drips:
            connection.close()
        wait_until(lambda: running.metrics.load == 0, "the requests are still counted")
