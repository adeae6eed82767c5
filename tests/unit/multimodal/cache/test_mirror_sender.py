from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from sensorium.multimodal.cache.interface import ItemHandle
from sensorium.multimodal.cache.mirror import MirrorReceiver, MirrorSender
from sensorium.types.errors import InvariantError
from sensorium.types.multimodal import MissingItems, Transfer

from .item_building import (
    LAYOUT,
    get_kept_sizes,
    get_sent_sizes,
    is_same,
    make_item,
    make_kwargs,
)

EPOCH = 5


def render(sender: MirrorSender, *mm_hashes: str, num_bytes: int = 128) -> list[ItemHandle]:
    handles = []
    for mm_hash in mm_hashes:
        handle = sender.get_and_update_item(mm_hash)
        if handle is None:
            handle = sender.get_and_update_item(mm_hash, make_item(mm_hash, num_bytes))
        assert handle is not None
        handles.append(handle)
    return handles


def send(sender: MirrorSender, *mm_hashes: str) -> Transfer:
    """Run a request from its rendering to its release."""
    handles = render(sender, *mm_hashes)
    transfer = sender.make_transfer(handles)
    sender.release(handles)
    return transfer


def inserts_of(transfer: Transfer) -> tuple[str, ...]:
    assert transfer.update is not None
    return transfer.update.inserts


def evictions_of(transfer: Transfer) -> tuple[str, ...]:
    assert transfer.update is not None
    return transfer.update.evictions


def make_sender(*sent: str, capacity_bytes: int = 256) -> MirrorSender:
    sender = MirrorSender(capacity_bytes, epoch=EPOCH)
    if sent:
        send(sender, *sent)
    return sender


def receive_all(
    receiver: MirrorReceiver, handles: Sequence[ItemHandle], transfer: Transfer
) -> None:
    received = receiver.receive([handle.mm_hash for handle in handles], transfer)
    assert isinstance(received, dict)
    for handle in handles:
        assert is_same(received[handle.mm_hash], make_kwargs(handle.mm_hash))


def test_an_item_is_sent_once() -> None:
    sender = make_sender()
    first = send(sender, "a")
    assert is_same(first.payloads["a"], make_kwargs("a"))  # type: ignore[arg-type]
    assert inserts_of(first) == ("a",)
    second = send(sender, "a")
    assert second.payloads == {}
    assert inserts_of(second) == ()
    statistics = sender.statistics()
    assert (statistics.num_queries, statistics.num_hits) == (2, 1)
    assert (statistics.num_items, statistics.num_bytes) == (1, 128)


def test_messages_are_numbered_from_0_in_their_epoch() -> None:
    sender = make_sender()
    updates = [send(sender, "a").update, send(sender, "a").update, sender.make_transfer(()).update]
    assert [(u.epoch, u.sequence) for u in updates if u] == [(EPOCH, 0), (EPOCH, 1), (EPOCH, 2)]


def test_a_sent_item_has_its_layout_and_no_tensors_here() -> None:
    sender = make_sender()
    item = make_item("a")
    tensor = weakref.ref(item.kwargs["pixels"])
    handle = sender.get_and_update_item("a", item)
    del item
    assert handle is not None
    sender.make_transfer([handle])
    sender.release([handle])
    assert tensor() is not None
    del handle
    assert tensor() is None
    hit = sender.get_and_update_item("a")
    assert hit is not None
    assert hit.is_hit
    assert hit.kwargs is None
    assert hit.layout == LAYOUT
    assert hit.num_bytes == 128


def test_an_evicted_staged_item_is_freed_without_a_message_to_the_core() -> None:
    sender = make_sender(capacity_bytes=128)
    item = make_item("a")
    tensor = weakref.ref(item.kwargs["pixels"])
    handle = sender.get_and_update_item("a", item)
    assert handle is not None
    sender.release([handle])
    del item, handle
    assert tensor() is not None
    transfer = send(sender, "b")
    assert tensor() is None
    assert evictions_of(transfer) == ()
    assert sender.statistics().num_evictions == 1


def test_a_sent_item_that_is_evicted_goes_with_the_next_message() -> None:
    sender = make_sender("a", "b")
    assert not sender.has_pending_evictions
    handles = render(sender, "c")
    assert sender.has_pending_evictions
    transfer = sender.make_transfer(handles)
    assert evictions_of(transfer) == ("a",)
    assert not sender.has_pending_evictions
    assert evictions_of(sender.make_transfer(())) == ()


def test_evictions_can_travel_without_a_request() -> None:
    sender, receiver = make_sender(), MirrorReceiver(EPOCH)
    receiver.receive(["a"], send(sender, "a"))
    sender.clear_cache()
    assert receiver.receive([], sender.make_transfer(())) == {}
    assert get_kept_sizes(receiver) == {}


