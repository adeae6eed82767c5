"""The parts of a frontend's process that need neither a model nor a core."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from sensorium.server.options import ServeOptions
from sensorium.server.processes.control import CoreDown, CoreUp
from sensorium.server.processes.frontend_app import SyncBeforeEnd, make_config
from sensorium.server.processes.frontend_main import Inbox
from tests.unit.server.processes.test_control import INFO


def test_messages_wait_for_their_reader_and_keep_their_order() -> None:
    inbox = Inbox()
    taken: list[Any] = []
    early, late = [CoreUp(INFO), CoreDown("first")], [CoreDown("second"), CoreUp(INFO)]
    for message in early:
        inbox.add(message)
    assert taken == []
    inbox.attach(taken.append)
    assert taken == early
    for message in late:
        inbox.add(message)
    assert taken == early + late


def test_metrics_are_up_to_date_before_the_last_byte_is_sent() -> None:
    happened: list[str] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"b"})

    async def send(message: Any) -> None:
        happened.append(message.get("body", b"").decode() or "start")

    async def receive() -> Any:
        raise AssertionError("no reader is expected here")

    wrapped = SyncBeforeEnd(app, lambda: happened.append("sync"))
    asyncio.run(wrapped({"type": "http"}, receive, send))
    assert happened == ["start", "a", "sync", "b"]


def test_uvicorn_gets_what_the_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    access = logging.getLogger("uvicorn.access")  # uvicorn changes it for the whole process
    for name in ("handlers", "propagate"):
        monkeypatch.setattr(access, name, getattr(access, name))

    async def app(_scope: Any, _receive: Any, _send: Any) -> None: ...

    options = ServeOptions(access_log=False, shutdown_timeout=1.5)
    config = make_config(options, app)
    assert (config.access_log, config.server_header) == (False, False)
    assert config.timeout_graceful_shutdown == 12  # and time to tell those who are not done
