"""The block pool against a plain model of it: references, names and the order of eviction."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sensorium.core.block_pool import NULL_BLOCK, BlockPool
from sensorium.types.errors import InvariantError

NAMES = [bytes([letter]) for letter in b"abcdef"]


class BlockPoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(2, 8))
    def build(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_ids = range(1, num_blocks)
        self.num_refs = dict.fromkeys(self.block_ids, 0)
        self.name_of: dict[int, bytes] = {}
        self.unused: list[int] = list(self.block_ids)  # free and named, least recently used first

    def held(self) -> list[int]:
        return [block_id for block_id, count in self.num_refs.items() if count]

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        free = {block_id for block_id, refs in self.num_refs.items() if not refs}
        if count > len(free):
            with pytest.raises(InvariantError):
                self.pool.allocate(count)
            return
        cached = [block_id for block_id in self.unused if block_id in self.name_of]
        block_ids = self.pool.allocate(count)
        assert len(set(block_ids)) == count
        assert set(block_ids) <= free
        num_evicted = max(0, count - (len(free) - len(cached)))
        evicted = [block_id for block_id in block_ids if block_id in self.name_of]
        assert evicted == cached[:num_evicted]
        for block_id in block_ids:
            self.num_refs[block_id] = 1
            self.name_of.pop(block_id, None)
            self.unused.remove(block_id)

    @rule(name=st.sampled_from(NAMES))
    def acquire_cached(self, name: bytes) -> None:
        block_id = self.pool.get_cached(name)
        if block_id is None:
            assert name not in self.name_of.values()
            return
        assert self.name_of[block_id] == name
        self.pool.acquire(block_id)
        self.num_refs[block_id] += 1
        if block_id in self.unused:
            self.unused.remove(block_id)

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.lists(st.sampled_from(self.held()), unique=True, max_size=4))
        self.pool.release([NULL_BLOCK, *block_ids])
        for block_id in block_ids:
            self.num_refs[block_id] -= 1
            if self.num_refs[block_id] == 0:
                self.unused.append(block_id)

    @rule(data=st.data())
    def release_what_is_free(self, data: st.DataObject) -> None:
        free = [block_id for block_id, refs in self.num_refs.items() if not refs]
        if free:
            with pytest.raises(InvariantError):
                self.pool.release([data.draw(st.sampled_from(free))])

    @precondition(lambda self: self.held())
    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def register(self, data: st.DataObject, name: bytes) -> None:
        block_id = data.draw(st.sampled_from(self.held()))
        self.pool.register(block_id, name)
        if block_id not in self.name_of and name not in self.name_of.values():
            self.name_of[block_id] = name

    @rule()
    def clear_cache(self) -> None:
        self.pool.clear_cache()
        self.name_of.clear()

    @invariant()
    def a_block_is_free_or_used(self) -> None:
        for block_id, refs in self.num_refs.items():
            assert self.pool.is_free(block_id) == (refs == 0)
        assert not self.pool.is_free(NULL_BLOCK)
        assert self.pool.num_free == list(self.num_refs.values()).count(0)
        assert self.pool.statistics().num_used == len(self.held())

    @invariant()
    def a_name_leads_to_its_block(self) -> None:
        found = {name: self.pool.get_cached(name) for name in NAMES}
        expected = {name: block_id for block_id, name in self.name_of.items()}
        assert found == {name: expected.get(name) for name in NAMES}
        assert self.pool.statistics().num_cached == len(expected)


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
