"""An interruption of `sensorium transcribe --live` waits for nothing."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

from sensorium.cli.speech import live_client
from sensorium.cli.speech.live_client import LiveClient
from tests.support.waiting import wait_until_async


def test_an_interruption_does_not_wait_for_a_server_that_has_stopped_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its part of the closing handshake would come behind all audio that it has not read."""
    made: list[Any] = []

    def connect_and_keep(*arguments: Any, **options: Any) -> Any:
        # Without the pings that end such a connection after 20 seconds or more.
        made.append(connect(*arguments, **options, ping_interval=None))
        return made[0]

    monkeypatch.setattr(live_client, "connect", connect_and_keep)
    asyncio.run(_interrupt_while_stuck(made))


async def _interrupt_while_stuck(made: list[Any]) -> None:
    never = asyncio.Event()

    async def read_nothing(_connection: ServerConnection) -> None:
        await never.wait()

    def is_stuck() -> bool:
        connection = getattr(made[0], "connection", None) if made else None
        return connection is not None and connection.paused

    endless = os.open("/dev/zero", os.O_RDONLY)
    try:
        async with serve(read_nothing, "127.0.0.1", 0, close_timeout=0) as server:
            port = server.sockets[0].getsockname()[1]
            client = LiveClient(f"http://127.0.0.1:{port}", key=None, fields={})
            running = asyncio.create_task(client._run(endless))
            await wait_until_async(is_stuck, "the server has no room for more audio")
            running.cancel()
            await asyncio.wait({running}, timeout=30.0)
            has_ended = running.cancelled()
            made[0].connection.transport.abort()  # otherwise the test would not end either
            never.set()
    finally:
        os.close(endless)
    assert has_ended
