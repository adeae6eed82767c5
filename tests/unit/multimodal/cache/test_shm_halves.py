"""Sender and receiver over a shared-memory store, as a frontend and a core use them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sensorium.multimodal.cache.interface import ItemHandle, ReceiverCache, SenderCache
from sensorium.multimodal.cache.shm import ShmReceiver, ShmSender
from sensorium.multimodal.cache.shm_store import ShmStore
from sensorium.types.errors import InvariantError
from sensorium.types.multimodal import (
    ItemLayout,
    MissingItems,
    ProcessedItem,
    ShmReference,
    Transfer,
)

CAPACITY = 16 * 1024
SIZE = 4096 - 128  # with its metadata a quarter of the capacity
LAYOUT = ItemLayout(text="<image>", token_id=7, num_embeds=1)


def make_item(
    name: str, size: int = SIZE, layout: ItemLayout | None = LAYOUT, fill: int = 1
) -> ProcessedItem:
    kwargs = {"pixel_values": torch.full((size,), fill, dtype=torch.uint8)}
    return ProcessedItem(modality="image", mm_hash=name, kwargs=kwargs, layout=layout)


@pytest.fixture
def stores() -> Iterator[list[ShmStore]]:
    """The stores of a frontend, a core and a pool process."""
    first = ShmStore.create(capacity_bytes=CAPACITY, max_object_bytes=CAPACITY)
    stores = [first, ShmStore.attach(first.fd), ShmStore.attach(first.fd)]
    yield stores
    for store in stores:
        store.close()


@pytest.fixture
def sender(stores: list[ShmStore]) -> ShmSender:
    return ShmSender(stores[0])


@pytest.fixture
def receiver(stores: list[ShmStore]) -> ShmReceiver:
    return ShmReceiver(stores[1])


def get(sender: ShmSender, item: ProcessedItem) -> ItemHandle:
    handle = sender.get_and_update_item(item.mm_hash, item)
    assert handle is not None
    return handle


def get_leaseholders(stores: list[ShmStore]) -> list[int]:
    members = {store._member: number for number, store in enumerate(stores)}
    return sorted(members[member] for member in stores[0]._index.get_members())


def test_the_halves_are_what_frontend_and_core_expect(
    sender: ShmSender, receiver: ShmReceiver
) -> None:
    frontend_app: SenderCache = sender
    core_app: ReceiverCache = receiver
    assert frontend_app.statistics() == core_app.statistics()


def test_item_goes_to_the_core_as_a_reference(
    stores: list[ShmStore], sender: ShmSender, receiver: ShmReceiver
) -> None:
    handle = get(sender, make_item("a", fill=4))
    assert (handle.modality, handle.layout, handle.num_bytes) == ("image", LAYOUT, SIZE)
    assert (handle.is_hit, handle.kwargs) == (False, None)
    transfer = sender.make_transfer([handle])
    assert transfer.payloads == {"a": handle.reference}
    received = receiver.receive(["a", "a"], transfer)
    assert isinstance(received, dict)
    assert (received["a"]["pixel_values"] == 4).all()
    assert get_leaseholders(stores) == [0, 1]
    sender.release([handle])
    assert get_leaseholders(stores) == [1]
    receiver.release(["a", "a"])
    assert get_leaseholders(stores) == []


def test_queries_and_hits_are_counted_as_the_interface_says(sender: ShmSender) -> None:
    def count() -> tuple[int, int]:
        statistics = sender.statistics()
        return statistics.num_queries, statistics.num_hits

    assert sender.get_and_update_item("a") is None
    assert not sender.is_cached("a")
    assert count() == (0, 0)
    get(sender, make_item("a"))
    assert count() == (1, 0)
    assert get(sender, make_item("a")).is_hit
    assert count() == (2, 1)
    again = sender.get_and_update_item("a")
    assert again is not None
    assert (again.is_hit, again.layout, again.num_bytes) == (True, LAYOUT, SIZE)
    assert sender.is_cached("a")
    assert count() == (3, 2)
    assert sender.statistics().num_items == 1


def test_entry_without_a_layout_takes_over_the_layout_of_the_item(
    stores: list[ShmStore], sender: ShmSender
) -> None:
    bare = get(sender, make_item("a", layout=None))
    assert bare.layout is None
    assert sender.get_and_update_item("a") is None
    assert not sender.is_cached("a")
    unlaid = sender.get_and_update_item("a", needs_layout=False)
    assert unlaid is not None
    assert (unlaid.is_hit, unlaid.layout) == (True, None)
    assert sender.is_cached("a", needs_layout=False)
    sender.release([unlaid])
    whole = get(sender, make_item("a"))
    assert (whole.is_hit, whole.layout) == (False, LAYOUT)
    assert sender.is_cached("a")
    again = sender.get_and_update_item("a")
    assert again is not None
    assert again.layout == LAYOUT
    sender.release([bare, whole, again])
    assert get_leaseholders(stores) == []
    assert sender.statistics().num_items == 1


def test_a_layout_is_served_although_the_store_is_full(
    stores: list[ShmStore], sender: ShmSender
) -> None:
    handles = [get(sender, make_item(name, layout=None)) for name in "abcd"]
    whole = get(sender, make_item("a"))
    assert (whole.is_hit, whole.layout) == (False, LAYOUT)
    assert whole.reference == handles[0].reference
    sender.release([*handles, whole])
    assert get_leaseholders(stores) == []


def test_item_without_room_is_sent_as_it_is(sender: ShmSender, receiver: ShmReceiver) -> None:
    item = make_item("a", CAPACITY)
    handle = get(sender, item)
    assert handle.reference is None
    transfer = sender.make_transfer([handle])
    received = receiver.receive(["a"], transfer)
    assert received == {"a": item.kwargs}
    sender.release([handle])
    receiver.release(["a"])
    assert sender.statistics().num_oversize == 1
    assert receiver.receive(["a"], Transfer()) == MissingItems(mm_hashes=("a",), epoch=0)


def test_core_names_all_that_is_missing_and_holds_nothing(
    stores: list[ShmStore], sender: ShmSender, receiver: ShmReceiver
) -> None:
    handle = get(sender, make_item("a"))
    gone = ShmReference(slot=9, generation=3)
    transfer = Transfer(payloads={"a": handle.reference or gone, "b": gone})
    missing = receiver.receive(["b", "a", "c"], transfer)
    assert missing == MissingItems(mm_hashes=("b", "c"), epoch=0)
    assert get_leaseholders(stores) == [0]


def test_stale_reference_is_healed_if_the_item_is_elsewhere(
    sender: ShmSender, receiver: ShmReceiver
) -> None:
    stale = get(sender, make_item("a"))
    sender.release([stale])
    sender.clear_cache()
    get(sender, make_item("b", fill=2))
    get(sender, make_item("a", fill=1))
    received = receiver.receive(["a"], sender.make_transfer([stale]))
    assert isinstance(received, dict)
    assert (received["a"]["pixel_values"] == 1).all()


def test_reference_of_another_item_is_not_taken_for_the_one_named(
    stores: list[ShmStore], sender: ShmSender, receiver: ShmReceiver
) -> None:
    handle = get(sender, make_item("b"))
    assert handle.reference is not None
    missing = receiver.receive(["a"], Transfer(payloads={"a": handle.reference}))
    assert missing == MissingItems(mm_hashes=("a",), epoch=0)
    assert get_leaseholders(stores) == [0]


def test_items_that_the_core_could_not_find_are_sent_by_value(sender: ShmSender) -> None:
    item = make_item("a")
    handles = [get(sender, item)]
    sender.handle_missing(MissingItems(mm_hashes=("a",), epoch=0))
    assert sender.get_and_update_item("a") is None
    handles.append(get(sender, item))
    assert sender.make_transfer(handles[1:]).payloads == {"a": item.kwargs}
    assert sender.statistics().num_resends == 1
    handles.append(get(sender, item))
    assert sender.make_transfer(handles[2:]).payloads == {"a": handles[0].reference}
    sender.release(handles)


def test_requests_that_use_one_item_hold_it_until_the_last_has_ended(
    stores: list[ShmStore], sender: ShmSender, receiver: ShmReceiver
) -> None:
    """Also across a clear, when the second request brings another reference."""
    first = get(sender, make_item("a", fill=1))
    received = receiver.receive(["a"], sender.make_transfer([first]))
    sender.release([first])
    sender.clear_cache()
    second = get(sender, make_item("a", fill=1))
    assert second.reference != first.reference
    receiver.receive(["a"], sender.make_transfer([second]))
    sender.release([second])
    receiver.release(["a"])
    for name in "bcdefgh":
        sender.release([get(sender, make_item(name, fill=9))])
    assert isinstance(received, dict)
    assert (received["a"]["pixel_values"] == 1).all()
    receiver.release(["a"])
    assert get_leaseholders(stores) == []
    with pytest.raises(InvariantError, match="more often"):
        receiver.release(["a"])


def test_item_that_a_pool_process_has_put_is_adopted(
    stores: list[ShmStore], sender: ShmSender
) -> None:
    reference = stores[2].put(make_item("a"))
    assert reference is not None
    handle = sender.adopt("a", reference)
    stores[2].release(reference)
    assert handle is not None
    assert (handle.mm_hash, handle.layout, handle.is_hit) == ("a", LAYOUT, False)
    assert handle.reference == reference
    statistics = sender.statistics()
    assert (statistics.num_queries, statistics.num_hits) == (1, 0)
    assert get_leaseholders(stores) == [0]
    with pytest.raises(InvariantError, match="is media item a, not b"):
        sender.adopt("b", reference)
    sender.release([handle])
    assert get_leaseholders(stores) == []


def test_item_of_a_pool_process_that_died_is_not_adopted(
    stores: list[ShmStore], sender: ShmSender
) -> None:
    reference = stores[2].put(make_item("a"))
    assert reference is not None
    stores[2].close()
    sender.clear_cache()
    assert sender.adopt("a", reference) is None
    assert sender.statistics().num_queries == 0


def test_receiver_counts_what_came_from_the_store(sender: ShmSender, receiver: ShmReceiver) -> None:
    handles = [get(sender, make_item("a")), get(sender, make_item("b", CAPACITY))]
    receiver.receive(["a", "b"], sender.make_transfer(handles))
    statistics = receiver.statistics()
    assert (statistics.num_queries, statistics.num_hits) == (2, 1)
    receiver.clear_cache()
    assert receiver.statistics().num_items == 0
    assert not sender.is_cached("a")
