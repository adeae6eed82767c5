"""Human speech through our front end and our encoder path, checked by Whisper tiny.en.

`test_transcribing` runs Whisper itself in the engine. What is checked with it here:

- Ours: decoding and resampling files (`multimodal/decoding`), the call of the processor, the
  worker's encoder path and its cache.
- Transformers': the feature extractor, the audio tower's code, Whisper's encoder (with which the
  tower's embeddings are compared) and `WhisperForConditionalGeneration`, which says what words are
  in the spectrograms that our front end made.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr  # type: ignore[import-untyped]
import torch

from real_models.speech import RATE, get_recordings
from sensorium import LLM, SamplingParams
from sensorium.multimodal.decoding.audio import resample
from tests.real.hearing import (
    MAX_ERROR_RATE,
    NUM_FRAMES,
    Whisper,
    count_errors,
    get_error_rate,
    make_hearing_model,
    read_samples,
)
from tests.support.engine import get_hf_model, make_llm, process_with_tensors
from tests.support.media import write_audio, write_av_audio

TOLERANCE = 2e-3
HOP = 160  # samples to a frame
PARAMS = SamplingParams(temperature=0, max_tokens=2)


@pytest.fixture(scope="module")
def whisper(real_folder: Callable[[str], Path]) -> Whisper:
    return Whisper(real_folder("whisper"))


@pytest.fixture(scope="module")
def recordings(real_folder: Callable[[str], Path]) -> dict[Path, str]:
    return get_recordings(real_folder("speech"))


@pytest.fixture(scope="module")
def llm(
    real_folder: Callable[[str], Path],
    tiny_model: Callable[[str], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[LLM]:
    """Qwen2.5-Omni with Whisper's ears."""
    directory = tmp_path_factory.mktemp("hearing")
    make_hearing_model(tiny_model("qwen2_5_omni"), real_folder("whisper"), directory)
    with make_llm(str(directory), max_model_len=4096) as llm:
        yield llm


def make_prompt(*audios: bytes) -> dict[str, Any]:
    marker = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    return {"prompt": marker * len(audios), "multi_modal_data": {"audio": list(audios)}}


def make_features(llm: LLM, audio: bytes) -> torch.Tensor:
    """The spectrogram that the worker gets, [80, 3000]."""
    _, items = process_with_tensors(llm, "any", make_prompt(audio), PARAMS)
    (item,) = items.values()
    return item["input_features"][0]


def encode(llm: LLM, audios: list[bytes]) -> list[torch.Tensor]:
    """Return what the worker's encoder makes of each recording, all in one request."""
    hf_model = get_hf_model(llm)
    own_encode, seen = hf_model.encode, []

    def encode_and_note(*arguments: Any) -> Any:
        seen.extend(embeds := own_encode(*arguments))
        return embeds

    hf_model.encode = encode_and_note
    try:
        (output,) = llm.generate(make_prompt(*audios), PARAMS, use_tqdm=False)
    finally:
        hf_model.encode = own_encode
    assert output.error is None
    assert len(seen) == len(audios)
    return [embeds.float().cpu() for embeds in seen]


def test_embeddings_of_half_a_minute_are_those_of_whispers_encoder(
    llm: LLM, whisper: Whisper, recordings: dict[Path, str]
) -> None:
    speech = np.concatenate([read_samples(path) for path in recordings])[: NUM_FRAMES * HOP]
    assert len(speech) == NUM_FRAMES * HOP
    features = whisper.get_features(speech)
    (embeds,) = encode(llm, [write_audio(speech, "WAV", "PCM_16")])
    torch.testing.assert_close(embeds, whisper.encode(features), atol=TOLERANCE, rtol=0)
    # The reference is the encoder as it stands in Transformers.
    encoder = whisper.model.model.encoder
    with torch.inference_mode():
        whole = encoder(features[None]).last_hidden_state[0]
        normed = encoder.layer_norm(whisper.run_layers(features))
    torch.testing.assert_close(normed, whole, atol=1e-5, rtol=0)


def test_embeddings_of_several_recordings_in_one_request_are_those_of_each(
    llm: LLM, whisper: Whisper, recordings: dict[Path, str]
) -> None:
    """Whisper encodes the silence behind a short recording and towers do not.

    So the reference is cut to the same length.
    """
    found = encode(llm, [path.read_bytes() for path in recordings])
    for path, embeds in zip(recordings, found, strict=True):
        samples = read_samples(path)
        features = whisper.get_features(samples)[:, : -(-len(samples) // HOP)]
        expected = whisper.encode(features)
        torch.testing.assert_close(embeds, expected, atol=TOLERANCE, rtol=0, msg=path.name)


def test_spectrograms_are_bit_equal_and_their_words_are_recognised(
    llm: LLM, whisper: Whisper, recordings: dict[Path, str]
) -> None:
    found = []
    for path in recordings:
        features = make_features(llm, path.read_bytes())
        assert torch.equal(features, whisper.get_features(read_samples(path))), path.name
        found.append(whisper.transcribe(features))
    assert get_error_rate(found, list(recordings.values())) <= MAX_ERROR_RATE, found


def make_stereo_flac(samples: Any) -> bytes:
    louder = resample(samples, RATE, 48_000)
    return write_audio(np.stack([louder, 0.5 * louder], axis=1), "FLAC", "PCM_24", rate=48_000)


def make_mp3(samples: Any) -> bytes:
    return write_audio(resample(samples, RATE, 44_100), "MP3", "MPEG_LAYER_III", rate=44_100)


def make_opus(samples: Any) -> bytes:
    return write_av_audio(resample(samples, RATE, 48_000), "ogg", "libopus", rate=48_000)


@pytest.mark.parametrize("write", [make_stereo_flac, make_mp3, make_opus])
def test_words_are_recognised_in_other_formats_and_rates(
    llm: LLM, whisper: Whisper, recordings: dict[Path, str], write: Callable[[Any], bytes]
) -> None:
    clear = [path for path in recordings if path.name.endswith(("0890.wav", "0930.wav"))]
    assert len(clear) == 2
    audios = [write(read_samples(path)) for path in clear]
    found = [whisper.transcribe(make_features(llm, audio)) for audio in audios]
    assert found == [recordings[path] for path in clear]


def test_resampled_spectrograms_are_those_of_other_libraries(
    llm: LLM, whisper: Whisper, recordings: dict[Path, str]
) -> None:
    """For every recording, because the words of the shortest change with the samples' last bits."""
    for path in recordings:
        audio = make_stereo_flac(read_samples(path))
        samples, rate = soundfile.read(io.BytesIO(audio), dtype="float32")
        expected = whisper.get_features(soxr.resample(samples.mean(axis=1), rate, RATE))
        torch.testing.assert_close(make_features(llm, audio), expected, atol=1e-4, rtol=0)


def test_other_words_are_recognised_in_audio_at_the_wrong_rate(
    llm: LLM, whisper: Whisper, recordings: dict[Path, str]
) -> None:
    """A control: what a front end that forgets to resample would make of it."""
    path, words = list(recordings.items())[2]
    audio = write_audio(resample(read_samples(path), RATE, 48_000), "WAV", "PCM_16", rate=RATE)
    found = whisper.transcribe(make_features(llm, audio))
    assert count_errors(found, words) > len(words.split()) / 3
