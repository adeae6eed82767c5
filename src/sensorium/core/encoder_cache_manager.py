"""Accounting for encoder outputs: which ones the worker holds, and which requests need them.

Owns capacity, references and eviction order. Holds no tensors: `worker.encoder_runner` does, and
acts only on what the scheduler puts into `SchedulerOutput`. Sizes are counted in embeddings.

An entry is *reserved* (scheduled to be encoded), then *computed*; a computed one without references
is *evictable*.

Invariants:
  1. used + free == capacity.
  2. An entry with a reference is never evicted, nor is a reserved one.
  3. An entry that was never computed is never a hit.
  4. References are per (request, item): an image that a prompt has twice keeps its entry until
     the tokens of its second place are computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sensorium.core.request import Request
from sensorium.types.errors import InvariantError
from sensorium.types.multimodal import get_mm_features_in_window
from sensorium.types.scheduling import EncoderInput


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderCacheStatistics:
    """Counts of what the encoder cache holds, in embeddings, and of how it was used."""

    capacity: int
    num_used_embeds: int
    num_evictable_embeds: int
    num_entries: int
    num_references: int
    num_evictions: int
    # Media items that had to be encoded or found; items of preempted requests count again.
    num_queries: int
    num_hits: int  # found in this cache, or as keys and values in the KV cache


@dataclass(slots=True)
class _Entry:
    """An encoder output in the cache, with the media items of requests that need it."""

    num_embeds: int
    is_computed: bool = False
    references: set[tuple[str, int]] = field(default_factory=set)  # (request id, mm_index)


class EncoderCacheManager:
    """A record of the encoder outputs in the worker's cache, and of the requests that need them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.request_cached_ids: dict[str, set[int]] = {}  # request id -> mm_index of its items
        self._entries: dict[str, _Entry] = {}  # encoder key -> entry
        self._evictable: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self._num_free = capacity
        self._num_evictable = 0
        self._num_evictions = 0
        self._num_queries = 0
        self._num_hits = 0
        self.num_releases = 0  # entries given up so far; no space becomes free unless it grows
        self._freed_keys: list[str] = []

    @property
    def num_reclaimable_embeds(self) -> int:
        """The most embeddings that can be allocated, if all evictable entries are evicted."""
        return self._num_free + self._num_evictable

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def is_computed(self, key: str) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.is_computed

    def is_evictable(self, key: str) -> bool:
        return key in self._evictable

    def get_num_embeds(self, key: str) -> int:
        return self._entries[key].num_embeds

    def has_reference(self, request: Request, mm_index: int) -> bool:
        return mm_index in self.request_cached_ids.get(request.request_id, ())

    def get_cached_input_ids(self, request: Request) -> frozenset[int] | set[int]:
        """Return the request's items that hold references: the manager's own set, not a copy."""
        return self.request_cached_ids.get(request.request_id, frozenset())

    def check_and_update_cache(self, request: Request, mm_index: int) -> bool:
        """Give an item a reference to its entry in the cache; return False if there is no entry."""
        key = request.get_encoder_key(mm_index)
        entry = self._entries.get(key)
        if entry is None:
            return False
        if key in self._evictable:
            del self._evictable[key]
            self._num_evictable -= entry.num_embeds
        self._add_reference(entry, request.request_id, mm_index)
        self._num_hits += 1
        return True

    def take_items(
        self,
        request: Request,
        *,
        to_share: Sequence[int],
        to_encode: Sequence[int],
        duplicates: Sequence[int],
    ) -> tuple[EncoderInput, ...]:
        """Take references for a request's media items, and return the items to encode."""
        # Shared entries come first, so that they are not evicted to make space. Duplicates come
        # last, because they share an entry that is allocated here.
        for mm_index in to_share:
            self.check_and_update_cache(request, mm_index)
        for mm_index in to_encode:
            self.allocate(request, mm_index)
        for mm_index in duplicates:
            self.check_and_update_cache(request, mm_index)
        request.count_encoder_items(encoded=tuple(to_encode), shared=(*to_share, *duplicates))
        return tuple(EncoderInput(mm_index=i, key=request.get_encoder_key(i)) for i in to_encode)

    def count_stored(self, request: Request) -> None:
        """Count the media items of a request as hits: the KV cache has their keys and values."""
        indices = tuple(range(len(request.mm_features)))
        request.count_encoder_items(encoded=(), shared=indices)
        self._num_queries += len(indices)
        self._num_hits += len(indices)

    def can_allocate(self, num_embeds: int) -> bool:
        return num_embeds <= self.num_reclaimable_embeds

    def allocate(self, request: Request, mm_index: int) -> None:
        """Reserve space for the encoder output of an item, and evict entries if necessary."""
        key = request.get_encoder_key(mm_index)
        num_embeds = request.mm_features[mm_index].mm_position.get_num_embeds()
        if key in self._entries or not self.can_allocate(num_embeds):
            raise InvariantError(
                f"encoder output {key} is in the encoder cache already, or does not fit into it"
            )
        while self._num_free < num_embeds:
            self._evict_oldest()
        entry = self._entries[key] = _Entry(num_embeds)
        self._num_free -= num_embeds
        self._add_reference(entry, request.request_id, mm_index)

    def mark_computed(self, key: str) -> None:
        """Record that the worker has encoded an item; an unknown key is ignored."""
        entry = self._entries.get(key)
        if entry is None or entry.is_computed:
            return
        entry.is_computed = True
        if not entry.references:
            self._make_evictable(key, entry)

    def discard(self, key: str) -> set[str]:
        """Remove an entry that could not be encoded; return the ids of requests that need it."""
        entry = self._entries.get(key)
        if entry is None:
            return set()
        if entry.is_computed:
            raise InvariantError(f"encoder output {key} is computed, and can't be discarded")
        del self._entries[key]
        self._num_free += entry.num_embeds
        self.num_releases += 1
        for request_id, mm_index in entry.references:
            self._remove_from_index(request_id, mm_index)
        return {request_id for request_id, _ in entry.references}

    def free_encoder_input(self, request: Request, mm_index: int) -> None:
        """Drop the reference of an item to its encoder output, if it holds one."""
        if not self.has_reference(request, mm_index):
            return
        self._remove_from_index(request.request_id, mm_index)
        key = request.get_encoder_key(mm_index)
        entry = self._entries[key]
        entry.references.remove((request.request_id, mm_index))
        if entry.is_computed and not entry.references:
            self._make_evictable(key, entry)

    def free_passed_items(self, request: Request, start: int) -> None:
        """Drop the references of items that the tokens computed from `start` on have completed."""
        end = request.num_computed_tokens
        lo, hi = get_mm_features_in_window(request.mm_features, start, end)
        for mm_index in range(lo, hi):
            if request.mm_features[mm_index].mm_position.end <= end:
                self.free_encoder_input(request, mm_index)

    def free(self, request: Request) -> None:
        """Drop all references that the items of a request hold."""
        for mm_index in tuple(self.request_cached_ids.get(request.request_id, ())):
            self.free_encoder_input(request, mm_index)

    def add_freed_keys(self, keys: Iterable[str]) -> None:
        """Make the worker drop encoder outputs that it may hold, but that have no entry."""
        self._freed_keys.extend(keys)

    def take_freed_keys(self) -> tuple[str, ...]:
        """Return the keys evicted or added since the last call, which the worker must drop."""
        freed, self._freed_keys = tuple(self._freed_keys), []
        return freed

    def clear_cache(self) -> None:
        """Evict all entries that can be evicted."""
        while self._evictable:
            self._evict_oldest()

    def statistics(self) -> EncoderCacheStatistics:
        return EncoderCacheStatistics(
            capacity=self.capacity,
            num_used_embeds=self.capacity - self._num_free,
            num_evictable_embeds=self._num_evictable,
            num_entries=len(self._entries),
            num_references=sum(len(entry.references) for entry in self._entries.values()),
            num_evictions=self._num_evictions,
            num_queries=self._num_queries,
            num_hits=self._num_hits,
        )

    def _add_reference(self, entry: _Entry, request_id: str, mm_index: int) -> None:
        entry.references.add((request_id, mm_index))
        self._num_queries += 1
        self.request_cached_ids.setdefault(request_id, set()).add(mm_index)

    def _remove_from_index(self, request_id: str, mm_index: int) -> None:
        held = self.request_cached_ids[request_id]
        held.discard(mm_index)
        if not held:
            del self.request_cached_ids[request_id]

    def _make_evictable(self, key: str, entry: _Entry) -> None:
        self._evictable[key] = None
        self._num_evictable += entry.num_embeds
        self.num_releases += 1

    def _evict_oldest(self) -> None:
        key, _ = self._evictable.popitem(last=False)
        num_embeds = self._entries.pop(key).num_embeds
        self._num_evictable -= num_embeds
        self._num_free += num_embeds
        self._num_evictions += 1
        self._freed_keys.append(key)
