"""Servers over a scripted transcriber and a detector of loudness."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sensorium.engine.speech.live import TurnSource
from tests.support.talking import (
    LoudnessDetector,
)
from tests.unit.server.standing_in import RunningServer, serve
from tests.unit.server.transcribing import ScriptedTranscriber


@pytest.fixture
def transcriber() -> ScriptedTranscriber:
    return ScriptedTranscriber()


@pytest.fixture
def make_server(transcriber: ScriptedTranscriber) -> Iterator[Callable[..., RunningServer]]:
    contexts = []

    def make(**options: Any) -> RunningServer:
        source = TurnSource(transcriber, make_detector=LoudnessDetector)
        context = serve(transcriber=transcriber, live=source, **options)
        contexts.append(context)
        return context.__enter__()

    yield make
    for context in contexts:
        context.__exit__(None, None, None)


@pytest.fixture
def server(make_server: Callable[..., RunningServer]) -> RunningServer:
    return make_server()
