"""The mirrored cache, its leader here and its follower in another process that may be killed.

Whatever the leader believes the follower to have is there, or is healed by a re-send. Requests may
fail only for media that the client left out, and only when it is gone.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sensorium.multimodal.cache.interface import CacheStatistics, ItemHandle
from sensorium.multimodal.cache.mirror import MirrorSender
from sensorium.types.multimodal import MissingItems, ProcessedItem
from tests.unit.multimodal.cache.item_building import (
    LAYOUT,
    get_sent_sizes,
    is_same,
    make_item,
    make_kwargs,
)

from .mirror_follower import Message, Nursery, Reply, decode_items, encode_items

SIZES = {"a": 64, "b": 64, "c": 128, "d": 128, "e": 192, "f": 256, "g": 704, "empty": 0}
MAX_UNREAD = 8


@dataclass(frozen=True, kw_only=True)
class Part:
    """A media part of a request, which may name media without sending it."""

    mm_hash: str
    has_source: bool = True  # False: the client left the media out
    was_awaited: bool = False  # it waited for another request that processed this media


parts = st.builds(
    Part,
    mm_hash=st.sampled_from(sorted(SIZES)),
    has_source=st.sampled_from([True, True, True, False]),
    was_awaited=st.sampled_from([False, False, False, True]),
)


@dataclass(eq=False)
class Request:
    parts: list[Part]
    needs_layout: bool
    handles: list[ItemHandle] = field(default_factory=list)
    is_under_way: bool = False
    refusing_epochs: set[int] = field(default_factory=set)

    @property
    def mm_hashes(self) -> tuple[str, ...]:
        return tuple(part.mm_hash for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class Unread:
    """A message without a read answer yet; `sent_sizes` is what the leader believed then.
    Without a request: evictions alone, a repeat, or a request that was given up.
    """

    message: Message
    request: Request | None
    sent_sizes: dict[str, int]
    is_repeat: bool = False


class MirrorMachine(RuleBasedStateMachine):
    def __init__(self, nursery: Nursery) -> None:
        super().__init__()
        self.nursery = nursery
        self.follower = nursery.start_follower()
        self.requests: list[Request] = []
        self.unread: deque[Unread] = deque()
        self.given_up: set[Request] = set()
        # Handles with an entry in the leader's table, which may not be evicted; and handles
        # without one, as a reset or a new epoch removed it.
        self.pinning: set[ItemHandle] = set()
        self.stale: set[ItemHandle] = set()
        self.live: dict[weakref.ref[object], str] = {}
        self.epochs: set[int] = set()
        self.num_disturbances = 0

    @initialize(capacity=st.sampled_from([320, 192, 64, 448, 1024]), is_calm=st.booleans())
    def build(self, capacity: int, is_calm: bool) -> None:
        self.capacity = capacity
        self.is_calm = is_calm
        self.start_leader()

    def start_leader(self) -> None:
        self.sender = MirrorSender(self.capacity)
        self.expected = dict.fromkeys(("num_queries", "num_hits", "num_resends", "num_oversize"), 0)
        self.num_evictions = 0
        self.cached: set[str] = set()

    # What a frontend does

    @rule(wanted=st.lists(parts, max_size=4), needs_layout=st.sampled_from([True, True, False]))
    def render(self, wanted: list[Part], needs_layout: bool) -> None:
        request = Request(wanted, needs_layout)
        self.requests.append(request)
        for part in wanted:
            handle = self.find_or_process(part, needs_layout)
            if handle is None:
                self.end(request)
                return
            request.handles.append(handle)

    @rule(
        wanted=st.lists(parts, min_size=1, max_size=3),
        is_late=st.booleans(),
        is_reset_before=st.sampled_from([False, False, False, False, True]),
    )
    def serve(self, wanted: list[Part], is_late: bool, is_reset_before: bool) -> None:
        """A request from its beginning to its end, perhaps before others that were there first."""
        self.render(wanted, needs_layout=True)
        if is_reset_before and not self.is_calm:
            self.reset_leader()
        for request in [] if is_late else self.ready[-1:]:
            self.deliver(self.make_message(request.handles, is_refused=False), request)
        self.read_answers()
        for request in self.ready:
            self.deliver(self.make_message(request.handles, is_refused=False), request)
        self.read_answers()

    @rule(part=parts, has_layout=st.booleans())
    def inject(self, part: Part, has_layout: bool) -> None:
        item = self.process(part.mm_hash, has_layout)
        handle = self.query(part.mm_hash, item, needs_layout=False)
        assert handle is not None
        self.release([handle])

    @rule(mm_hash=st.sampled_from(sorted(SIZES)))
    def use(self, mm_hash: str) -> None:
        handle = self.query(mm_hash, None, needs_layout=False)
        if handle is not None:
            self.release([handle])

    @precondition(lambda self: self.ready and len(self.unread) < MAX_UNREAD)
    @rule(
        index=st.integers(0, 7),
        fate=st.sampled_from(["arrives"] * 6 + ["lost", "twice"]),
        is_refused=st.sampled_from([False, False, False, True]),
        is_reset_before=st.sampled_from([False, False, True]),
    )
    def send(self, index: int, fate: str, is_refused: bool, is_reset_before: bool) -> None:
        if is_reset_before and not self.is_calm:
            self.reset_leader()
        request = self.ready[index % len(self.ready)]
        message = self.make_message(request.handles, is_refused)
        if self.is_calm or fate == "arrives":
            self.deliver(message, request)
            return
        self.num_disturbances += 1
        if fate == "twice":
            self.deliver(message, request)
            self.deliver(message, None, is_repeat=True)

    @precondition(lambda self: self.sender.has_pending_evictions and len(self.unread) < MAX_UNREAD)
    @rule()
    def flush(self) -> None:
        self.deliver(self.make_message([], is_refused=False), None)
        assert not self.sender.has_pending_evictions

    @precondition(lambda self: self.unread)
    @rule()
    def read_answer(self) -> None:
        unread, reply = self.unread.popleft(), self.follower.read_reply()
        if unread.message.update is None:
            assert reply.kept == {}
        elif reply.missing is not None:
            self.check_refusal(unread, reply, reply.missing)
            self.heal(unread.request, reply.missing)
        else:
            self.check_delivery(unread, reply)

    def read_answers(self) -> None:
        while self.unread:
            self.read_answer()

    @precondition(lambda self: self.requests)
    @rule(index=st.integers(0, 7))
    def give_up(self, index: int) -> None:
        """Refused after it was rendered, or aborted on its way."""
        self.end(self.requests[index % len(self.requests)])

    # What happens to it

    @precondition(lambda self: not self.is_calm and len(self.unread) < MAX_UNREAD)
    @rule(
        what=st.sampled_from(["reset", "reset core", "restart", "restart core", "loss", "repeat"])
    )
    def disturb(self, what: str) -> None:
        if what == "reset":
            self.reset_leader()
        elif what == "reset core":
            self.num_disturbances += 1
            message = Message()
            self.follower.send(message)
            self.unread.append(Unread(message=message, request=None, sent_sizes={}))
        elif what == "restart":
            self.restart_leader()
        elif what == "restart core":
            self.restart_follower()
        else:
            self.num_disturbances += 1
            message = self.make_message([], is_refused=False)
            for is_repeat in (False, True) if what == "repeat" else ():
                self.deliver(message, None, is_repeat=is_repeat)

    def reset_leader(self) -> None:
        self.sender.clear_cache()
        self.lose_entries({handle.mm_hash for handle in self.pinning})
        assert self.take_forgotten() >= {handle.mm_hash for handle in self.pinning}
        assert self.cached == set()

    def restart_follower(self) -> None:
        self.num_disturbances += 1
        self.follower.kill()
        self.unread.clear()
        self.given_up.clear()
        for request in self.requests:
            request.is_under_way = False
        self.follower = self.nursery.start_follower()

    def restart_leader(self) -> None:
        self.num_disturbances += 1
        while self.unread:
            self.unread.popleft()
            self.follower.read_reply()
        for state in (self.requests, self.given_up, self.pinning, self.stale):
            state.clear()
        self.start_leader()
        assert not [mm_hash for tensor, mm_hash in self.live.items() if tensor() is not None]

    # How it does it

    @property
    def ready(self) -> list[Request]:
        return [request for request in self.requests if not request.is_under_way]

    def process(self, mm_hash: str, has_layout: bool = True) -> ProcessedItem:
        item = make_item(mm_hash, SIZES[mm_hash], layout=LAYOUT if has_layout else None)
        self.live |= {weakref.ref(tensor): mm_hash for tensor in item.kwargs.values()}
        return item

    def find_or_process(self, part: Part, needs_layout: bool) -> ItemHandle | None:
        """Return the part's entry, or `None` if the client left it out and it is gone."""
        if part.was_awaited and part.has_source:
            return self.query(part.mm_hash, self.process(part.mm_hash), needs_layout)
        handle = self.query(part.mm_hash, None, needs_layout)
        if handle is None and part.has_source:
            return self.query(part.mm_hash, self.process(part.mm_hash), needs_layout)
        return handle

    def query(
        self, mm_hash: str, item: ProcessedItem | None, needs_layout: bool
    ) -> ItemHandle | None:
        num_bytes = self.sender.statistics().num_bytes
        is_hit = self.sender.is_cached(mm_hash, needs_layout=needs_layout)
        assert mm_hash in self.cached or not is_hit
        handle = self.sender.get_and_update_item(mm_hash, item, needs_layout=needs_layout)
        forgotten = self.take_forgotten()
        assert not forgotten or num_bytes + SIZES[mm_hash] > self.capacity
        assert (handle is None) == (item is None and not is_hit)
        if handle is None:
            return None
        assert handle.is_hit == is_hit
        assert handle.layout == LAYOUT or not needs_layout
        self.expected["num_queries"] += 1
        self.expected["num_hits"] += is_hit
        self.expected["num_oversize"] += mm_hash not in self.cached
        if mm_hash in self.cached:
            self.pinning.add(handle)
        return handle

    def take_forgotten(self) -> set[str]:
        """Return what the leader lost since the last call; evicted entries had no holder."""
        cached = {h for h in SIZES if self.sender.is_cached(h, needs_layout=False)}
        forgotten, self.cached = self.cached - cached, cached
        num_evictions = self.sender.statistics().num_evictions
        if num_evictions > self.num_evictions:
            assert len(forgotten) == num_evictions - self.num_evictions
        assert forgotten.isdisjoint(handle.mm_hash for handle in self.pinning)
        self.num_evictions = num_evictions
        return forgotten

    def lose_entries(self, mm_hashes: set[str]) -> None:
        lost = {handle for handle in self.pinning if handle.mm_hash in mm_hashes}
        self.pinning -= lost
        self.stale |= lost

    def make_message(self, handles: list[ItemHandle], is_refused: bool) -> Message:
        transfer = self.sender.make_transfer(handles)
        self.take_forgotten()
        self.pinning |= {handle for handle in handles if handle.mm_hash in self.cached}
        update = transfer.update
        assert update is not None
        assert set(update.inserts) <= transfer.payloads.keys()
        assert transfer.payloads.keys() <= {handle.mm_hash for handle in handles}
        mm_hashes = tuple(handle.mm_hash for handle in handles)
        payloads = encode_items(dict(transfer.payloads))
        return Message(mm_hashes=mm_hashes, update=update, payloads=payloads, is_refused=is_refused)

    def deliver(
        self, message: Message, request: Request | None, *, is_repeat: bool = False
    ) -> None:
        if request is not None:
            request.is_under_way = True
        self.follower.send(message)
        self.unread.append(
            Unread(
                message=message,
                request=request,
                sent_sizes=get_sent_sizes(self.sender),
                is_repeat=is_repeat,
            )
        )

    def check_delivery(self, unread: Unread, reply: Reply) -> None:
        message = unread.message
        assert message.update is not None
        assert not unread.is_repeat
        assert reply.epoch == message.update.epoch
        assert reply.kept == unread.sent_sizes
        assert reply.kept == {mm_hash: SIZES[mm_hash] for mm_hash in reply.kept}
        assert sum(reply.kept.values()) <= self.capacity
        if reply.items is None:
            assert message.is_refused
        else:
            items = decode_items(reply.items)
            assert items.keys() == set(message.mm_hashes)
            assert all(is_same(items[h], make_kwargs(h, SIZES[h])) for h in items)
        if unread.request is not None:
            self.finish(unread.request)

    def check_refusal(self, unread: Unread, reply: Reply, missing: MissingItems) -> None:
        update = unread.message.update
        assert update is not None
        assert reply.epoch == missing.epoch
        request = unread.request
        if missing.epoch != update.epoch:
            assert reply.kept == {}
            assert set(missing.mm_hashes) == set(unread.message.mm_hashes)
            self.epochs.add(missing.epoch)
            assert len(self.epochs) <= 1 + self.num_disturbances
            if request is not None:
                assert missing.epoch not in request.refusing_epochs, "re-sent twice in one epoch"
                request.refusing_epochs.add(missing.epoch)
            return
        assert reply.kept == unread.sent_sizes
        assert request is not None
        for handle in request.handles if request not in self.given_up else ():
            if handle.mm_hash in missing.mm_hashes:
                assert handle.kwargs is None
                assert handle in self.stale, "the core lacks what the leader believed to be there"

    def heal(self, request: Request | None, missing: MissingItems) -> None:
        sent = get_sent_sizes(self.sender).keys()
        self.sender.handle_missing(missing)
        self.lose_entries(sent - get_sent_sizes(self.sender).keys())
        self.take_forgotten()
        self.expected["num_resends"] += len(missing.mm_hashes)
        if request is None or request in self.given_up:
            self.given_up.discard(request)
            return
        request.is_under_way = False
        for index, (part, old) in enumerate(zip(request.parts, request.handles, strict=True)):
            if old.mm_hash in missing.mm_hashes and old.kwargs is None:
                fresh = self.find_or_process(part, request.needs_layout)
                if fresh is None:
                    assert not part.has_source
                    assert old.mm_hash not in get_sent_sizes(self.sender)
                    self.end(request)
                    return
                request.handles[index] = fresh
                self.release([old])

    def finish(self, request: Request) -> None:
        if request in self.given_up:
            self.given_up.discard(request)
        else:
            request.is_under_way = False
            self.end(request)

    def end(self, request: Request) -> None:
        self.requests.remove(request)
        self.release(request.handles)
        request.handles.clear()
        if request.is_under_way:
            self.given_up.add(request)

    def release(self, handles: list[ItemHandle]) -> None:
        self.sender.release(handles)
        self.pinning.difference_update(handles)
        self.stale.difference_update(handles)

    # What always holds

    def held_handles(self) -> Iterator[ItemHandle]:
        for request in self.requests:
            yield from request.handles

    @invariant()
    def the_counters_are_right(self) -> None:
        statistics = self.sender.statistics()
        assert statistics == CacheStatistics(
            **self.expected,
            num_evictions=self.num_evictions,
            num_items=len(self.cached),
            num_bytes=sum(SIZES[mm_hash] for mm_hash in self.cached),
            capacity_bytes=self.capacity,
        )
        assert statistics.num_bytes <= self.capacity
        assert len(self.sender._held) == sum(1 for _ in self.held_handles())

    @invariant()
    def tensors_live_only_where_they_are_needed(self) -> None:
        staged = self.cached - get_sent_sizes(self.sender).keys()
        needed = staged | {handle.mm_hash for handle in self.held_handles()}
        self.live = {tensor: h for tensor, h in self.live.items() if tensor() is not None}
        assert set(self.live.values()) <= needed

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:  # what failed before is what should be seen
                self.let_everything_arrive()
                self.check_that_nothing_is_left()
        finally:
            self.follower.close()

    def let_everything_arrive(self) -> None:
        """Check that without disturbances no request needs more than three attempts.

        The reasons for another attempt: an unread answer, a new epoch, and what was left out in it.
        """
        for _ in range(3):
            self.read_answers()
            for request in self.ready:
                self.deliver(self.make_message(request.handles, is_refused=False), request)
        self.read_answers()
        assert self.requests == []
        assert self.given_up == set()

    def check_that_nothing_is_left(self) -> None:
        """Nothing is pinned: an item as large as the cache drives out everything else."""
        whole = make_item("whole", self.capacity)
        handle = self.sender.get_and_update_item("whole", whole)
        assert handle is not None
        self.sender.release([handle])
        self.take_forgotten()
        assert self.cached <= {"empty"}
        self.reset_leader()
        for _ in range(2):  # a message that was lost last is noticed now
            self.deliver(self.make_message([], is_refused=False), None)
            unread, reply = self.unread.popleft(), self.follower.read_reply()
            if reply.missing is not None:
                self.check_refusal(unread, reply, reply.missing)
                self.sender.handle_missing(reply.missing)
        assert reply.missing is None
        assert reply.kept == {}
        del whole, handle
        assert not [tensor for tensor in self.live if tensor() is not None]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.mark.processes
def test_leader_and_follower_agree_whatever_happens(nursery: Nursery) -> None:
    run_state_machine_as_test(
        lambda: MirrorMachine(nursery),
        settings=settings(
            max_examples=min(60, settings().max_examples),
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
