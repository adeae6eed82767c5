"""Processed tensors live as long as a request needs them, once for all that do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sensorium.engine.payload_store import PayloadStore
from sensorium.types.errors import InvariantError, RequestError
from sensorium.types.multimodal import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
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


def payloads(*hashes: str) -> dict[str, MultiModalKwargsItem]:
    return {mm_hash: {} for mm_hash in hashes}


def test_a_shared_item_stays_until_its_last_request_goes() -> None:
    store = PayloadStore()
    items = payloads("x", "y")
    store.add(make_request("a", "x", "y"), items)
    store.add(make_request("b", "x"), payloads("x"))
    assert store["x"] is items["x"]
    store.release("a")
    assert set(store) == {"x"}
    store.release("b")
    assert len(store) == 0


def test_an_item_twice_in_one_request_is_released_once() -> None:
    store = PayloadStore()
    store.add(make_request("a", "x", "x"), payloads("x"))
    store.add(make_request("b", "x"), {})
    store.release("a")
    assert "x" in store


def test_an_item_that_is_here_need_not_come_again_but_another_must() -> None:
    store = PayloadStore()
    store.add(make_request("a", "x"), payloads("x"))
    with pytest.raises(RequestError, match="media item y"):
        store.add(make_request("b", "x", "y"), {})
    store.release("b")
    store.release("a")
    assert len(store) == 0


def test_items_that_the_request_does_not_name_are_not_kept() -> None:
    store = PayloadStore()
    store.add(make_request("a", "x"), payloads("x", "stray"))
    assert set(store) == {"x"}


def test_adding_a_request_twice_is_our_bug() -> None:
    store = PayloadStore()
    store.add(make_request("a", "x"), payloads("x"))
    with pytest.raises(InvariantError, match="'a' were added twice"):
        store.add(make_request("a", "x"), {})


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.lists(st.sampled_from("xyz"), max_size=3))))
@settings(deadline=None)
def test_it_holds_exactly_the_items_of_the_requests_it_has(
    events: list[tuple[str, list[str]]],
) -> None:
    """A request that comes a second time leaves instead."""
    store = PayloadStore()
    held: dict[str, set[str]] = {}
    for request_id, hashes in events:
        if request_id in held:
            store.release(request_id)
            del held[request_id]
        else:
            store.add(make_request(request_id, *hashes), payloads(*hashes))
            held[request_id] = set(hashes)
        assert set(store) == set().union(*held.values())
