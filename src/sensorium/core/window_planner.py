"""Decides how many tokens of a request fit into a step, given its media.

Makes decisions only, which the scheduler commits.

Invariants:
  1. Planning changes neither the request nor the caches.
  2. A window never ends inside an unsplittable span.
  3. The first request of a step can always take a whole span, and encode one item, whatever the
     budgets are, unless the encoders rest in this step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from sensorium.core.admission import Limits
from sensorium.core.encoder_cache_manager import EncoderCacheManager
from sensorium.core.request import Request
from sensorium.types.multimodal import get_mm_features_in_window
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
    """What one call of `Scheduler.schedule` has used and decided so far."""

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


class WindowPlanner:
    """A planner of the windows of tokens that requests compute in a step."""

    def __init__(self, limits: Limits, encoder_cache: EncoderCacheManager) -> None:
        self._limits = limits
        self._encoder_cache = encoder_cache

    def get_plan(self, request: Request, start: int, step: Step) -> WindowPlan:
        """Return the window that begins at `start`, empty if there is no room in this step."""
        end = min(request.num_tokens, start + step.num_tokens_left)
        if end <= start:
            return WindowPlan(start=start, end=start, shortage=Shortage.TOKENS)
        end = self._get_end_outside_span(request, start, end, is_first=step.num_tokens == 0)
        if end <= start:
            return WindowPlan(start=start, end=start, shortage=Shortage.SPAN)
        room = _EncoderRoom(self._encoder_cache, self._limits, step)
        end = self._get_end_with_encoders(request, start, end, room)
        if end <= start:
            return WindowPlan(start=start, end=start, shortage=room.shortage)
        return WindowPlan(
            start=start,
            end=end,
            shortage=room.shortage,
            to_encode=tuple(room.to_encode),
            to_share=tuple(room.to_share),
            duplicates=tuple(room.duplicates),
        )

    def _get_end_outside_span(
        self, request: Request, start: int, end: int, *, is_first: bool
    ) -> int:
        """Return the end, moved to the start of the span that it would split.

        It is moved to the end of the span if nothing else runs and nothing comes before the span.
        """
        span = request.get_split_span(end)
        if span is None:
            return end
        span_start, span_end = span
        if span_start > start:
            return span_start
        return span_end if is_first else start

    def _get_end_with_encoders(
        self, request: Request, start: int, end: int, room: _EncoderRoom
    ) -> int:
        """Put the window's items into `room`, and return the end before the first without room."""
        limits = self._limits
        if not request.mm_features or (limits.is_encoder_decoder and start > 0):
            return end
        lo, hi = get_mm_features_in_window(
            request.mm_features, start, end, is_encoder_decoder=limits.is_encoder_decoder
        )
        held = self._encoder_cache.get_cached_input_ids(request)
        for mm_index in range(lo, hi):
            if mm_index in held:
                continue
            position = request.mm_features[mm_index].mm_position
            if not limits.is_encoder_decoder:
                a, b = position.get_embeds_indices_in_range(
                    max(0, start - position.offset), min(position.length, end - position.offset)
                )
                if a == b:
                    continue
            if not room.take(
                request.get_encoder_key(mm_index), mm_index, position.get_num_embeds()
            ):
                return start if limits.is_encoder_decoder else max(start, position.offset)
        return end


class _EncoderRoom:
    """A trial balance of encoder space and compute for one window."""

    def __init__(self, cache: EncoderCacheManager, limits: Limits, step: Step) -> None:
        self.to_encode: list[int] = []
        self.to_share: list[int] = []
        self.duplicates: list[int] = []
        self.shortage = Shortage.NONE
        self._cache = cache
        self._step = step
        self._max_num_embeds = limits.max_num_encoder_embeds
        self._num_used = step.num_encoder_embeds  # encoded in this step, with this window
        # An encoder-decoder model needs all items of its window at once, or none.
        self._is_unlimited = limits.is_encoder_decoder and step.num_encoder_embeds == 0
        self._num_reclaimable = cache.num_reclaimable_embeds
        self._encoded: set[str] = set()
        self._shared: set[str] = set()

    def take(self, key: str, mm_index: int, num_embeds: int) -> bool:
        """Take the item if there is room for it in this step, and return whether there is."""
        if key in self._encoded:
            self.duplicates.append(mm_index)
            return True
        is_held = self._cache.is_computed(key) or self._cache.is_reserved(key)
        num_reclaimed = self._get_num_reclaimed(key, num_embeds, is_held=is_held)
        self.shortage = self._get_shortage(num_reclaimed, 0 if is_held else num_embeds)
        if self.shortage is not Shortage.NONE:
            return False
        self._num_reclaimable -= num_reclaimed
        if is_held:
            self._shared.add(key)
            self.to_share.append(mm_index)
        else:
            self._num_used += num_embeds
            self._encoded.add(key)
            self.to_encode.append(mm_index)
        return True

    def _get_num_reclaimed(self, key: str, num_embeds: int, *, is_held: bool) -> int:
        """Return how much less can be reclaimed once the item is taken."""
        if not is_held:
            return num_embeds
        is_reclaimable = self._cache.is_evictable(key) and key not in self._shared
        return self._cache.get_num_embeds(key) if is_reclaimable else 0

    def _get_shortage(self, num_reclaimed: int, num_to_encode: int) -> Shortage:
        if self._step.is_encoder_closed or num_reclaimed > self._num_reclaimable:
            return Shortage.ENCODER_SPACE
        if num_to_encode and self._step.is_encoder_resting:
            return Shortage.ENCODER_COMPUTE
        # The first item of a step is encoded whatever it costs.
        is_free = num_to_encode == 0 or self._num_used == 0 or self._is_unlimited
        if is_free or self._num_used + num_to_encode <= self._max_num_embeds:
            return Shortage.NONE
        return Shortage.ENCODER_COMPUTE
