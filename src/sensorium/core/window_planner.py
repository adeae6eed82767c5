"""Decides which tokens of a request fit into a step (its window), given its media.

This module only plans: the scheduler carries the plans out.

Invariants:
  1. Planning changes neither the request nor the caches.
  2. A window never ends inside an unsplittable span.
  3. The first request of a step can always take a whole span, and encode one item, whatever the
     budgets are, unless this step encodes nothing (`Step.is_encoder_resting`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from sensorium.core.admission import Limits
from sensorium.core.encoder_cache_manager import EncoderCacheManager
from sensorium.core.request import Request
from sensorium.types.multimodal import get_mm_features_in_window
from sensorium.types.scheduling import (
    BlockIds,
    EncoderInput,
    ScheduledRequest,
    SchedulerOutput,
    StartedRequest,
)


class Shortage(Enum):
    """The resource that was missing when a request was given fewer tokens than it has left."""

    NONE = auto()
    TOKENS = auto()
    SPAN = auto()  # too few tokens are left for an unsplittable span
    ENCODER_SPACE = auto()
    ENCODER_COMPUTE = auto()


@dataclass(slots=True, kw_only=True)
class Step:
    """A record of what a step of the scheduler uses and decides while it is planned."""

    max_num_tokens: int
    reserved_for: str | None = None  # the request that tokens are reserved for, if any
    num_reserved_tokens: int = 0
    num_tokens: int = 0
    num_encoder_embeds: int = 0
    # An earlier request waits for space in the encoder cache, so later ones may not take any.
    is_encoder_closed: bool = False
    # Nothing is encoded in this step, because an earlier one encoded more than its budget.
    is_encoder_resting: bool = False
    is_short_of_blocks: bool = False
    # A running request is left out of this step, because its last token is not known yet.
    has_waiting: bool = False
    scheduled: dict[str, ScheduledRequest] = field(default_factory=dict)
    started: list[StartedRequest] = field(default_factory=list)
    # The first request with an unsplittable span that did not fit, and the tokens that it needs.
    deferred: tuple[str, int] | None = None

    @property
    def num_tokens_left(self) -> int:
        return max(0, self.max_num_tokens - self.num_tokens - self.num_reserved_tokens)

    def add_started(self, request: Request) -> None:
        self.started.append(
            StartedRequest(
                request=request.core_request,
                output_token_ids=request.output_token_ids,
                is_long=request.is_long,
                has_media=request.has_media,
            )
        )

    def add_tokens(
        self,
        request: Request,
        end: int,
        block_ids: BlockIds = (),
        encoder_inputs: tuple[EncoderInput, ...] = (),
    ) -> None:
        """Give a request work in this step: its tokens before `end` that are not scheduled yet."""
        start = request.num_scheduled_tokens
        num_sampled = int(end == request.num_tokens + request.num_due_tokens)
        self.num_tokens += end - start
        self.scheduled[request.request_id] = ScheduledRequest(
            request_id=request.request_id,
            run=request.run,
            num_computed_tokens=start,
            num_new_tokens=end - start,
            new_block_ids=block_ids,
            num_sampled=num_sampled,
            encoder_inputs=encoder_inputs,
        )
        request.num_scheduled_tokens = end
        request.num_due_tokens += num_sampled

    def make_output(
        self,
        stopped_request_ids: tuple[str, ...],
        dropped_tokens: tuple[tuple[str, int], ...],
        freed_encoder_keys: tuple[str, ...],
    ) -> SchedulerOutput:
        """Return the plan of this step for the worker, including what the worker has to drop."""
        return SchedulerOutput(
            scheduled=tuple(self.scheduled.values()),
            started=tuple(self.started),
            stopped_request_ids=stopped_request_ids,
            dropped_tokens=dropped_tokens,
            freed_encoder_keys=freed_encoder_keys,
            num_scheduled_tokens=self.num_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """The tokens [start, end) of a request that a step may compute, and their media items."""

    start: int
    end: int
    shortage: Shortage  # why the window is shorter than the rest of the request
    # Indices of the media items that the window needs; all three are empty if the window is.
    to_encode: tuple[int, ...] = ()  # items that this window encodes
    to_share: tuple[int, ...] = ()  # items with an encoder output in the cache
    duplicates: tuple[int, ...] = ()  # items equal to one that this window encodes

    @property
    def is_empty(self) -> bool:
        return self.end <= self.start


class Carryover:
    """The state between steps: a media span that did not fit, and encoding beyond the budget."""

    def __init__(self) -> None:
        # The request with a media span that did not fit into the last step, and its size in tokens.
        self._deferred: tuple[str, int] | None = None
        # Embeddings that were encoded beyond the budgets of the steps so far.
        self._encoder_debt = 0

    def begin(self, limits: Limits, can_go_on: Callable[[str], bool]) -> Step:
        """Return a new step, with tokens reserved for the span that did not fit, if it can run."""
        step = Step(
            max_num_tokens=limits.max_num_batched_tokens,
            is_encoder_resting=self._encoder_debt > 0,
        )
        request_id, num_tokens = self._deferred or ("", 0)
        if not step.is_encoder_resting and can_go_on(request_id):
            step.reserved_for = request_id
            step.num_reserved_tokens = num_tokens
        return step

    def take_deferred(self, step: Step) -> None:
        """Remember the span that did not fit; while the encoders rest, an earlier one stays."""
        kept = self._deferred if step.is_encoder_resting else None
        self._deferred = kept or step.deferred

    def add_encoded(self, step: Step, budget: int) -> None:
        """Count the embeddings that a step encodes against its budget."""
        self._encoder_debt = max(0, self._encoder_debt + step.num_encoder_embeds - budget)

    def end_rest(self) -> None:
        """Let the encoders work again, because there is nothing else to do."""
        self._encoder_debt = 0


class WindowPlanner:
    """A planner of windows that respect the token budget, encoder cache and encoder budget."""

    def __init__(self, limits: Limits, encoder_cache: EncoderCacheManager) -> None:
        self._limits = limits
        self._encoder_cache = encoder_cache

    def get_plan(self, request: Request, start: int, step: Step, most: int) -> WindowPlan:
        """Return a plan for the tokens of a request from `start` on that fit into a step.

        The plan has at most `most` tokens, or one longer unsplittable span. It is empty if no token
        fits.
        """
        # A request that is computed again, after it dropped tokens, may have more of them than the
        # model takes at once. They are dropped again before it continues.
        ready = min(request.num_ready_tokens, self._limits.max_model_len)
        last = min(ready, start + step.num_tokens_left)
        end = min(last, start + most)
        if end <= start:
            return WindowPlan(start=start, end=start, shortage=Shortage.TOKENS)
        is_first = step.num_tokens == 0
        end = self._get_end_outside_span(request, start, end, math.inf if is_first else last)
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

    def get_missing_items(self, request: Request, start: int) -> list[int]:
        """Return the media items that prompt tokens from `start` on need, but the cache lacks."""
        features, is_outside_prompt = request.mm_features, self._limits.is_encoder_decoder
        end = request.num_prompt_tokens
        first, last = get_mm_features_in_window(
            features, start, end, is_encoder_decoder=is_outside_prompt
        )
        cache = self._encoder_cache
        return [i for i in range(first, last) if request.get_encoder_key(i) not in cache]

    def _get_end_outside_span(self, request: Request, start: int, end: int, last: float) -> int:
        """Return `end`, or the start of the unsplittable span that it would split.

        If that leaves the window empty, return the span's end, or `start` if that is past `last`.
        """
        span = request.get_split_span(end)
        if span is None:
            return end
        span_start, span_end = span
        if span_start > start:
            return span_start
        return span_end if span_end <= last else start

    def _get_end_with_encoders(
        self, request: Request, start: int, end: int, room: _EncoderRoom
    ) -> int:
        """Return `end`, or the start of the first media item that can't be encoded in this step.

        The items before it are added to `room`. An encoder-decoder model needs all items at once:
        if one does not fit, `start` is returned.
        """
        limits = self._limits
        has_media = request.has_media or start > 0  # this matters for encoder-decoder models only
        if not request.mm_features or (limits.is_encoder_decoder and has_media):
            return end
        if request.is_stream:  # its audio is encoded while it streams, and never cached
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
    """A running balance of encoder cache space and compute while a window is planned."""

    def __init__(self, cache: EncoderCacheManager, limits: Limits, step: Step) -> None:
        # Indices of the media items that fit, as in `WindowPlan`.
        self.to_encode: list[int] = []
        self.to_share: list[int] = []
        self.duplicates: list[int] = []
        self.shortage = Shortage.NONE  # why the last item did not fit
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
        """Plan a media item if its encoder output fits into this step; return whether it does."""
        if key in self._encoded:
            self.duplicates.append(mm_index)
            return True
        is_held = key in self._cache
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
        """Return how many reclaimable embeddings of the encoder cache a media item takes up.

        An entry that could be evicted counts in full, because the item keeps it in the cache.
        """
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
