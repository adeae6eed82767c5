"""The times of a request: moments in the core, and the durations of stages before it.

Moments are in seconds of the machine's monotonic clock, which all of its processes share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# The stages of one media item, in their order. In `wait` another request was processing it.
ITEM_STAGES = ("fetch", "hash", "wait", "decode", "process")

# stage -> seconds, for the stages that took place.
ItemTimes = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreTimes:
    """The moments of one request in the core; `None` for those that it did not reach."""

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    encode_s: float = 0.0  # how long the steps that encoded its media spent on encoding
