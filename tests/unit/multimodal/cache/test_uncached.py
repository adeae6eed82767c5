from __future__ import annotations

import pytest

from sensorium.multimodal.cache.interface import (
    CacheStatistics,
    ProcessorCache,
    ReceiverCache,
    SenderCache,
)
from sensorium.multimodal.cache.mirror_receiver import MirrorReceiver
from sensorium.multimodal.cache.mirror_sender import MirrorSender
from sensorium.multimodal.cache.processor_only import ProcessorOnlyCache
from sensorium.multimodal.cache.uncached import UncachedReceiver, UncachedSender
from sensorium.types.errors import InvariantError
from sensorium.types.transfer import MissingItems, ShmReference, Transfer

from .item_building import is_same, make_item, make_kwargs


def test_the_caches_have_the_shared_interface() -> None:
    """What mypy checks of these lines is the test."""
    caches: list[ProcessorCache] = [ProcessorOnlyCache(1), MirrorSender(1), UncachedSender()]
    senders: list[SenderCache] = [MirrorSender(1), UncachedSender()]
    receivers: list[ReceiverCache] = [MirrorReceiver(), UncachedReceiver()]
    for cache in [*caches, *senders, *receivers]:
        assert cache.statistics().num_items == 0


def test_every_request_brings_its_tensors() -> None:
    sender, receiver = UncachedSender(), UncachedReceiver()
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


def test_what_did_not_come_is_missing() -> None:
    transfer = Transfer(payloads={"a": make_kwargs("a")})
    missing = UncachedReceiver().receive(["a", "b", "b"], transfer)
    assert missing == MissingItems(mm_hashes=("b",), epoch=0)


def test_a_reference_to_shared_memory_is_a_bug() -> None:
    transfer = Transfer(payloads={"a": ShmReference(slot=0, generation=0)})
    for receiver in (UncachedReceiver(), MirrorReceiver()):
        with pytest.raises(InvariantError):
            receiver.receive(["a"], transfer)
