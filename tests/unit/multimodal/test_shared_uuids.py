"""Bindings of uuids that several frontends share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from sensorium.multimodal.cache.shm_memory import ShmSegment
from sensorium.multimodal.cache.shm_store import ShmStore
from sensorium.multimodal.names import BoundSource, MediaHasher, SharedUuidBindings, UuidScope
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import ProcessedItem

CAT = BoundSource(digest="a" * 64, is_encoded=True)
DOG = BoundSource(digest="b" * 64, is_encoded=False)
IMAGE: dict[str, Any] = {"modality": "image", "scope": UuidScope()}


@pytest.fixture
def stores() -> Iterator[tuple[ShmStore, ShmStore]]:
    with (
        closing(ShmStore.create(capacity_bytes=1 << 20, max_object_bytes=1 << 19)) as one,
        closing(ShmStore.attach(one.fd)) as two,
    ):
        yield one, two


@pytest.fixture
def pair(stores: tuple[ShmStore, ShmStore]) -> tuple[SharedUuidBindings, SharedUuidBindings]:
    hasher = MediaHasher("sha256", model_revision="r", processor_fingerprint="f")
    one, two = stores
    return SharedUuidBindings(one, hasher), SharedUuidBindings(two, hasher)


Pair = tuple[SharedUuidBindings, SharedUuidBindings]


def test_a_uuid_that_one_frontend_binds_is_bound_for_all(pair: Pair) -> None:
    one, two = pair
    assert two.get("u", **IMAGE) is None
    one.bind("u", CAT, **IMAGE)
    one.bind("v", DOG, **IMAGE)
    assert two.get("u", **IMAGE) == CAT
    assert two.get("v", **IMAGE) == DOG
    two.check("u", CAT, **IMAGE)
    two.bind("u", CAT, **IMAGE)


def test_salts_and_modalities_are_separate(pair: Pair) -> None:
    one, two = pair
    one.bind("u", CAT, **IMAGE)
    assert two.get("u", modality="video", scope=UuidScope()) is None
    assert two.get("u", modality="image", scope=UuidScope(cache_salt="tenant")) is None
    two.bind("u", DOG, modality="image", scope=UuidScope(cache_salt="tenant"))
    assert one.get("u", modality="image", scope=UuidScope(cache_salt="tenant")) == DOG
    assert one.get("u", **IMAGE) == CAT


def test_a_uuid_that_another_frontend_has_bound_is_refused_for_something_else(pair: Pair) -> None:
    one, two = pair
    one.bind("u", CAT, **IMAGE)
    with pytest.raises(RequestError, match="'u' was first used for another image"):
        two.check("u", DOG, **IMAGE)
    with pytest.raises(RequestError, match="'u' was first used for another image"):
        two.bind("u", DOG, **IMAGE)
    assert [bindings.get("u", **IMAGE) for bindings in pair] == [CAT, CAT]


def test_bindings_keep_no_lease(pair: Pair, stores: tuple[ShmStore, ShmStore]) -> None:
    one, two = pair
    one.bind("u", CAT, **IMAGE)
    two.get("u", **IMAGE)
    two.bind("u", CAT, **IMAGE)
    with pytest.raises(RequestError):
        two.bind("u", DOG, **IMAGE)
    assert [store._num_leases.total() for store in stores] == [0, 0]


def test_clients_are_separate(pair: Pair) -> None:
    one, two = pair
    mine: dict[str, Any] = {"modality": "image", "scope": UuidScope(client="mine")}
    yours: dict[str, Any] = {"modality": "image", "scope": UuidScope(client="yours")}
    one.bind("u", CAT, **mine)
    assert [two.get("u", **scope) for scope in (mine, yours, IMAGE)] == [CAT, None, None]
    two.bind("u", DOG, **yours)
    assert [one.get("u", **scope) for scope in (mine, yours, IMAGE)] == [CAT, DOG, None]


def test_a_uuid_that_one_frontend_uses_stays_bound_for_the_others(
    pair: Pair, stores: tuple[ShmStore, ShmStore]
) -> None:
    one, two = pair
    one.bind("u", CAT, **IMAGE)
    for number in range(64):  # twice what the store can hold
        kwargs = {"pixels": torch.zeros(1 << 15, dtype=torch.uint8)}
        name = f"{number}"
        item = ProcessedItem(modality="image", mm_hash=name, kwargs=kwargs, layout=None)
        reference = stores[0].put(item)
        assert reference is not None
        stores[0].release(reference)
        assert one.get("u", **IMAGE) == CAT
    assert two.get("u", **IMAGE) == CAT


def test_looking_a_uuid_up_takes_the_mutex_once(
    pair: Pair, stores: tuple[ShmStore, ShmStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    one.bind("u", CAT, **IMAGE)
    enter = ShmSegment.__enter__
    entered: list[ShmSegment] = []

    def count(segment: ShmSegment) -> None:
        entered.append(segment)
        enter(segment)

    monkeypatch.setattr(ShmSegment, "__enter__", count)
    for bindings, store in zip(pair, stores, strict=True):
        assert bindings.get("u", **IMAGE) == CAT
        assert entered == [store._segment]
        entered.clear()
    assert two.get("v", **IMAGE) is None
    assert len(entered) == 1
