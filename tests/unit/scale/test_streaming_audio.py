"""Streaming audio ends with an error if its engine takes no more of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from sensorium.scale import messages
from sensorium.scale.cluster_engine import _AudioLink
from sensorium.scale.engines import Engines
from sensorium.types.errors import EngineLostError
from sensorium.types.outputs import RequestDelta


class _Engine:
    """An engine of a cluster that is removed after some parts of the audio."""

    def __init__(self, *, takes: int) -> None:
        self._left = takes
        self.has_ended = False
        self.parts: asyncio.Queue[bool] = asyncio.Queue()

    async def append_audio(self, message: messages.AppendAudio, *, replica: str) -> None:
        assert replica == "one"
        if not self._left:
            raise EngineLostError("the engine is being removed")
        self._left -= 1
        self.parts.put_nowait(message.is_last)

    async def answer(self) -> AsyncGenerator[messages.Answer, None]:
        try:
            is_last = False
            while not is_last:
                is_last = await self.parts.get()
                yield messages.Delta(RequestDelta(request_id="sound", deltas=()))
        finally:
            self.has_ended = True


def _link(engine: _Engine) -> _AudioLink:
    return _AudioLink(cast(Engines, cast(Any, engine)), engine.answer(), "sound", "one")


async def _read_all(link: _AudioLink) -> int:
    return len([delta async for delta in link.get_deltas()])


def test_streaming_audio_is_read_to_its_end() -> None:
    async def run() -> int:
        link = _link(_Engine(takes=2))
        link.send(None, is_last=False)
        link.send(None, is_last=True)
        return await _read_all(link)

    assert asyncio.run(run()) == 2


def test_an_engine_that_takes_no_more_audio_ends_the_request() -> None:
    async def run() -> None:
        engine = _Engine(takes=1)
        link = _link(engine)
        link.send(None, is_last=False)
        link.send(None, is_last=True)
        with pytest.raises(EngineLostError, match="being removed"):
            await asyncio.wait_for(_read_all(link), 120)
        assert engine.has_ended

    asyncio.run(run())


def test_a_caller_that_is_cancelled_ends_the_call() -> None:
    async def run() -> None:
        engine = _Engine(takes=1)
        link = _link(engine)
        link.send(None, is_last=False)
        first = asyncio.Event()

        async def read() -> None:
            async for _ in link.get_deltas():
                first.set()

        reading = asyncio.create_task(read())
        await first.wait()
        link.abort()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert engine.has_ended

    asyncio.run(run())
