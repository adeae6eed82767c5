"""The state of one call of `Scheduler.schedule`, which is thrown away at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from sensorium.types.scheduling import ScheduledRequest, StartedRequest


class Shortage(Enum):
    """The reason why a window was cut short."""

    NONE = auto()
    TOKENS = auto()
    SPAN = auto()  # too few tokens are left for an unsplittable span
    ENCODER_SPACE = auto()
    ENCODER_COMPUTE = auto()


@dataclass(slots=True, kw_only=True)
class Step:
    """What a step has used and decided so far."""

    max_num_tokens: int
    reserved_for: str | None = None  # a request that tokens are kept for, from those ahead of it
    num_reserved_tokens: int = 0
    num_tokens: int = 0
    num_encoder_embeds: int = 0
    # An earlier request waits for its media, so that later ones may not take encoder space.
    is_encoder_closed: bool = False
    # Nothing is encoded in this step, so that others go on after an item beyond the budget.
    is_encoder_resting: bool = False
    is_short_of_blocks: bool = False
    scheduled: dict[str, ScheduledRequest] = field(default_factory=dict)
    started: list[StartedRequest] = field(default_factory=list)
    # The first request with an unsplittable span that found too few tokens, and how many it needs.
    deferred: tuple[str, int] | None = None

    @property
    def num_tokens_left(self) -> int:
        return max(0, self.max_num_tokens - self.num_tokens - self.num_reserved_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """The tokens `[start, end)` of a request, and their items. An empty window has no items."""

    start: int
    end: int
    shortage: Shortage
    to_encode: tuple[int, ...] = ()
    to_share: tuple[int, ...] = ()  # items with an encoder output in the cache
    duplicates: tuple[int, ...] = ()  # items equal to one that this window encodes

    @property
    def is_empty(self) -> bool:
        return self.end <= self.start
