from __future__ import annotations

import pytest

from sensorium.multimodal.cache.interface import (
    CacheStatistics,
    ProcessorCache,
    ReceiverCache,
    SenderCache,
)
from sensorium.multimodal.cache.item_table import ItemTable
from sensorium.multimodal.cache.mirror import MirrorReceiver, MirrorSender
from sensorium.types.errors import InvariantError
from sensorium.types.multimodal import MissingItems, ShmReference, Transfer

from .item_building import is_same, make_item, make_kwargs


def test_the_caches_have_the_shared_interface() -> None:
    """What mypy checks of these lines is the test."""
    caches: list[ProcessorCache] = [ItemTable(1), MirrorSender(1)]
    senders: list[SenderCache] = [MirrorSender(1)]
    receivers: list[ReceiverCache] = [MirrorReceiver()]
    for cache in [*caches, *senders, *receivers]:
        assert cache.statistics().num_items == 0


def test_every_request_brings_its_tensors() -> None:
    sender, receiver = MirrorSender(0), MirrorReceiver()
    for _ in range(2):
        assert sender.get_and_update_item("a") is None
        handle = sender.get_and_update_item("a", make_item("a"))
        assert handle is not None
        assert not handle.is_hit
        assert not sender.is_cached("a")
        received = receiver.receive(["a", "a"], sender.make_transfer([handle]))
        assert isinstance(received, dict)
        assert is_same(received["a"], make_kwargs("a"))
        sender.release([handle])
    assert sender.statistics() == receiver.statistics() == CacheStatistics()


def test_items_without_a_payload_are_missing() -> None:
    transfer = Transfer(payloads={"a": make_kwargs("a")})
    missing = MirrorReceiver(epoch=5).receive(["a", "b", "b"], transfer)
    assert missing == MissingItems(mm_hashes=("b",), epoch=5)


def test_a_reference_to_shared_memory_is_an_invariant_error() -> None:
    transfer = Transfer(payloads={"a": ShmReference(slot=0, generation=0)})
    with pytest.raises(InvariantError):
        MirrorReceiver().receive(["a"], transfer)


def test_an_item_without_tensors_is_not_kept_without_a_capacity() -> None:
    sender = MirrorSender(0)
    handle = sender.get_and_update_item("a", make_item("a", 0))
    assert handle is not None
    assert sender.make_transfer([handle]) == Transfer(payloads={"a": {}})
    assert not sender.is_cached("a")


def test_nothing_is_logged_of_items_that_a_cache_without_capacity_does_not_keep(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert MirrorSender(0).get_and_update_item("a", make_item("a")) is not None
    assert caplog.records == []
