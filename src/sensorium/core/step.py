"""What one call of `Scheduler.schedule` has used and decided so far; thrown away at its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from sensorium.types.scheduling import ScheduledRequest, StartedRequest


@dataclass(slots=True, kw_only=True)
class Step:
    """`is_encoder_closed`: an earlier request waits for encoder space, so later ones may not take
    any of it.
    """

    max_num_tokens: int
    num_tokens: int = 0
    num_encoder_embeds: int = 0
    is_encoder_closed: bool = False
    has_preempted: bool = False
    scheduled: dict[str, ScheduledRequest] = field(default_factory=dict)
    started: list[StartedRequest] = field(default_factory=list)
    # The first request whose unsplittable span found too little room: it comes first in the next
    # step.
    deferred_request_id: str | None = None

    @property
    def num_tokens_left(self) -> int:
        return max(0, self.max_num_tokens - self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """The tokens `[start, end)` of a request and their items: to encode, to share because they are
    there already, and twins of an item that this very window encodes.
    """

    start: int
    end: int
    to_encode: tuple[int, ...] = ()
    to_share: tuple[int, ...] = ()
    twins: tuple[int, ...] = ()
