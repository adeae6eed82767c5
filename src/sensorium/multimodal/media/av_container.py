"""Opens an encoded sound or video with FFmpeg, and only what can't reach beyond its own bytes.

Playlists and manifests (HLS, DASH, concat, ...) name other files and addresses: no such format is
on the list, and no protocol is either.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sensorium.multimodal.media.refusals import refuse_damaged
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
    """Whatever goes wrong inside the block is refused as a damaged file."""
    import av

    options = {
        "format_whitelist": _FORMATS,
        "protocol_whitelist": "none",
        "max_streams": str(_MAX_STREAMS),
        **get_decoder_options(max_pixels),  # the container is probed by decoding, too
        "threads": "1",
    }
    with refuse_damaged(kind):
        try:
            container = av.open(
                io.BytesIO(data), mode="r", options=options, metadata_errors="replace"
            )
        except av.error.FFmpegError as error:
            raise RequestError(
                f"this is not {kind} that can be read: of an unsupported format, or damaged"
            ) from error
        with container:
            yield container


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
    if stream.duration is not None and stream.time_base is not None:
        durations.append(float(stream.duration * stream.time_base))
    refuse_if_longer(max(durations), max_duration_s)
    return max(durations)


def refuse_if_longer(duration_s: float, max_duration_s: float) -> None:
    if duration_s > max_duration_s:
        raise RequestError(f"it is longer than {max_duration_s:g} seconds, which is the limit")
