"""Audio is taken whole, or refused with the number of seconds that the model takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from sensorium.models.loading import load_config
from sensorium.multimodal.media import MediaLimits
from sensorium.multimodal.processing.item_worker import SAMPLES, ItemJob, ItemWorker, LengthCheck
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import ProcessedItem
from tests.support.media import make_melody, write_audio

RATE = 16_000
# The windows of the tiny models, in seconds. Audio Flamingo's is set here: ten minutes take long.
WINDOWS = {"qwen2_audio": 3.0, "gemma4": 30.0, "qwen2_5_omni": 30.0, "audioflamingo3": 12.0}


@pytest.fixture(scope="module")
def processor_of(tiny_model: Callable[[str], str]) -> Callable[[str], MultiModalProcessor]:
    @cache
    def make(family: str) -> MultiModalProcessor:
        directory = tiny_model(family)
        processor = MultiModalProcessor(directory, load_config(directory, trust_remote_code=False))
        if family == "audioflamingo3":
            processor.hf_processor.max_audio_len = int(WINDOWS[family])
        return processor

    return make


def process_melody(worker: ItemWorker, seconds: float) -> ProcessedItem:
    job = ItemJob(mm_hash="", modality="audio", decode_options=None, processor_kwargs={})
    item, _ = worker.process(job, make_melody(round(seconds * RATE)))
    return item


@pytest.mark.parametrize("family", WINDOWS)
@pytest.mark.parametrize("is_asked_before", [False, True])
def test_audio_longer_than_the_window_is_refused_and_audio_that_fills_it_is_accepted(
    processor_of: Callable[[str], MultiModalProcessor], family: str, is_asked_before: bool
) -> None:
    worker, window = ItemWorker(processor_of(family), MediaLimits()), WINDOWS[family]
    if is_asked_before:
        for seconds in (0.3 * window, window):
            assert process_melody(worker, seconds).layout is not None
    for seconds in (window + 0.2, 3 * window):
        with pytest.raises(RequestError) as caught:
            process_melody(worker, seconds)
        assert str(caught.value) == (
            f"the audio is {seconds:.4g} s long; this model takes at most {window:g} s: "
            "send it in pieces"
        )
    assert process_melody(worker, window).layout is not None
    assert process_melody(worker, window + 0.04).layout is not None  # the padding of a coder


def test_all_windows_of_a_processor_that_takes_several_are_encoded(
    processor_of: Callable[[str], MultiModalProcessor],
) -> None:
    worker = ItemWorker(processor_of("audioflamingo3"), MediaLimits())
    num_windows = [
        len(process_melody(worker, s).kwargs["input_features"]) for s in (2.0, 3.5, 11.9)
    ]
    assert num_windows == [1, 2, 4]


def test_voxtral_takes_any_audio_in_windows(
    processor_of: Callable[[str], MultiModalProcessor],
) -> None:
    worker = ItemWorker(processor_of("voxtral"), MediaLimits())
    assert len(process_melody(worker, 61.0).kwargs["input_features"]) == 3


def test_the_window_of_a_processor_that_does_not_name_it_is_found(
    processor_of: Callable[[str], MultiModalProcessor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LengthCheck, "_iter_candidates", lambda _: iter(()))
    worker = ItemWorker(processor_of("qwen2_audio"), MediaLimits())
    assert process_melody(worker, 3.0).layout is not None
    with pytest.raises(RequestError, match=r"3.2 s long; this model would cut off its end"):
        process_melody(worker, 3.2)
    assert process_melody(worker, 2.9).layout is not None


def test_options_of_one_client_do_not_change_the_window_of_another(
    processor_of: Callable[[str], MultiModalProcessor],
) -> None:
    """Neither by silence, nor by what drowns everything, nor by options."""
    worker = ItemWorker(processor_of("qwen2_5_omni"), MediaLimits())
    for audio in (np.zeros(RATE, np.float32), np.full(2 * RATE, 1e30, np.float32)):
        job = ItemJob(mm_hash="", modality="audio", decode_options=None, processor_kwargs={})
        worker.process(job, audio)
    short = ItemJob(
        mm_hash="",
        modality="audio",
        decode_options=None,
        processor_kwargs={"max_length": RATE, "truncation": True},
    )
    with pytest.raises(RequestError, match="send it in pieces"):
        worker.process(short, make_melody(5 * RATE))
    assert process_melody(worker, 5.0).layout is not None


def test_audio_within_a_known_window_is_not_probed_again(
    processor_of: Callable[[str], MultiModalProcessor], monkeypatch: pytest.MonkeyPatch
) -> None:
    length_check = LengthCheck(processor_of("qwen2_5_omni"))
    length_check.check(RATE, {})
    monkeypatch.setattr(LengthCheck, "_ask", _refuse_to_ask)
    for seconds in (0.1, 5, 29, 30):
        length_check.check(int(seconds * RATE), {})


def _refuse_to_ask(*_: object) -> bool:
    raise AssertionError("the processor was asked again")


def test_decoded_audio_may_be_longer_than_the_window_but_not_than_the_limit(
    processor_of: Callable[[str], MultiModalProcessor],
) -> None:
    worker = ItemWorker(processor_of("qwen2_audio"), MediaLimits(max_duration_s=10.0))
    job = ItemJob(
        mm_hash="name",
        modality="audio",
        decode_options={},
        processor_kwargs={},
        is_decoded_only=True,
    )
    audio = make_melody(round(8.0 * RATE))
    item, times = worker.process(job, write_audio(audio, "WAV", "FLOAT"))
    assert np.array_equal(item.kwargs[SAMPLES].numpy(), audio)
    assert (item.mm_hash, set(times)) == ("name", {"decode", "process"})
    with pytest.raises(RequestError, match="longer than 10"):
        worker.process(job, write_audio(make_melody(11 * RATE), "WAV", "FLOAT"))
