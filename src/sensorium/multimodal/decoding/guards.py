"""Turns what decoders raise on damaged files into refusals in our own words.

Messages name neither addresses nor paths nor what a library said: they go to clients.

A ceiling for the memory of a process that decodes what strangers send.

Limits on pixels and seconds are checked before anything is allocated for them. Some containers
need memory before they say what they hold: a file of a kilobyte can list a hundred million samples
of which FFmpeg makes a table. Below a ceiling that is a refused file.

What decoding one item may take: an estimate of its work in seconds, and a deadline.

Decoders call `expect` with what a header promises, before they decode anything, and `spend` for
what they have really decoded. So a header that lies changes nothing but the moment at which the
work is seen to be long. The constants are one core's speed, measured on 2020s server CPUs; they
order items by their work and need no more than the right order of magnitude.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sensorium.types.errors import RequestError, SensoriumError


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
    """This process may take that much more than it has now. For processes that do nothing else:
    any allocation beyond fails, not only a decoder's. Without Linux' accounts it does nothing.
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
        """`deadline_s` counts from now."""
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
