"""Encoded audio becomes mono samples at the model's rate."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import soxr

from sensorium.multimodal.decoding.audio import _trim_end, decode_audio, resample
from sensorium.multimodal.media import MediaLimits
from sensorium.types.errors import RequestError
from tests.support.media import (
    RATE,
    Samples,
    make_audios,
    make_clip,
    make_images,
    make_melody,
    write_audio,
    write_video,
)

LIMITS = MediaLimits()
MELODY = make_melody(4000)


def decode(data: bytes, *, rate: int = RATE, limits: MediaLimits = LIMITS) -> Samples:
    samples = decode_audio(data, sampling_rate=rate, limits=limits)
    assert samples.dtype == np.float32
    assert samples.ndim == 1
    return samples


def test_16_bit_samples_are_exact() -> None:
    integers = np.random.default_rng(0).integers(-(2**15), 2**15, 3000).astype(np.int16)
    for kind in ("WAV", "FLAC"):
        decoded = decode(write_audio(integers, kind, "PCM_16"))
        np.testing.assert_array_equal(decoded, integers.astype(np.float32) / 32_768)


@pytest.mark.parametrize(
    ("subtype", "step"),
    [
        ("PCM_U8", 2**-7),
        ("PCM_16", 2**-15),
        ("PCM_24", 2**-23),
        ("PCM_32", 2**-24),
        ("FLOAT", 1e-9),
        ("DOUBLE", 2**-24),
    ],
)
def test_wav_of_every_width_has_the_same_full_scale(subtype: str, step: float) -> None:
    data = write_audio(MELODY, "WAV", subtype)
    decoded = decode(data)
    np.testing.assert_allclose(decoded, MELODY, atol=step)
    read, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    np.testing.assert_array_equal(decoded, read)


def test_every_kind_of_file_is_decoded() -> None:
    for kind, data in make_audios().items():
        decoded = decode(data)
        assert 700 <= len(decoded) <= 4100, kind
        loudness = np.abs(decoded).max()
        assert 0.4 < loudness < 0.6, kind


@pytest.mark.parametrize("kind", ["flac", "mp3", "ogg vorbis"])
def test_samples_are_those_of_the_usual_reader(kind: str) -> None:
    """Transformers loads audio with libsndfile."""
    data = make_audios()[kind]
    read, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    decoded = decode(data)
    assert decoded.shape == read.shape
    np.testing.assert_allclose(decoded, read, atol=2e-3)


def test_channels_are_mixed_down_by_their_mean() -> None:
    channels = np.random.default_rng(1).integers(-(2**15), 2**15, (500, 3)).astype(np.int16)
    decoded = decode(write_audio(channels, "WAV", "PCM_16"))
    expected = (channels.T.astype(np.float32) / 32_768).mean(axis=0)
    np.testing.assert_array_equal(decoded, expected)


@pytest.mark.parametrize("rate", [8_000, 44_100, 48_000])
def test_other_rates_are_resampled_as_one_piece_would_be(rate: int) -> None:
    noise = np.random.default_rng(2).integers(-(2**14), 2**14, 150_001).astype(np.int16)
    decoded = decode(write_audio(noise, "WAV", "PCM_16", rate=rate))
    expected = soxr.resample(noise.astype(np.float32) / 32_768, rate, RATE, quality="HQ")
    np.testing.assert_array_equal(decoded, expected)
    np.testing.assert_array_equal(resample(noise.astype(np.float32) / 32_768, rate, RATE), expected)


def test_the_end_of_an_ogg_file_is_trimmed_only_if_it_is_the_end() -> None:
    pieces = [np.full(4, index, dtype=np.float32) for index in range(5)]
    for length, expected in [(18, 18), (20, 20), (100, 20), (10, 20)]:
        trimmed = np.concatenate(list(_trim_end(iter(pieces), length)))
        np.testing.assert_array_equal(trimmed, np.concatenate(pieces)[:expected])


def test_the_audio_of_a_video_is_decoded_and_a_video_without_audio_refused() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        pictures = container.add_stream("mpeg4", rate=10)
        pictures.width, pictures.height, pictures.pix_fmt = 48, 32, "yuv420p"
        audio = container.add_stream("aac", rate=RATE, layout="mono")
        for pixels in make_clip(3):
            container.mux(pictures.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        for start in range(0, 3072, 1024):
            part = make_melody(3072)[None, start : start + 1024]
            frame = av.AudioFrame.from_ndarray(part, format="fltp", layout="mono")
            frame.sample_rate, frame.pts = RATE, start
            container.mux(audio.encode(frame))
        container.mux(pictures.encode(None))
        container.mux(audio.encode(None))
    decoded = decode(file.getvalue())
    assert 3000 <= len(decoded) <= 4096
    assert np.abs(decoded).max() > 0.4
    with pytest.raises(RequestError, match="no audio track"):
        decode(write_video(make_clip(3)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_samples_that_are_no_numbers_are_refused(value: float) -> None:
    samples = MELODY.copy()
    samples[70] = value
    for channels in (samples, np.stack([samples, MELODY], axis=1)):
        with pytest.raises(RequestError, match="not finite"):
            decode(write_audio(channels, "WAV", "FLOAT"))
    with pytest.raises(RequestError, match="not finite"):
        decode(write_audio(np.full(400, 1e300), "WAV", "DOUBLE"))


def test_empty_audio_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        decode(write_audio(np.zeros(0, dtype=np.float32), "WAV", "PCM_16"))


@pytest.mark.parametrize("rate", [1, 999, 768_001])
def test_rates_that_no_audio_has_are_refused(rate: int) -> None:
    with pytest.raises(RequestError, match=f"samples a second, not {rate}"):
        decode(write_audio(MELODY, "WAV", "PCM_16", rate=rate))


def test_long_audio_is_refused_by_its_header() -> None:
    for data in make_audios().values():
        with pytest.raises(RequestError, match=r"longer than 0\.01 seconds"):
            decode(data, limits=MediaLimits(max_duration_s=0.01))


def test_a_file_longer_than_its_header_says_is_refused_while_decoding() -> None:
    data = bytearray(write_audio(make_melody(64_000), "FLAC", "PCM_16"))
    # STREAMINFO begins after "fLaC" and its block's header; the lower 32 bits of the number of
    # samples stand at its bytes 14 to 17, 0 meaning unknown.
    struct.pack_into(">I", data, 8 + 14, 0)
    limits = MediaLimits(max_duration_s=1.0)
    with pytest.raises(RequestError, match="longer than 1 seconds"):
        decode(bytes(data), limits=limits)
    assert len(decode(bytes(data))) == 64_000


@pytest.mark.parametrize("data", [b"", b"hello", b"RIFF", make_images()["png"]])
def test_what_is_no_audio_is_refused(data: bytes) -> None:
    with pytest.raises(RequestError, match="can't be opened as audio: its format is not"):
        decode(data)


def test_files_that_name_other_files_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret.wav").write_bytes(write_audio(MELODY, "WAV", "PCM_16"))
    target = tmp_path / "secret.wav"
    playlists = [
        f"ffconcat version 1.0\nfile {target}\n",
        f"#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile://{target}\n"
        "#EXT-X-ENDLIST\n",
        '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><Period><AdaptationSet>'
        f"<Representation><BaseURL>{target}</BaseURL></Representation></AdaptationSet></Period></MPD>",
    ]
    for playlist in playlists:
        with pytest.raises(RequestError, match=r"can't be (opened|decoded) as audio") as caught:
            decode(playlist.encode())
        assert "secret" not in str(caught.value)
