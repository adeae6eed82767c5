"""Opens an encoded sound or video with FFmpeg, and only what can't reach beyond its own bytes.

Playlists and manifests (HLS, DASH, concat, ...) name other files and addresses: no such format is
on the list, and no protocol is either.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sensorium.multimodal.decoding.guards import refuse_damaged
from sensorium.types.errors import RequestError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.stream import Stream

_FORMATS = (
    "aac,aiff,apng,avi,caf,flac,flv,gif,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mp3,mpeg,mpegts,ogg,"
    "w64,wav"
)
_MICROSECONDS = 1_000_000  # FFmpeg's unit for the duration of a container
_MAX_STREAMS = 32


@contextmanager
def open_container(data: bytes, kind: str, *, max_pixels: int) -> Iterator[InputContainer]:
    """Open the file. What FFmpeg can't read inside the block is refused as a damaged file."""
    import av

    options = {
        "format_whitelist": _FORMATS,
        "protocol_whitelist": "none",
        "max_streams": str(_MAX_STREAMS),
        **get_decoder_options(max_pixels),  # the container is probed by decoding, too
        "threads": "1",
    }
    with refuse_damaged(kind, av.error.FFmpegError):
        try:
            container = av.open(
                io.BytesIO(data), mode="r", options=options, **_get_metadata_options()
            )
        except av.error.FFmpegError as error:
            raise RequestError(
                f"this is not {kind} that can be read: of an unsupported format, or damaged"
            ) from error
        with container:
            yield container


def _get_metadata_options() -> dict[str, Any]:
    """Return what makes `av.open` accept titles and comments that are not UTF-8.

    PyAV 18 refuses such a file unless it is asked not to. PyAV 19 never does, and has no such
    argument.
    """
    import av

    major_version = int(av.__version__.split(".")[0])
    return {"metadata_errors": "replace"} if major_version < 19 else {}


def check_codec(stream: Stream) -> None:
    """Raise a `RequestError` if FFmpeg has no decoder for the stream."""
    if stream.codec_context is None:
        raise RequestError("it is encoded in a way that can't be decoded here")


def get_decoder_options(max_pixels: int) -> dict[str, str]:
    """No larger frame is allocated. Decoders round sizes up to whole blocks, so that the exact
    limit is for whoever sees the frame.
    """
    return {"max_pixels": str(2 * max_pixels)}


def check_duration(container: InputContainer, stream: Stream, max_duration_s: float) -> float:
    """Return the seconds that the header claims, which may be 0, or a lie. Raise `RequestError` if
    they are too many.
    """
    durations = [0.0]
    if container.duration is not None:
        durations.append(container.duration / _MICROSECONDS)
    # An unknown time base is None with PyAV 18, and a false ratio (0/1 or 1/0) with PyAV 19.
    if stream.duration is not None and stream.time_base:
        durations.append(float(stream.duration * stream.time_base))
    refuse_if_longer(max(durations), max_duration_s)
    return max(durations)


def refuse_if_longer(duration_s: float, max_duration_s: float) -> None:
    if duration_s > max_duration_s:
        raise RequestError(f"it is longer than {max_duration_s:g} seconds, which is the limit")
