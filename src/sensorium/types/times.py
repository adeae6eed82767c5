"""When things happened to a request, in seconds of the machine's monotonic clock, which all of its
processes share; and how long the stages of its perception took.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# The stages of one media item, in their order. `wait`: another request was processing it.
ITEM_STAGES = ("fetch", "hash", "wait", "decode", "process")

# Seconds by stage; what did not happen is not in it.
ItemTimes = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreTimes:
    """One request in the core. `None`: it has not come that far. `encode_s`: how long the steps
    that encoded its media spent on encoding.
    """

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    encode_s: float = 0.0
