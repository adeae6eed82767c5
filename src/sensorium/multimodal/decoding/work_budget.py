"""What decoding one item may take: an estimate of its work in seconds, and a deadline.

Decoders call `expect` with what a header promises, before they decode anything, and `spend` for
what they have really decoded. So a header that lies changes nothing but the moment at which the
work is seen to be long. The constants are one core's speed, measured on 2020s server CPUs; they
order items by their work and need no more than the right order of magnitude.
"""

from __future__ import annotations

import math
import time

from sensorium.types.errors import RequestError, SensoriumError

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
