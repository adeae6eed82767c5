"""Live sessions of a model that takes a sound while it goes on, over a core in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from sensorium.engine.async_engine import AsyncEngine
from sensorium.engine.speech.live_streams import StreamSession, StreamSource
from sensorium.engine.speech.streamed import StreamedModel
from sensorium.speech.live.session import (
    Completed,
    Flushed,
    LiveEvent,
    LiveOptions,
    SpeechStarted,
    TurnDetection,
)
from tests.integration.async_serving import run_core
from tests.integration.test_async_engine import run
from tests.support.talking import LOUD, QUIET, LoudnessDetector, make_sound


async def read_to_flush(session: StreamSession) -> list[LiveEvent]:
    events: list[LiveEvent] = []
    async for event in session.get_events():
        events.append(event)
        if isinstance(event, Flushed):
            break
    return events


def test_the_sound_decides_when_a_text_ends(
    tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    """Here every token ends a text. Nothing that was said is lost by that."""
    events: list[LiveEvent] = []

    async def test(engine: AsyncEngine, _: Any) -> None:
        sounds: Any = engine._inputs.processor.beside
        model = StreamedModel(processor=sounds, tokenizer=engine.tokenizer, silent_ids=())
        session = StreamSource(engine, model).open(LiveOptions(turn_detection=None))
        try:
            await session.append(make_sound((LOUD, 4.0)))
            await session.flush()
            events.extend(await read_to_flush(session))
        finally:
            await session.close()

    with run_core(tiny_model("voxtral_realtime"), tmp_path) as core:
        ends = tuple(range(core.built.adapter.vocab_size))
        defaults = replace(core.info.defaults, eos_token_ids=ends)
        core.info = msgspec.structs.replace(core.info, defaults=defaults)
        run(core, lambda *parts: asyncio.wait_for(test(*parts), 60))
    (done,) = [event for event in events if isinstance(event, Completed)]
    assert done.transcript.usage.num_output_tokens > 4.0 / 0.08


def test_times_go_on_when_turn_detection_begins(
    tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    """They count from the begin of the session, also what came before the detection."""
    events: list[LiveEvent] = []

    async def test(engine: AsyncEngine, _: Any) -> None:
        sounds: Any = engine._inputs.processor.beside
        model = StreamedModel(processor=sounds, tokenizer=engine.tokenizer, silent_ids=())
        source = StreamSource(engine, model, make_detector=LoudnessDetector)
        session = source.open(LiveOptions(turn_detection=None))
        try:
            await session.append(make_sound((LOUD, 3.0)))
            await session.commit()
            session.configure(LiveOptions(turn_detection=TurnDetection()))
            await session.append(make_sound((QUIET, 0.5), (LOUD, 1.0), (QUIET, 1.0)))
            await session.flush()
            events.extend(await read_to_flush(session))
        finally:
            await session.close()

    with run_core(tiny_model("voxtral_realtime"), tmp_path) as core:
        run(core, lambda *parts: asyncio.wait_for(test(*parts), 60))
    (started,) = [event for event in events if isinstance(event, SpeechStarted)]
    assert 3100 <= started.start_ms <= 3600
    first, second = [event.audio_s for event in events if isinstance(event, Completed)]
    assert first == 3.0
    assert 1.5 <= second <= 2.5
