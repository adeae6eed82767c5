"""The shared-memory store with real processes that are killed at any of its stores."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from sensorium.multimodal.cache.shm_memory import SlotState
from sensorium.multimodal.cache.shm_store import ShmStore, _make_key
from tests.property.shm_child import is_right, make_item, sweep
from tests.property.shm_nursery import ChildDiedError, ChildProcess, Nursery, find_holders

CAPACITY = 32 * 1024
# Two of the largest don't fit together; the last one never does.
SIZES = (1, 100, 900, 3_000, 7_000, 9_000, 14_000, 20_000, 40_000)
NAMES = [f"{letter}-{size}" for size in SIZES for letter in "ab"]
NAME_OF = {make_item(name, has_layout=False).mm_hash: name for name in NAMES}
MAX_CHILDREN = 3
nurseries: list[Nursery] = []


@pytest.fixture(scope="module", autouse=True)
def nursery() -> Iterator[Nursery]:
    nurseries.append(Nursery())
    yield nurseries[0]
    nurseries.pop().close()


def check_table(store: ShmStore) -> None:
    """No overlap, nothing outside, one item a key, and the bytes that the key says."""
    with store._segment:
        index = store._index
        slots = np.flatnonzero(index._states != SlotState.FREE).tolist()
        extents = sorted((int(index._offsets[slot]), int(index._rooms[slot])) for slot in slots)
        end = 0
        for offset, room in extents:
            assert offset >= end, "items overlap"
            end = offset + room
        assert end <= index.reserved_bytes <= index.capacity_bytes
        assert os.fstat(store.fd).st_blocks * 512 >= index.reserved_bytes
        ready = [slot for slot in slots if index._states[slot] == SlotState.READY]
        keys = [index._keys[:, slot].tobytes() for slot in ready]
        references = [store._add_lease(slot) for slot in ready]
    assert len(set(keys)) == len(keys), "a key is there twice"
    for key, reference in zip(keys, references, strict=True):
        entry = store._read_item(reference)
        name = NAME_OF[entry.mm_hash]
        assert key == _make_key(entry.mm_hash)
        assert entry.layout in (None, make_item(name, has_layout=True).layout)
        assert is_right(name, store.open(reference)), f"wrong bytes of {name}"
        store.release(reference)


ANY = st.integers(0, 11)


class ShmStoreMachine(RuleBasedStateMachine):
    """The test's own instance looks on while children put, lease, release and die.

    The model has the leases of each child and what must be there. A child that dies takes its part
    along. When a child dies is a matter of time, and not repeatable. So what is drawn must not
    depend on what there is: rules have no preconditions, and draw numbers that stand for any
    choice.
    """

    @initialize()
    def build(self) -> None:
        self.store = ShmStore.create(capacity_bytes=CAPACITY, max_object_bytes=31_000)
        self.inode = os.fstat(self.store.fd).st_ino
        self.children: list[ChildProcess] = []
        self.members: dict[int, int] = {}  # by pid
        self.leases: dict[int, Counter[tuple[int, int]]] = {}  # by pid
        self.names: dict[tuple[int, int], str] = {}
        for _ in range(2):
            self.start_child()

    def ask(
        self, child: ChildProcess, do: str, *arguments: object, num_stores: int | None
    ) -> object:
        """Return the child's answer, or `None` if there is none because it died."""
        try:
            return child.ask(do, *arguments, num_stores=num_stores)
        except ChildDiedError:
            self.forget(child)
            return None

    def forget(self, child: ChildProcess) -> None:
        self.children.remove(child)
        del self.members[child.pid], self.leases[child.pid]

    def note_lease(self, child: ChildProcess, reference: object, name: str) -> None:
        if reference is not None:
            slot, generation = reference
            assert self.names.setdefault((slot, generation), name) == name
            self.leases[child.pid][slot, generation] += 1

    @rule()
    def add_child(self) -> None:
        if len(self.children) < MAX_CHILDREN:
            self.start_child()

    def start_child(self) -> None:
        child = nurseries[0].start(self.store.fd)
        self.members[child.pid] = child.ask("hello")
        assert len(set(self.members.values())) == len(self.members)
        self.leases[child.pid] = Counter()
        self.children.append(child)

    def pick(self, which: int) -> ChildProcess:
        if not self.children:
            self.start_child()
        return self.children[which % len(self.children)]

    @rule(
        which=ANY,
        name=st.sampled_from(NAMES),
        has_layout=st.booleans(),
        num_stores=st.none() | st.integers(0, 40),
    )
    def put(self, which: int, name: str, has_layout: bool, num_stores: int | None) -> None:
        child = self.pick(which)
        reference = self.ask(child, "put", name, has_layout, num_stores=num_stores)
        self.note_lease(child, reference, name)

    @rule(
        which=ANY,
        name=st.sampled_from(NAMES),
        is_use=st.booleans(),
        num_stores=st.none() | st.integers(0, 3),
    )
    def acquire(self, which: int, name: str, is_use: bool, num_stores: int | None) -> None:
        child = self.pick(which)
        is_cached = self.store.is_cached(make_item(name, has_layout=False).mm_hash)
        reference = self.ask(child, "acquire", name, is_use, num_stores=num_stores)
        assert (reference is not None) == is_cached or child not in self.children
        self.note_lease(child, reference, name)

    @rule(which=ANY, what=ANY, num_stores=st.none() | st.integers(0, 1))
    def lease(self, which: int, what: int, num_stores: int | None) -> None:
        """Lease by a reference from earlier, which succeeds if a child still has it leased."""
        if not self.names:
            return
        child = self.pick(which)
        reference = sorted(self.names)[what % len(self.names)]
        is_leased = any(counts[reference] for counts in self.leases.values())
        mm_hash = self.ask(child, "lease", *reference, num_stores=num_stores)
        if mm_hash is not None:
            assert NAME_OF[str(mm_hash)] == self.names[reference]
            self.note_lease(child, reference, self.names[reference])
        else:
            assert not is_leased or child not in self.children

    @rule(which=ANY, what=ANY, num_stores=st.none() | st.integers(0, 2))
    def release(self, which: int, what: int, num_stores: int | None) -> None:
        holders = [child for child in self.children if self.leases[child.pid]]
        if not holders:
            return
        child = holders[which % len(holders)]
        held = sorted(self.leases[child.pid])
        reference = held[what % len(held)]
        self.ask(child, "release", *reference, num_stores=num_stores)
        if child in self.children:
            counts = self.leases[child.pid]
            counts[reference] -= 1
            counts += Counter()  # drops zeros
            self.leases[child.pid] = counts

    @rule(which=ANY, num_stores=st.none() | st.integers(0, 4))
    def clear(self, which: int, num_stores: int | None) -> None:
        child = self.pick(which)
        self.ask(child, "clear", num_stores=num_stores)
        if child in self.children:
            assert self.store.statistics().num_items == 0

    @rule(which=ANY, num_stores=st.none() | st.integers(0, 4))
    def sweep_in_a_child(self, which: int, num_stores: int | None) -> None:
        self.ask(self.pick(which), "sweep", num_stores=num_stores)

    @rule(which=ANY, name=st.sampled_from(NAMES), delay_us=st.integers(0, 1500))
    def kill_during_put(self, which: int, name: str, delay_us: int) -> None:
        child = self.pick(which)
        child.send("put", name, True)
        time.sleep(delay_us / 1e6)
        child.kill()
        self.forget(child)

    @rule(which=ANY)
    def kill_and_replace(self, which: int) -> None:
        """The new child gets the number of the dead one, and none of its leases."""
        child = self.pick(which)
        child.kill()
        self.forget(child)
        self.start_child()

    @rule(which=ANY)
    def leave(self, which: int) -> None:
        child = self.pick(which)
        child.leave()
        self.forget(child)

    @rule(name=st.sampled_from(NAMES), num_stores=st.none() | st.integers(0, 40))
    def race(self, name: str, num_stores: int | None) -> None:
        """Two put the same item at once, and the first may die of it."""
        if len(self.children) < 2:
            return
        first, second = self.children[:2]
        first.send("put", name, True, num_stores=num_stores)
        second.send("put", name, True)
        references = []
        for child in (first, second):
            try:
                references.append(child.receive())
                self.note_lease(child, references[-1], name)
            except ChildDiedError:
                assert child is first
                self.forget(child)
        stored = [tuple(reference) for reference in references if reference is not None]
        assert len(set(stored)) <= 1

    @rule()
    def sweep(self) -> None:
        """Then exactly the living have leases, and nothing waits for the dead."""
        sweep(self.store)
        index = self.store._index
        expected = Counter(
            (slot, self.members[pid]) for pid, counts in self.leases.items() for slot, _ in counts
        )
        actual: Counter[tuple[int, int]] = Counter()
        for slot in np.flatnonzero(index._states != SlotState.FREE).tolist():
            words = index._leases[:, slot].tobytes()
            bits = np.unpackbits(np.frombuffer(words, np.uint8), bitorder="little")
            actual.update((slot, int(member)) for member in np.flatnonzero(bits))
            assert index._states[slot] != SlotState.WRITING
            assert index._states[slot] != SlotState.RETIRED or bits.any()
        assert actual == expected

    @invariant()
    def leased_items_are_unchanged(self) -> None:
        for child in self.children:
            for slot, generation in self.leases[child.pid]:
                assert child.ask("check", slot, generation, self.names[slot, generation])

    @invariant()
    def the_table_is_sound(self) -> None:
        check_table(self.store)

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for child in list(self.children):
            child.kill()
        # All that the dead held is there again: the largest item has room.
        largest = self.store.put(make_item("c-29900", has_layout=True))
        assert largest is not None
        self.store.release(largest)
        self.store.close()
        del self.store
        assert find_holders(self.inode) == []


TestShmStore = ShmStoreMachine.TestCase
TestShmStore.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.processes
def test_processes_that_put_and_read_as_they_like_never_see_wrong_bytes(nursery: Nursery) -> None:
    """No order is imposed; one of them is killed again and again, and another one comes."""
    choose = Random(0)
    end = time.monotonic() + 3
    with closing(ShmStore.create(capacity_bytes=CAPACITY, max_object_bytes=31_000)) as store:
        steady = [nursery.start(store.fd) for _ in range(2)]
        for seed, child in enumerate(steady):
            child.send("stress", NAMES, seed, 3)
        num_killed = 0
        while time.monotonic() < end or num_killed < 6:  # a busy machine starts few
            victim = nursery.start(store.fd)
            victim.send("stress", NAMES, choose.random(), 60)
            time.sleep(choose.uniform(0.0, 0.1))
            victim.kill()
            num_killed += 1
            check_table(store)
        assert all(child.receive() > 10 for child in steady)
        for child in steady:
            child.leave()
        sweep(store)
        assert not (store._index._states == SlotState.WRITING).any()
        assert not (store._index._states == SlotState.RETIRED).any()
        assert list(store._index.get_members()) == []
