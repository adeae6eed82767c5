"""Only what a decoder reports makes a file damaged. An error of our own is a bug, and stays one.

Both major versions of PyAV are imitated here where they differ; `make test-install` runs them.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import av
import pytest
import soxr
from av.rational import AVRational
from PIL import Image

from sensorium.multimodal.decoding.audio import decode_audio
from sensorium.multimodal.decoding.guards import check_duration
from sensorium.multimodal.decoding.images import decode_image, read_image_size
from sensorium.multimodal.decoding.video import decode_video
from sensorium.multimodal.media import MediaLimits
from sensorium.types.errors import RequestError
from tests.support.media import (
    RATE,
    make_clip,
    make_melody,
    make_pixels,
    write_audio,
    write_image,
    write_video,
)

LIMITS = MediaLimits()
PICTURE = write_image(make_pixels(), "PNG")
AUDIO = write_audio(make_melody(4000), "WAV", "PCM_16")
VIDEO = write_video(make_clip())


def decode_wav(data: bytes = AUDIO, rate: int = RATE) -> Any:
    return decode_audio(data, sampling_rate=rate, limits=LIMITS)


def decode_clip(data: bytes = VIDEO) -> Any:
    return decode_video(data, choose_frames=lambda _: [0, 2], limits=LIMITS)


def break_it(*_: object, **__: object) -> Any:
    raise TypeError("open() got an unexpected keyword argument")


def use_version(monkeypatch: pytest.MonkeyPatch, version: str, *removed: str) -> list[set[str]]:
    """Let `av` be of that version; return a list that will have the arguments of each `av.open`."""
    real_open: Callable[..., Any] = av.open
    calls: list[set[str]] = []

    def open_as_that_version(*args: Any, **options: Any) -> Any:
        calls.append(set(options))
        if options.keys() & set(removed):
            raise TypeError("open() got an unexpected keyword argument")
        return real_open(*args, **{n: v for n, v in options.items() if n != "metadata_errors"})

    monkeypatch.setattr(av, "__version__", version)
    monkeypatch.setattr(av, "open", open_as_that_version)
    return calls


def test_pyav_19_is_opened_without_the_argument_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_version(monkeypatch, "19.0.2", "metadata_errors", "metadata_encoding", "stream_options")
    assert len(decode_wav()) == 4000
    assert len(decode_clip()[0]) == 2


def test_pyav_18_is_asked_to_accept_titles_of_any_encoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = use_version(monkeypatch, "18.1.0")
    decode_wav()
    assert ["metadata_errors" in options for options in calls] == [True]


def test_a_title_that_is_not_utf_8_is_no_damage() -> None:
    title = b"caf\xe9 \xff\xfe"
    entry = b"INAM" + struct.pack("<I", len(title)) + title + bytes(len(title) % 2)
    notes = b"LIST" + struct.pack("<I", len(entry) + 4) + b"INFO" + entry
    # The notes go behind the format, which ends at byte 36 of a plain WAV file.
    data = AUDIO[:36] + notes + AUDIO[36:]
    data = data[:4] + struct.pack("<I", len(data) - 8) + data[8:]
    with av.open(io.BytesIO(data), **_get_lenient_options()) as container:
        assert "caf" in container.metadata["title"]
    assert len(decode_wav(data)) == 4000


def _get_lenient_options() -> dict[str, Any]:
    is_old = int(av.__version__.split(".")[0]) < 19
    return {"metadata_errors": "replace"} if is_old else {}


@pytest.mark.parametrize(
    "decode",
    [decode_wav, decode_clip],
    ids=["audio", "video"],
)
def test_a_wrong_call_of_pyav_is_not_a_damaged_file(
    monkeypatch: pytest.MonkeyPatch, decode: Callable[[], Any]
) -> None:
    monkeypatch.setattr(av, "open", break_it)
    with pytest.raises(TypeError, match="unexpected keyword"):
        decode()


def test_a_wrong_call_of_the_resampler_is_not_a_damaged_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(soxr, "ResampleStream", break_it)
    with pytest.raises(TypeError, match="unexpected keyword"):
        decode_wav(rate=8000)


@pytest.mark.parametrize("error", [TypeError, AttributeError, KeyError, NameError])
@pytest.mark.parametrize("decode", [decode_image, read_image_size])
def test_a_wrong_call_of_pillow_is_not_a_damaged_file(
    monkeypatch: pytest.MonkeyPatch, decode: Callable[..., Any], error: type[Exception]
) -> None:
    def fail(*_: object) -> Any:
        raise error("ours")

    Image.init()
    monkeypatch.setitem(Image.OPEN, "PNG", (fail, Image.OPEN["PNG"][1]))
    with pytest.raises(error, match="ours"):
        decode(PICTURE, limits=LIMITS)


def test_a_wrong_call_for_the_orientation_is_not_a_damaged_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Image.Image, "getexif", break_it)
    with pytest.raises(TypeError, match="unexpected keyword"):
        decode_image(write_image(make_pixels(), "JPEG"), limits=LIMITS)


def test_a_codec_without_a_decoder_is_refused() -> None:
    """Its stream has no codec context, on which we would stumble."""
    format_tag = AUDIO.index(b"fmt ") + 8
    audio = AUDIO[:format_tag] + b"\x34\x12" + AUDIO[format_tag + 2 :]
    with pytest.raises(RequestError, match="no decoder for the codec"):
        decode_wav(audio)
    with pytest.raises(RequestError, match="no decoder for the codec"):
        decode_clip(write_video(make_clip(), "avi").replace(b"FMP4", b"nope"))


@pytest.mark.parametrize("time_base", [None, AVRational(0, 1), AVRational(1, 0)])
def test_a_duration_without_a_unit_is_not_counted(time_base: AVRational | None) -> None:
    """An unknown time base is None with PyAV 18, and a false ratio with PyAV 19."""
    container: Any = SimpleNamespace(duration=None)
    stream: Any = SimpleNamespace(duration=10**9, time_base=time_base)
    check_duration(container, stream, 1.0)
    stream.time_base = AVRational(1, 1000)
    with pytest.raises(RequestError, match="longer than 1 seconds"):
        check_duration(container, stream, 1.0)


def test_a_rotation_matrix_without_an_angle_leaves_frames_unchanged() -> None:
    """A matrix that flattens frames has no angle."""
    start = VIDEO.index(b"tkhd") + 4 + 40  # its matrix, in version 0 of this box
    identity = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    assert VIDEO[start : start + 36] == identity
    flat = struct.pack(">9i", 0, 0, 0, 0, 0, 0, 0, 0, 1 << 30)
    frames, _ = decode_clip(VIDEO[:start] + flat + VIDEO[start + 36 :])
    assert frames.shape == (2, 32, 48, 3)
