"""Processed tensors live as long as a request needs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sensorium.engine.core_process.engine_core import PayloadStore
from sensorium.multimodal.cache.mirror import MirrorReceiver
from sensorium.types.errors import InvariantError
from sensorium.types.multimodal import (
    MissingItems,
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    PlaceholderRange,
    Transfer,
)
from sensorium.types.request import EngineCoreRequest
from sensorium.types.sampling import SamplingParams


def make_request(request_id: str, *hashes: str) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=(0,) * 9,
        sampling_params=SamplingParams(),
        mm_features=tuple(
            MultiModalFeatureSpec(
                modality="image", mm_hash=mm_hash, mm_position=PlaceholderRange(index, 1)
            )
            for index, mm_hash in enumerate(hashes)
        ),
    )


def payloads(*hashes: str) -> Transfer:
    return Transfer(payloads={mm_hash: {} for mm_hash in hashes})


class CountingReceiver(MirrorReceiver):
    """Notes what is held."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Counter[str] = Counter()

    def receive(
        self, mm_hashes: Sequence[str], transfer: Transfer
    ) -> dict[str, MultiModalKwargsItem] | MissingItems:
        received = super().receive(mm_hashes, transfer)
        if not isinstance(received, MissingItems):
            self.held.update(received.keys())
        return received

    def release(self, mm_hashes: Iterable[str]) -> None:
        self.held -= Counter(mm_hashes)


@pytest.fixture
def receiver() -> CountingReceiver:
    return CountingReceiver()


@pytest.fixture
def store(receiver: CountingReceiver) -> PayloadStore:
    return PayloadStore(receiver)


def test_a_shared_item_stays_until_its_last_request_goes(
    store: PayloadStore, receiver: CountingReceiver
) -> None:
    store.add(make_request("a", "x", "y"), payloads("x", "y"))
    store.add(make_request("b", "x"), payloads("x"))
    assert receiver.held == {"x": 2, "y": 1}
    store.release("a")
    assert set(store) == {"x"}
    assert receiver.held == {"x": 1}
    store.release("b")
    store.release("b")
    assert len(store) == receiver.held.total() == 0


def test_what_is_read_belongs_to_a_request_that_has_not_ended(store: PayloadStore) -> None:
    """Equal tensors may lie in two places, each leased for its own request."""
    places: list[MultiModalKwargsItem] = [{}, {}]
    for request_id, place in zip("ab", places, strict=True):
        store.add(make_request(request_id, "x"), Transfer(payloads={"x": place}))
    store.release("a")
    assert store["x"] is places[1]
    store.add(make_request("c", "x"), Transfer(payloads={"x": places[0]}))
    store.release("b")
    assert store["x"] is places[0]


def test_an_item_twice_in_one_request_is_held_once(
    store: PayloadStore, receiver: CountingReceiver
) -> None:
    store.add(make_request("a", "x", "x"), payloads("x"))
    assert receiver.held == {"x": 1}
    store.release("a")
    assert len(store) == receiver.held.total() == 0


def test_missing_items_are_requested_and_nothing_is_kept(
    store: PayloadStore, receiver: CountingReceiver
) -> None:
    missing = store.add(make_request("b", "x", "y"), payloads("x"))
    assert missing is not None
    assert missing.mm_hashes == ("y",)
    store.release("b")
    assert len(store) == receiver.held.total() == 0


def test_items_that_the_request_does_not_name_are_not_kept(store: PayloadStore) -> None:
    store.add(make_request("a", "x"), payloads("x", "stray"))
    assert set(store) == {"x"}


def test_adding_a_request_twice_is_an_invariant_error(store: PayloadStore) -> None:
    store.add(make_request("a", "x"), payloads("x"))
    with pytest.raises(InvariantError, match="'a' was added twice"):
        store.add(make_request("a", "x"), payloads("x"))


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.lists(st.sampled_from("xyz"), max_size=3))))
@settings(deadline=None)
def test_the_store_holds_exactly_the_items_of_its_requests(
    events: list[tuple[str, list[str]]],
) -> None:
    """A request that comes a second time leaves instead."""
    store = PayloadStore(MirrorReceiver())
    held: dict[str, set[str]] = {}
    for request_id, hashes in events:
        if request_id in held:
            store.release(request_id)
            del held[request_id]
        else:
            store.add(make_request(request_id, *hashes), payloads(*hashes))
            held[request_id] = set(hashes)
        assert set(store) == set().union(*held.values())