def test_an_evicted_item_that_comes_back_is_evicted_and_inserted_in_one_message() -> None:
    sender, receiver = MirrorSender(128, epoch=EPOCH), MirrorReceiver(EPOCH)
    receiver.receive(["a"], send(sender, "a"))
    sender.release(render(sender, "b"))
    handles = render(sender, "a")
    transfer = sender.make_transfer(handles)
    assert evictions_of(transfer) == inserts_of(transfer) == ("a",)
    receive_all(receiver, handles, transfer)
    assert get_kept_sizes(receiver) == get_sent_sizes(sender) == {"a": 128}


def test_items_of_a_request_do_not_evict_each_other() -> None:
    sender = make_sender("a", "b")
    handles = render(sender, "a", "b", "c")
    transfer = sender.make_transfer(handles)
    assert transfer.payloads.keys() == {"c"}
    assert inserts_of(transfer) == evictions_of(transfer) == ()
    assert get_sent_sizes(sender).keys() == {"a", "b"}


def test_an_item_without_room_at_first_is_kept_if_there_is_some_at_sending() -> None:
    sender = make_sender(capacity_bytes=128)
    others, handles = render(sender, "a"), render(sender, "b")
    sender.release(others)
    assert inserts_of(sender.make_transfer(handles)) == ("b",)
    assert get_sent_sizes(sender) == {"b": 128}


def test_an_item_larger_than_the_cache_travels_with_each_request() -> None:
    sender = make_sender("a", capacity_bytes=128)
    for _ in range(2):
        handles = render(sender, "large", num_bytes=256)
        transfer = sender.make_transfer(handles)
        assert transfer.payloads.keys() == {"large"}
        assert inserts_of(transfer) == evictions_of(transfer) == ()
        sender.release(handles)
    assert sender.statistics().num_oversize == 2


def test_an_item_twice_in_a_request_travels_once() -> None:
    sender = make_sender()
    transfer = send(sender, "a", "a", "a")
    assert inserts_of(transfer) == ("a",)
    assert sender.statistics().num_queries == 3
    assert sender.statistics().num_hits == 2


def test_of_two_requests_that_staged_an_item_only_the_first_sends_it() -> None:
    sender, receiver = make_sender(), MirrorReceiver(EPOCH)
    item = make_item("a")
    handles = [sender.get_and_update_item("a", item) for _ in range(2)]
    first, second = ([handle] for handle in handles if handle)
    assert first[0].kwargs is not None
    assert second[0].kwargs is not None
    receive_all(receiver, second, sender.make_transfer(second))
    transfer = sender.make_transfer(first)
    assert transfer.payloads == {}
    receive_all(receiver, first, transfer)


def test_an_item_of_a_refused_request_serves_the_next() -> None:
    sender = make_sender()
    sender.release(render(sender, "a"))
    handle = sender.get_and_update_item("a")
    assert handle is not None
    assert handle.is_hit
    assert sender.make_transfer([handle]).payloads.keys() == {"a"}


def test_clearing_evicts_what_was_sent() -> None:
    sender = make_sender("a")
    sender.release(render(sender, "b"))
    sender.clear_cache()
    assert sender.statistics().num_items == 0
    assert evictions_of(sender.make_transfer(())) == ("a",)


def test_tensors_that_were_cleared_before_sending_are_sent_and_kept() -> None:
    sender, receiver = make_sender(), MirrorReceiver(EPOCH)
    handles = render(sender, "a", "a")
    sender.clear_cache()
    transfer = sender.make_transfer(handles)
    receive_all(receiver, handles, transfer)
    assert get_kept_sizes(receiver) == get_sent_sizes(sender) == {"a": 128}
    sender.release(handles)
    send(sender, "b", "c")
    assert not sender.is_cached("a"), "a pin was left over"


def test_a_hit_that_was_cleared_before_sending_is_missing_and_heals() -> None:
    sender, receiver = make_sender(), MirrorReceiver(EPOCH)
    receiver.receive(["a"], send(sender, "a"))
    handles = render(sender, "a")
    sender.clear_cache()
    answer = receiver.receive(["a"], sender.make_transfer(handles))
    assert answer == MissingItems(mm_hashes=("a",), epoch=EPOCH, num_applied=2)
    sender.handle_missing(answer)
    fresh = render(sender, "a")
    sender.release(handles)
    receive_all(receiver, fresh, sender.make_transfer(fresh))
    assert sender.statistics().num_resends == 1


def test_a_hit_that_was_cleared_is_served_by_what_another_request_staged() -> None:
    sender, receiver = MirrorSender(256, epoch=EPOCH), MirrorReceiver(EPOCH)
    receiver.receive(["a"], send(sender, "a"))
    stale = render(sender, "a")
    large = render(sender, "b")
    sender.clear_cache()
    sender.release(render(sender, "a", "c"))
    handles = [*large, *stale]
    transfer = sender.make_transfer(handles)
    assert evictions_of(transfer) == ("a",)
    receive_all(receiver, handles, transfer)
    assert get_kept_sizes(receiver) == get_sent_sizes(sender) == {"a": 128, "b": 128}


