"""The encoder cache's accounting against a plain model of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sensorium.core.encoder_cache_manager import EncoderCacheManager
from sensorium.core.request import Request
from sensorium.types.errors import InvariantError

from .strategies import make_request


@dataclass
class Entry:
    num_embeds: int
    is_computed: bool = False
    references: set[tuple[str, int]] = field(default_factory=set)

    @property
    def is_evictable(self) -> bool:
        return self.is_computed and not self.references


def make_requests() -> list[Request]:
    """Items that several requests share, an item twice in one request, and another salt."""
    core_requests = [
        make_request("a", "two", "three", "two", "rows", cache_salt=None),
        make_request("b", "three", "six", "empty", "two", cache_salt=None),
        make_request("c", "two", "three", cache_salt="salt"),
    ]
    return [Request(r, rank=(0, n), block_size=4) for n, r in enumerate(core_requests)]


REQUESTS = make_requests()
ITEMS = [(request, i) for request in REQUESTS for i in range(len(request.mm_features))]
KEYS = sorted({request.get_encoder_key(i) for request, i in ITEMS})
items = st.sampled_from(ITEMS)
keys = st.sampled_from(KEYS)


class EncoderCacheMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(0, 16))
    def build(self, capacity: int) -> None:
        self.cache = EncoderCacheManager(capacity)
        self.entries: dict[str, Entry] = {}
        self.evictable: list[str] = []  # least recently used first
        self.freed: list[str] = []

    @property
    def num_used(self) -> int:
        return sum(entry.num_embeds for entry in self.entries.values())

    def evict_oldest(self) -> None:
        key = self.evictable.pop(0)
        del self.entries[key]
        self.freed.append(key)

    @rule(item=items)
    def allocate(self, item: tuple[Request, int]) -> None:
        request, mm_index = item
        key = request.get_encoder_key(mm_index)
        num_embeds = request.mm_features[mm_index].mm_position.get_num_embeds()
        num_pinned = sum(e.num_embeds for e in self.entries.values() if not e.is_evictable)
        has_room = num_pinned + num_embeds <= self.cache.capacity
        assert self.cache.can_allocate(num_embeds) == has_room
        if key in self.entries or not has_room:
            with pytest.raises(InvariantError):
                self.cache.allocate(request, mm_index)
            return
        self.cache.allocate(request, mm_index)
        while self.num_used + num_embeds > self.cache.capacity:
            self.evict_oldest()
        self.entries[key] = Entry(num_embeds, references={(request.request_id, mm_index)})

    @rule(item=items)
    def share(self, item: tuple[Request, int]) -> None:
        request, mm_index = item
        key = request.get_encoder_key(mm_index)
        assert self.cache.check_and_update_cache(request, mm_index) == (key in self.entries)
        if key in self.entries:
            self.entries[key].references.add((request.request_id, mm_index))
            if key in self.evictable:
                self.evictable.remove(key)

    @rule(key=keys)
    def mark_computed(self, key: str) -> None:
        self.cache.mark_computed(key)
        entry = self.entries.get(key)
        if entry is not None and not entry.is_computed:
            entry.is_computed = True
            self.note_if_evictable(key)

    @rule(key=keys)
    def discard(self, key: str) -> None:
        entry = self.entries.get(key)
        if entry is not None and entry.is_computed:
            with pytest.raises(InvariantError):
                self.cache.discard(key)
            return
        needy = {request_id for request_id, _ in entry.references} if entry else set()
        assert self.cache.discard(key) == needy
        self.entries.pop(key, None)

    @rule(item=items)
    def free_item(self, item: tuple[Request, int]) -> None:
        request, mm_index = item
        self.cache.free_encoder_input(request, mm_index)
        self.drop_reference(request, mm_index)

    @rule(request=st.sampled_from(REQUESTS))
    def free_request(self, request: Request) -> None:
        held = sorted(self.cache.get_cached_input_ids(request))
        self.cache.free(request)
        for mm_index in held:
            self.drop_reference(request, mm_index)

    def drop_reference(self, request: Request, mm_index: int) -> None:
        key = request.get_encoder_key(mm_index)
        reference = request.request_id, mm_index
        if key in self.entries and reference in self.entries[key].references:
            self.entries[key].references.remove(reference)
            self.note_if_evictable(key)

    def note_if_evictable(self, key: str) -> None:
        if self.entries[key].is_evictable:
            self.evictable.append(key)

    @rule()
    def take_freed_keys(self) -> None:
        assert list(self.cache.take_freed_keys()) == self.freed
        self.freed = []

    @rule()
    def clear_cache(self) -> None:
        self.cache.clear_cache()
        while self.evictable:
            self.evict_oldest()

    @invariant()
    def sizes_agree(self) -> None:
        statistics = self.cache.statistics()
        num_evictable = sum(self.entries[key].num_embeds for key in self.evictable)
        assert statistics.num_used_embeds == self.num_used <= self.cache.capacity
        assert statistics.num_evictable_embeds == num_evictable
        assert self.cache.num_reclaimable_embeds == (
            self.cache.capacity - self.num_used + num_evictable
        )

    @invariant()
    def states_agree(self) -> None:
        for key in KEYS:
            entry = self.entries.get(key)
            assert self.cache.is_computed(key) == (entry is not None and entry.is_computed)
            assert (key in self.cache) == (entry is not None)
            assert self.cache.is_evictable(key) == (key in self.evictable)

    @invariant()
    def references_agree(self) -> None:
        held: dict[str, set[int]] = {}
        for entry in self.entries.values():
            for request_id, mm_index in entry.references:
                held.setdefault(request_id, set()).add(mm_index)
        assert self.cache.request_cached_ids == held
        assert self.cache.statistics().num_references == sum(map(len, held.values()))


TestEncoderCacheMachine = EncoderCacheMachine.TestCase
TestEncoderCacheMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
