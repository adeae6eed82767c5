"""Raw audio in chunks that end anywhere becomes the same samples as in one piece."""

from __future__ import annotations

import io
import wave

import av
import numpy as np
import pytest
import soxr
from hypothesis import given
from hypothesis import strategies as st

from sensorium.speech.live.audio import AudioDecoder, AudioFormat, Encoding, write_wav
from tests.support.talking import LOUD, make_tones, to_pcm16


def decode_in_chunks(form: AudioFormat, audio: bytes, sizes: list[int]) -> np.ndarray:
    decoder, pieces, start = AudioDecoder(form), [], 0
    for size in sizes:
        pieces.append(decoder.decode(audio[start : start + size]))
        start += size
    pieces.append(decoder.decode(audio[start:]))
    return np.concatenate([*pieces, decoder.flush()])


@pytest.mark.parametrize(
    "form",
    [AudioFormat("pcm16", 16_000), AudioFormat("pcm16", 24_000), AudioFormat("mulaw", 8_000)],
    ids=str,
)
@given(sizes=st.lists(st.integers(0, 3000), max_size=12))
def test_samples_do_not_depend_on_where_chunks_end(form: AudioFormat, sizes: list[int]) -> None:
    audio = make_tones((LOUD, 0.4), rate=form.rate)
    audio = to_pcm16(audio)
    whole = decode_in_chunks(form, audio, [])
    assert np.array_equal(decode_in_chunks(form, audio, sizes), whole)


def test_resampled_audio_is_that_of_one_call() -> None:
    audio = make_tones((LOUD, 1.0), rate=24_000)
    found = decode_in_chunks(AudioFormat("pcm16", 24_000), to_pcm16(audio), [999] * 30)
    stored = np.frombuffer(to_pcm16(audio), "<i2").astype(np.float32) / 32768
    expected = soxr.resample(stored, 24_000, 16_000, "HQ")
    assert len(found) == 16_000
    assert np.abs(found - expected).max() < 1e-4


@pytest.mark.parametrize(("encoding", "codec"), [("mulaw", "pcm_mulaw"), ("alaw", "pcm_alaw")])
def test_each_code_of_g711_is_the_sample_that_ffmpeg_decodes(
    encoding: Encoding, codec: str
) -> None:
    codes = bytes(range(256))
    context = av.CodecContext.create(codec, "r")
    context.sample_rate, context.layout = 8000, "mono"
    (frame,) = context.decode(av.Packet(codes))
    expected = frame.to_ndarray()[0]
    decoder = AudioDecoder(AudioFormat(encoding, 16_000))  # a rate at which nothing is resampled
    assert np.array_equal(decoder.decode(codes) * 32768, expected)


def test_a_wav_file_has_the_samples() -> None:
    samples = np.array([0.0, 0.5, -0.5, 1.5, -1.5], np.float32)
    with wave.open(io.BytesIO(write_wav(samples))) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 16_000)
        stored = np.frombuffer(file.readframes(5), "<i2").tolist()
    assert stored == [0, 16384, -16384, 32767, -32768]


def test_a_flush_ends_a_stream() -> None:
    decoder = AudioDecoder(AudioFormat("pcm16", 24_000))
    for _ in range(2):
        audio = to_pcm16(make_tones((LOUD, 0.3), rate=24_000)) + b"\x01"  # half a sample too much
        assert len(decoder.decode(audio)) + len(decoder.flush()) == 4800