def test_a_new_epoch_forgets_what_was_sent_and_keeps_what_is_staged() -> None:
    sender = make_sender("a", "b", capacity_bytes=512)
    sender.release(render(sender, "c"))
    sender.clear_cache()
    send(sender, "a")
    sender.release(render(sender, "c"))
    sender.handle_missing(MissingItems(mm_hashes=("a",), epoch=9))
    assert sender.is_cached("c")
    assert not sender.is_cached("a")
    transfer = send(sender, "c")
    assert transfer.update is not None
    assert (transfer.update.epoch, transfer.update.sequence) == (9, 0)
    assert evictions_of(transfer) == ()
    assert inserts_of(transfer) == ("c",)


def test_the_first_message_only_learns_the_epoch() -> None:
    sender, receiver = MirrorSender(256), MirrorReceiver()
    handles = render(sender, "a")
    answer = receiver.receive(["a"], sender.make_transfer(handles))
    assert isinstance(answer, MissingItems)
    sender.handle_missing(answer)
    receive_all(receiver, handles, sender.make_transfer(handles))
    assert get_kept_sizes(receiver) == get_sent_sizes(sender) == {"a": 128}


def test_requests_that_were_under_way_in_a_restart_send_their_item_once() -> None:
    sender, receiver = make_sender(), MirrorReceiver()
    requests = [render(sender, "a") for _ in range(3)]
    transfers = [sender.make_transfer(handles) for handles in requests]
    answers = [receiver.receive(["a"], transfer) for transfer in transfers]
    num_payloads = 0
    for handles, answer in zip(requests, answers, strict=True):
        assert isinstance(answer, MissingItems)
        sender.handle_missing(answer)
        transfer = sender.make_transfer(handles)
        num_payloads += len(transfer.payloads)
        receive_all(receiver, handles, transfer)
    assert num_payloads == 1


def test_an_item_that_the_core_should_have_but_lacks_is_forgotten_and_evicted() -> None:
    sender = make_sender("a", "b")
    sender.handle_missing(MissingItems(mm_hashes=("a", "a"), epoch=EPOCH, num_applied=1))
    assert not sender.is_cached("a")
    assert sender.is_cached("b")
    assert evictions_of(sender.make_transfer(())) == ("a",)


def test_an_answer_older_than_an_item_does_not_make_it_missing() -> None:
    sender = make_sender("a")
    sender.handle_missing(MissingItems(mm_hashes=("a",), epoch=EPOCH, num_applied=0))
    assert sender.is_cached("a")


def test_a_sent_entry_without_a_layout_is_completed_without_sending_again() -> None:
    sender, receiver = make_sender(), MirrorReceiver(EPOCH)
    injected = make_item("a", layout=None)
    handle = sender.get_and_update_item("a", injected, needs_layout=False)
    assert handle is not None
    receive_all(receiver, [handle], sender.make_transfer([handle]))
    assert sender.get_and_update_item("a") is None
    handles = render(sender, "a")
    assert not handles[0].is_hit
    assert handles[0].layout == LAYOUT
    assert handles[0].kwargs is not None
    transfer = sender.make_transfer(handles)
    assert transfer.payloads == {}
    receive_all(receiver, handles, transfer)
    statistics = sender.statistics()
    assert (statistics.num_queries, statistics.num_hits) == (2, 0)
    assert sender.is_cached("a")


def test_a_released_handle_cannot_be_sent() -> None:
    sender = make_sender()
    handles = render(sender, "a")
    sender.release(handles)
    with pytest.raises(InvariantError):
        sender.make_transfer(handles)
    assert send(sender, "a").payloads.keys() == {"a"}


def test_threads_may_render_at_once() -> None:
    sender, receiver = make_sender(capacity_bytes=512), MirrorReceiver(EPOCH)

    def render_many(seed: int) -> None:
        for n in range(200):
            handles = render(sender, f"{(seed + n) % 7}", f"{(seed * n) % 5}")
            sender.release(handles)

    with ThreadPoolExecutor(4) as threads:
        results = [threads.submit(render_many, seed) for seed in range(4)]
        for n in range(100):
            handles = render(sender, f"{n % 7}", f"{n % 3}")
            receive_all(receiver, handles, sender.make_transfer(handles))
            sender.release(handles)
        for result in results:
            result.result(timeout=120)
    receiver.receive([], sender.make_transfer(()))
    assert get_kept_sizes(receiver) == get_sent_sizes(sender)
    assert len(sender._held) == 0
    statistics = sender.statistics()
    assert statistics.num_queries == 2 * 900
    assert statistics.num_bytes <= 512
