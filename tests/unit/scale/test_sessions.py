"""The turns of a live session go to one engine of a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

from sensorium.scale import messages
from sensorium.scale.cluster_engine import ClusterEngine, ClusterTranscriber, _Session
from sensorium.speech.options import SpeechOptions


class _Engine:
    """Stands for the engine of a frontend. Each call is taken by the next of these engines."""

    def __init__(self, *replicas: str) -> None:
        self._replicas = iter(replicas)
        self.wanted: list[tuple[str, str | None] | None] = []

    async def start_transcript(
        self, _: object, __: object, *, session: _Session | None, **___: object
    ) -> AsyncGenerator[messages.Answer, None]:
        self.wanted.append(None if session is None else (session.key, session.replica))
        return self._answer()

    async def _answer(self) -> AsyncGenerator[messages.Answer, None]:
        yield messages.Accepted(next(self._replicas))


async def _say(transcriber: ClusterTranscriber) -> None:
    async for _ in transcriber.transcribe(b"sound", SpeechOptions(), request_id="one"):
        pass


def test_a_turn_goes_to_the_engine_that_had_the_turn_before_it() -> None:
    """Also if that was not its home because of load, and after the engine was replaced."""
    engine = _Engine("spilled", "spilled", "other", "other", "any")
    whole = ClusterTranscriber(cast(ClusterEngine, cast(Any, engine)), cast(Any, None))

    async def run() -> None:
        first, second = whole.start_session(), whole.start_session()
        for transcriber in (first, first, first, second, whole):
            await _say(transcriber)

    asyncio.run(run())
    *turns, begin, alone = engine.wanted
    keys, replicas = zip(*(turn for turn in turns if turn), strict=True)
    assert replicas == (None, "spilled", "spilled")
    assert len(set(keys)) == 1
    assert begin is not None
    assert begin[0] not in keys
    assert begin[1] is None
    assert alone is None
