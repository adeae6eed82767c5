"""Human speech through `/v1/realtime` with Whisper tiny.en: turns are found, and understood."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from real_models.speech import get_recordings
from tests.real.hearing import count_errors, normalize, read_samples
from tests.support.server import ServerProcess, serve
from tests.support.talking import QUIET, Talker, make_tones

COMPLETED = "conversation.item.input_audio_transcription.completed"
MAX_ERROR_RATE = 0.1  # with sentences that turn detection may divide


@pytest.fixture(scope="module")
def server(real_folder: Callable[[str], Path]) -> Iterator[ServerProcess]:
    with serve(str(real_folder("whisper"))) as running:
        yield running


def test_a_book_that_is_read_aloud_is_transcribed(
    server: ServerProcess, real_folder: Callable[[str], Path]
) -> None:
    recordings = get_recordings(real_folder("speech"))
    book = {path: words for path, words in recordings.items() if "librivox" in path.name}
    pause = make_tones((QUIET, 1.5))
    audio = np.concatenate([pause, *(x for path in book for x in (read_samples(path), pause))])
    with Talker(server.get_url()) as talker:
        talker.receive()
        talker.say(audio)
        talker.commit(final=True)
        done = talker.receive_until("transcription.done")[-1]
    expected = normalize(" ".join(book.values()))
    num_errors = count_errors(normalize(done["text"]), expected)
    assert num_errors / len(expected.split()) <= MAX_ERROR_RATE, done["text"]
    assert done["usage"]["seconds"] == pytest.approx(len(audio) / 16_000, abs=0.001)


def test_turns_begin_and_end_around_what_is_said(
    server: ServerProcess, real_folder: Callable[[str], Path]
) -> None:
    (path,) = (each for each in get_recordings(real_folder("speech")) if "goforward" in each.name)
    speech, pause = read_samples(path), make_tones((QUIET, 2.0))
    with Talker(server.get_url(), "?intent=transcription") as talker:
        talker.receive()
        talker.set_input(format={"type": "audio/pcm", "rate": 16_000})
        talker.say(np.concatenate([pause, speech, pause]))
        messages = talker.receive_until(COMPLETED)
    assert normalize(messages[-1]["transcript"]) == "go forward ten meters"
    start_ms, end_ms = messages[0]["audio_start_ms"], messages[1]["audio_end_ms"]
    assert start_ms >= 1600
    assert end_ms <= 2000 + 1000 * len(speech) / 16_000 + 600
