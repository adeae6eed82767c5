"""The sign of life of a core: when it last moved on, in a page that it shares with its parent.

A process that is stopped, or whose device never answers, is alive to the kernel. So the thread that
computes writes the time at every turn of its loop and at every block of the model: a long step of a
slow machine goes on writing, and a thread that hangs does not, whatever other threads do. The page
is anonymous memory (`memfd_create`), reserved when it is made; the core inherits its descriptor.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from typing import Literal, Self

_NUM_BYTES = mmap.PAGESIZE
_BEAT, _LONG_WORK = 0, 1  # places in the page, in units of 8 bytes
# Between two looks of the parent at most so many times the interval count as silence: a parent
# that was itself held up, with the whole machine or container, has not watched that long.
_MAX_GAP_LOOKS = 2
_LOOKS_PER_LIMIT = 10
_MAX_LOOK_S = 1.0
_BEATS_PER_LIMIT = 5

Verdict = Literal["moves", "stalled", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What the page holds."""

    beat: float  # when the core last moved on, in seconds of the monotonic clock; 0: not yet
    is_long_work: bool  # whether it has announced work without signs of life


class Pulse:
    """One process's view of the page. The core writes, its parent reads and clears."""

    def __init__(self, fd: int) -> None:
        """Use `create` or `attach`. The descriptor is taken over."""
        self.fd = fd
        self._map = mmap.mmap(fd, _NUM_BYTES)
        # Aligned stores of 8 bytes: a reader never sees half a number.
        self._values = memoryview(self._map).cast("d")

    @classmethod
    def create(cls) -> Pulse:
        fd = os.memfd_create("sensorium-pulse", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, _NUM_BYTES)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int) -> Pulse:
        """The page behind an inherited descriptor, which stays the caller's."""
        return cls(os.dup(fd))

    def beat(self) -> None:
        self._values[_BEAT] = time.monotonic()

    def note_long_work(self, is_begun: bool) -> None:
        """Note that work without signs of life begins, or that it has ended."""
        self.beat()
        self._values[_LONG_WORK] = float(is_begun)

    def clear(self) -> None:
        """Forget what a core wrote that has ended."""
        self._values[_BEAT] = self._values[_LONG_WORK] = 0.0

    def read(self) -> Sign:
        return Sign(beat=self._values[_BEAT], is_long_work=bool(self._values[_LONG_WORK]))

    def close(self) -> None:
        self._values.release()
        self._map.close()
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def get_look_interval(limit_s: float) -> float:
    """Return how often the parent looks, in seconds."""
    return min(_MAX_LOOK_S, limit_s / _LOOKS_PER_LIMIT)


def get_idle_interval(limit_s: float) -> float:
    """Return how long a core without work may sleep between two signs, in seconds."""
    return min(_MAX_LOOK_S, limit_s / _BEATS_PER_LIMIT)


class StallWatch:
    """Decides whether a core moves, from what its parent sees at its looks. It has no clock.

    A core is stalled after `limit_s` seconds of silence, and lost after twice that.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._max_gap_s = _MAX_GAP_LOOKS * get_look_interval(limit_s)
        self._looked: float | None = None  # when, last
        self._beat = 0.0  # as seen at the last look
        self._silent_s = 0.0

    def look(self, now: float, sign: Sign) -> Verdict:
        gap_s = 0.0 if self._looked is None else min(now - self._looked, self._max_gap_s)
        self._looked = now
        if sign.beat != self._beat or sign.is_long_work or not sign.beat:
            self._silent_s = 0.0
        else:
            self._silent_s += gap_s
        self._beat = sign.beat
        if self._silent_s >= 2 * self._limit_s:
            return "lost"
        return "stalled" if self._silent_s >= self._limit_s else "moves"
