"""What one call of `Scheduler.schedule` has used and decided so far; thrown away at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from sensorium.core.request import Rank
from sensorium.types.scheduling import ScheduledRequest, StartedRequest


class Shortage(Enum):
    """What cut a window short."""

    NONE = auto()
    TOKENS = auto()
    SPAN = auto()  # too few tokens are left for an unsplittable span
    ENCODER_SPACE = auto()
    ENCODER_COMPUTE = auto()


@dataclass(slots=True, kw_only=True)
class Step:
    """`encoder_waiter` waits for encoder space, so those behind it may not take any of it.

    `overdue` is the first that went without encoder space or compute.
    """

    max_num_tokens: int
    num_tokens: int = 0
    num_encoder_embeds: int = 0
    encoder_waiter: Rank | None = None
    overdue: Rank | None = None
    is_short_of_blocks: bool = False
    scheduled: dict[str, ScheduledRequest] = field(default_factory=dict)
    started: list[StartedRequest] = field(default_factory=list)
    # The first request whose unsplittable span found too little room: it comes first in the next
    # step.
    deferred_request_id: str | None = None

    @property
    def num_tokens_left(self) -> int:
        return max(0, self.max_num_tokens - self.num_tokens)

    def is_encoder_closed(self, rank: Rank) -> bool:
        return self.encoder_waiter is not None and self.encoder_waiter < rank

    def add_shortage(self, shortage: Shortage, request_id: str, rank: Rank) -> None:
        if shortage is Shortage.SPAN and self.deferred_request_id is None:
            self.deferred_request_id = request_id
        if shortage in (Shortage.ENCODER_SPACE, Shortage.ENCODER_COMPUTE):
            self.overdue = min(rank, self.overdue or rank)
        if shortage is Shortage.ENCODER_SPACE:
            self.encoder_waiter = min(rank, self.encoder_waiter or rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """The tokens `[start, end)` of a request and their items.

    Items to encode, to share because they are there already, and twins of an item that this very
    window encodes. An empty window has no items.
    """

    start: int
    end: int
    shortage: Shortage
    to_encode: tuple[int, ...] = ()
    to_share: tuple[int, ...] = ()
    twins: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        return self.end <= self.start
