"""What keeps decoding safe: bounded memory, bounded work, files that reach nothing else.

Messages name neither addresses nor paths nor another library's words, because they go to clients.

Decoders call `WorkBudget.expect` with what a header promises, before they decode anything, and
`spend` for what they have really decoded. So a false header changes nothing but the moment at which
the work is seen to be long. The constants are one core's speed, measured on server CPUs of the
2020s. They order items by their work and need no more than the right order of magnitude.

Playlists and manifests (HLS, DASH, concat, ...) name other files and addresses. No such format is
on the list for FFmpeg, and no protocol is either.
"""

from __future__ import annotations

import io
import math
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sensorium.types.errors import RequestError, SensoriumError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.stream import Stream


@contextmanager
def refuse_damaged(kind: str, *decoder_errors: type[Exception]) -> Iterator[None]:
    """Raise a `RequestError` if the block fails in a way in which a decoder reports a bad file.

    `kind` is what was expected, as in "an image". Errors of any other type pass through: they are
    bugs, not damaged files, and have to reach the log and the client as such.
    """
    try:
        yield
    except SensoriumError:
        raise
    except MemoryError as error:
        raise RequestError("there is not enough memory to decode this file") from error
    except decoder_errors as error:
        raise RequestError(f"this is not {kind} that can be read: truncated or damaged") from error


_STATUS = Path("/proc/self/status")


def limit_memory_growth(num_bytes: int) -> None:
    """Allow this process to take that much more memory than it has now.

    Limits on pixels and seconds are checked before anything is allocated for them, but some
    containers need memory before that: a file of a kilobyte can list a hundred million samples, and
    FFmpeg makes a table of them. Below a ceiling that is a refused file. Any allocation beyond it
    fails, not only a decoder's, so this is for processes that only decode. Without Linux' accounts
    it does nothing.
    """
    if not _STATUS.exists():
        return
    fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    num_used = int(fields["VmData"].split()[0]) * 1024
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = num_used + num_bytes
    resource.setrlimit(
        resource.RLIMIT_DATA,
        (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most),
    )


_PIXELS_PER_S = 100e6  # real pictures: 50 to 150 million; frames of videos: 100 to 500 million
_FRAME_S = 50e-6  # what a frame costs, however small it is
_SOUND_S_PER_S = 300.0  # seconds of sound that are decoded and processed in one second
SOUND_FRAME_S = 100e-6  # what a frame of a sound costs, however short it is


class CostlyItemError(SensoriumError):
    """An item is more work than this attempt may take. It is not the item's fault."""

    def __init__(self, cost_s: float) -> None:
        super().__init__(f"about {cost_s:.1f} s of work")
        self.cost_s = cost_s


class WorkBudget:
    """The work and the time that one attempt to decode an item may take. Used by one thread."""

    def __init__(self, *, max_cost_s: float = math.inf, deadline_s: float = math.inf) -> None:
        """Start the clock: `deadline_s` counts from here."""
        self._max_cost_s = max_cost_s
        self._deadline_s = deadline_s
        self._ends_at = time.monotonic() + deadline_s
        self._spent_s = 0.0

    def expect(self, cost_s: float) -> None:
        """Raise `CostlyItemError` if this is more work than is left to this attempt."""
        if cost_s > self._max_cost_s:
            raise CostlyItemError(cost_s)

    def spend(self, cost_s: float) -> None:
        """Note work that was done. Raise `RequestError` if the deadline has passed."""
        self._spent_s += cost_s
        self.expect(self._spent_s)
        self.check_time()

    def check_time(self) -> None:
        """Raise `RequestError` if the deadline has passed."""
        if time.monotonic() > self._ends_at:
            raise RequestError(f"it could not be decoded within {self._deadline_s:g} seconds")


def estimate_frames_s(num_frames: int, width: int, height: int) -> float:
    """Estimate the seconds that it takes to decode so many frames, or one picture."""
    return num_frames * (width * height / _PIXELS_PER_S + _FRAME_S)


def estimate_sound_s(duration_s: float) -> float:
    """Estimate the seconds that it takes to decode and process a sound of that length."""
    return duration_s / _SOUND_S_PER_S


_FORMATS = (
    "aac,aiff,apng,avi,caf,flac,flv,gif,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mp3,mpeg,mpegts,ogg,"
    "w64,wav"
)
_MICROSECONDS = 1_000_000  # FFmpeg's unit for the duration of a container
_MAX_STREAMS = 32


@contextmanager
def open_container(data: bytes, kind: str, *, max_pixels: int) -> Iterator[InputContainer]:
    """Open the file, and refuse as damaged what FFmpeg can't read inside the block."""
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
    """Return options with which FFmpeg allocates no larger frame.

    Decoders round sizes up to whole blocks. So the exact limit has to be checked with each frame.
    """
    return {"max_pixels": str(2 * max_pixels)}


def check_duration(container: InputContainer, stream: Stream, max_duration_s: float) -> float:
    """Return the seconds that the header claims, which may be 0 or false.

    Raise `RequestError` if they are too many.
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
