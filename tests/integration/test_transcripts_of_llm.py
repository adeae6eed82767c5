"""An `LLM` transcribes many recordings together, as they come, and whichever of them fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sensorium import LLM, RequestError
from sensorium.speech.transcript import Transcript, TranscriptDelta
from tests.integration.speaking import make_brief, make_wav
from tests.integration.test_interruption import interrupt
from tests.parity.cases import make_audio
from tests.support.engine import assert_nothing_is_left, make_llm

RATE = 16_000
SOUNDS = [make_wav(7.0), make_wav(2.5, seed=1), make_wav(4.0, seed=2)]
BAD = b"Dear model, this is a letter. " * 20


@pytest.fixture(scope="module")
def directory(tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_brief(tiny_model("whisper"), tmp_path_factory.mktemp("brief") / "whisper"))


@pytest.fixture(scope="module")
def shared_llm(directory: str) -> Iterator[LLM]:
    llm = make_llm(directory, max_model_len=None)
    yield llm
    llm.close()


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    yield shared_llm
    assert_nothing_is_left(shared_llm)
    assert not shared_llm.core.has_requests


def transcribe(llm: LLM, audios: Any, **options: Any) -> Any:
    return llm.transcribe(audios, use_tqdm=False, **options)


def get_parts(transcript: Transcript | None) -> Any:
    """Return what does not depend on the batch, not even in the last bits of a number."""
    assert transcript is not None
    parts = [(each.start, each.end, each.text, each.token_ids) for each in transcript.segments]
    return transcript.text, transcript.language, transcript.error, parts


def get_all(transcripts: Iterable[Transcript | None]) -> list[Any]:
    return [get_parts(transcript) for transcript in transcripts]


def test_a_recording_that_fails_does_not_affect_the_others(llm: LLM, tmp_path: Path) -> None:
    expected = transcribe(llm, SOUNDS)
    assert all(transcript.text for transcript in expected)
    missing = tmp_path / "missing.wav"
    audios = [SOUNDS[0], BAD, SOUNDS[1], missing, SOUNDS[2]]
    with pytest.raises(RequestError, match=r"audios\[1\]: .*can't be opened as audio") as caught:
        transcribe(llm, audios)
    assert caught.value.path == ("audios", 1)
    found = transcribe(llm, audios, return_errors=True)
    assert [each.text for each in caught.value.outputs] == [each.text for each in found]
    assert get_all([found[0], found[2], found[4]]) == get_all(expected)
    errors = [str(transcript.error) for transcript in found if transcript.error]
    assert len(errors) == 2
    assert "No such file" in errors[1]
    with pytest.raises(RequestError) as caught:
        transcribe(llm, BAD)
    assert caught.value.path == ()


def test_a_bug_and_a_failing_engine_fail_only_one_recording(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = transcribe(llm, SOUNDS)
    add, num_calls = llm._add, 0

    def fail_once(*arguments: Any, **options: Any) -> str:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 5:
            raise ZeroDivisionError("it is a bug")
        return add(*arguments, **options)

    monkeypatch.setattr(llm, "_add", fail_once)
    found = transcribe(llm, SOUNDS, return_errors=True)
    failed = [index for index, each in enumerate(found) if each.error is not None]
    assert len(failed) == 1
    assert str(found[failed[0]].error) == "internal error: ZeroDivisionError: it is a bug"
    others = [index for index in range(3) if index not in failed]
    assert get_all(found[index] for index in others) == get_all(expected[i] for i in others)


def test_a_stream_gives_each_segment_once_and_the_seconds_that_are_done(llm: LLM) -> None:
    deltas = list(llm.stream_transcripts([*SOUNDS, BAD]))
    for index, expected in enumerate(transcribe(llm, SOUNDS)):
        own = [delta for delta in deltas if delta.index == index]
        *before, last = (delta.final for delta in own)
        assert before == [None] * len(before)
        assert last is not None
        assert get_parts(last) == get_parts(expected)
        assert tuple(each for delta in own for each in delta.segments) == last.segments
        times = [delta.done_s for delta in own]
        assert times == sorted(times)
        assert {delta.duration_s for delta in own} == {expected.duration_s}
        assert times[-1] == expected.duration_s
    long = [delta.done_s for delta in deltas if delta.index == 0]
    assert len({round(time, 3) for time in long}) > 3  # it moves within a recording
    (failed,) = (delta for delta in deltas if delta.index == 3)
    assert failed.final is not None
    assert failed.final.error is not None


def test_the_first_text_comes_before_the_last_window(llm: LLM) -> None:
    deltas = llm.stream_transcripts(make_wav(20.0, seed=5))
    first = next(delta for delta in deltas if delta.segments)
    assert first.done_s < 10.0
    deltas.close()
    assert not llm.core.has_requests


def test_two_streams_and_a_call_share_an_engine(llm: LLM) -> None:
    """Each gets its own outputs, whichever of them computes a step."""
    expected = transcribe(llm, SOUNDS)
    first, second = llm.stream_transcripts(SOUNDS), llm.stream_transcripts(SOUNDS[::-1])
    found: list[TranscriptDelta] = [next(first), next(second), next(first), next(second)]
    assert get_all(transcribe(llm, SOUNDS[1])) == get_all([expected[1]])
    finals = {delta.index: delta.final for delta in [*found[::2], *first] if delta.final}
    assert get_all(finals[index] for index in range(3)) == get_all(expected)
    finals = {delta.index: delta.final for delta in [*found[1::2], *second] if delta.final}
    assert get_all(finals[index] for index in range(3)) == get_all(expected[::-1])


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
def test_an_interruption_leaves_nothing(directory: str, is_after: bool) -> None:
    llm = make_llm(directory, max_model_len=None)
    interrupt(llm.core, "step", call=7, is_after=is_after)
    with pytest.raises(KeyboardInterrupt):
        transcribe(llm, SOUNDS)
    assert_nothing_is_left(llm)
    assert all(transcript.text for transcript in transcribe(llm, SOUNDS))
    llm.close()


def test_unsupported_options_are_refused_at_once(
    llm: LLM, tiny_model: Callable[[str], str]
) -> None:
    with pytest.raises(RequestError, match=r"unknown option\(s\) colour"):
        llm.stream_transcripts(SOUNDS, colour="red")  # type: ignore[call-arg]
    with pytest.raises(RequestError, match=r"audios\[0\]\.language: Unknown language 'ja'"):
        transcribe(llm, SOUNDS, language="ja")
    moonshine = make_llm(tiny_model("moonshine"), max_model_len=None)
    with pytest.raises(RequestError, match="needs_words: this model does not give"):
        moonshine.stream_transcripts(SOUNDS, needs_words=True)
    with pytest.raises(RequestError, match="task: this model does not translate"):
        moonshine.stream_transcripts(SOUNDS, task="translate")
    with pytest.raises(RequestError, match="language: 'klingon' is no known language"):
        transcribe(moonshine, SOUNDS, language="klingon")
    assert transcribe(moonshine, SOUNDS, language="English")[0].language == "en"
    # `done_s` counts the pieces of a long recording. Four of them run at a time.
    audio = (make_audio(150.0, seed=3), RATE)
    times = [delta.done_s for delta in moonshine.stream_transcripts(audio)]
    assert len(set(times)) >= 3
    assert times[-1] == 150.0
    with pytest.raises(RequestError, match="only transcribes speech"):
        moonshine.chat([{"role": "user", "content": "Hello!"}])
    with pytest.raises(RequestError, match="does not transcribe"):
        make_llm(tiny_model("llama")).stream_transcripts(SOUNDS)
