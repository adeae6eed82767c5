"""Keeps decoding safe: bounds memory and work, and lets FFmpeg read nothing but the given file.

Messages contain no addresses, no paths and no texts of other libraries, because clients read them.

Decoders call `WorkBudget.expect` with the work that a file's header announces, before they decode
anything, and `spend` with the work that they have done. So a false header only delays the refusal.
The constants are the speed of one core, measured on server CPUs of the 2020s. They only tell short
work from long work, so that the right order of magnitude is enough.

Playlists and manifests (HLS, DASH, concat, ...) refer to other files and addresses. FFmpeg may use
none of these formats, and no protocol.
"""

from __future__ import annotations

import io
import math
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sensorium.types.errors import RequestError, SensoriumError

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.stream import Stream
    from av.video.stream import VideoStream

S = TypeVar("S", "AudioStream", "VideoStream")


@contextmanager
def refuse_damaged(kind: str, *decoder_errors: type[Exception]) -> Iterator[None]:
    """Turn errors that a damaged file causes inside the `with` block into a `RequestError`.

    These are `decoder_errors` and `MemoryError`. Other errors pass through, because they are bugs.
    `kind` says in the error text what the file should be, such as "an image".
    """
    try:
        yield
    except SensoriumError:
        raise
    except MemoryError as error:
        raise RequestError(
            "there is not enough memory to decode this file: send a smaller one"
        ) from error
    except decoder_errors as error:
        raise RequestError(
            f"this file can't be decoded as {kind}: it is truncated or damaged"
        ) from error


_STATUS = Path("/proc/self/status")


def limit_memory_growth(num_bytes: int) -> None:
    """Limit this process to `num_bytes` more memory than it uses now, on systems with /proc.

    Some container formats need memory before pixels and seconds can be checked: a file of a
    kilobyte can list a hundred million samples, and FFmpeg makes a table of them. Above the limit
    every allocation of the process fails, so call this only in processes that do nothing but
    decode and process media.
    """
    if not _STATUS.exists():
        return
    fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    num_used = int(fields["VmData"].split()[0]) * 1024
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = num_used + num_bytes
    if most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


_PIXELS_PER_S = 100e6  # real images: 50 to 150 million; frames of videos: 100 to 500 million
_FRAME_S = 50e-6  # the least time that a frame takes
_AUDIO_S_PER_S = 300.0  # seconds of audio that are decoded and processed in one second
AUDIO_FRAME_S = 100e-6  # the least time that a frame of audio takes


class CostlyItemError(SensoriumError):
    """An error for a media item that takes more work than the current attempt may spend.

    The item is not wrong: a process for long jobs may run it. `cost_s` is the estimated work in
    seconds.
    """

    def __init__(self, cost_s: float) -> None:
        super().__init__(
            f"the media item takes about {cost_s:.1f} s of work, and must be run as a long job"
        )
        self.cost_s = cost_s


class WorkBudget:
    """A limit on the work and on the time of one attempt to decode a media item, for one thread.

    Work is estimated in seconds of one CPU core (`max_cost_s`). Time is measured by the clock.
    """

    def __init__(self, *, max_cost_s: float = math.inf, deadline_s: float = math.inf) -> None:
        """Start the clock: `deadline_s` counts in seconds from this call."""
        self._max_cost_s = max_cost_s
        self._deadline_s = deadline_s
        self._ends_at = time.monotonic() + deadline_s
        self._spent_s = 0.0

    def expect(self, cost_s: float) -> None:
        """Raise `CostlyItemError` if the budget does not allow `cost_s` seconds for the item."""
        if cost_s > self._max_cost_s:
            raise CostlyItemError(cost_s)

    def spend(self, cost_s: float) -> None:
        """Add `cost_s` seconds of finished work, and check the budget and the deadline."""
        self._spent_s += cost_s
        self.expect(self._spent_s)
        self.check_time()

    def check_time(self) -> None:
        """Raise `RequestError` if the deadline for decoding the item has passed."""
        if time.monotonic() > self._ends_at:
            raise RequestError(
                f"the file could not be decoded within {self._deadline_s:g} seconds, "
                "which is the limit"
            )


def estimate_frames_s(num_frames: int, width: int, height: int) -> float:
    """Return the estimated seconds for decoding frames of this size; an image is one frame."""
    return num_frames * (width * height / _PIXELS_PER_S + _FRAME_S)


def estimate_audio_s(duration_s: float) -> float:
    """Return the estimated seconds for decoding and processing audio of this length."""
    return duration_s / _AUDIO_S_PER_S


_FORMATS = (
    "aac,aiff,apng,avi,caf,flac,flv,gif,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mp3,mpeg,mpegts,ogg,"
    "w64,wav"
)
_MICROSECONDS = 1_000_000  # FFmpeg's unit for the duration of a container
_MAX_STREAMS = 32


@contextmanager
def open_container(data: bytes, kind: str, *, max_pixels: int) -> Iterator[InputContainer]:
    """Open a media file with FFmpeg, and close it at the end of the `with` block.

    Raise `RequestError` if FFmpeg can't read it, also inside the block. `kind` is as in
    `refuse_damaged`. FFmpeg allocates no frame that is much larger than `max_pixels`.
    """
    import av

    options = {
        "format_whitelist": _FORMATS,
        "protocol_whitelist": "none",
        "max_streams": str(_MAX_STREAMS),
        **get_decoder_options(max_pixels),  # FFmpeg may decode frames to find out what they are
        "threads": "1",
    }
    with refuse_damaged(kind, av.error.FFmpegError):
        try:
            container = av.open(
                io.BytesIO(data), mode="r", options=options, **_get_metadata_options()
            )
        except av.error.FFmpegError as error:
            raise RequestError(
                f"this file can't be opened as {kind}: its format is not supported, "
                "or it is damaged"
            ) from error
        with container:
            yield container


def _get_metadata_options() -> dict[str, Any]:
    """Return arguments with which `av.open` accepts titles and comments that are not UTF-8.

    PyAV 18 refuses such files without this argument. PyAV 19 accepts them, and does not have it.
    """
    import av

    major_version = int(av.__version__.split(".")[0])
    return {"metadata_errors": "replace"} if major_version < 19 else {}


def get_first_stream(streams: Sequence[S], missing: str) -> S:
    """Return the first audio or video stream, set up so that FFmpeg decodes it in one thread.

    Raise `RequestError` if there is no stream (with the text `missing`), or no decoder for it.
    """
    if not streams:
        raise RequestError(missing)
    stream = streams[0]
    if stream.codec_context is None:
        raise RequestError("this server has no decoder for the codec of this file: convert it")
    stream.codec_context.thread_count = 1  # processes decode several files at once
    return stream


def get_decoder_options(max_pixels: int) -> dict[str, str]:
    """Return the FFmpeg options that keep a decoder from allocating huge frames.

    The limit is twice `max_pixels`, because decoders round sizes up to whole blocks. The caller
    checks the exact limit for each frame.
    """
    return {"max_pixels": str(2 * max_pixels)}


def check_duration(container: InputContainer, stream: Stream, max_duration_s: float) -> float:
    """Return the length in seconds that the file's header gives, which may be 0 or wrong.

    Raise `RequestError` if the length is above `max_duration_s`.
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
    """Raise `RequestError` if audio or video of `duration_s` seconds is too long."""
    if duration_s > max_duration_s:
        raise RequestError(
            f"the media is longer than {max_duration_s:g} seconds, which is the limit"
        )
