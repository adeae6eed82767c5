"""Live sessions of a streaming model, over a core in this process."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sensorium.engine.async_engine import AsyncEngine
from sensorium.engine.speech.live_streams import StreamSession, StreamSource
from sensorium.engine.speech.streamed import StreamedModel
from sensorium.speech.live.session import (
    Completed,
    Failed,
    Flushed,
    LiveEvent,
    LiveOptions,
    SpeechStarted,
    TextDelta,
    TurnDetection,
)
from tests.integration.async_serving import run_core
from tests.integration.test_async_engine import run
from tests.support.talking import LOUD, QUIET, RATE, LoudnessDetector, make_tones


async def read_to_flush(session: StreamSession) -> list[LiveEvent]:
    events: list[LiveEvent] = []
    async for event in session.get_events():
        events.append(event)
        if isinstance(event, Flushed):
            break
    return events


def test_the_audio_decides_when_a_text_ends(
    tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    """Here every token ends a text. Nothing that was said is lost by that."""
    events: list[LiveEvent] = []

    async def test(engine: AsyncEngine, _: Any) -> None:
        audios: Any = engine._inputs.processor.outside_audio
        model = StreamedModel(processor=audios, tokenizer=engine.tokenizer, silent_ids=())
        session = StreamSource(engine, model).open(LiveOptions(turn_detection=None))
        try:
            await session.append(make_tones((LOUD, 4.0)))
            await session.flush()
            events.extend(await read_to_flush(session))
        finally:
            await session.close()

    with run_core(tiny_model("voxtral_realtime"), tmp_path) as core:
        ends = tuple(range(core.built.hf_model.vocab_size))
        defaults = replace(core.info.defaults, eos_token_ids=ends)
        core.info = msgspec.structs.replace(core.info, defaults=defaults)
        run(core, lambda *parts: asyncio.wait_for(test(*parts), 240))
    (done,) = [event for event in events if isinstance(event, Completed)]
    assert done.transcript.usage.num_output_tokens > 4.0 / 0.08


def test_times_continue_when_turn_detection_begins(
    tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    """They count from the start of the session, including audio before the detection."""
    events: list[LiveEvent] = []

    async def test(engine: AsyncEngine, _: Any) -> None:
        audios: Any = engine._inputs.processor.outside_audio
        model = StreamedModel(processor=audios, tokenizer=engine.tokenizer, silent_ids=())
        source = StreamSource(engine, model, make_detector=LoudnessDetector)
        session = source.open(LiveOptions(turn_detection=None))
        try:
            await session.append(make_tones((LOUD, 3.0)))
            await session.commit()
            session.configure(LiveOptions(turn_detection=TurnDetection()))
            await session.append(make_tones((QUIET, 0.5), (LOUD, 1.0), (QUIET, 1.0)))
            await session.flush()
            events.extend(await read_to_flush(session))
        finally:
            await session.close()

    with run_core(tiny_model("voxtral_realtime"), tmp_path) as core:
        run(core, lambda *parts: asyncio.wait_for(test(*parts), 240))
    (started,) = [event for event in events if isinstance(event, SpeechStarted)]
    assert 3100 <= started.start_ms <= 3600
    first, second = [event.audio_s for event in events if isinstance(event, Completed)]
    assert first == 3.0
    assert 1.5 <= second <= 2.5


MAX_MODEL_LEN = 64  # 15 tokens of the prompt, and 49 of 80 ms each


def remove_window(directory: str, target: Path) -> str:
    """Copy a model, and let all layers of its decoder attend to everything."""
    shutil.copytree(directory, target)
    config = json.loads((target / "config.json").read_text())
    config["text_config"]["sliding_window"] = None
    (target / "config.json").write_text(json.dumps(config))
    return str(target)


@pytest.mark.parametrize("is_detecting", [False, True])
@pytest.mark.parametrize("chunk_s", [0.08, 8.0])
def test_an_item_fails_with_a_reason_when_a_context_without_a_window_is_full(
    tiny_model: Callable[[str], str], tmp_path: Path, chunk_s: float, is_detecting: bool
) -> None:
    """The session continues with another item, and so do other requests."""
    events: list[LiveEvent] = []
    detection = TurnDetection() if is_detecting else None

    async def test(engine: AsyncEngine, _: Any) -> None:
        audios: Any = engine._inputs.processor.outside_audio
        model = StreamedModel(processor=audios, tokenizer=engine.tokenizer, silent_ids=())
        source = StreamSource(engine, model, make_detector=LoudnessDetector)
        session = source.open(LiveOptions(turn_detection=detection))

        async def talk() -> None:
            audio = make_tones((QUIET, 0.5), (LOUD, 6.0), (QUIET, 1.0))
            step = int(chunk_s * RATE)
            for start in range(0, len(audio), step):
                await session.append(audio[start : start + step])
                await asyncio.sleep(0.02)

        try:
            talking = asyncio.create_task(talk())
            async for event in session.get_events():
                events.append(event)
                if isinstance(event, Failed):
                    break
            await talking
            await session.clear()
            await session.append(make_tones((QUIET, 0.5), (LOUD, 1.0), (QUIET, 1.0)))
            await session.flush()
            events.extend(await read_to_flush(session))
        finally:
            await session.close()

    directory = remove_window(tiny_model("voxtral_realtime"), tmp_path / "model")
    with run_core(directory, tmp_path, max_model_len=MAX_MODEL_LEN) as core:
        run(core, lambda *parts: asyncio.wait_for(test(*parts), 240))
        assert core.error is None
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert "context is full: 3.92 s of this item are transcribed" in str(failed.error)
    (done,) = [event for event in events if isinstance(event, Completed)]
    assert done.item_id != failed.item_id
    texts = {event.item_id for event in events if isinstance(event, TextDelta)}
    assert texts >= {failed.item_id, done.item_id}
